"""What a run does when the recipe leaves a key out and upstream's default would not do."""

import dataclasses
from typing import Any

from tplora.recipe.schema import Recipe

__all__ = ["fill_defaults"]


def fill_defaults(recipe: Recipe) -> Recipe:
    """The same recipe with every default of ours written into ``lora`` and ``train``.

    - ``task_type`` is CAUSAL_LM; nothing else can be trained.
    - ``save_strategy`` is "no": the adapter is saved at the end; a run that is to be resumed asks
      for "steps" or "epoch".
    - ``bf16`` is off: trl's default is autocast wherever fp16 is off. The base's dtype is
      ``model.dtype``.
    - ``activation_checkpointing`` is on, as in trl, under the name that is not deprecated; off for
      aLoRA, which peft does not run with it.
    - Rows to evaluate on are evaluated on: before the first step and at the end of each epoch.
    - Stopping early goes by the evaluation's loss.
    """
    lora = {"task_type": "CAUSAL_LM", **recipe.lora}
    train = {"save_strategy": "no", "bf16": False} | _rename_checkpointing(recipe.train)
    train.setdefault("activation_checkpointing", not lora.get("alora_invocation_tokens"))
    if recipe.data.eval is not None and "eval_strategy" not in train:
        train = {"eval_strategy": "epoch", "eval_on_start": True} | train
    if train.get("early_stopping_patience") is not None:
        train.setdefault("metric_for_best_model", "loss")
    return dataclasses.replace(recipe, lora=lora, train=train)


def _rename_checkpointing(train: dict[str, Any]) -> dict[str, Any]:
    return {
        key.replace("gradient_checkpointing", "activation_checkpointing"): value
        for key, value in train.items()
    }
