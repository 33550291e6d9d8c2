"""python -m tests.benchmarks.gpu: a table on stdout, records beside this file; under 8 minutes."""

import dataclasses
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.measure import Size, layers, loss, write_base
from tests.benchmarks.gpu.two_ranks import SMALL, compare

RECORDS = Path(__file__).with_name("records.jsonl")
NOTE = "no CUDA device here: nothing is measured; run this on a machine with a card"
BUDGET_S = 8 * 60


def main(
    size: Size = Size(),  # noqa: B008
    small: Size = SMALL,
    device: torch.device | None = None,
) -> int:
    """Ask one card every question, or where there are several two of them over NCCL as well.

    Args:
        size: Of the layers and the head that are timed.
        small: Of the model that two processes share.
        device: Where; the first card when left out.
    """
    if device is None:
        if not torch.cuda.is_available():
            print(NOTE)  # noqa: T201
            return 0
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        print(torch.cuda.get_device_name(device), torch.__version__)  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        path = write_base(size, Path(folder) / "base")
        return ask(questions(path, size, small, device), RECORDS)


def questions(
    path: str, size: Size, small: Size, device: torch.device
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Each with what answers it."""
    narrow = dataclasses.replace(small, dtype=torch.bfloat16)
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "two ranks, gloo": partial(compare, device, small),
        "two ranks, gloo, bf16": partial(compare, device, narrow),
        "bf16 layers": partial(layers, path, size, device, is_packed=False),
        "nf4 layers": partial(layers, path, size, device, is_packed=True),
        f"loss, {size.head_vocab:,}": partial(loss, size, device),
    }
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        found["two cards, nccl"] = partial(compare, device, small, backend="nccl")
        found["two cards, nccl, bf16"] = partial(compare, device, narrow, backend="nccl")
    return found


def ask(asked: dict[str, Callable[[], dict[str, Any]]], file: Path) -> int:
    """A row for each question, also for one that fails; how many failed.

    What would begin after the budget is not asked, and has failed.
    """
    failed, start = 0, time.monotonic()
    with file.open("w") as records:
        for name, question in asked.items():
            began = time.monotonic()
            try:
                if began - start > BUDGET_S:
                    raise TimeoutError(f"not asked: {BUDGET_S} s are over")
                found = question()
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"}
            release()
            took = time.monotonic() - began
            failed += "failed" in found or found.get("is_same") is False
            records.write(json.dumps({"question": name, "took_s": took} | found) + "\n")
            records.flush()
            print(f"{name:22}", _say(found), f"[{took:.0f} s]", flush=True)  # noqa: T201
    return failed


def release() -> None:
    """Give what a question held back: its models are in cycles, and a child needs room, too."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _say(found: dict[str, Any]) -> str:
    if "failed" in found:
        return found["failed"]
    if "worst" in found:
        return f"differ by {found['worst']:.1e} at most from one process"
    times = ", ".join(f"{name} {1e3 * n:.1f} ms" for name, n in found["seconds"].items())
    sizes = ", ".join(f"{name} {n / 2**20:,.0f} MiB" for name, n in found["bytes"].items())
    return f"{times}, tplora / peft {found['ratio']:.2f}; on top {sizes}"


if __name__ == "__main__":
    sys.exit(main())
