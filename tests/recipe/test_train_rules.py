from pathlib import Path

import pytest
from transformers import DistributedConfig
from transformers.training_args import OptimizerNames

from tests.recipe.writing import problem_of_key, problems_of, write_recipe
from tplora.recipe.check import read_recipe
from tplora.recipe.lora_rules import SUPPORTED
from tplora.recipe.methods import METHODS
from tplora.recipe.refusals import REFUSED
from tplora.recipe.schema import ParallelTable
from tplora.recipe.train_rules import ALLOWED_OPTIMIZERS, REFUSED_KEYS
from tplora.recipe.upstream_fields import OWN_TRAIN_KEYS, lora_fields, train_fields

# Every key a recipe may set, looked at one by one: the same on each rank, or of no effect there.
ALLOWED = {
    "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps",
    "average_tokens_across_devices", "max_grad_norm", "tf32", "activation_checkpointing",
    "activation_checkpointing_kwargs", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "torch_empty_cache_steps", "logging_strategy", "logging_steps", "logging_first_step",
    "log_on_each_node", "logging_nan_inf_filter", "log_level", "log_level_replica", "report_to",
    "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size",
    "prediction_loss_only", "eval_on_start", "eval_accumulation_steps", "save_only_model",
    "save_strategy", "save_steps", "save_total_limit", "metric_for_best_model", "greater_is_better",
    "full_determinism", "seed", "data_seed", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns",
    "train_sampling_strategy", "length_column_name", "skip_memory_metrics", "dataset_num_proc",
    "eos_token", "max_length", "truncation_mode", "shuffle_dataset", "pad_to_multiple_of",
    "completion_only_loss", "loss_type", "pad_token", "router_aux_loss_coef",
    "label_smoothing_factor", "bf16", "packing", "padding_free", "packing_strategy", "eval_packing",
    "load_best_model_at_end", *OWN_TRAIN_KEYS,
    # DPO and KTO
    "beta", "disable_dropout", "discopop_tau", "f_alpha_divergence_coef", "f_divergence_type",
    "label_smoothing", "ld_alpha", "loss_weights", "use_weighting", "desirable_weight",
    "undesirable_weight",
}  # fmt: skip


def test_every_key_of_upstream_was_looked_at() -> None:
    fields = {name for method in METHODS for name in train_fields(method)}
    assert fields == ALLOWED | set(REFUSED_KEYS)
    assert not ALLOWED & set(REFUSED_KEYS)
    assert set(SUPPORTED) <= set(lora_fields())
    assert set(ALLOWED_OPTIMIZERS) <= {one.value for one in OptimizerNames}


def test_every_field_of_distributed_config_is_taken_or_refused_by_name() -> None:
    refused = {key for table, key in REFUSED if table == "parallel"}
    fields = set(DistributedConfig.__dataclass_fields__)
    assert fields <= set(ParallelTable.model_fields) | refused
    assert not set(ParallelTable.model_fields) & refused


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("lr = 1e-4", "unknown key; did you mean learning_rate?"),
        ("lora_alpha = 8", "it belongs in [lora]"),
        ("max_steps = 5.0", "needs a whole number"),
        ("max_steps = 0", "needs 1 or more; leave it out to train for num_train_epochs"),
        ("learning_rate = true", "needs a number"),
        ("learning_rate = 0", "needs to be more than 0"),
        ("label_smoothing_factor = 1", "needs a number from 0 up to, but not, 1"),
        (
            'loss_type = "dft"\nlabel_smoothing_factor = 0.1',
            'smooths the labels of loss_type "nll" alone; leave one of them out',
        ),
        ("learning_rate = nan", "needs a finite number"),
        ("per_device_train_batch_size = 0", "needs 1 or more"),
        ("gradient_accumulation_steps = 0", "needs 1 or more"),
        ("warmup_steps = -1", "needs 0 or more"),
        ("logging_steps = 2.5", "needs a whole number of steps"),
        ("adam_beta1 = 1.0", "needs a number from 0 up to, but not, 1"),
        ('lr_scheduler_type = "lineer"', 'needs one of "linear", "cosine"'),
        ('lr_scheduler_type = "greedy"', "ranks could differ"),
        ('optim = "adafactor"', "needs one of adamw_torch, adamw_torch_fused, sgd"),
        ("report_to = [1]", "needs text in quotes, or a list of text in quotes"),
        ('train_sampling_strategy = "batch_rebalance"', "different batches"),
        ("save_steps = 5", 'no effect while save_strategy is "no"'),
        ('output_dir = "there"', "comes from --output"),
        ("assistant_only_loss = false", "it is a key of [data]"),
        (
            'packing = true\npacking_strategy = "wrapped"',
            'has each row read those before it; use "b',
        ),
        ('packing = true\npacking_strategy = "bfd_split"', "without what came before it"),
        ('packing = true\npacking_strategy = "ffd"', 'needs "bfd"'),
        ("eval_packing = true", "has no effect without packing = true"),
        ("padding_free = true\npad_to_multiple_of = 8", "joined rows have no padding"),
        ("bf16_full_eval = true", 'model.dtype = "bfloat16"'),
        ('deepspeed = "ds.json"', "the mesh is built from [parallel]"),
        ('fsdp = "full_shard"', "the mesh is built from [parallel]"),
        ("push_to_hub = true", "set export.push_to_hub"),
        ('resume_from_checkpoint = "x"', "tplora finetune RECIPE --resume"),
        ("torch_compile = true", "cuts each layer into some 14 graphs"),
        ("model_init_kwargs = { a = 1 }", "move them there"),
        ("dataloader_prefetch_factor = 2", "needs dataloader_num_workers"),
    ],
)
def test_a_train_key_that_cannot_be_done_is_one_line(tmp_path: Path, line: str, words: str) -> None:
    text = "" if line.startswith("max_steps") else "max_steps = 3"
    path = write_recipe(tmp_path, ("max_steps = 3", f"{line}\n{text}"))
    (problem,) = problems_of(path)
    assert words in problem
    assert problem.startswith("train.")


def test_both_names_of_activation_checkpointing_at_once_are_refused(tmp_path: Path) -> None:
    line = "activation_checkpointing = true\ngradient_checkpointing = false"
    assert "keep activation_checkpointing" in problem_of_key(tmp_path, "train", line)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ("selective = true", "is not called there"),
        ("preserve_rng_state = false", "other dropout masks"),
        ("early_stop = false", "taken again"),
        ("every_n_layers = 0", "needs 1 or more"),
        ("offload = 1", "needs true or false"),
        ("keep_reduced_output = true", "unknown keyword; did you mean keep_reduced_outputs?"),
        ("keep_reduced_outputs = true, use_reentrant = true", "leave one of them out"),
    ],
)
def test_a_keyword_of_checkpointing_that_cannot_be_done_is_one_line(tmp_path, keywords, words):
    line = f"activation_checkpointing_kwargs = {{ {keywords} }}"
    assert words in problem_of_key(tmp_path, "train", line)


@pytest.mark.parametrize(
    ("line", "of", "words"),
    [
        ("bf16 = true", "", "has not been held to one process"),
        ("overlap_communication = true", "parallel", "are not overlapped; leave one of them out"),
        (
            "gradient_checkpointing_kwargs = { keep_reduced_outputs = true }",
            "",
            "are not kept; leave one of them out",
        ),
    ],
)
def test_what_a_cut_sequence_cannot_be_asked_for_with_is_one_line(tmp_path, line, of, words):
    cut = "[parallel]\nsequence_parallel = true\n"
    changes = (
        "max_steps = 3\n",
        f"max_steps = 3\n{'' if of else line}\n{cut}{line if of else ''}\n",
    )
    (problem,) = problems_of(write_recipe(tmp_path, changes))
    assert words in problem


def test_keywords_of_checkpointing_that_is_off_are_refused(tmp_path: Path) -> None:
    line = "activation_checkpointing = false\nactivation_checkpointing_kwargs = { offload = true }"
    assert "no effect while" in problem_of_key(tmp_path, "train", line)


@pytest.mark.parametrize(
    "line",
    ["packing = false", "packing = true\neval_packing = false", "padding_free = true",
     "activation_checkpointing_kwargs = { keep_reduced_outputs = true }",
     "gradient_checkpointing_kwargs = { use_reentrant = true, every_n_layers = 2 }",
     "bf16 = false", "bf16 = true", 'optim = "sgd"', 'report_to = ["none"]', "tf32 = true",
     'save_strategy = "steps"\nsave_only_model = true', 'save_strategy = "epoch"',
     "learning_rate = 1", "max_grad_norm = 0",
     "warmup_steps = 0.1", "lr_scheduler_kwargs = { num_cycles = 2 }", "logging_steps = 0.1"],
)  # fmt: skip
def test_a_train_key_that_can_be_done_is_kept_as_given(tmp_path: Path, line: str) -> None:
    recipe = read_recipe(write_recipe(tmp_path, ("[train]", f"[train]\n{line}")))
    assert line.split(" = ")[0].replace("gradient_ch", "activation_ch") in recipe.train


def test_a_secret_is_refused_without_being_shown(tmp_path: Path) -> None:
    problems = problems_of(write_recipe(tmp_path), "train.hub_token=s3cret", "model.token=s3cret")
    assert len(problems) == 2
    assert not any("s3cret" in problem for problem in problems)
