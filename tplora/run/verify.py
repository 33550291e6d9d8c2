"""Check what a run has left: its adapter, or a model merged from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tplora.artifact.verify import VerifyReport, verify_adapter, verify_merged, write_record
from tplora.run.base import find_base
from tplora.run.folder import find_adapter, find_probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["check_run"]


def check_run(
    run: Path,
    *,
    merged: Path | None = None,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> tuple[VerifyReport, Path]:
    """Compare with what the trained model said, and keep what was found beside it.

    Args:
        run: The run's folder, with its probe.
        merged: A model merged from it; its adapter when left out.
        tolerance: Fraction of the largest logit; by dtype when left out.
        progress: Called with one line before each long step.

    Returns:
        The report, and where it was written.

    Raises:
        ArtifactError: If something is missing or damaged.
    """
    adapter = find_adapter(run)
    base = find_base(run, adapter, progress=progress)
    probe = find_probe(run, adapter)
    limit: float | Literal["by dtype"] = "by dtype" if tolerance is None else tolerance
    if merged is None:
        report = verify_adapter(
            adapter,
            base.path,
            probe,
            dtype=base.dtype,
            quantization=base.quantization,
            tolerance=limit,
        )
        return report, write_record(report, adapter, compared="adapter in plain PEFT")
    report = verify_merged(merged, base.path, probe, dtype=base.dtype, tolerance=limit)
    return report, write_record(report, merged, compared="merged model")
