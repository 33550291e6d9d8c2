"""What a step will take and say, as rows of the plan's table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.plan.size import format_size
from tplora.plan.traffic import largest_gathered, step_traffic

if TYPE_CHECKING:
    from tplora.plan.axes import Axes
    from tplora.plan.build import Plan
    from tplora.plan.step_cost import Batch, StepCost

__all__ = ["peak_bytes", "say_batch", "step_facts"]

_AXES = {"world": "all processes", "data": "the data axes"}


def peak_bytes(plan: Plan, axes: Axes, cost: StepCost) -> int:
    """The most that lives at once on a rank; with ``fsdp_size``, at most."""
    if axes.fsdp_size == 1:
        return cost.peak
    pieces = -(-cost.weights // axes.fsdp_size)
    return cost.peak - cost.weights + pieces + largest_gathered(plan, axes.fsdp_size)


def step_facts(
    plan: Plan, axes: Axes, cost: StepCost, *, num_micro_batches: int
) -> list[tuple[str, str]]:
    """Rows of the plan's table: memory of a rank, and bytes of a step on each axis."""
    size = format_size
    weights = f"base {size(cost.weights)}"
    if axes.fsdp_size > 1:
        weights = (
            f"base {size(-(-cost.weights // axes.fsdp_size))} and at most "
            f"{size(largest_gathered(plan, axes.fsdp_size))} of it gathered"
        )
    memory = (
        f"{size(peak_bytes(plan, axes, cost))} at the most with {say_batch(cost.batch)}: {weights},"
        f" factors {size(cost.factors)}, AdamW state {size(cost.optimizer)}, and "
        f"{size(cost.working)} of what a step makes (forward keeps {size(cost.kept)} for backward, "
        f"head and loss take {size(cost.loss)}, gradients {size(cost.gradients)}); what CUDA, NCCL "
        "and a kernel inside itself take comes on top"
    )
    traffic = [
        f"{one.what} {size(one.num_bytes)} in {one.count:,} over "
        f"{_AXES.get(one.axis, f'the {one.axis} axis')}"
        for one in step_traffic(plan, axes, cost, num_micro_batches=num_micro_batches)
    ]
    rows = [("memory per rank", memory)]
    if traffic:
        rows.append(("bytes and collectives", f"of an optimizer step: {'; '.join(traffic)}"))
    return rows


def say_batch(batch: Batch) -> str:
    """The work of a micro-batch in words."""
    how = "activation checkpointing" if batch.is_checkpointed else "every activation kept"
    joined = " joined" if batch.is_joined else ""
    passes = batch.passes_before + batch.reference_passes
    beside = f", with {passes} more to compare with" if passes else ""
    return f"{batch.rows} x {batch.length:,} tokens{joined}{beside} and {how}"
