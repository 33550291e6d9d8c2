"""What a recipe's step will take and say, before any weight is read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from trl import SFTConfig

from tplora.base.source import resolve_model
from tplora.errors import PlanError
from tplora.plan.step_cost import Batch, StepCost
from tplora.recipe.methods import DEFAULT_METHOD
from tplora.rehearsal.step import rehearse
from tplora.run.vocabulary import set_up_adapter

if TYPE_CHECKING:
    from tplora.plan.build import Plan
    from tplora.recipe.schema import Recipe

__all__ = ["num_micro_batches", "planned_batch", "predict_step"]


def planned_batch(recipe: Recipe) -> Batch:
    """A micro-batch of the recipe, each row as long as a row may be."""
    return Batch(
        rows=_setting(recipe, "per_device_train_batch_size"),
        length=_setting(recipe, "max_length"),
        is_checkpointed=bool(recipe.train.get("activation_checkpointing", True)),
        checkpointing=recipe.train.get("activation_checkpointing_kwargs") or {},
        is_accumulated=num_micro_batches(recipe) > 1,
    )


def num_micro_batches(recipe: Recipe) -> int:
    """Micro-batches of one optimizer step on each data rank."""
    return _setting(recipe, "gradient_accumulation_steps")


def predict_step(recipe: Recipe, plan: Plan, *, rows: int | None = None) -> StepCost:
    """Run a step of the recipe through on tensors without storage.

    Args:
        recipe: A checked recipe.
        plan: Of the recipe's model and adapter.
        rows: Of a micro-batch; the recipe's when left out.

    Raises:
        PlanError: If the model's code needs values, or the step is another than that of "sft".
    """
    if recipe.method != DEFAULT_METHOD:
        raise PlanError(
            [
                f'train.method = "{recipe.method}": its step runs the model more than once, and '
                f'only that of "{DEFAULT_METHOD}" is run through; measure it with tplora bench'
            ]
        )
    batch = planned_batch(recipe)
    if batch.checkpointing.get("offload"):
        raise PlanError(
            [
                "train.activation_checkpointing_kwargs.offload: what is kept goes to the host, "
                "which is not run through; measure it with tplora bench"
            ]
        )
    setup = set_up_adapter(recipe, resolve_model(recipe.model, recipe_folder=recipe.path.parent))
    return rehearse(
        plan,
        setup.config,
        setup.lora,
        batch if rows is None else dataclasses.replace(batch, rows=rows),
        attn_implementation=recipe.model.attn_implementation,
        trust_remote_code=recipe.model.trust_remote_code,
    )


def _setting(recipe: Recipe, name: str) -> int:
    usual: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(SFTConfig)}
    return int(recipe.train.get(name) or usual[name])
