"""python -m tests.benchmarks.load: a table on stdout, records beside this file."""

import json
import statistics
import tempfile
from pathlib import Path

from tests.benchmarks.load.measure import KINDS, Size, read_bytes, seconds, write_base
from tests.world import World


def main(size: Size = Size(), num_repeats: int = 5) -> None:  # noqa: B008
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(__file__).parent / "records.jsonl").open("w") as file,
    ):
        path = write_base(size, Path(folder) / "base")
        whole = sum(one.stat().st_size for one in Path(path).glob("*.safetensors"))
        print(f"{whole / 1e9:.2f} GB in files")  # noqa: T201
        for tp_size in (1, 2, 4):
            with World(tp_size) as world:
                found = world.run(read_bytes, path, timeout_s=300)
                times: dict[str, list[float]] = {kind: [] for kind in KINDS}
                work: dict[str, list[float]] = {kind: [] for kind in KINDS}
                for repeat in range(num_repeats):
                    for kind in KINDS if repeat % 2 else reversed(KINDS):
                        ranks = world.run(seconds, path, kind, timeout_s=300)
                        times[kind].append(ranks[0][0])
                        work[kind].append(sum(one for _, one in ranks))
            record = {
                "tp_size": tp_size,
                "file_bytes": whole,
                "ranks": found,
                "seconds": times,
                "cpu_seconds": work,
            }
            file.write(json.dumps(record) + "\n")
            read = [round(one["loading"] / one["share"], 4) for one in found]
            checked = [round(one["checking"] / one["share"], 4) for one in found]
            print(  # noqa: T201
                f"tp {tp_size}: read / share {read}, sample / share {checked}, seconds "
                f"{ {kind: round(statistics.median(t), 2) for kind, t in times.items()} }, "
                f"tplora / transformers {_ratio(times):.2f}, of all ranks' CPU {_ratio(work):.2f}",
                flush=True,
            )


def _ratio(found: dict[str, list[float]]) -> float:
    pairs = zip(found["tplora"], found["transformers"], strict=True)
    return statistics.median(a / b for a, b in pairs)


if __name__ == "__main__":
    main()
