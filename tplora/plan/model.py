"""Whether a model can be cut into so many pieces exactly, whatever is trained of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.plan.architectures import architecture_problem
from tplora.plan.style import AROUND_EXPERTS, STYLES

if TYPE_CHECKING:
    from tplora.plan.facts import ModelFacts

__all__ = ["find_model_problems"]


def find_model_problems(facts: ModelFacts, tp_size: int) -> list[str]:
    """Why this model cannot be cut into ``tp_size`` exactly."""
    where = f"parallel.tp_size = {tp_size}"
    if tp_size < 1:
        return [f"{where}: needs a whole number of at least 1"]
    if tp_size == 1:
        return []
    if not facts.has_tp_plan:
        return [
            f"{where}: {facts.class_name} has no tensor-parallel plan in transformers; "
            "use parallel.tp_size = 1"
        ]
    unproven = architecture_problem(facts.model_type, facts.text_type)
    problems = [f"{where}: {unproven}; use parallel.tp_size = 1"] if unproven else []
    problems += _style_problems(facts, where)
    if facts.are_heads_cut and not _divides_heads(facts, tp_size):
        most = min((kv_heads for _, kv_heads in facts.heads), default=1)
        works = [size for size in range(1, most + 1) if _divides_heads(facts, size)]
        found = " or ".join(
            f"{n} attention heads and {kv} key-value heads" for n, kv in facts.heads
        )
        problems.append(
            f"{where}: {facts.class_name} has {found}, which must divide; "
            f"use one of {', '.join(map(str, works))}"
        )
    if facts.attention_dropout > 0:
        problems.append(
            f"model: attention_dropout = {facts.attention_dropout} draws its masks per rank, which "
            "is not the run at tp_size 1; set attention_dropout = 0 in the model's config.json"
        )
    return problems


def _style_problems(facts: ModelFacts, where: str) -> list[str]:
    """Styles that tplora has not been held to: new ones, or a plan that is not the model's own."""
    known = {style for styles in STYLES.values() for style in styles} | AROUND_EXPERTS
    unknown = [(name, style) for name, style in facts.styles if style not in known]
    if unknown:
        name, style = unknown[0]
        return [
            f"{where}: transformers cuts {name} and {len(unknown) - 1} more by style {style!r}, "
            "which has not been proven exact; use parallel.tp_size = 1"
        ]
    if facts.foreign_styles:
        name, given = facts.foreign_styles[0]
        return [
            f"{where}: {name} has style {given!r}, which is not {facts.class_name}'s own; only "
            "its own plan is proven exact; load it without tp_plan"
        ]
    return []


def _divides_heads(facts: ModelFacts, tp_size: int) -> bool:
    return not any(heads % tp_size or kv_heads % tp_size for heads, kv_heads in facts.heads)
