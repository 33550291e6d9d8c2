"""What the command line shows a person: errors, small tables, lines."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.table import Table

from tplora.errors import TploraError
from tplora.launch.failure import format_traceback

__all__ = ["byte_bar", "say", "show", "show_error", "show_table"]


def show_error(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """Print an exception that nobody caught: ours as one line per problem, others shortly.

    Has the signature of ``sys.excepthook``.
    """
    if not isinstance(error, TploraError):
        sys.stderr.write(format_traceback(error, max_frames=10))
        return
    console = Console(stderr=True)
    for problem in str(error).splitlines():
        console.print("[bold red]error:[/]", end=" ")
        console.print(problem, markup=False, highlight=False, soft_wrap=True)


def show_table(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values below each other."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table, highlight=False)


def show(block: RenderableType) -> None:
    """Print a table or text whose own brackets are no markup."""
    Console().print(block, markup=False, highlight=False)


def say(message: str, *, style: str = "", is_error: bool = False) -> None:
    """Print a line as it is, unwrapped, so that a path in it can be copied."""
    console = Console(stderr=is_error)
    console.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def byte_bar() -> Iterator[Callable[[int, int], None]]:
    """Yield what takes bytes done and bytes to do; a bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
