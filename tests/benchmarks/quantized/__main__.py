"""``python -m tests.benchmarks.quantized``: a table, and a line of JSON per load."""

import json
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.quantized.measure import SAVED, Size, compare, write_base, write_quantized

RECORDS = Path(__file__).with_name("records.jsonl")
METHODS = ("nf4", "nf4-double", "int8")
SMALL = Size(hidden=384, ffn=384, layers=1, vocab=64)


def main() -> None:
    torch.set_num_threads(1)
    columns = ("tp_size", "method", "peak MiB", "bound MiB", "held MiB", "of the bound")
    table = Table(*columns)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_base(Size(), Path(folder) / "base")
        warm = write_base(SMALL, Path(folder) / "warm")
        saved = [write_quantized(one, Path(f"{one}-saved")) for one in (path, warm)]
        for tp_size in (2, 3):
            records += compare(Size(), path, warm, tp_size, METHODS)
            records += compare(Size(), *saved, tp_size, [SAVED])
    for one in records:
        peak, limit, held = (one[key] / 2**20 for key in ("peak_bytes", "bound", "held"))
        shown = (f"{n:.1f}" for n in (peak, limit, held))
        table.add_row(str(one["tp_size"]), one["method"], *shown, f"{peak / limit:.2f}")
    RECORDS.write_text("".join(json.dumps(one) + "\n" for one in records))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
