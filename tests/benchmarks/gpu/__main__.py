"""python -m tests.benchmarks.gpu: a table on stdout, records beside this file; under 8 minutes."""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.measure import Size, layers, loss, write_base
from tests.benchmarks.gpu.two_ranks import compare

RECORDS = Path(__file__).with_name("records.jsonl")
NOTE = "no CUDA device here: nothing is measured; run this on a machine with a card"


def main(size: Size = Size()) -> int:  # noqa: B008
    if not torch.cuda.is_available():
        print(NOTE)  # noqa: T201
        return 0
    device = torch.device("cuda", 0)
    print(torch.cuda.get_device_name(device), torch.__version__)  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        path = write_base(size, Path(folder) / "base")
        questions: dict[str, Callable[[], dict[str, Any]]] = {
            "bf16 layers": lambda: layers(path, size, device, is_packed=False),
            "nf4 layers": lambda: layers(path, size, device, is_packed=True),
            "loss, 152k": lambda: loss(size, device),
            "two ranks, gloo": lambda: compare(device),
        }
        return ask(questions, RECORDS)


def ask(questions: dict[str, Callable[[], dict[str, Any]]], file: Path) -> int:
    """A row for each question, also for one that fails; how many failed."""
    failed = 0
    with file.open("w") as records:
        for name, question in questions.items():
            try:
                found = question()
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"}
            failed += "failed" in found or found.get("is_same") is False
            records.write(json.dumps({"question": name} | found) + "\n")
            records.flush()
            print(f"{name:16}", _say(found), flush=True)  # noqa: T201
    return failed


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
