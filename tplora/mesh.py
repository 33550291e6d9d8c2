"""Processes and their device: the only reader of torchrun's environment.

Axis names are transformers' own: ``tp`` inside a node, data axes across nodes.
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tplora.errors import LaunchError

__all__ = [
    "PREEMPTED",
    "Processes",
    "are_restarts_possible",
    "child_environment",
    "current_processes",
    "join_process_group",
    "largest_of_ranks",
    "leave_process_group",
    "num_restarts",
    "tell_all",
]

PREEMPTED = 75
"""What a process exits with that was asked to end, with all it has trained in a checkpoint.

EX_TEMPFAIL of sysexits.h, "try again later": unlike 128 + 15 it says that nothing is lost, and a
scheduler may start the run again.
"""

# A rank that writes takes as long as its disk does, and one that dies ends the wait at once.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """This process among its peers, as torchrun told it; alone when nothing was told."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    is_launched: bool
    """Whether torchrun (or anything that sets its variables) started this process."""


def current_processes() -> Processes:
    """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, all or none of them.

    Raises:
        LaunchError: If only some are set, or one is not a number.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    found = {name: os.environ[name] for name in names if name in os.environ}
    if "RANK" not in found and "LOCAL_RANK" not in found:
        return Processes(rank=0, local_rank=0, world_size=1, local_world_size=1, is_launched=False)
    missing = [name for name in names if name not in found]
    if missing:
        raise LaunchError(
            f"environment: {', '.join(found)} set but {', '.join(missing)} missing; "
            "start with `tplora finetune` or torchrun, which set all four"
        )
    try:
        rank, local_rank, world_size, local_world_size = (int(found[name]) for name in names)
    except ValueError as error:
        raise LaunchError(f"environment: {error}; torchrun sets whole numbers") from None
    return Processes(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        is_launched=True,
    )


def join_process_group(processes: Processes, *, timeout_s: float = 600) -> torch.device:
    """Join the world's process group, once, and return this process's device.

    NCCL with one GPU a process where CUDA is there, else gloo on the CPU. One process alone joins
    nothing.

    Raises:
        LaunchError: If this node has fewer GPUs than processes.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if processes.local_rank >= torch.cuda.device_count():
            raise LaunchError(
                f"local rank {processes.local_rank}: this node has {torch.cuda.device_count()} "
                "GPUs; start one process per GPU"
            )
        device = torch.device("cuda", processes.local_rank)
        torch.cuda.set_device(device)
    if processes.world_size > 1 and not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            **_meeting_place(processes),
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    return device


def _meeting_place(processes: Processes) -> dict[str, Any]:
    """Where ranks find each other that torchrun has started again: not where those before them did.

    torchrun's store holds the addresses of ranks that are gone, and torch 2.13 gives it to the next
    ones as it is. Nodes may count restarts differently, so it is left at that for several.
    """
    is_reused = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and num_restarts() > 0
    if not is_reused or processes.world_size > processes.local_world_size:
        return {}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port)  # type: ignore[attr-defined]
    return {
        "store": dist.PrefixStore(f"attempt {num_restarts()}", store),  # type: ignore[attr-defined]
        "rank": processes.rank,
        "world_size": processes.world_size,
    }


def num_restarts() -> int:
    """How often the processes of this run have been started before, as torchrun counts them."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def are_restarts_possible() -> bool:
    """Whether whoever started this process will start it again should it fail."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def tell_all(value: Any) -> Any:
    """What the first rank of the world gives, on every rank; waits for as long as that takes.

    Collective. Not bound by the timeout of the other collectives: a rank waits here for another's
    disk. A rank that dies ends the wait.
    """
    group = _patient_group()
    if group is None:
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0, group=group, device=torch.device("cpu"))
    return told[0]


def largest_of_ranks(number: int) -> int:
    """The largest of the ranks' numbers, on every rank. Collective; 8 bytes, on the CPU."""
    group = _patient_group()
    if group is None:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return int(found)


def _patient_group() -> dist.ProcessGroup | None:
    """All ranks over gloo, whatever the others use: it needs no device and waits patiently.

    Made when first asked for, by all ranks at once; None for a process alone.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _patient and _is_alive(_patient[0]):
        return _patient[0]
    _patient[:] = [dist.new_group(backend="gloo", timeout=_PATIENCE)]
    return _patient[0]


_patient: list[dist.ProcessGroup] = []


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except ValueError:  # it was ended, with the world or by itself
        return False


def leave_process_group() -> None:
    """Leave the process group if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def child_environment(num_processes: int, *, is_on_loopback: bool = True) -> dict[str, str]:
    """What each of ``num_processes`` ranks on this machine gets, except what the user has set.

    Args:
        num_processes: Ranks on this machine.
        is_on_loopback: Whether all ranks of the run are on it.

    Returns:
        Its share of the cores, and libraries that keep their advice to themselves: with several
        ranks every notice would come several times.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cores // num_processes)),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "DATASETS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if sys.platform == "linux" and is_on_loopback:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's own name may resolve to nowhere
    return {name: value for name, value in wanted.items() if name not in os.environ}
