"""``python -m tests.benchmarks.experts``: a table, and a line of JSON per repeat."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.experts.measure import Size, compare, on_ranks, summary
from tests.world import World

RECORDS = Path(__file__).with_name("records.jsonl")
# batched_mm copies W for every pair of token and expert: 1 GiB for 256 tokens.
RUNS = (("eager", Size()), ("grouped_mm", Size()), ("batched_mm", replace(Size(), num_tokens=64)))


def main() -> None:
    torch.set_num_threads(1)
    table = Table("experts", "tokens")
    records = []
    for implementation, size in RUNS:
        records += (found := compare(size, implementation, num_repeats=9))
        numbers = summary(found)
        if not table.rows:
            for name in numbers:
                table.add_column(name, justify="right")
        table.add_row(implementation, str(size.num_tokens), *(f"{n:.2f}" for n in numbers.values()))
    with World(2) as world:
        ranks = world.run(on_ranks, Size().case)
    RECORDS.write_text("".join(json.dumps(one) + "\n" for one in [*records, *ranks]))
    Console(width=130).print(table, *ranks, sep="\n")


if __name__ == "__main__":
    main()
