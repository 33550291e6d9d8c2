"""What ``[train]`` may ask for: the keys of trl's configs that are safe when ranks share one model.

Ranks of a tp group must run the same batches through the same code, or they wait for each other
for ever or drift apart. A key that has not been shown to keep that is refused, with the reason.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tplora.recipe.best_rules import find_best_problems
from tplora.recipe.packing_rules import find_packing_problems
from tplora.recipe.preference_rules import REFUSED_PREFERENCE_KEYS
from tplora.recipe.wording import Places, say_problem

__all__ = ["ALLOWED_OPTIMIZERS", "REFUSED_KEYS", "find_train_problems"]

_HUB = "the adapter is uploaded once it is verified: set export.push_to_hub"
_RESUME = "a run goes on with: tplora finetune RECIPE --resume; leave it out"
_LAUNCH = "the processes and their devices are settled when they start; leave it out"
_FSDP = "the mesh is built from [parallel]; leave it out"
_KERNEL = "replaces the code of layers that are cut across ranks and is not checked; leave it out"
_COMPILE = (
    "gives the same numbers, but torch cuts each layer into some 14 graphs around what "
    "communicates, and compiles for minutes; leave it out"
)
_NO_METRICS = "has an effect only with compute_metrics, which a recipe cannot give; leave it out"
_FLAG = "is a flag for scripts and does nothing here; leave it out"
_COLUMNS = "[data] takes messages, prompt and completion, or text rows as they are; leave it out"
_HALF = 'casts the factors beside their copies; hold the base in it: model.dtype = "bfloat16"'
_UNCHECKED = "is not checked under tensor parallelism yet; leave it out"

REFUSED_KEYS: Mapping[str, str] = {
    "output_dir": "the run's folder comes from --output; leave it out",
    "parallelism_config": "it is built from [parallel]; leave it out",
    "assistant_only_loss": "it is a key of [data]; move it there",
    "model_init_kwargs": "the keys of [model] are these arguments; move them there",
    "trust_remote_code": "it is a key of [model]; move it there",
    "dataset_text_field": _COLUMNS,
    "dataset_kwargs": _COLUMNS,
    "label_names": _COLUMNS,
    "chat_template_path": "can resize the embeddings; put the template in the tokenizer's folder",
    "fsdp": _FSDP,
    "fsdp_config": _FSDP,
    "deepspeed": _FSDP,
    "accelerator_config": "how batches reach the ranks of a tp group is settled here; leave it out",
    "local_rank": _LAUNCH,
    "use_cpu": _LAUNCH,
    "ddp_backend": _LAUNCH,
    "ddp_timeout": _LAUNCH,
    "ddp_find_unused_parameters": _LAUNCH,
    "ddp_bucket_cap_mb": _LAUNCH,
    "ddp_broadcast_buffers": _LAUNCH,
    "ddp_static_graph": _LAUNCH,
    "resume_from_checkpoint": _RESUME,
    "ignore_data_skip": "a resumed run would train on the same rows again; leave it out",
    "restore_callback_states_from_checkpoint": "no callback of a run has a state; leave it out",
    "enable_jit_checkpoint": _UNCHECKED,
    "save_on_each_node": "one rank writes, the others give it their factors; leave it out",
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "use_liger_kernel": _KERNEL,
    "liger_kernel_config": _KERNEL,
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "fp16": "scales the loss by what each rank sees alone, so ranks could differ; leave it out",
    "bf16_full_eval": _HALF,
    "fp16_full_eval": _HALF,
    "neftune_noise_alpha": "draws noise on each rank alone, so ranks could differ; leave it out",
    "auto_find_batch_size": "one rank out of memory would leave the others waiting; leave it out",
    "activation_offloading": _UNCHECKED,
    "debug": _UNCHECKED,
    "use_cache": "trl turns it off in training; leave it out",
    "optim_args": "the allowed optimizers read none; leave it out",
    "optim_target_modules": "the allowed optimizers read none; leave it out",
    "include_num_input_tokens_seen": "counts a batch once per rank of a tp group; leave it out",
    "disable_tqdm": "rank 0 shows its own progress bar, on a terminal only; leave it out",
    "include_for_metrics": _NO_METRICS,
    "batch_eval_metrics": _NO_METRICS,
    "eval_do_concat_batches": _NO_METRICS,
    "eval_use_gather_object": _NO_METRICS,
    "do_train": _FLAG,
    "do_eval": _FLAG,
    "do_predict": _FLAG,
    **REFUSED_PREFERENCE_KEYS,
}

# Element by element, so a shard steps exactly as its part of the full factor would.
ALLOWED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")

_CHOICES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "optim": (ALLOWED_OPTIMIZERS, "others look at a whole factor, or are not checked on shards"),
    "train_sampling_strategy": (
        ("random", "sequential", "group_by_length"),
        "batch_rebalance would give the ranks of a tp group different batches",
    ),
    "truncation_mode": (("keep_start", "keep_end"), "trl knows no other"),
}
_CHOICES_OF: Mapping[str, Mapping[str, tuple[tuple[str, ...], str]]] = {
    "sft": {"loss_type": (("nll", "dft"), "SFTTrainer knows no other")},
    "dpo": {"truncation_mode": (("keep_start",), "the other is on its way out of trl")},
}
_AT_LEAST: Mapping[str, float] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_length": 1,
    "eval_accumulation_steps": 1,
    "torch_empty_cache_steps": 1,
    "save_total_limit": 1,
    "early_stopping_patience": 1,
    "early_stopping_threshold": 0,
    "dataset_num_proc": 1,
    "pad_to_multiple_of": 1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "eval_delay": 0,
    "dataloader_num_workers": 0,
    "seed": 0,
    "data_seed": 0,
}
_ABOVE_ZERO = (
    "learning_rate", "num_train_epochs", "logging_steps", "eval_steps", "save_steps",
    "adam_epsilon",
)  # fmt: skip
_ELSEWHERE = (
    "output_dir", "parallelism_config", "assistant_only_loss", "model_init_kwargs",
    "trust_remote_code",
)  # fmt: skip
_STEPS = ("logging_steps", "eval_steps", "save_steps")


def find_train_problems(
    train: Mapping[str, Any], defaults: Mapping[str, Any], places: Places, *, method: str
) -> Iterator[str]:
    """Every rule broken by a table whose names and types are right."""
    choices = {**_CHOICES, **_CHOICES_OF.get(method, {})}
    for key, value in train.items():
        # A value that is upstream's default asks for nothing, unless the key lives elsewhere.
        asks = value != defaults[key] or key in _ELSEWHERE
        message = (REFUSED_KEYS.get(key) or _say_value(key, value, choices)) if asks else None
        if message:
            yield say_problem(["train", key], message, places=places, value=value)
    yield from _save_problems(train, places)
    yield from find_packing_problems(method, train, places)
    yield from find_best_problems(method, train, places)
    yield from _worker_problems(train, places)
    yield from _checkpointing_problems(train, places)
    loss_type = train.get("loss_type", "nll") if method == "sft" else method
    if train.get("label_smoothing_factor") and loss_type != "nll":
        message = 'trl smooths the labels of loss_type "nll" alone; leave one of them out'
        key, value = "label_smoothing_factor", train["label_smoothing_factor"]
        yield say_problem(["train", key], message, places=places, value=value)


def _say_value(
    key: str, value: object, choices: Mapping[str, tuple[tuple[str, ...], str]]
) -> str | None:
    if key in choices and value not in choices[key][0]:
        allowed, reason = choices[key]
        if key == "optim":
            reason = _bitsandbytes_reason(str(value)) or reason
        return f"needs one of {', '.join(allowed)}; {reason}"
    if key == "lr_scheduler_type" and value == "greedy":
        return (
            "follows the loss of each rank by itself, so ranks could differ; take another schedule"
        )
    if isinstance(value, int | float):
        return _say_number(key, value)
    return None


def _bitsandbytes_reason(optimizer: str) -> str | None:
    """Why none of bitsandbytes' optimizers is allowed; adapters' states are small anyway."""
    if "8bit" in optimizer or "4bit" in optimizer:
        return (
            "its state is rounded by blocks of 256 values and kept in 32 bits of small tensors, "
            "both of which depend on how a factor is cut"
        )
    if optimizer.startswith("paged_") or "bnb" in optimizer:
        return "bitsandbytes' optimizers do not step factors that are cut (DTensors)"
    return None


def _say_number(key: str, value: float) -> str | None:
    if value != value or value in (float("inf"), float("-inf")):
        return "needs a finite number"
    if key in _AT_LEAST and value < _AT_LEAST[key]:
        return f"needs {_AT_LEAST[key]:g} or more"
    if key in _ABOVE_ZERO and value <= 0:
        return "needs to be more than 0"
    if key in _STEPS and value > 1 and value != int(value):
        return "needs a whole number of steps, or a fraction of the run below 1"
    if key == "max_steps" and value < 1:
        return "needs 1 or more; leave it out to train for num_train_epochs"
    if (key.startswith("adam_beta") or key == "label_smoothing_factor") and not 0 <= value < 1:
        return "needs a number from 0 up to, but not, 1"
    return None


def _save_problems(train: Mapping[str, Any], places: Places) -> Iterator[str]:
    if train.get("save_strategy", "no") == "no":
        for key in ("save_steps", "save_total_limit"):
            if key in train:
                message = (
                    'has no effect while save_strategy is "no"; set save_strategy, or leave it out'
                )
                yield say_problem(["train", key], message, places=places, value=train[key])


def _worker_problems(train: Mapping[str, Any], places: Places) -> Iterator[str]:
    if train.get("dataloader_num_workers", 0) == 0:
        for key in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
            if train.get(key):
                message = "needs dataloader_num_workers of 1 or more beside it"
                yield say_problem(["train", key], message, places=places, value=train[key])


def _checkpointing_problems(train: Mapping[str, Any], places: Places) -> Iterator[str]:
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        new = old.replace("gradient", "activation")
        if old in train and new in train:
            message = f"is the old name of {new}, which is set too; keep {new}"
            yield say_problem(["train", old], message, places=places, value=train[old])
