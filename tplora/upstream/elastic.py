"""torchrun's agent and rendezvous, with what a launcher of ours has to know of them.

``launch_agent`` (torch 2.13, distributed/launcher/api.py) builds its agent itself; here the same
parts are put together with an agent that can be asked and a rendezvous that keeps the nodes' order.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from os import kill
from typing import TYPE_CHECKING, Any

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from tplora.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from subprocess import Popen

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.multiprocessing import LogsSpecs

__all__ = ["Meeting", "NodeRendezvous", "WatchedAgent", "build_agent"]

# Seconds between two looks at whether another node has ended the run: each asks its store.
_LOOK_S = 1.0
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
        """Whether a node has ended the run."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """End the run for every node."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """Nodes that have come, or come back, since the processes were started."""
        return self._inner.num_nodes_waiting()

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


class WatchedAgent(LocalElasticAgent):
    """Starts the processes of one node, ends all when one fails, and starts them again if told to.

    ``_start_workers`` and ``_monitor_workers`` are what an agent is made of
    (``SimpleElasticAgent``, torch 2.13); it counts restarts down in ``_remaining_restarts``.

    Args:
        spec: What to start.
        logs_specs: As the agent's.
        shutdown_s: Seconds that processes get to end after SIGTERM, then they are killed.
        rendezvous: That of ``spec``.
        started: Called whenever processes have been started.
        may_restart: Given the exit code of each failed rank and how many restarts are left,
            whether to start all of them again; asked only where some are left.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        shutdown_s: int,
        rendezvous: NodeRendezvous,
        started: Callable[[], None],
        may_restart: Callable[[Mapping[int, int], int], bool],
    ) -> None:
        super().__init__(spec, logs_specs)
        self._shutdown_s = self._shutdown_timeout = shutdown_s
        self._started, self._may_restart = started, may_restart
        self._rendezvous_of_nodes = rendezvous
        self._last_look = time.monotonic()

    def pass_on(self, number: int) -> bool:
        """Send a signal to every process that runs; whether there was one."""
        running = self._running()
        for pid in running:
            with suppress(ProcessLookupError):
                kill(pid, number)
        return bool(running)

    def _running(self) -> list[int]:
        return [process.pid for process in self._processes() if process.poll() is None]

    def _processes(self) -> list[Popen[bytes]]:
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # So that TORCHELASTIC_RESTART_COUNT is the same on every node.
        self._remaining_restarts = self._num_left()
        workers: dict[int, Any] = super()._start_workers(worker_group)
        self._started()
        return workers

    def _num_left(self) -> int:
        spec = self._worker_group.spec
        return max(0, int(spec.max_restarts) - self._rendezvous_of_nodes.num_rounds + 1)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._end_all_if_one_failed()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._end_if_another_node_did()
        elif result.state != WorkerState.SUCCEEDED:
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            left = self._num_left()
            self._remaining_restarts = left if left and self._may_restart(codes, left) else 0
        return result

    def _end_all_if_one_failed(self) -> None:
        """The agent would do so itself, but wait half a minute for those that do not listen."""
        if self._pcontext is not None and any(process.poll() for process in self._processes()):
            self._pcontext.close(signal.SIGTERM, self._shutdown_s)

    def _end_if_another_node_did(self) -> None:
        rendezvous = self._rendezvous_of_nodes
        if rendezvous.is_alone or time.monotonic() - self._last_look < _LOOK_S:
            return
        self._last_look = time.monotonic()
        if rendezvous.is_closed():
            raise RendezvousClosedError


def build_agent(
    meeting: Meeting,
    command: Sequence[str],
    *,
    num_processes: int,
    max_restarts: int,
    **watch: Any,
) -> tuple[WatchedAgent, NodeRendezvous]:
    """An agent of this node over ``command``, whose first word is the program."""
    rendezvous = NodeRendezvous(meeting)
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_processes,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    return WatchedAgent(spec, rendezvous=rendezvous, **watch), rendezvous
