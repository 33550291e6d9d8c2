"""How much of a model is adapted or trained, by kind of weight, and what is missed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tplora.plan.build import Plan
    from tplora.plan.facts import Role

__all__ = ["Coverage", "count_coverage", "say_missed_experts"]

_KINDS: dict[Role, str] = {
    "linear": "linear layers",
    "experts": "expert weights",
    "router": "routers",
    "embedding": "embeddings",
    "head": "head",
    "other": "others (norms, biases, ...)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """One kind of weight: how many there are, how many are trained, and how large they are."""

    role: Role
    label: str
    num_weights: int
    num_adapted: int
    num_parameters: int
    num_parameters_adapted: int
    """Of the base, in weights that are adapted; not the factors' own."""


def count_coverage(plan: Plan) -> tuple[Coverage, ...]:
    """Every kind of weight that the model has; a tied head counts as its embedding."""
    adapted = {
        layer.name if layer.kind == "parameter" else f"{layer.name}.weight" for layer in plan.layers
    }
    for part in plan.trained:
        leaves = ["weight"] if part.what == "tokens" else [leaf for leaf, _ in part.factors]
        adapted |= {f"{part.name}.{leaf}" for leaf in leaves}
    found = []
    for role, label in _KINDS.items():
        weights = plan.facts.with_role(role)
        hit = [parameter for parameter in weights if parameter.name in adapted]
        if weights:
            found.append(
                Coverage(
                    role=role,
                    label=label,
                    num_weights=len(weights),
                    num_adapted=len(hit),
                    num_parameters=sum(parameter.numel for parameter in weights),
                    num_parameters_adapted=sum(parameter.numel for parameter in hit),
                )
            )
    return tuple(found)


def say_missed_experts(plan: Plan) -> str | None:
    """What a person has to know whose adapter leaves the experts out, or None."""
    experts = next((row for row in count_coverage(plan) if row.role == "experts"), None)
    if experts is None or experts.num_adapted:
        return None
    total = sum(parameter.numel for parameter in plan.facts.parameters)
    share = 100 * experts.num_parameters / total
    return (
        f"the experts are not adapted: {experts.num_weights} stacks of weights, {share:.0f} % of "
        'the model; "all-linear" does not reach them, lora.experts = true does'
    )
