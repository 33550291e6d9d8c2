"""Where one rank of a run writes and shows."""

from __future__ import annotations

from contextlib import ExitStack
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tplora.errors import TploraError

if TYPE_CHECKING:
    import threading
    from pathlib import Path

__all__ = ["Stage"]


class Stage(ExitStack):
    """Where one rank writes and shows: the first one does, the others do neither."""

    checkpoint: Path | None = None
    """Where training goes on; None is the first step."""

    def __init__(
        self, folder: Path, asked: threading.Event, *, is_writer: bool, keeps_log: bool
    ) -> None:
        super().__init__()
        self.folder, self.asked_to_end, self.is_writer = folder, asked, is_writer
        self.consoles: list[Console] = []
        if is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            mode = "a" if keeps_log else "w"
            log = self.enter_context((folder / "log.txt").open(mode, encoding="utf-8"))
            self.consoles = [Console(), Console(file=log, width=120, force_terminal=False)]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        """Keep in the log what ended the run; the terminal is told by whoever started it."""
        if error is not None and self.consoles:
            lines = [str(error)] if isinstance(error, TploraError) else format_exception(error)
            self.consoles[-1].print("".join(lines), markup=False, highlight=False, soft_wrap=True)
        return super().__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Show a line on the terminal and keep it in the log."""
        for console in self.consoles:
            console.print(text, markup=False, highlight=False, soft_wrap=True)
