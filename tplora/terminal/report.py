"""What a bug report needs to say about the machine: versions, devices, cores, memory."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

__all__ = ["environment_report"]

_PACKAGES = (
    "tplora",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "trl",
    "datasets",
    "bitsandbytes",
    "safetensors",
)


def environment_report() -> list[tuple[str, str]]:
    """Name and value, in the order to be read."""
    return [
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        *((name, _version(name)) for name in _PACKAGES),
        ("CUDA", _cuda()),
        ("GPUs", _gpus()),
        ("backends", _backends()),
        ("CPU cores", str(_num_cores())),
        ("memory", _memory()),
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cuda() -> str:
    built = torch.version.cuda
    if built is None:
        return "none: this torch is built for the CPU"
    return built if torch.cuda.is_available() else f"{built}, but no usable device"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    names = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        names.append(f"{index}: {found.name}, {found.total_memory / 2**30:.0f} GiB")
    return "\n".join(names)


def _backends() -> str:
    checks = {
        "gloo": torch.distributed.is_gloo_available,
        "nccl": torch.distributed.is_nccl_available,
    }
    return ", ".join(name for name, is_there in checks.items() if is_there()) or "none"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _memory() -> str:
    num_pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{num_pages * page_bytes / 2**30:.1f} GiB"
