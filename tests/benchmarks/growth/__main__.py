"""python -m tests.benchmarks.growth: tables on stdout, records beside this file."""

import json
import sys
import tempfile
from pathlib import Path

from transformers import AutoConfig

from tests.benchmarks.growth.measure import CHANGES, bytes_of, fit_line, measure
from tests.benchmarks.steps.measure import Work
from tests.rehearsal.models import write_model

VARIED = {"tp_size": (1, 2, 3, 4), "r": (8, 16, 64, 256), "length": (128, 512, 1024, 2048)}


def main(num_repeats: int = 3) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(__file__).parent / "records.jsonl").open("w") as file,
    ):
        path = write_model("llama", Path(folder) / "llama", **CHANGES)
        config = AutoConfig.from_pretrained(path)
        for key, values in VARIED.items():
            rows = []
            for value in values:
                work = Work(**{"path": path, "tp_size": 2, "length": 512, key: value})
                found = measure(work, sys.executable, num_repeats=num_repeats)
                found["formula_bytes"] = bytes_of(work, config)
                file.write(json.dumps({"varied": key} | found) + "\n")
                file.flush()
                rows.append(found)
            print(f"\n{key}")  # noqa: T201
            for row in rows:
                print(  # noqa: T201
                    f"  {row[key]:5}  {1e3 * row['seconds']:8.1f} ms  {row['bytes']:11,} bytes "
                    f"(formula {row['formula_bytes']:11,})  {row['made_bytes']:12,} made"
                )
            if key != "tp_size":
                xs = [row[key] for row in rows]
                for what in ("bytes", "made_bytes", "seconds"):
                    start, slope, worst = fit_line(xs, [row[what] for row in rows])
                    print(  # noqa: T201
                        f"  {what} = {start:.4g} + {slope:.4g} x {key}, at most {worst:.1%} off",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
