"""The architectures that are exact when cut, as tables."""

from collections.abc import Mapping

from rich import box
from rich.console import Group
from rich.table import Table

from tplora.errors import PlanError
from tplora.plan.architectures import Architecture, proven_architectures, proven_classes

__all__ = ["models_table"]


def models_table(name: str = "") -> Group:
    """Every exact architecture whose name has ``name`` in it, and the classes that hold one.

    Raises:
        PlanError: If there is none.
    """
    rows = [row for row in proven_architectures() if name in row.model_type]
    held = {key: texts for key, texts in proven_classes().items() if name in key}
    if not rows and not held:
        raise PlanError(
            [f"models: {name!r} is in no name of an architecture; see `tplora models` for all"]
        )
    return Group(*([_exact(rows)] if rows else []), *([_held(held)] if held else []))


def _exact(rows: list[Architecture]) -> Table:
    table = _table(
        "model type", "proven at", "precision", "experts", "head", "joined rows", "not adapted"
    )
    for row in rows:
        table.add_row(
            row.model_type,
            "tp " + ", ".join(map(str, row.tp_sizes)),
            row.precision,
            row.experts or "-",
            row.head,
            "apart" if row.packs else "refused",
            ", ".join(row.not_adapted) or "-",
        )
    return table


def _held(held: Mapping[str, tuple[str, ...]]) -> Table:
    table = _table("on rows of text", "text model")
    for name, texts in held.items():
        table.add_row(name, ", ".join(texts))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
