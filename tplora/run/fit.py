"""What fits a GPU of a given size: the fewest processes, and the most rows of a micro-batch.

    fits(axes, rows)  :=  peak bytes of a rank  <=  memory, less what is left for CUDA and NCCL

Each answer is one of steps that were run through (``predict_step``), not of a curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tplora.errors import PlanError
from tplora.plan.axes import Axes
from tplora.plan.size import format_size
from tplora.plan.step_report import peak_bytes
from tplora.run.predict import micro_batch_rows, predict_step
from tplora.run.preflight import plan_recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from tplora.plan.build import Plan
    from tplora.plan.step_cost import StepCost
    from tplora.recipe.schema import Recipe

__all__ = ["RESERVED", "Fit", "find_fit", "largest"]

RESERVED = 0.08
"""Of a GPU's memory, what is left for its context, communicators and gaps between blocks."""
_MOST_PROCESSES = 64
_MOST_OF_A_NODE = 8
_MOST_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What fits; None where nothing does."""

    memory: int
    smallest: Axes | None
    """The fewest processes that hold the recipe's micro-batch."""
    smallest_peak: int
    largest_rows: int
    """Rows of a micro-batch on the axes that were planned; 0 if not even one fits."""
    largest_peak: int

    def facts(self) -> list[tuple[str, str]]:
        """Rows of the plan's table."""
        size = format_size
        limit = f"{size(self.memory)} less {100 * RESERVED:g} % for CUDA, NCCL and gaps"
        smallest = "none up to 64 processes does; use shorter rows or fewer of them"
        if self.smallest is not None:
            smallest = f"{self.smallest} ({size(self.smallest_peak)})"
        rows = f"{self.largest_rows} ({size(self.largest_peak)})" if self.largest_rows else "none"
        return [
            ("fits", f"in {limit}: the fewest processes for this micro-batch: {smallest}"),
            ("largest micro-batch", f"on the planned processes, rows of this length: {rows}"),
        ]


def find_fit(recipe: Recipe, axes: Axes, memory: int, *, progress: Callable[[str], None]) -> Fit:
    """What fits into ``memory`` bytes.

    Args:
        recipe: A checked recipe.
        axes: Those that were planned.
        memory: Of one GPU.
        progress: Called with a line before each step that is run through.

    Raises:
        PlanError: If the step cannot be run through.
    """
    limit, asked = int(memory * (1 - RESERVED)), micro_batch_rows(recipe)

    @cache
    def step(tp_size: int, rows: int) -> tuple[Plan, StepCost]:
        progress(f"a step of {rows} rows on tp_size {tp_size} ...")
        plan = plan_recipe(recipe, tp_size=tp_size)
        return plan, predict_step(recipe, plan, rows=rows)

    def peak(on: Axes, rows: int) -> int:
        plan, cost = step(on.tp_size, rows)
        return peak_bytes(plan, on, cost)

    smallest = next(
        (one for one in _candidates(recipe) if peak(one, asked) <= limit),
        None,
    )
    rows = largest(lambda n: peak(axes, n), limit)
    return Fit(
        memory=memory,
        smallest=smallest,
        smallest_peak=peak(smallest, asked) if smallest else 0,
        largest_rows=rows,
        largest_peak=peak(axes, rows) if rows else 0,
    )


def _candidates(recipe: Recipe) -> list[Axes]:
    """Meshes by their number of processes, the fewest data ranks first; tp inside a node."""
    tp_sizes = [n for n in range(1, _MOST_OF_A_NODE + 1) if _is_possible(recipe, n)]
    fsdp_sizes = [1] if recipe.quantization.is_asked else [2**k for k in range(7)]
    found = [Axes(tp_size=tp, fsdp_size=fsdp) for tp in tp_sizes for fsdp in fsdp_sizes]
    return sorted(
        (axes for axes in found if axes.world_size <= _MOST_PROCESSES),
        key=lambda axes: (axes.world_size, axes.fsdp_size),
    )


def _is_possible(recipe: Recipe, tp_size: int) -> bool:
    try:
        plan_recipe(recipe, tp_size=tp_size)
    except PlanError:
        return False
    return True


def largest(peak: Callable[[int], int], limit: int) -> int:
    """The largest n with ``peak(n) <= limit``; 0 if there is none.

    From two sizes a line is drawn; what it says is tried, until n fits and n + 1 does not.
    """
    if peak(1) > limit:
        return 0
    slope = max(1, peak(2) - peak(1))
    fits, fails = 1, _MOST_ROWS + 1
    while fits + 1 < fails:
        guess = fits + (limit - peak(fits)) // slope
        guess = min(max(guess, fits + 1), fails - 1)
        if peak(guess) <= limit:
            fits = guess
        else:
            fails = guess
    return fits
