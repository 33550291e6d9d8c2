"""``python -m tests.benchmarks.merge``: a table, and a line of JSON per base."""

import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.merge.measure import Size, measure

RECORDS = Path(__file__).with_name("records.jsonl")
SIZES = (
    Size(),
    Size(layers=10, dtype="float32"),
    Size(shard_bytes=10_000_000),  # files of a few tensors, or of one
)


def main() -> None:
    columns = (
        "dtype",
        "base GB",
        "largest file MB",
        "peak MB",
        "of it",
        "copy s",
        "merge s",
        "ratio",
        "copy to cache s",
        "CPU s",
    )
    table, records = Table(*columns), []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            records.append(measure(size, Path(folder)))
        one = records[-1]
        ratio = sorted(one["ratios"])[len(one["ratios"]) // 2]
        table.add_row(
            one["dtype"],
            f"{one['base_bytes'] / 1e9:.2f}",
            f"{one['largest_file'] / 1e6:.0f}",
            f"{one['peak_bytes'] / 1e6:.0f}",
            f"{one['peak_bytes'] / one['largest_file']:.2f}",
            f"{one['copy_s']:.2f}",
            f"{one['merge_s']:.2f}",
            f"{ratio:.2f}",
            f"{one['copy_to_cache_s']:.2f}",
            f"{sum(one['merge_cpu_s']):.2f}",
        )
    RECORDS.write_text("".join(json.dumps(one) + "\n" for one in records))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
