"""torchrun's rendezvous, in which the nodes of a run keep their order and say why they leave."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from tplora.errors import LaunchError

__all__ = ["LEAVE_S", "Meeting", "NodeRendezvous"]

LEAVE_S = 6.0
"""Seconds that a node's processes get to end by themselves once another node has ended the run."""
# Seconds that a node waits for the others to start.
_JOIN_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and how the launchers of a run's nodes meet."""

    num_nodes: int
    node_rank: int
    endpoint: str
    """HOST:PORT of the first node; port 0 is any free one, for a node alone."""
    run_id: str
    agreed: str = ""
    """What every node has to have been started with, in words."""


class NodeRendezvous(RendezvousHandler):
    """torchrun's dynamic rendezvous, in which each node keeps the place it was given.

    The dynamic one sorts nodes by host name; here ranks follow ``node_rank``, so that the first
    rank is on the first node, which is also where the store lives.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._inner = _connect(meeting)
        self._store: Any = None
        self._lost_at: float | None = None
        self.num_rounds = 0
        """How often processes were started so far, on every node alike."""

    @property
    def is_alone(self) -> bool:
        """Whether the run has one node only."""
        return self._meeting.num_nodes == 1

    @property
    def use_agent_store(self) -> bool:
        """No: the first rank makes one for its own attempt.

        The launchers' holds the addresses of ranks that are gone (``next_rendezvous`` of
        dynamic_rendezvous.py, torch 2.13, makes it once), and those that come after would try them.
        """
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes, then say who is who."""
        found = self._inner.next_rendezvous()
        self.num_rounds += 1
        self._store = PrefixStore("tplora", found.store)
        rank = self._meeting.node_rank
        if self._store.add(f"node {rank}", 1) > 1:
            raise LaunchError(f"--node-rank {rank}: another node has it; give each node its own")
        self._check_agreed(rank)
        address = self._meeting.endpoint.rpartition(":")[0].strip("[]") if rank == 0 else None
        where = RendezvousStoreInfo.build(rank, self._store, address)
        return RendezvousInfo(found.store, rank, found.world_size, where)

    def _check_agreed(self, rank: int) -> None:
        if rank == 0:
            self._store.set("agreed", self._meeting.agreed)
        first = self._store.get("agreed").decode("utf-8")
        if first != self._meeting.agreed:
            raise LaunchError(
                f"node {rank} was started with {self._meeting.agreed}, node 0 with {first}; start "
                "every node with the same command, but for --node-rank"
            )

    def tell(self, name: str, text: str) -> None:
        """Leave a text for the other nodes of this round."""
        if self._store is not None and not self.is_alone:
            with suppress(RuntimeError):  # the store's node may be the one that is gone
                self._store.set(name, text)

    def ask(self, name: str, *, timeout_s: float) -> str | None:
        """A text that a node has left in this round, if it comes in time."""
        if self._store is None or self.is_alone:
            return None
        end = time.monotonic() + timeout_s
        with suppress(RuntimeError):
            while time.monotonic() < end:
                if self._store.check([name]):
                    text: str = self._store.get(name).decode("utf-8")
                    return text
                time.sleep(0.05)
        return None

    def get_backend(self) -> str:
        """As the one within."""
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        """Whether a node has ended the run, or has taken its store with it."""
        try:
            return self._inner.is_closed()
        except RendezvousConnectionError:
            return True

    def set_closed(self) -> None:
        """End the run for every node."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """Nodes that have come, or come back, since the processes were started.

        Raises:
            RendezvousConnectionError: If the first node is gone; this one's processes get a moment
                to end by themselves, as those there may have done.
        """
        try:
            return self._inner.num_nodes_waiting()
        except RendezvousConnectionError:
            self._lost_at = self._lost_at or time.monotonic()
            if time.monotonic() - self._lost_at > LEAVE_S:
                raise
            return 0

    def leave(self) -> None:
        """End the run for every node; the first waits for the others to have heard it."""
        self.shutdown()
        if self._store is None or self.is_alone:
            return
        with suppress(RuntimeError):
            self._store.add("left", 1)
            end = time.monotonic() + 2 * LEAVE_S
            is_first = self._meeting.node_rank == 0
            while is_first and self._num_left() < self._meeting.num_nodes:
                if time.monotonic() > end:
                    return
                time.sleep(0.1)

    def _num_left(self) -> int:
        return int(self._store.add("left", 0))

    def get_run_id(self) -> str:
        """As the one within."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """End the run for every node, and leave."""
        return self._inner.shutdown()


def _connect(meeting: Meeting) -> RendezvousHandler:
    """The store is the first node's; others wait until it is there."""
    is_alone = meeting.num_nodes == 1
    options = {} if is_alone else {"is_host": meeting.node_rank == 0, "join_timeout": _JOIN_S}
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=meeting.endpoint,
        run_id=meeting.run_id,
        min_nodes=meeting.num_nodes,
        max_nodes=meeting.num_nodes,
        local_addr="localhost" if is_alone else None,
        **options,
    )
    end = time.monotonic() + _JOIN_S
    while True:
        try:
            return rendezvous_registry.get_rendezvous_handler(parameters)
        except RendezvousConnectionError:
            if meeting.node_rank == 0 or time.monotonic() > end:
                raise
            time.sleep(1)
