"""Bytes of one optimizer step on each axis of the mesh: what a rank gives, or is gathered for it.

    axis     what goes over it                                      how often
    tp       activations and their gradients                        each micro-batch
    tp       partial gradients of factors                           each step; no data axes
    world    gradients of replicated factors                        each step; data axes
    data     gradients of cut factors                               each step; data axes
    fsdp     the frozen base, layer by layer, gathered              each micro-batch

Of the base, forward gathers the embedding, each layer, and norm and head together. These last are
kept; backward gathers the layers again, and before the first of them ends, the embedding. So does
each further pass of the same micro-batch, such as that of a reference.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.plan.axes_cost import bucket_bytes
from tplora.plan.cost import shard_shape_of

if TYPE_CHECKING:
    from tplora.plan.axes import Axes
    from tplora.plan.build import Plan
    from tplora.plan.step_cost import StepCost

__all__ = ["AxisTraffic", "gathered_bytes", "largest_gathered", "step_traffic"]

_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTraffic:
    """What goes over one axis in an optimizer step, seen from rank 0."""

    axis: str
    what: str
    count: int
    num_bytes: int


def step_traffic(
    plan: Plan, axes: Axes, cost: StepCost, *, num_micro_batches: int
) -> list[AxisTraffic]:
    """Every axis that anything goes over, the tp axis first."""
    found = []
    for what, parts in (("forward", cost.forward), ("backward", cost.backward)):
        count, size = (sum(getattr(p, key) for p in parts) for key in ("count", "num_bytes"))
        found.append(("tp", what, count * num_micro_batches, size * num_micro_batches))
    for axis, size in bucket_bytes(plan, axes).items():
        found.append((axis, "gradients of factors", 1, size))
    if axes.fsdp_size > 1:
        units = _unit_bytes(plan, axes.fsdp_size)
        num_passes = cost.batch.passes_before + cost.batch.reference_passes
        without_head = len(units) - ("head" in units)
        num_gathers = len(units) + (1 + num_passes) * without_head
        size = gathered_bytes(plan, axes.fsdp_size, num_passes)
        found.append(
            ("fsdp", "the base", num_gathers * num_micro_batches, size * num_micro_batches)
        )
    return [
        AxisTraffic(axis=axis, what=what, count=count, num_bytes=size)
        for axis, what, count, size in found
        if count
    ]


def gathered_bytes(plan: Plan, fsdp_size: int, num_passes: int = 0) -> int:
    """What a micro-batch gathers of the base for rank 0, forward and backward.

    Args:
        plan: Of the model and its adapter.
        fsdp_size: Ranks that share the base out.
        num_passes: Further ones, forward alone.
    """
    units = _unit_bytes(plan, fsdp_size)
    head = units.get("head", 0)
    return head + (2 + num_passes) * (sum(units.values()) - head)


def largest_gathered(plan: Plan, fsdp_size: int) -> int:
    """What is there of the base beside its pieces, at most.

    The norm and head that are kept, what runs, and what is gathered meanwhile.
    """
    units = _unit_bytes(plan, fsdp_size)
    kept = units.pop("head", 0)
    return kept + sum(sorted(units.values(), reverse=True)[:2])


def _unit_bytes(plan: Plan, fsdp_size: int) -> dict[str, int]:
    """Bytes of what is gathered at once, by a layer's name, "embedding" or "head".

    Each weight is shared out by rows, and the last piece filled up to the length of the others.
    """
    units: dict[str, int] = {}
    for parameter in plan.facts.parameters:
        layer = _LAYER.match(parameter.name)
        is_own = parameter.role == "embedding" and not plan.facts.is_tied
        unit = layer[1] if layer else "embedding" if is_own else "head"
        rows, *rest = shard_shape_of(plan, parameter, 0)
        size = -(-rows // fsdp_size) * fsdp_size * plan.base_dtype_bytes
        for length in rest:
            size *= length
        units[unit] = units.get(unit, 0) + size
    return units
