"""The architectures that are exact when cut, as a table."""

from rich import box
from rich.table import Table

from tplora.errors import PlanError
from tplora.plan.architectures import Architecture, proven_architectures, proven_classes

__all__ = ["models_table"]


def models_table(name: str = "") -> Table:
    """Every architecture whose name has ``name`` in it, and the classes that hold one.

    Raises:
        PlanError: If there is none.
    """
    rows = [row for row in proven_architectures() if name in row.model_type]
    held = {key: texts for key, texts in proven_classes().items() if name in key}
    if not rows and not held:
        raise PlanError(
            [f"models: {name!r} is in no name of an architecture; see `tplora models` for all"]
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("model type", "at tp_size > 1", "proven at", "precision", "experts", "head"):
        table.add_column(column, no_wrap=True)
    table.add_column("not adapted", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row))
    for key, texts in held.items():
        table.add_row(key, f"exact on rows of text, around {' or '.join(texts)}")
    return table


def _cells(row: Architecture) -> tuple[str, ...]:
    return (
        row.model_type,
        "exact",
        ", ".join(map(str, row.tp_sizes)),
        row.precision,
        row.experts or "-",
        row.head,
        ", ".join(row.not_adapted) or "-",
    )
