"""A command of any adapter, trained here or elsewhere: look at it, or compare two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["inspect"]


def inspect(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="An adapter, or a run.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="Another one, to compare it with.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base's folder, if it is not where the adapter says.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One row for each layer.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show what an adapter holds and what looks wrong in it, or how two differ."""
    from tplora.artifact.comparison import compare_adapters
    from tplora.artifact.inspection import inspect_adapter
    from tplora.run.folder import find_adapter
    from tplora.terminal.adapters import as_json, comparison_tables, inspection_tables
    from tplora.terminal.show import show

    folder = find_adapter(adapter)
    if other is None:
        found = inspect_adapter(folder, base=base)
        tables = inspection_tables(found, by_layer=layers)
        text = as_json(found) if json else None
    else:
        compared = compare_adapters(folder, find_adapter(other))
        tables = comparison_tables(compared, by_layer=layers)
        text = as_json(compared) if json else None
    if text is None:
        show(tables)
    else:
        print(text)
