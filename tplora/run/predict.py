"""What a recipe's step will take and say, before any weight is read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from trl import SFTConfig

from tplora.base.source import resolve_model
from tplora.errors import PlanError
from tplora.plan.step_cost import Batch, StepCost
from tplora.recipe.packing_rules import joins_rows
from tplora.recipe.preference_rules import LOSS_TYPES, OF_BATCH
from tplora.rehearsal.step import rehearse
from tplora.run.vocabulary import set_up_adapter

if TYPE_CHECKING:
    from tplora.plan.build import Plan
    from tplora.recipe.schema import Recipe

__all__ = ["micro_batch_rows", "num_micro_batches", "planned_batch", "predict_step"]


def planned_batch(recipe: Recipe, rows: int | None = None) -> Batch:
    """A micro-batch of the recipe, each row as long as a row may be; of pairs, both answers.

    Args:
        recipe: A checked recipe.
        rows: Of the micro-batch, as ``per_device_train_batch_size`` counts them, which it is when
            left out.
    """
    sequences, before, beside = _PASSES[_passes_of(recipe)]
    return Batch(
        rows=sequences * (micro_batch_rows(recipe) if rows is None else rows),
        passes_before=before,
        reference_passes=beside,
        length=_setting(recipe, "max_length"),
        is_checkpointed=bool(recipe.train.get("activation_checkpointing", True)),
        is_accumulated=num_micro_batches(recipe) > 1,
        is_joined=joins_rows(recipe.train),
    )


def micro_batch_rows(recipe: Recipe) -> int:
    """Rows, pairs or packs of one micro-batch on each data rank."""
    return _setting(recipe, "per_device_train_batch_size")


def num_micro_batches(recipe: Recipe) -> int:
    """Micro-batches of one optimizer step on each data rank."""
    return _setting(recipe, "gradient_accumulation_steps")


def predict_step(recipe: Recipe, plan: Plan, *, rows: int | None = None) -> StepCost:
    """Run a step of the recipe through on tensors without storage.

    Args:
        recipe: A checked recipe.
        plan: Of the recipe's model and adapter.
        rows: As in ``planned_batch``.

    Raises:
        PlanError: If the model's code needs values, or the step is under autocast.
    """
    if recipe.train.get("bf16"):
        raise PlanError(
            [
                "train.bf16 = true: what autocast casts is known on a device alone; measure it "
                "with tplora bench"
            ]
        )
    setup = set_up_adapter(recipe, resolve_model(recipe.model, recipe_folder=recipe.path.parent))
    return rehearse(
        plan,
        setup.config,
        setup.lora,
        planned_batch(recipe, rows),
        attn_implementation=recipe.model.attn_implementation,
        trust_remote_code=recipe.model.trust_remote_code,
    )


_PASSES = {"sft": (1, 0, 0), "dpo": (2, 0, 1), "kto": (1, 1, 2), "kto without pairs": (1, 0, 1)}
"""Sequences of a row, passes ahead of the one that is learned from, and passes of the reference.

KTO's usual loss has each prompt answered by another row's answer as well, by both adapters.
"""


def _passes_of(recipe: Recipe) -> str:
    has_pairs = recipe.train.get("loss_type", LOSS_TYPES["kto"][0]) in OF_BATCH
    return "kto without pairs" if recipe.method == "kto" and not has_pairs else recipe.method


def _setting(recipe: Recipe, name: str) -> int:
    usual: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(SFTConfig)}
    return int(recipe.train.get(name) or usual[name])
