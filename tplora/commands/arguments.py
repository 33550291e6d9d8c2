"""What several commands take."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["BaseName", "Overrides", "RecipePath", "RunName"]

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, such as train.max_steps=5. Can be repeated.",
    ),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, an adapter's, or a hub id.")
]
BaseName = Annotated[
    str | None,
    typer.Option(help="The base's folder or hub id.", show_default="what it was trained on"),
]
