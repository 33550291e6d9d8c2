"""Writes a file in a thread of its own while the next bytes are made."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from io import FileIO
    from pathlib import Path

__all__ = ["Writer", "one_thread"]


class Writer:
    """One file after the other; what goes wrong is raised by the call that comes after.

    Args:
        in_flight: Pieces that may wait to be written; their memory has to stay as it is.
    """

    def __init__(self, in_flight: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[Future[None]] = deque()
        self._in_flight = in_flight
        self._target: FileIO | None = None

    def open(self, path: Path) -> None:
        """Begin a file."""
        self._target = path.open("wb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Add to it, soon."""
        assert self._target is not None, "open was called"
        self._submit(_write_all, self._target, data)

    def settle(self, then: Callable[[], None]) -> None:
        """Bring the file to disk, then call ``then``, while the next one is begun."""
        assert self._target is not None, "open was called"
        self._submit(_settle, self._target, then)
        self._target = None

    def finish(self) -> None:
        """Wait for all of it."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Let go of thread and file, whatever state they are in."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._target is not None:
            self._target.close()

    def _submit(self, function: Callable[..., None], *args: object) -> None:
        self._waiting.append(self._pool.submit(function, *args))
        while len(self._waiting) > self._in_flight:
            self._waiting.popleft().result()


def _write_all(target: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[target.write(view) :]


def _settle(target: FileIO, then: Callable[[], None]) -> None:
    os.fsync(target.fileno())
    target.close()
    then()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums of a few rows take less time than threads take to meet, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
