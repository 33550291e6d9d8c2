"""Start the ranks of a run on this machine, through torchrun's own engine, and wait for them.

One rank's failure ends all of them; so does Ctrl-C, and so does the end of this process.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tplora.errors import LaunchError
from tplora.launch.failure import Exit, describe_failure, find_root_cause, read_exits
from tplora.plan.axes import fill_world
from tplora.recipe.schema import ParallelTable

__all__ = ["count_gpus", "default_num_processes", "launch"]

# Seconds that ranks get to end after SIGTERM, then they are killed.
_SHUTDOWN_S = 5
_NUM_LOG_LINES = 15


def launch(
    argv: Sequence[str], *, num_processes: int, log_folder: Path | None, env: Mapping[str, str]
) -> None:
    """Run ``python argv`` on ``num_processes`` ranks of this machine and wait for all of them.

    Rank 0 has this process's terminal; the others write to ``rank1.log`` and so on.

    Args:
        argv: What follows the interpreter: ``-m module argument ...`` or ``script argument ...``.
        num_processes: Ranks to start.
        log_folder: Where the other ranks' output goes; None when nobody will want to read it.
        env: Variables on top of this process's own.

    Raises:
        LaunchError: If a rank failed. Its traceback has been written to stderr, once.
        KeyboardInterrupt: If this process was interrupted; no rank is left.
        SystemExit: With 128 + n if this process got another signal n; no rank is left.
    """
    with tempfile.TemporaryDirectory(prefix="tplora-") as scratch:
        logs = log_folder or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        config = _launch_config(num_processes, _RankEnvironment(env))
        run = elastic_launch(config, sys.executable)
        try:
            with _quiet(), _interruptible():
                # The engine puts each process's number in the place of ${local_rank}.
                prefix = [*_path_options(), "-m", "tplora.launch.rank"]
                run(*prefix, scratch, str(logs), "${local_rank}", *argv)
        except ChildFailedError as error:
            codes = {rank: found.exitcode for rank, found in error.failures.items()}
            _end_groups(found.pid for found in error.failures.values())
            _report(read_exits(Path(scratch), codes), num_processes, logs, keep=bool(log_folder))
        except _Interrupted:
            raise KeyboardInterrupt from None
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None


def default_num_processes(parallel: ParallelTable, *, num_gpus: int) -> int:
    """How many ranks a run gets on this machine: the axes' product; "auto" takes every GPU.

    Raises:
        LaunchError: If there are GPUs, but fewer than that, or "auto" cannot share them out.
    """
    data_size = parallel.fsdp_size * parallel.dp_replicate_size
    if parallel.tp_size == "auto":
        return fill_world(max(data_size, num_gpus), parallel).world_size
    wanted = parallel.tp_size * data_size
    if 0 < num_gpus < wanted:
        sizes = "parallel.tp_size" if data_size == 1 else "parallel: the product of its sizes"
        raise LaunchError(
            f"{sizes} = {wanted}: this machine has {num_gpus} GPU{'s'[: num_gpus > 1]}; "
            f"set it to {num_gpus} or less, or run on the CPU with CUDA_VISIBLE_DEVICES="
        )
    return wanted


def count_gpus() -> int:
    """The GPUs of this machine that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class _RankEnvironment(LogsSpecs):
    """Passes variables on, and leaves output and error files to tplora.launch.rank.

    The engine would open two files per rank, and not close those of a rank that ends by itself.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(log_dir=os.devnull)
        self._env = dict(env)

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for variables in envs.values():
            variables.update(self._env)
        inherited = dict.fromkeys(envs, "")
        nowhere = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=inherited, stderrs=inherited, error_files=nowhere)


class _Interrupted(SignalException):
    """Ctrl-C. The engine only sees a SIGTERM, which ends a rank even inside a collective."""


def _launch_config(num_processes: int, logs: LogsSpecs) -> LaunchConfig:
    known = {field.name for field in fields(LaunchConfig)}
    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": num_processes,
        "run_id": uuid.uuid4().hex,
        "role": "rank",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",  # port 0: any free one
        "local_addr": "localhost",
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "logs_specs": logs,
        "signals_to_handle": "SIGTERM,SIGHUP,SIGQUIT",
        "shutdown_timeout": _SHUTDOWN_S,
    }
    # The last two are younger than torch 2.11; without them ending takes longer, not forever.
    return LaunchConfig(**{name: value for name, value in options.items() if name in known})


def _path_options() -> list[str]:
    """Keep the current folder off the ranks' import path unless this process has it there."""
    here = os.getcwd()
    return [] if any(path in ("", here) for path in sys.path) else ["-P"]


def _log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the engine's own log off the terminal: what it has to say is said by _report."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Take Ctrl-C, and give every signal back to whoever had it before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # impatience must not stop the clearing up
    raise _Interrupted("interrupted", sigval=signal.SIGTERM)


def _end_groups(pids: Iterator[int]) -> None:
    """End what failed ranks started themselves; each rank leads a process group."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _report(exits: Sequence[Exit], num_processes: int, logs: Path, *, keep: bool) -> NoReturn:
    """Write the cause's traceback, or the end of its log, to stderr and raise the one line."""
    cause = find_root_cause(exits)
    log = _log_path(logs, cause.rank)
    record = cause.record
    if record is not None and not record.is_user_error:
        sys.stderr.write(f"\nrank {cause.rank}:\n{record.traceback}\n")
    elif record is None and log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if lines:
            tail = "\n".join(lines[-_NUM_LOG_LINES:])
            sys.stderr.write(f"\nrank {cause.rank}, the end of its log:\n{tail}\n\n")
    shown = log if keep and log.is_file() else None
    raise describe_failure(cause, num_processes=num_processes, log=shown) from None
