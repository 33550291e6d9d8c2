"""What a benchmark found: a table for a person, an object for a program."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from tplora.plan.size import format_size

__all__ = ["BenchResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Times of the first rank; memory of the rank that took the most."""

    recipe: str
    axes: str
    device: str
    dtype: str
    step_seconds: tuple[float, ...]
    step_tokens: tuple[float, ...]
    """Tokens without padding of each step, each counted once."""
    collective_share: float | None
    """Part of a step in which a collective is under way; None in one process."""
    peak_bytes: int
    peak_kind: str
    """What the peak is of: "allocated" on a GPU, "resident" on a CPU."""
    flops_per_step: float
    """What the model needs, of all ranks."""
    device_flops: float | None
    """What all devices can at most; None where that is not known."""
    versions: dict[str, str]

    def percentile(self, percent: int) -> float:
        """Seconds that so many percent of the steps did not exceed; the nearest step's own."""
        ordered = sorted(self.step_seconds)
        return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

    @property
    def tokens_per_s(self) -> float:
        """Over all timed steps."""
        return sum(self.step_tokens) / sum(self.step_seconds)

    @property
    def utilisation(self) -> float | None:
        """Model FLOPs utilisation: what was needed of what the devices could have done."""
        if self.device_flops is None:
            return None
        return self.flops_per_step / statistics.mean(self.step_seconds) / self.device_flops

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for a table."""
        share, used = self.collective_share, self.utilisation
        unknown = f"peak of {self.device} in {self.dtype} is not in the table of devices"
        return [
            ("recipe", f"{self.recipe}, {self.axes}, {self.device}, base in {self.dtype}"),
            ("tokens/s", f"{self.tokens_per_s:,.1f} (without padding, of all ranks together)"),
            (
                f"step, of {len(self.step_seconds)}",
                f"median {self.percentile(50):.4g} s, 90 % within {self.percentile(90):.4g} s, "
                f"shortest {min(self.step_seconds):.4g} s, longest {max(self.step_seconds):.4g} s",
            ),
            ("in collectives", "one process has none" if share is None else f"{100 * share:.3g} %"),
            ("peak memory", f"{format_size(self.peak_bytes)} a rank ({self.peak_kind})"),
            (
                "model FLOPs",
                f"{self.flops_per_step:.3g} a step; "
                + (unknown if used is None else f"{100 * used:.3g} % of what the devices can"),
            ),
        ]

    def record(self) -> dict[str, Any]:
        """Everything, with what follows from it."""
        return asdict(self) | {
            "tokens_per_s": self.tokens_per_s,
            "median_s": self.percentile(50),
            "p90_s": self.percentile(90),
            "utilisation": self.utilisation,
        }
