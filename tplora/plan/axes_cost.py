"""What data axes cost: processes, and bytes of gradients per optimizer step on each axis.

A factor whose gradient is reduced is sent in the dtype it is trained in. A bucket carries one
number more for each factor: whether it has a gradient at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.plan.cost import base_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tplora.plan.axes import Axes
    from tplora.plan.build import Plan
    from tplora.plan.style import FactorPlan

__all__ = ["axes_facts", "bucket_bytes"]


def bucket_bytes(
    plan: Plan, axes: Axes, tp_rank: int = 0, *, bytes_per_element: int = 4
) -> dict[str, int]:
    """Bytes that a rank hands to an all-reduce per optimizer step, by the ranks it goes over.

    "tp" without data axes; with them, "world" for replicated factors and "data" for cut ones. An
    axis that nothing goes over is left out.
    """
    whole = [f for f in _trained(plan) if f.shard_dim is None]
    cut = [f for f in _trained(plan) if f.shard_dim is not None]
    if axes.data_size == 1:
        sizes = {
            "tp": sum(f.shard_numel(tp_rank, plan.tp_size) for f in whole if f.is_grad_partial)
        }
    else:
        sizes = {
            name: sum(f.shard_numel(tp_rank, plan.tp_size) for f in factors) + len(factors)
            for name, factors in (("world", whole), ("data", cut))
        }
    return {name: size * bytes_per_element for name, size in sizes.items() if size}


def axes_facts(plan: Plan, axes: Axes) -> list[tuple[str, str]]:
    """Rows of the plan's table; none where there is one data rank."""
    if axes.data_size == 1:
        return []
    names = {"world": "over all processes", "data": f"over {axes.data_size} data ranks"}
    sent = bucket_bytes(plan, axes)
    buckets = [f"{size:,} bytes {names[name]}" for name, size in sent.items()]
    base = base_bytes(plan, 0, bytes_per_element=plan.base_dtype_bytes)
    said = "nothing is sent for the frozen base"
    if axes.fsdp_size > 1:
        said = (
            f"of its base a rank keeps {base // axes.fsdp_size:,} bytes, and gathers each layer's "
            f"over {axes.fsdp_size} ranks forward and backward, {2 * base:,} bytes at most for "
            "each micro-batch"
        )
    return [
        ("processes", f"{axes.world_size}: {axes}, tp ranks next to each other"),
        (
            "over data axes",
            f"gradients of factors are averaged once per optimizer step: {' and '.join(buckets)}; "
            f"{said}",
        ),
    ]


def _trained(plan: Plan) -> Iterator[FactorPlan]:
    for layer in plan.layers:
        yield from (factor for factor in layer.factors if factor.is_trained)
    for part in plan.trained:
        yield from (factor for _, factor in part.factors)
