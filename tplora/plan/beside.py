"""Everything that a config trains beside LoRA's factors, or why it cannot be exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.plan.biases import plan_biases
from tplora.plan.saved_modules import plan_saved_modules
from tplora.plan.tokens import plan_tokens

if TYPE_CHECKING:
    from peft import LoraConfig

    from tplora.plan.facts import ModelFacts
    from tplora.plan.layer import LayerPlan
    from tplora.plan.trained import TrainedPlan

__all__ = ["plan_beside"]


def plan_beside(
    facts: ModelFacts, lora: LoraConfig, layers: tuple[LayerPlan, ...], *, tp_size: int
) -> tuple[tuple[TrainedPlan, ...], list[str]]:
    """What is trained beside ``layers``' factors, and every problem with it, by name."""
    adapted = {layer.module_name for layer in layers}
    modules, problems = plan_saved_modules(facts, lora, adapted, tp_size=tp_size)
    saved = {plan.name for plan in modules}
    tokens, more = plan_tokens(facts, lora, adapted | saved, tp_size=tp_size)
    biases, even_more = plan_biases(facts, lora, layers, saved, tp_size=tp_size)
    problems += [*more, *even_more, *_tying_problems(facts, lora, modules, tokens)]
    return (*modules, *tokens, *biases), problems


def _tying_problems(
    facts: ModelFacts, lora: LoraConfig, modules: list[TrainedPlan], tokens: list[TrainedPlan]
) -> list[str]:
    """PEFT only warns where there is nothing to tie; and ties factors in a way that drifts."""
    if not lora.ensure_weight_tying:
        return []
    where = "lora.ensure_weight_tying = true"
    if not facts.tied:
        return [f"{where}: the model's embedding and head are two weights; leave it out"]
    if not any(plan.tied_to for plan in (*modules, *tokens)):
        return [
            f"{where}: ties what lora.modules_to_save or lora.trainable_token_indices train of the "
            "embedding and the head; name one of them there, or leave it out"
        ]
    return []
