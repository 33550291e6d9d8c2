"""The trainer of each method, its arguments, and its rows as it takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trl

from tplora.recipe.methods import METHODS
from tplora.train.packing import pack_rows
from tplora.train.trainer import TploraDPOTrainer, TploraKTOTrainer, TploraSFTTrainer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainingArguments

__all__ = ["TRAINERS", "build_arguments", "prepare_rows", "sequence_of"]

TRAINERS: dict[str, type[Any]] = {
    "sft": TploraSFTTrainer,
    "dpo": TploraDPOTrainer,
    "kto": TploraKTOTrainer,
}


def build_arguments(method: str, settings: dict[str, Any]) -> TrainingArguments:
    """Trl's config of a method, for rows that are tokens already."""
    if method == "sft":
        settings = {"dataset_kwargs": {"skip_prepare_dataset": True}, **settings}
        if settings.get("padding_free") and not settings.get("packing"):
            settings["max_length"] = None  # the rows are cut already, which trl cannot know
    args: TrainingArguments = getattr(trl, METHODS[method].config)(**settings)
    return args


def prepare_rows(
    method: str, rows: Dataset, args: TrainingArguments, *, is_eval: bool = False
) -> Dataset:
    """Rows as the method takes them: packed if that is asked for, with what they need beside.

    KTO estimates a divergence from answers to other prompts: within each batch, each prompt gets
    the answer of the row before it, the first one that of the last (trl 1.16).
    """
    if method == "sft" and _is_packed(args, is_eval=is_eval):
        assert args.max_length is not None
        return pack_rows(rows, args.max_length)
    if method != "kto" or args.loss_type != "kto":
        return rows
    answers, size = rows["completion_ids"], args.per_device_train_batch_size
    others = []
    for start in range(0, len(rows), size):
        batch = answers[start : start + size]
        others += [batch[-1], *batch[:-1]]
    return rows.add_column("KL_completion_ids", others, feature=rows.features["completion_ids"])


def _is_packed(args: TrainingArguments, *, is_eval: bool) -> bool:
    return bool(args.packing if not is_eval or args.eval_packing is None else args.eval_packing)


def sequence_of(row: dict[str, Any]) -> list[int]:
    """A row's tokens as one sequence; of a pair the better answer."""
    if "input_ids" in row:
        return list(row["input_ids"])
    answer = row.get("chosen_ids") or row["completion_ids"]
    return [*row["prompt_ids"], *answer]
