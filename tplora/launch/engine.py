"""What surrounds torchrun's engine while it runs: signals, its log, the ranks' environment."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

__all__ = [
    "Interrupted",
    "RankEnvironment",
    "end",
    "end_groups",
    "interrupt",
    "own_signals",
    "path_options",
    "quiet",
]


class RankEnvironment(LogsSpecs):
    """Passes variables on, and leaves output and error files to tplora.launch.rank.

    The engine would open two files per rank, and not close those of a rank that ends by itself.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(log_dir=os.devnull)
        self._env = dict(env)

    @property
    def root_log_dir(self) -> str:
        """None is written to."""
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Add the variables to each rank's."""
        for variables in envs.values():
            variables.update(self._env)
        inherited = dict.fromkeys(envs, "")
        nowhere = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=inherited, stderrs=inherited, error_files=nowhere)


class Interrupted(SignalException):
    """Ctrl-C. The engine only sees a SIGTERM, which ends a rank even inside a collective."""


def path_options() -> list[str]:
    """Keep the current folder off the ranks' import path unless this process has it there."""
    here = os.getcwd()
    return [] if any(path in ("", here) for path in sys.path) else ["-P"]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the engine's own log off the terminal: what it has to say is said by _Run."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def own_signals() -> Iterator[None]:
    """Give every signal back to whoever had it before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle Ctrl-C: the engine ends the ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # impatience must not stop the clearing up
    raise Interrupted("interrupted", sigval=signal.SIGTERM)


def end(number: int, frame: FrameType | None) -> NoReturn:
    """Handle another signal the same way."""
    raise SignalException(f"got signal {number}", sigval=signal.Signals(number))


def end_groups(pids: Sequence[int]) -> None:
    """End what failed ranks started themselves; each rank leads a process group."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
