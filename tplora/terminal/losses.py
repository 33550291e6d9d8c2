"""What a reduced rank loses, as a table; and the bar while it is being reduced."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from tplora.artifact.inspection import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from tplora.artifact.convert.reduction import Loss

__all__ = ["layer_bar", "loss_table"]


def loss_table(losses: Mapping[str, Loss], *, by_layer: bool) -> Table:
    """Rows per kind of module or per layer, and the whole adapter.

    The error is ``|delta - delta'| / |delta|``; the adapter's is that of all layers as one vector.
    """
    groups: dict[str, list[Loss]] = {}
    for module, loss in losses.items():
        groups.setdefault(module if by_layer else kind_of(module), []).append(loss)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("module", overflow="fold")
    for column in ("n", "r", "|delta|", "relative error"):
        table.add_column(column, justify="right")
    for kind, group in groups.items():
        _add_row(table, kind, group, [one.relative for one in group])
    everything = list(losses.values())
    table.add_section()
    _add_row(table, "all", everything, [_overall(everything)])
    return table


def _add_row(table: Table, name: str, group: list[Loss], errors: list[float]) -> None:
    ranks = sorted({f"{before} -> {after}" for before, after in (one.r for one in group)})
    size = f"{math.hypot(*(one.norm for one in group)):.3g}"
    table.add_row(name, str(len(group)), ", ".join(ranks[:3]), size, _range(errors))


def _overall(losses: Collection[Loss]) -> float:
    total = math.hypot(*(one.norm for one in losses))
    return math.hypot(*(one.distance for one in losses)) / total if total else 0.0


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low}..{high}"


@contextlib.contextmanager
def layer_bar() -> Iterator[Callable[[int, int], None]]:
    """Yield what takes layers done and layers to do; a bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
