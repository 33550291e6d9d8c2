"""The command line: which commands there are, and how they end. What each does: ``commands/``."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING

import typer

from tplora.commands import about, results, training
from tplora.commands.adapters import inspect
from tplora.commands.convert import convert

if TYPE_CHECKING:
    from types import TracebackType


__all__ = ["app", "main"]

app = typer.Typer(
    name="tplora",
    help="Fine-tune language models too large for one GPU: LoRA under tensor parallelism.",
    epilog="Start with: tplora recipes list",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich's takes longer to import than tplora may take at all
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(
    help="List the recipes that come with tplora, or copy one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(recipes_app, name="recipes")

for command in (
    training.finetune,
    training.plan,
    training.bench,
    training.check,
    results.export,
    results.verify,
    results.generate,
    results.push,
    inspect,
    convert,
    about.models,
    about.report,
):
    app.command()(command)
recipes_app.command("list")(about.list_shipped)
recipes_app.command()(about.copy)


def main() -> None:
    """Run the command line.

    Errors leave it as exceptions: the interpreter shows them through ``show_error`` and exits with
    status 1, and in a rank that ``launch`` started, ``tplora.launch.rank`` gets them instead.
    """
    sys.excepthook = _show_error
    warnings.simplefilter("ignore", FutureWarning)  # upstream's notices to each other, not to users
    if not sys.stderr.isatty():  # a progress bar in a file or a pipe is one very long line
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    typer.main.get_command(app)(prog_name="tplora")


def _show_error(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    from tplora.terminal.show import show_error

    show_error(kind, error, traceback)
