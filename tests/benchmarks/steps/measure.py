"""Implementations step in turn, each in processes of its own that wait while the others step."""

import json
import os
import socket
import statistics
import subprocess
import sys
import sysconfig
import venv
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STOCK = ("transformers==5.20.2", "peft==0.21.2")
"""The newest pair in which PEFT's own LoRA runs on a model that transformers has cut."""


@dataclass(frozen=True)
class Work:
    """One step, the same for every implementation."""

    path: str
    tp_size: int
    rows: int = 1
    length: int = 128
    r: int = 8


def stock_python(folder: Path) -> str:
    """An interpreter with ``STOCK`` before this one's own packages; made if it is not there.

    torch and the rest are this environment's: only what is compared differs.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *STOCK], check=True)
        own = next(folder.glob("lib/python*/site-packages"))
        (own / "zz_parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return str(python)


class Ranks:
    """The processes of one implementation. Use as a context manager."""

    def __init__(self, name: str, work: Work, python: str) -> None:
        self.name = name
        self.size = 1 if name == "plain" else work.tp_size
        self._argv = [python, "-m", "tests.benchmarks.steps.worker", name, json.dumps(asdict(work))]

    def __enter__(self) -> "Ranks":
        port, root = _free_port(), Path(__file__).parents[3]
        self._procs = [
            subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("SHOW") else subprocess.DEVNULL,
                text=True,
                cwd=root,
                env=os.environ | _environment(rank, self.size, port, root),
            )
            for rank in range(self.size)
        ]
        assert self._read() == ["ready"] * self.size, self.name
        return self

    def __exit__(self, *_: object) -> None:
        for proc in self._procs:
            assert proc.stdin
            proc.stdin.close()
        for proc in self._procs:
            assert proc.stdout
            proc.stdout.close()
            proc.wait(30)

    def ask(self, what: str) -> list[Any]:
        """The answer of each rank."""
        for proc in self._procs:
            assert proc.stdin
            proc.stdin.write(what + "\n")
            proc.stdin.flush()
        return self._read()

    def _read(self) -> list[Any]:
        found = []
        for proc in self._procs:
            assert proc.stdout
            line = proc.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.name}: a rank ended; run it alone to see why")
            found.append(json.loads(line))
        return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def _environment(rank: int, size: int, port: int, root: Path) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }


def compare(
    work: Work, names: list[str], *, stock: Path | None, num_repeats: int, num_warmup: int = 2
) -> list[dict[str, Any]]:
    """A record for each implementation and repeat; in turn, the order reversed each time.

    Raises:
        AssertionError: If their first losses are not the same: then it is not the same work.
    """
    records: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Ranks(
                    name,
                    work,
                    stock_python(stock) if name == "stock" and stock else sys.executable,
                )
            )
            for name in names
        ]
        first = [one.ask("step")[0]["loss"] for one in ranks]
        assert max(first) - min(first) < 1e-3, dict(zip(names, first, strict=True))
        for one in ranks:
            for _ in range(num_warmup - 1):
                one.ask("step")
        counts = {one.name: max(one.ask("count"), key=lambda c: c["made_bytes"]) for one in ranks}
        about = asdict(work) | {"path": Path(work.path).name}
        for repeat in range(num_repeats):
            for one in ranks if repeat % 2 else reversed(ranks):
                seconds = max(answer["seconds"] for answer in one.ask("step"))
                found = {"implementation": one.name, "repeat": repeat, "seconds": seconds}
                records.append(about | found | counts[one.name])
    return records


def summary(records: list[dict[str, Any]], of: str) -> dict[str, dict[str, float]]:
    """For each implementation: the median of its paired ratios to ``of``, and what it takes."""
    names = sorted({record["implementation"] for record in records})
    by_name = {
        name: sorted((r for r in records if r["implementation"] == name), key=lambda r: r["repeat"])
        for name in names
    }
    found = {}
    for name in names:
        pairs = zip(by_name[of], by_name[name], strict=True)
        found[name] = {
            "seconds": statistics.median(r["seconds"] for r in by_name[name]),
            f"{of} / this": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
            **{
                key: by_name[name][0][key]
                for key in ("collectives", "bytes", "made_bytes", "held_bytes")
            },
        }
    return found
