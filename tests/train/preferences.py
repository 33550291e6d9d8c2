"""trl's DPO and KTO over a tplora model on a mesh, or over plain PEFT in one process."""

from dataclasses import dataclass

import datasets
from transformers import PrinterCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from tests.axes.running import Mesh, load_on
from tests.models import CUT, InDouble, load_plain, lora
from tests.train.tiny_tokenizer import tiny_tokenizer
from tests.train.training import logged_numbers
from tplora.adapter.head.fused import install_fused_head
from tplora.train.parallelism import parallelism_config
from tplora.train.trainer import TploraDPOTrainer, TploraKTOTrainer

SIZES = CUT | {"vocab_size": 512, "max_position_embeddings": 256}
ALONE = Mesh()
OURS = {"dpo": TploraDPOTrainer, "kto": TploraKTOTrainer}
THEIRS = {"dpo": DPOTrainer, "kto": KTOTrainer}
CONFIGS = {"dpo": DPOConfig, "kto": KTOConfig}


@dataclass(frozen=True)
class Preferring:
    """One training. Plain values: it travels to the ranks."""

    method: str = "dpo"
    num_rows: int = 11
    """In batches of 4, two a step: the second step of an epoch has three rows in one batch."""
    batch_size: int = 4
    accumulation: int = 2
    max_steps: int = 10
    dropout: float = 0.0
    has_eval: bool = False
    save_steps: int = 0
    changes: tuple[tuple[str, object], ...] = ()
    """Of the trainer's arguments."""
    lora: tuple[tuple[str, object], ...] = (("init_lora_weights", False),)
    """B is drawn as well, so that the reference is another model than the base."""


def pairs(num_rows, *, first=0):
    return [
        {
            "prompt": f"what is {k} and {k}?" + " now" * (k % 3),
            "chosen": f" the answer is {2 * k}" + " yes" * (k % 2),
            "rejected": " nobody knows" * (1 + k % 4),
        }
        for k in range(first, first + num_rows)
    ]


def rated(num_rows, *, first=0):
    return [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for k, pair in enumerate(pairs(num_rows, first=first))
        for name in (("chosen",) if k % 3 else ("rejected",))
    ]


ROWS = {"dpo": pairs, "kto": rated}


def arguments(folder, setup, mesh, **more):
    return CONFIGS[setup.method](
        **{
            "output_dir": str(folder),
            "max_steps": setup.max_steps,
            "per_device_train_batch_size": setup.batch_size // mesh.data_size,
            "per_device_eval_batch_size": setup.batch_size // mesh.data_size,
            "gradient_accumulation_steps": setup.accumulation,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "disable_tqdm": True,
            "log_level": "error",
            "save_strategy": "steps" if setup.save_steps else "no",
            "save_steps": setup.save_steps or 500,
            "eval_strategy": "steps" if setup.has_eval else "no",
            "eval_steps": 2,
            "max_grad_norm": 0.05,
            "gradient_checkpointing": False,
            "include_num_input_tokens_seen": "non_padding",
            **{k: list(v) if isinstance(v, tuple) else v for k, v in setup.changes},
            **more,
        }
    )


def build(path, folder, setup, mesh=ALONE, *, trainer=None, model=None, callbacks=()):
    """A trainer, ours when left out, over a tplora model on a mesh."""
    datasets.disable_progress_bars()
    config = lora("all-linear", dropout=setup.dropout, **dict(setup.lora))
    model = load_on(mesh, path, config) if model is None else model
    rows = ROWS[setup.method]
    more = {"parallelism_config": parallelism_config(model)} if hasattr(model, "plan") else {}
    built = (trainer or OURS[setup.method])(
        model=model,
        args=arguments(folder, setup, mesh, **more),
        train_dataset=datasets.Dataset.from_list(rows(setup.num_rows)),
        eval_dataset=datasets.Dataset.from_list(rows(5, first=20)) if setup.has_eval else None,
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
    )
    built.remove_callback(PrinterCallback)
    return built


def run_on(mesh, path, folder, setup, resumed=None):
    """Logged numbers, factors and tokens seen of a training under our trainer."""
    trainer = build(path, folder, setup, mesh)
    with InDouble():
        trainer.train(resume_from_checkpoint=resumed and str(resumed))
    model = trainer.model
    factors = {name: factor.full().cpu() for name, factor in model.factors().items()}
    return logged_numbers(trainer.state.log_history), factors, trainer.state.num_input_tokens_seen


def run_plain(path, folder, setup, *, is_double=True):
    """The same by trl's unmodified trainer over plain PEFT, in this process alone.

    Its head computes in float32, whatever the model's dtype; in double it is ours, uncut.
    """
    model = load_plain(path, lora("all-linear", dropout=setup.dropout, **dict(setup.lora)))
    trainer = build(path, folder, setup, trainer=THEIRS[setup.method], model=model)
    if is_double:
        install_fused_head(model.get_base_model())
    with InDouble():
        trainer.train()
    factors = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "lora_" in name and ".default." in name
    }
    return logged_numbers(trainer.state.log_history), factors, trainer.state.num_input_tokens_seen
