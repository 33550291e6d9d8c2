"""One write at a time, beside the training: what a checkpoint's files cost, no step waits for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Runs one function in a thread of its own and keeps what went wrong until it is asked for.

    The thread is not a daemon: a process that ends well ends after it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem = ""

    def start(self, write: Callable[[], None]) -> None:
        """Begin to write; what was begun before has been waited for."""
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def wait(self) -> str:
        """Wait for the end of what was begun; its problem in words, told once, or ""."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        problem, self._problem = self._problem, ""
        return problem

    def look(self) -> str | None:
        """As ``wait``, without waiting: None while it goes on."""
        if self._thread is not None and self._thread.is_alive():
            return None
        return self.wait()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # whatever it is, all ranks have to be told
            self._problem = str(error) or type(error).__name__
