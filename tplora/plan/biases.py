"""``bias``: which biases of the base are trained, in place, as PEFT trains them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.plan.excluded import is_from_a_file
from tplora.plan.trained import part_problem, place_parameter, plan_part, style_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from peft import LoraConfig

    from tplora.plan.facts import ModelFacts, PartFacts
    from tplora.plan.layer import LayerPlan
    from tplora.plan.trained import TrainedPlan

__all__ = ["plan_biases"]


def plan_biases(
    facts: ModelFacts,
    lora: LoraConfig,
    layers: Iterable[LayerPlan],
    saved: Collection[str],
    *,
    tp_size: int,
) -> tuple[list[TrainedPlan], list[str]]:
    """Each module whose bias is trained, and why others cannot be.

    "all" are the biases of every module, "lora_only" those of the adapted ones. The bias of a
    module that is trained whole is trained with it.
    """
    if lora.bias == "none":
        return [], []
    adapted = {layer.module_name: layer for layer in layers}
    plans, problems = [], list(_nothing_to_train(facts, lora, adapted))
    for part in facts.parts:
        shape, layer = dict(part.parameters).get("bias"), adapted.get(part.name)
        is_asked = lora.bias == "all" or layer is not None
        if shape is None or not is_asked or part.name in saved:
            continue
        problem = _problem(facts, part, layer, tp_size)
        if problem is None:
            factor = place_parameter(shape, "bias", style_of(part, tp_size))
            plans.append(plan_part(part, "bias", (("bias", factor),), tp_size))
        else:
            instead = '"none"' if layer is not None else '"lora_only" or "none"'
            problems.append(f'lora.bias = "{lora.bias}": {part.name} {problem}; use {instead}')
    return plans, problems


def _nothing_to_train(
    facts: ModelFacts, lora: LoraConfig, adapted: Collection[str]
) -> Iterator[str]:
    """PEFT trains no bias then, and does not say so."""
    if is_from_a_file(lora):
        return
    having = [part.name for part in facts.parts if "bias" in dict(part.parameters)]
    where = f'lora.bias = "{lora.bias}"'
    if not having:
        yield f'{where}: {facts.class_name} has no bias; use "none"'
    elif lora.bias == "lora_only" and not set(having) & set(adapted):
        kinds = sorted({name.rpartition(".")[2] for name in having})
        yield (
            f"{where}: no adapted layer has a bias, those with one are {', '.join(kinds[:12])}; "
            'adapt one of them, or use "all" or "none"'
        )


def _problem(
    facts: ModelFacts, part: PartFacts, layer: LayerPlan | None, tp_size: int
) -> str | None:
    if tp_size == 1:
        return None
    if layer is not None and layer.kind == "parameter":
        return "is adapted inside its own forward, where its bias cannot be trained"
    return part_problem(facts, part)
