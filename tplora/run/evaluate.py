"""The evaluation loss of a merged model, on a run's own rows, beside that of the trained one."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from tplora.base.source import resolve_model
from tplora.errors import DataError, SourceError
from tplora.recipe.parse import load_recipe
from tplora.run.preflight import tokenize_recipe_rows
from tplora.run.vocabulary import load_tokenizer
from tplora.upstream import auto_class_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tplora.recipe.schema import Recipe
    from tplora.run.base import Base

__all__ = ["merged_eval_loss", "say_merged_loss"]

_ROOM = 1.3
"""Memory that evaluating takes, over the bytes of the weights."""


def say_merged_loss(run: Path, merged: Path, base: Base, *, say: Callable[[str], None]) -> None:
    """Evaluate a merged model and tell how far its loss is from the trained model's.

    Nothing is done where the run has no rows to evaluate on, or the model no room in memory.
    """
    kept = run / "recipe.toml"
    recipe = load_recipe(kept) if kept.is_file() else None
    if recipe is None or recipe.data.eval is None:
        say("its loss was not looked at: the run has no data.eval")
        return
    num_bytes = sum(path.stat().st_size for path in merged.glob("*.safetensors"))
    if num_bytes * _ROOM > _free_bytes():
        say("its loss was not looked at: the model does not fit the memory that is free")
        return
    say("evaluating it on data.eval (--no-evaluate leaves this out) ...")
    try:
        found = merged_eval_loss(recipe, merged, base)
    except (DataError, SourceError) as error:  # the model is there; the run's rows may have gone
        say(f"its loss was not looked at: {error}")
        return
    trained = _trained_loss(run)
    told = "" if trained is None else f", {found - trained:+.4f} from {trained:.4f} as trained"
    say(f"eval loss of the merged model: {found:.4f}{told}")


def merged_eval_loss(recipe: Recipe, merged: Path, base: Base) -> float:
    """What a plain trl trainer says of the merged model, in one process.

    Args:
        recipe: The run's, whose evaluation rows and batches are used.
        merged: The model's folder.
        base: That was trained on, for the dtype.
    """
    (rows,) = tokenize_recipe_rows(recipe, keys=["data.eval"])
    model = auto_class_of(str(merged)).from_pretrained(merged, dtype=base.dtype)
    source = resolve_model(recipe.model, recipe_folder=recipe.path.parent)
    size = recipe.train.get("per_device_eval_batch_size", SFTConfig.per_device_eval_batch_size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                per_device_eval_batch_size=size,
                use_cpu=not _fits_device(model),
                report_to="none",
                disable_tqdm=not sys.stderr.isatty(),
                log_level="error",
                bf16=False,
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=rows.dataset,  # which it asks for, and does not train on
            eval_dataset=rows.dataset,
            processing_class=load_tokenizer(recipe, source),
        )
        trainer.pop_callback(PrinterCallback)
        found: dict[str, Any] = trainer.evaluate()
    return float(found["eval_loss"])


def _trained_loss(run: Path) -> float | None:
    """Of the trained model, if it was evaluated after the last step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    last = max(record["step"] for record in records)
    losses = [r["eval_loss"] for r in records if "eval_loss" in r and r["step"] == last]
    return losses[-1] if losses else None


def _free_bytes() -> int:
    """Memory that a process may still take, as the kernel estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(found.split()[1]) << 10
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fits_device(model: Any) -> bool:
    if not torch.cuda.is_available():
        return False
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return bool(num_bytes * _ROOM < torch.cuda.mem_get_info()[0])
