"""Commands of tplora itself: its recipes, what it supports, where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["copy", "list_shipped", "models", "report"]


def list_shipped() -> None:
    """List the recipes."""
    from tplora.terminal.shipped import list_recipes, shelf
    from tplora.terminal.show import say, show_table

    found = list_recipes(shelf())
    show_table([(recipe.name, recipe.summary) for recipe in found])
    if found:
        say("\nto change one: tplora recipes copy NAME FOLDER")
    else:
        say(f"no recipes in {shelf()}: they come with a clone of tplora's repository")


def copy(
    name: Annotated[str, typer.Argument(help="As `tplora recipes list` shows it.")],
    to: Annotated[Path, typer.Argument(help="Folder to copy it to.")] = Path(),
) -> None:
    """Copy a recipe and its rows, to change them."""
    from tplora.terminal.shipped import copy_recipe, shelf
    from tplora.terminal.show import say

    for path in copy_recipe(name, folder=shelf(), to=to):
        say(str(path))


def models(
    name: Annotated[str, typer.Argument(help="Only names with this in them.")] = "",
) -> None:
    """List the architectures that are exact when cut."""
    from tplora.terminal.models import models_table
    from tplora.terminal.show import show

    show(models_table(name))


def report() -> None:
    """Show versions, devices, cores and memory, for a bug report."""
    from tplora.terminal.report import environment_report
    from tplora.terminal.show import show_table

    show_table(environment_report())
