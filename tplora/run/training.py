"""A recipe's ``[train]`` as what trl's trainer takes: its config, and callbacks of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import EarlyStoppingCallback

from tplora.recipe.upstream_fields import OWN_TRAIN_KEYS
from tplora.train.kinds import build_arguments
from tplora.train.parallelism import parallelism_config

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import TrainingArguments

    from tplora.adapter.model import TploraModel
    from tplora.recipe.schema import Recipe

__all__ = ["stopping_callbacks", "training_arguments"]


def training_arguments(
    recipe: Recipe, model: TploraModel, folder: Path, device: torch.device, *, resume: bool
) -> TrainingArguments:
    """The config of the recipe's method, in a run that may go on from a checkpoint."""
    asked = {key: value for key, value in recipe.train.items() if key not in OWN_TRAIN_KEYS}
    # What was evaluated before the first step is not evaluated before a later one.
    resumed = {"eval_on_start": False} if resume else {}
    settled = {
        "output_dir": str(folder),
        "parallelism_config": parallelism_config(model),
        "use_cpu": device.type == "cpu",
        "disable_tqdm": True,
        "log_level": "error",
        "include_num_input_tokens_seen": "non_padding",
        "logging_nan_inf_filter": False,
        # For how many evaluations nothing has become better.
        "restore_callback_states_from_checkpoint": "early_stopping_patience" in recipe.train,
    }
    return build_arguments(recipe.method, {"report_to": "none"} | asked | resumed | settled)


def stopping_callbacks(recipe: Recipe) -> list[EarlyStoppingCallback]:
    """Transformers' own callback, if the recipe wants to stop when nothing becomes better."""
    patience = recipe.train.get("early_stopping_patience")
    if patience is None:
        return []
    threshold = recipe.train.get("early_stopping_threshold", 0.0)
    return [EarlyStoppingCallback(patience, threshold)]
