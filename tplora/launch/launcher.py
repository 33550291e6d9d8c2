"""Start the ranks of a run on this machine, through torchrun's own engine, and wait for them.

One rank's failure ends all of them; so does Ctrl-C, and so does the end of this process. SIGTERM is
passed on: ranks that train save a checkpoint and end by themselves.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from tplora.errors import LaunchError
from tplora.launch.engine import (
    Interrupted,
    RankEnvironment,
    end,
    end_groups,
    interrupt,
    own_signals,
    path_options,
    quiet,
)
from tplora.launch.failure import (
    Exit,
    describe_exit,
    describe_failure,
    find_root_cause,
    read_exits,
    will_come_again,
)
from tplora.launch.nodes import Nodes, processes_of_node
from tplora.mesh import PREEMPTED
from tplora.upstream.elastic import WatchedAgent, build_agent
from tplora.upstream.rendezvous import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from tplora.recipe.schema import ParallelTable

__all__ = ["count_gpus", "default_num_processes", "launch"]

# Seconds that ranks get to end after SIGTERM, then they are killed.
_SHUTDOWN_S = 5
# Seconds that a node waits for another to say why its ranks have gone.
_CAUSE_S = 5
_NUM_LOG_LINES = 15


def launch(
    argv: Sequence[str],
    *,
    num_processes: int,
    log_folder: Path | None,
    env: Mapping[str, str],
    nodes: Nodes | None = None,
    max_restarts: int = 0,
    say: Callable[[str], None] = lambda message: None,
) -> None:
    """Run ``python argv`` on ``num_processes`` ranks of this machine and wait for all of them.

    The first rank has this process's terminal; the others write to ``rank1.log`` and so on.

    Args:
        argv: What follows the interpreter: ``-m module argument ...`` or ``script argument ...``.
        num_processes: Ranks to start.
        log_folder: Where the other ranks' output goes; None when nobody will want to read it.
        env: Variables on top of this process's own.
        nodes: Of a run over several machines, on each of which this is called.
        max_restarts: How often all ranks are started again when one failed, unless it would only
            fail again. They find TORCHELASTIC_RESTART_COUNT above 0.
        say: Called with one line whenever they are.

    Raises:
        LaunchError: If a rank failed. Its traceback has been written to stderr, once.
        KeyboardInterrupt: If this process was interrupted; no rank is left.
        SystemExit: With 75 if the ranks saved a checkpoint because they were asked to end, else
            with 128 + n if this process got signal n; no rank is left.
    """
    with tempfile.TemporaryDirectory(prefix="tplora-") as scratch:
        logs = log_folder or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        run = _Run(Path(scratch), logs, keep=bool(log_folder), say=say)
        run.start(argv, nodes or Nodes(), num_processes, max_restarts, env)


def default_num_processes(parallel: ParallelTable, *, num_gpus: int) -> int:
    """How many ranks a run gets on this machine: the axes' product; "auto" takes every GPU.

    Raises:
        LaunchError: If there are GPUs, but fewer than that, or "auto" cannot share them out.
    """
    return processes_of_node(parallel, Nodes(), num_gpus=num_gpus)[0]


def count_gpus() -> int:
    """The GPUs of this machine that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class _Run:
    """The ranks of this node, from their first start to their last end."""

    def __init__(
        self, records: Path, logs: Path, *, keep: bool, say: Callable[[str], None]
    ) -> None:
        self._records, self._logs, self._keep, self._say = records, logs, keep, say
        self._num_ranks, self._num_restarts = 0, 0
        self._last_said: str | None = None
        self._is_asked_to_end = False
        self._agent: WatchedAgent | None = None

    def start(
        self,
        argv: Sequence[str],
        nodes: Nodes,
        num_processes: int,
        max_restarts: int,
        env: Mapping[str, str],
    ) -> None:
        self._num_ranks, self._max_restarts = num_processes * nodes.num_nodes, max_restarts
        program = ["-m", "tplora.launch.rank", str(self._records), str(self._logs), *argv]
        with quiet(), own_signals():
            self._take_signals()
            self._agent, self._rendezvous = build_agent(
                _meeting(nodes, num_processes),
                [sys.executable, *path_options(), *program],
                num_processes=num_processes,
                max_restarts=max_restarts,
                logs_specs=RankEnvironment(env),
                shutdown_s=_SHUTDOWN_S,
                started=self._take_signals,
                may_restart=self._may_restart,
            )
            codes = self._wait(self._agent)
            if codes:
                try:
                    self._report(read_exits(self._records, codes))
                finally:
                    self._rendezvous.leave()

    def _wait(self, agent: WatchedAgent) -> dict[int, int]:
        """The exit codes of ranks that failed, and of those that were ended with them."""
        try:
            failures = agent.run().failures
        except Interrupted:
            raise KeyboardInterrupt from None
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None
        except LaunchError:
            self._rendezvous.leave()
            raise
        except RendezvousError as error:
            said = self._say_nodes(error)
            self._rendezvous.leave()
            raise LaunchError(said) from None
        if failures or self._rendezvous.is_alone:
            self._tell_cause({rank: found.exitcode for rank, found in failures.items()})
            self._rendezvous.shutdown()  # which tells the other nodes that it is over
        end_groups([found.pid for found in failures.values()])
        return {rank: found.exitcode for rank, found in failures.items()}

    # ---- signals

    def _take_signals(self) -> None:
        """Once more whenever ranks were started: the engine takes them for itself then."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, self._pass_on)
            for number in (signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, end)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The first SIGTERM asks the ranks to end; the second ends them."""
        is_first, self._is_asked_to_end = not self._is_asked_to_end, True
        if not (is_first and self._agent is not None and self._agent.pass_on(number)):
            end(number, frame)

    # ---- failures

    def _may_restart(self, codes: Mapping[int, int], num_left: int) -> bool:
        exits = read_exits(self._records, codes)
        if self._is_asked_to_end or PREEMPTED in codes.values() or not exits:
            return False
        cause = find_root_cause(exits)
        if will_come_again(cause, self._last_said):
            return False
        self._last_said = cause.record.message if cause.record else None
        self._num_restarts = self._max_restarts - num_left + 1
        self._say(
            f"restart {self._num_restarts} of {self._max_restarts}: "
            f"{_one_line(cause, self._num_ranks)}; going on from the last whole checkpoint"
        )
        for record in self._records.glob("rank*.json"):
            record.unlink()
        return True

    def _tell_cause(self, codes: Mapping[int, int]) -> None:
        exits = read_exits(self._records, codes)
        if exits:
            cause = find_root_cause(exits)
            if cause.record is None or not cause.record.is_lost_peer:
                self._rendezvous.tell("cause", _one_line(cause, self._num_ranks))

    def _say_nodes(self, error: RendezvousError) -> str:
        """A run of several nodes that another one has ended, or that has lost its first one."""
        told = self._rendezvous.ask("cause", timeout_s=_CAUSE_S)
        if told is not None:
            return f"another node ended the run: {told}"
        return (
            f"the nodes have lost each other ({type(error).__name__}): one has not come, has gone, "
            "or has ended the run; look at the output of the others, first of node 0"
        )

    def _report(self, exits: Sequence[Exit]) -> NoReturn:
        """Write the cause's traceback, or the end of its log, to stderr and raise the one line."""
        cause = find_root_cause(exits)
        if any(exit_.code == PREEMPTED for exit_ in exits) and cause.record is None:
            raise SystemExit(PREEMPTED)
        if self._is_asked_to_end and cause.record is None and cause.code == -signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        self._show(cause)
        log = self._logs / f"rank{cause.rank}.log"
        shown = log if self._keep and log.is_file() else None
        raise self._describe(cause, shown) from None

    def _describe(self, cause: Exit, log: Path | None) -> LaunchError:
        if cause.record is not None and cause.record.is_lost_peer:
            told = self._rendezvous.ask("cause", timeout_s=_CAUSE_S)
            if told is not None:
                return LaunchError(f"another node ended the run: {told}")
        error = describe_failure(cause, num_processes=self._num_ranks, log=log)
        if not self._num_restarts:
            return error
        return LaunchError(f"{error} (after {self._num_restarts} of {self._max_restarts} restarts)")

    def _show(self, cause: Exit) -> None:
        log, record = self._logs / f"rank{cause.rank}.log", cause.record
        if record is not None and not record.is_user_error:
            sys.stderr.write(f"\nrank {cause.rank}:\n{record.traceback}\n")
        elif record is None and log.is_file():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                tail = "\n".join(lines[-_NUM_LOG_LINES:])
                sys.stderr.write(f"\nrank {cause.rank}, the end of its log:\n{tail}\n\n")


def _meeting(nodes: Nodes, num_processes: int) -> Meeting:
    is_alone = nodes.num_nodes == 1
    return Meeting(
        num_nodes=nodes.num_nodes,
        node_rank=nodes.node_rank,
        endpoint="localhost:0" if is_alone else f"{nodes.host}:{nodes.port}",
        run_id=uuid.uuid4().hex if is_alone else "tplora",
        agreed=f"{num_processes} processes a node{nodes.agreed}",
    )


def _one_line(cause: Exit, num_ranks: int) -> str:
    if cause.record is not None:
        first = cause.record.message.strip().partition("\n")[0]
        return f"rank {cause.rank} of {num_ranks} stopped with {cause.record.type_name}: {first}"
    return f"rank {cause.rank} of {num_ranks} {describe_exit(cause.code)}"
