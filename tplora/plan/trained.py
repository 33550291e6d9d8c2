"""One module of the base of which something is trained itself: all of it, some tokens, its bias.

    W cut on             weight         bias of W    tokens of W
    out (column)         shard          shard        whole, gradient partial (a head)
    in (row)             shard          whole
    vocab (embedding)    shard                       whole, gradient partial
    hidden (embedding)   shard                       shard
    nothing              whole          whole        whole

Where nothing else is said the gradient is that of one process, or its shard. A whole parameter that
works on sharded activations (replicated_with_grad_allreduce) has a partial one. A row of trained
tokens is used by that rank alone which holds the token's row of W, in an embedding as in a head; a
row-parallel bias is added once, after the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tplora.plan.layer import known_styles
from tplora.plan.style import STYLES, FactorPlan, Style, TensorPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tplora.plan.facts import ModelFacts, PartFacts, PartKind

__all__ = [
    "TrainedPlan",
    "part_problem",
    "place_parameter",
    "plan_part",
    "runs_on_pieces",
    "style_of",
]

What = Literal["module", "tokens", "bias"]

_WHOLE = Style(weight_shard_dim=None)
_SUMMED = "replicated_with_grad_allreduce"
# Whose weight the module around them multiplies with itself (transformers 5.24): it would find a
# parameter where it needs a leaf.
_READ_FROM_OUTSIDE = {
    "gemma3n_text": ("altup.correction_coefs", "altup.prediction_coefs"),
    "jamba": ("mamba.dt_proj",),
    "longcat_flash": ("router.classifier",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPlan:
    """How a module is cut of which something is trained, and what that is."""

    name: str
    what: What
    kind: PartKind
    style: str | None
    weight: TensorPlan | None
    """The module's own weight, if it has one."""
    gathers_output: bool
    splits_input: bool
    transforms_output: bool
    factors: tuple[tuple[str, FactorPlan], ...]
    """What is trained, by the parameter's name in the module; nothing of its own if it is tied."""
    tokens: tuple[int, ...] = ()
    tied_to: str | None = None
    """The module whose trained weight or tokens this one uses."""


def style_of(part: PartFacts, tp_size: int) -> Style:
    """What surrounds a part that ``part_problem`` has nothing against."""
    if tp_size == 1:
        return _WHOLE
    if part.kind == "linear" or part.kind == "embedding":
        return STYLES[part.kind][part.style]
    return Style(weight_shard_dim=None, is_replica_grad_partial=part.style == _SUMMED)


def runs_on_pieces(part: PartFacts) -> bool:
    """Whether a part is cut and computes what torch's own class does: so may we, on pieces."""
    if part.kind != "linear" and part.kind != "embedding":
        return False
    style = STYLES[part.kind].get(part.style)
    return style is not None and style.weight_shard_dim is not None


def place_parameter(shape: tuple[int, ...], leaf: str, style: Style) -> FactorPlan:
    """The placement of a part's own parameter."""
    dim = style.weight_shard_dim
    if len(shape) == 1 and dim == 1:
        dim = None
    is_added_after_sum = leaf == "bias" and style.weight_shard_dim is not None
    return FactorPlan(
        shape=shape,
        shard_dim=dim,
        is_grad_partial=style.is_replica_grad_partial and not is_added_after_sum,
    )


def plan_part(
    part: PartFacts,
    what: What,
    factors: Iterable[tuple[str, FactorPlan]],
    tp_size: int,
    *,
    tokens: tuple[int, ...] = (),
    tied_to: str | None = None,
) -> TrainedPlan:
    """One part with what is trained of it."""
    style, shape = style_of(part, tp_size), dict(part.parameters).get("weight")
    return TrainedPlan(
        name=part.name,
        what=what,
        kind=part.kind,
        style=part.style,
        weight=None if shape is None else TensorPlan(shape=shape, shard_dim=style.weight_shard_dim),
        gathers_output=style.gathers_output,
        splits_input=style.splits_input,
        transforms_output=style.transforms_output,
        factors=tuple(factors),
        tokens=tokens,
        tied_to=tied_to,
    )


def part_problem(facts: ModelFacts, part: PartFacts) -> str | None:
    """Why a part cannot be trained itself where the model is cut, or None."""
    if part.name.endswith(_READ_FROM_OUTSIDE.get(facts.text_type, ())):
        return f"is a {part.type_name} whose weight {facts.text_type} reads from outside"
    if part.kind == "linear" or part.kind == "embedding":
        if part.style in STYLES[part.kind]:
            return None
        return (
            f"has style {part.style!r}, which is not exact when it is trained "
            f"({known_styles(part.kind)} are)"
        )
    if part.kind == "other":
        return (
            f"is a {part.type_name}; only linear layers, embeddings, norms and routers are exact "
            "when they are trained themselves on more than one rank"
        )
    if part.style in (None, _SUMMED):
        return None
    return f"is a {part.kind} with style {part.style!r}, which is not known to be exact"
