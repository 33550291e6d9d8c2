"""torchrun's agent, with what a launcher of ours has to know of it.

``launch_agent`` (torch 2.13, distributed/launcher/api.py) builds its agent itself; here the same
parts are put together with one that can be asked.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from os import kill
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from tplora.upstream.rendezvous import LEAVE_S, Meeting, NodeRendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from subprocess import Popen

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.multiprocessing import LogsSpecs

__all__ = ["WatchedAgent", "build_agent"]

# Seconds between two looks at whether another node has ended the run: each asks its store.
_LOOK_S = 1.0


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
        self._closed_at: float | None = None

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
            self._closed_at = self._closed_at or self._last_look
            if self._last_look - self._closed_at > LEAVE_S:
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
