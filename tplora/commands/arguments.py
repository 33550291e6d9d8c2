"""What several commands take."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Overrides", "RecipePath", "RunPath"]

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, such as train.max_steps=5. Can be repeated.",
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, as in runs/NAME.")]
