"""``python -m tests.benchmarks.step_overhead``: a table, and a line of JSON per step and kind."""

import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.step_overhead.measure import Size, on_ranks, summary
from tests.models import CUT
from tests.tiny import write_checkpoint
from tests.world import World

RECORDS = Path(__file__).with_name("records.jsonl")
RUNS = (Size(num_layers=30), Size(num_layers=72))


def main() -> None:
    table, records = Table("factors", "part"), []
    with World(2) as world, tempfile.TemporaryDirectory() as folder:
        for size in RUNS:
            name = f"{folder}/{size.num_layers}"
            path = write_checkpoint("llama", Path(name), num_hidden_layers=size.num_layers, **CUT)
            ranks = world.run(on_ranks, str(path), size, 15, timeout_s=600)
            records += ranks[0]
            for part, numbers in summary(ranks[0]).items():
                if len(table.columns) == 2:
                    for column in numbers:
                        table.add_column(column, justify="right")
                row = (f"{number:.2f}" for number in numbers.values())
                table.add_row(str(size.num_factors), part, *row)
    RECORDS.write_text("".join(json.dumps(one) + "\n" for one in records))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
