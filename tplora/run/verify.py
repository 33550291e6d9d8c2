"""Check what a run has left, its adapter or a merged model; or an adapter from elsewhere."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from tplora.artifact.probe import choose_probe_rows, record_probe
from tplora.artifact.verify import VerifyReport, verify_adapter, verify_merged, write_record
from tplora.run.adapted import load_adapted
from tplora.run.base import find_base
from tplora.run.folder import PROBE, find_named, find_probe
from tplora.run.generate import read_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tplora.run.base import Base

__all__ = ["Checked", "check_run"]

# Asked of an adapter that comes without what its trained model said.
_TEXTS = (
    "The capital of France is Paris, and the largest city of Japan is Tokyo. The capital of",
    "def mean(numbers):\n    return sum(numbers) / len(numbers)\n\n\ndef median(numbers):\n",
    "Question: What is seven times eight? Answer: 56. Question: What is nine times six? Answer:",
    "Im Anfang war das Wort. En un lugar de la Mancha, de cuyo nombre no quiero acordarme,",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found, and of what."""

    report: VerifyReport
    record: Path | None
    """Where it was written; None where the adapter lies in the hub's cache."""
    has_run: bool
    """Whether it was held to what the trained model said; if not, to tplora's own layers."""


def check_run(
    named: str | Path,
    *,
    merged: Path | None = None,
    base: str | None = None,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> Checked:
    """Compare with what the trained model said, and keep what was found beside it.

    An adapter that no run has left comes without that: tplora's own layers say it, with the adapter
    on its base, of a few short texts.

    Args:
        named: A run's folder, with its probe; an adapter's, or a hub id of one.
        merged: A model merged from it; its adapter when left out.
        base: Folder or hub id; what the run or the adapter names when left out.
        tolerance: Fraction of the largest logit; by dtype when left out.
        progress: Called with one line before each long step.

    Raises:
        ArtifactError: If something is missing or damaged.
    """
    run, adapter = find_named(named)
    source = find_base(run, adapter, named=base, progress=progress)
    limit: float | Literal["by dtype"] = "by dtype" if tolerance is None else tolerance
    with _probe(run, adapter, source, progress=progress) as (probe, has_run):
        if merged is not None:
            report = verify_merged(merged, source.path, probe, dtype=source.dtype, tolerance=limit)
        else:
            report = verify_adapter(
                adapter,
                source.path,
                probe,
                dtype=source.dtype,
                quantization=source.quantization,
                tolerance=limit,
            )
    compared = "adapter in plain PEFT" if merged is None else "merged model"
    compared += "" if has_run else ", with the adapter in tplora's layers"
    record = None
    if merged is not None or Path(named).exists():
        record = write_record(report, merged or adapter, compared=compared)
    return Checked(report=report, record=record, has_run=has_run)


@contextlib.contextmanager
def _probe(
    run: Path, adapter: Path, base: Base, *, progress: Callable[[str], None]
) -> Iterator[tuple[Path, bool]]:
    """Where it is said what is right, and whether the trained model has said it."""
    found = find_probe(run, adapter)
    if found.is_file() or (run / "recipe.toml").is_file():
        yield found, True
        return
    progress(f"no {PROBE} here: asking tplora's own layers, with the adapter")
    tokenizer = read_tokenizer(adapter, base)
    rows = choose_probe_rows(tokenizer(text)["input_ids"] for text in _TEXTS)
    with tempfile.TemporaryDirectory(prefix="tplora-") as folder:
        model = load_adapted(adapter, base, tp_size=1, device=torch.device("cpu"))
        record_probe(model, rows, Path(folder, PROBE), is_writer=True)
        del model
        yield Path(folder, PROBE), False
