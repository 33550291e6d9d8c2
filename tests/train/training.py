"""A trainer of each kind over a tiny tplora model and rows of unequal length."""

from dataclasses import dataclass

import datasets
import torch
from tokenizers import Tokenizer, models
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, PrinterCallback, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.models import load, lora
from tests.tiny import VOCAB
from tplora.train.parallelism import parallelism_config
from tplora.train.trainer import TploraSFTTrainer

TRAINERS = {"tplora": TploraSFTTrainer, "trl": SFTTrainer, "transformers": Trainer}


@dataclass(frozen=True)
class Setup:
    """One training. Plain values: it travels to the ranks."""

    trainer: str = "tplora"
    targets: str = "all-linear"
    dropout: float = 0.0
    learning_rate: float = 1e-2
    batch_size: int = 2
    eval_batch_size: int = 2
    accumulation: int = 2
    max_steps: int = 5
    has_eval: bool = False
    num_rows: int = 17
    """17 rows in micro-batches of 2, two a step: the fifth step has one row in one micro-batch."""
    save_steps: int = 0
    saves_weights_only: bool = True
    logging_steps: int = 1
    changes: tuple[tuple[str, object], ...] = ()
    """Further settings of the LoRA config."""
    arguments: tuple[tuple[str, object], ...] = ()
    """Further arguments of the trainer."""


def token_rows(num_rows, *, seed=5):
    """Token rows of unequal length, the first three of each not trained on."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for k in range(num_rows):
        size = 8 + 5 * k % 13
        tokens = torch.randint(3, VOCAB, (size,), generator=generator).tolist()
        rows.append({"input_ids": tokens, "completion_mask": [0] * 3 + [1] * (size - 3)})
    return rows


def _tokenizer():
    words = models.WordLevel({"<p>": 0, "<b>": 1, "<e>": 2}, unk_token="<p>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<p>", eos_token="<e>", bos_token="<b>"
    )


def collate(rows):
    """What trl's collator makes, for trainers that have none."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    kept = [torch.tensor(row["completion_mask"]).bool() for row in rows]
    labels = [t.masked_fill(~k, -100) for t, k in zip(tokens, kept, strict=True)]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(t) for t in tokens], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def build_trainer(path, folder, setup, *, rows=None, callbacks=(), **kwargs):
    """The trainer of ``setup`` over a tplora model cut over this rank's world."""
    datasets.disable_progress_bars()
    model = load(path, lora(setup.targets, dropout=setup.dropout, **dict(setup.changes)))
    is_trl = setup.trainer != "transformers"
    common = {
        "output_dir": str(folder),
        "max_steps": setup.max_steps,
        "per_device_train_batch_size": setup.batch_size,
        "per_device_eval_batch_size": setup.eval_batch_size,
        "gradient_accumulation_steps": setup.accumulation,
        "learning_rate": setup.learning_rate,
        "logging_steps": setup.logging_steps,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "save_strategy": "steps" if setup.save_steps else "no",
        "save_steps": setup.save_steps or 500,
        "save_only_model": setup.saves_weights_only,
        "eval_strategy": "steps" if setup.has_eval else "no",
        "eval_steps": setup.max_steps,
        "max_grad_norm": 0.05,
        "gradient_checkpointing": False,
        "parallelism_config": parallelism_config(model),
        **dict(setup.arguments),
    }
    if is_trl:
        args = SFTConfig(**{"max_length": 64, **common})
    else:
        args = TrainingArguments(**common, remove_unused_columns=False)
    trainer = TRAINERS[setup.trainer](
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows or token_rows(setup.num_rows)),
        eval_dataset=datasets.Dataset.from_list(token_rows(3, seed=6)) if setup.has_eval else None,
        callbacks=list(callbacks),
        **({"processing_class": _tokenizer()} if is_trl else {"data_collator": collate}),
        **kwargs,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def logged_numbers(history):
    """What was logged, without what a clock says."""
    clock = ("runtime", "per_second", "total_flos")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in clock)}
        for entry in history
    ]
