"""``modules_to_save``: which modules are trained whole, and how they are cut.

A name means every module whose own name ends with it; that is PEFT's rule, and so "norm" means
q_norm as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tplora.plan.style import FactorPlan
from tplora.plan.trained import part_problem, place_parameter, plan_part, style_of
from tplora.upstream import modules_saved_with_task

if TYPE_CHECKING:
    from collections.abc import Collection

    from peft import LoraConfig

    from tplora.plan.facts import ModelFacts, PartFacts
    from tplora.plan.trained import TrainedPlan

__all__ = ["plan_saved_modules"]


def plan_saved_modules(
    facts: ModelFacts, lora: LoraConfig, adapted: Collection[str], *, tp_size: int
) -> tuple[list[TrainedPlan], list[str]]:
    """Each module that is trained whole, and why others cannot be."""
    asked = list(dict.fromkeys(lora.modules_to_save or ()))
    tied = _tied_names(facts, lora, asked)
    entries, problems = _without_tied(facts, asked, tied), []
    found: dict[str, PartFacts] = {}
    # PEFT writes these into the config's own list, all of them: no model has both.
    with_task = modules_saved_with_task(lora)
    for entry in (*entries, *with_task):
        matched = [part for part in facts.parts if part.name.endswith(entry)]
        found |= {part.name: part for part in matched if part.name not in tied}
        if not matched and entry not in with_task:
            problems.append(f"lora.modules_to_save: {entry!r} matches no module; leave it out")
    plans = []
    for part in found.values():
        problem = _saved_problem(facts, part, adapted, tp_size)
        if problem is None:
            plans.append(plan_part(part, "module", _parameters(facts, part, tp_size), tp_size))
        else:
            problems.append(f"lora.modules_to_save: {part.name} {problem}; leave it out")
    tied_plans = [
        plan_part(facts.part(name), "module", (), tp_size, tied_to=facts.embedding) for name in tied
    ]
    problems += [
        f"lora.ensure_weight_tying: {plan.name} is cut otherwise than the embedding, or adapted; "
        "leave it out"
        for plan in tied_plans
        if plan.name in adapted or _is_cut_apart(plan, plans)
    ]
    return [*plans, *tied_plans], problems


def _tied_names(facts: ModelFacts, lora: LoraConfig, asked: list[str]) -> tuple[str, ...]:
    """Modules that are to go on sharing the embedding's weight once that is trained."""
    is_asked = any(entry.rpartition(".")[2] in ("embed_tokens", "lm_head") for entry in asked)
    return facts.tied if lora.ensure_weight_tying and is_asked else ()


def _without_tied(facts: ModelFacts, asked: list[str], tied: tuple[str, ...]) -> list[str]:
    """As PEFT does: the embedding instead of what is tied to it."""
    if not tied or facts.embedding is None:
        return asked
    entries = [*asked, *([facts.embedding] if facts.embedding not in asked else [])]
    for name in tied:
        hit = next((e for e in entries if re.match(rf"(^|.*\.){e}($|\..*)", name)), None)
        if hit is not None:
            entries.remove(hit)
    return entries


def _is_cut_apart(plan: TrainedPlan, plans: list[TrainedPlan]) -> bool:
    dims = {p.weight.shard_dim for p in (plan, *plans) if p.weight and p.name in _pair(plan)}
    return len(dims) > 1


def _pair(plan: TrainedPlan) -> tuple[str | None, str]:
    return plan.tied_to, plan.name


def _saved_problem(
    facts: ModelFacts, part: PartFacts, adapted: Collection[str], tp_size: int
) -> str | None:
    """Why a module cannot be trained whole, or None."""
    inside = [name for name in adapted if name == part.name or name.startswith(f"{part.name}.")]
    if inside:
        return (
            f"holds {inside[0]}, which has LoRA factors as well"
            if inside[0] != part.name
            else ("has LoRA factors as well")
        )
    if not _parameters(facts, part, 1):
        return "has no parameters"
    if part.has_buffers:
        return "has buffers that peft would save with it"
    return part_problem(facts, part) if tp_size > 1 else None


def _parameters(
    facts: ModelFacts, part: PartFacts, tp_size: int
) -> tuple[tuple[str, FactorPlan], ...]:
    """Every parameter of a module; in one process it may be a module with others inside."""
    if not part.is_container:
        style = style_of(part, tp_size)
        return tuple((leaf, place_parameter(shape, leaf, style)) for leaf, shape in part.parameters)
    prefix = f"{part.name}."
    return tuple(
        (f"{inner.name}.{leaf}".removeprefix(prefix), _whole(shape))
        for inner in facts.parts
        if inner.name == part.name or inner.name.startswith(prefix)
        for leaf, shape in inner.parameters
    )


def _whole(shape: tuple[int, ...]) -> FactorPlan:
    return FactorPlan(shape=shape, shard_dim=None, is_grad_partial=False)
