"""How one adapted weight is cut, and what surrounds its product: the plan's smallest value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.plan.style import (
    STYLES,
    Extra,
    FactorPlan,
    Kind,
    TensorPlan,
    place_extra,
    place_factors,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LayerPlan", "known_styles", "plan_weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One adapted weight: how W, A and B are cut and what surrounds the product."""

    name: str
    """The module's name; of kind "parameter", the parameter's."""
    kind: Kind
    style: str | None
    weight: TensorPlan
    has_bias: bool
    gathers_output: bool
    splits_input: bool
    transforms_output: bool
    a: FactorPlan
    b: FactorPlan
    extras: tuple[tuple[Extra, FactorPlan], ...] = ()
    """What is trained beside A and B."""

    @property
    def factors(self) -> tuple[FactorPlan, ...]:
        """Everything of this layer that is trained."""
        return self.a, self.b, *(plan for _, plan in self.extras)

    @property
    def num_matrices(self) -> int:
        """How many matrices W stacks: the number of experts, or 1."""
        return self.weight.shape[0] if len(self.weight.shape) == 3 else 1

    @property
    def r(self) -> int:
        """The LoRA rank."""
        return self.a.shape[0] // self.num_matrices

    @property
    def module_name(self) -> str:
        """The module that is adapted, or that owns the adapted parameter."""
        return self.name.rpartition(".")[0] if self.kind == "parameter" else self.name


def plan_weight(
    name: str,
    kind: Kind,
    style_name: str | None,
    shape: tuple[int, ...],
    in_out_dims: tuple[int, int],
    *,
    r: int,
    tp_size: int,
    has_bias: bool = False,
    extras: Iterable[Extra] = (),
) -> LayerPlan:
    """Place W by its style, and A and B by W; the style has to be one of ``STYLES[kind]``.

    Args:
        name: As in ``LayerPlan``.
        kind: Which part of the table.
        style_name: What transformers calls the cut.
        shape: W in full.
        in_out_dims: The dims of W that A and B share.
        r: The LoRA rank.
        tp_size: Ranks of one tensor-parallel group.
        has_bias: Whether a bias is added to the product.
        extras: What is trained beside A and B.
    """
    style = STYLES[kind][style_name]
    is_parallel = tp_size > 1
    dim = style.weight_shard_dim if is_parallel else None
    weight = TensorPlan(
        shape=shape,
        shard_dim=None if dim is None else dim + len(shape) - 2,
        split_factor=1 if dim is None else style.split_factor,
    )
    in_dim, out_dim = in_out_dims
    a, b = place_factors(
        weight,
        in_dim=in_dim,
        out_dim=out_dim,
        r=r,
        is_replica_grad_partial=is_parallel and style.is_replica_grad_partial,
    )
    return LayerPlan(
        name=name,
        kind=kind,
        style=style_name,
        weight=weight,
        has_bias=has_bias,
        gathers_output=is_parallel and style.gathers_output,
        splits_input=is_parallel and style.splits_input,
        transforms_output=is_parallel and style.transforms_output,
        a=a,
        b=b,
        extras=tuple((extra, place_extra(extra, weight, b)) for extra in extras),
    )


def known_styles(kind: Kind) -> str:
    """The styles that are exact with an adapter on a layer of this kind, for a message."""
    return ", ".join(sorted(style for style in STYLES[kind] if style))
