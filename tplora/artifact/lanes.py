"""Pieces of work done side by side in bounded memory, and taken up in the order they were given.

A piece has a thread to itself and sums in that one alone: pieces never wait for one another, so a
busy machine slows them down and no more, and what comes out is the same on any number of cores.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Lanes"]

_MOST_LANES = 8
"""More of them wait for the disk, and for Python between two sums."""
_WAITING_PER_LANE = 4

Room = TypeVar("Room")
Result = TypeVar("Result")


class Lanes(Generic[Room]):
    """What goes wrong in a piece is raised by a call that comes after.

    Args:
        new_room: Makes the memory that a piece works in; the next one gets it as it was left,
            unless it is so large that not every lane may have one.
        max_bytes: Of the pieces in hand; one that is larger comes alone.
    """

    def __init__(self, new_room: Callable[[], Room], max_bytes: int) -> None:
        self._new_room, self._max_bytes = new_room, max_bytes
        self._count = min(_MOST_LANES, len(os.sched_getaffinity(0)))
        self._max_waiting = _WAITING_PER_LANE * self._count
        self._rooms: list[Room] = []  # the one that was used last is warm
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None], int]] = deque()
        self._held = 0
        self._pool = ThreadPoolExecutor(
            self._count, initializer=torch.set_num_threads, initargs=(1,)
        )
        self._num_threads = torch.get_num_threads()

    def submit(
        self,
        piece: Callable[[Room], Result],
        *,
        num_bytes: int = 0,
        then: Callable[[Result], None] = lambda result: None,
    ) -> Future[Result]:
        """Have a piece done; ``then`` is called with what comes of it, here, in order.

        Args:
            piece: It begins after all that were given before it.
            num_bytes: That it takes.
            then: Called by one of the calls that come after.
        """
        while self._waiting and (
            self._held + num_bytes > self._max_bytes or len(self._waiting) >= self._max_waiting
        ):
            self._take_first()
        future = self._pool.submit(
            self._run, piece, is_large=num_bytes > self._max_bytes // self._count
        )
        self._waiting.append((future, then, num_bytes))
        self._held += num_bytes
        return future

    def call(self, then: Callable[[], Result]) -> Future[Result]:
        """Call ``then``, here, when all that was given before it is done."""
        nothing: Future[None] = Future()
        nothing.set_result(None)
        called: Future[Result] = Future()
        self._waiting.append((nothing, lambda _: called.set_result(then()), 0))
        return called

    def finish(self, called: Future[Any] | None = None) -> None:
        """Wait for everything that was given, or for what ``call`` gave."""
        while self._waiting and not (called is not None and called.done()):
            self._take_first()

    def close(self) -> None:
        """Let go of the threads; what has not begun does not begin."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(self._num_threads)  # threads that begin now would take ours

    def _run(self, piece: Callable[[Room], Result], *, is_large: bool) -> Result:
        room = self._rooms.pop() if self._rooms and not is_large else self._new_room()
        result = piece(room)
        if not is_large:
            self._rooms.append(room)
        return result

    def _take_first(self) -> None:
        future, then, num_bytes = self._waiting.popleft()
        then(future.result())
        self._held -= num_bytes
