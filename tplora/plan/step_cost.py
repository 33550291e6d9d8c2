"""What one training step takes on a rank and what it says to the others; pure data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.plan.cost import base_bytes, factor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tplora.plan.build import Plan

__all__ = ["Batch", "StepCost", "Traffic", "resident_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The work of one step on one rank."""

    rows: int
    """Sequences of one micro-batch; a pair is two."""
    length: int
    """Tokens of each row, padding included."""
    is_checkpointed: bool
    """Whether activations inside a layer are computed again in backward."""
    is_accumulated: bool = False
    """Whether gradients of earlier micro-batches are there already."""
    is_joined: bool = False
    """Whether its rows are one sequence, each kept to itself by its positions."""
    passes_before: int = 0
    """Forward passes over it that nothing is kept of, before the one that is learned from."""
    reference_passes: int = 0
    """Such passes of a frozen copy of the adapter, while the step's activations are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of a kind: how many, and the bytes that this rank gives to them."""

    kind: str
    """"all_reduce", "all_gather" or "reduce_scatter"."""
    count: int
    num_bytes: int

    @classmethod
    def of(cls, calls: Iterable[tuple[str, int]]) -> tuple[Traffic, ...]:
        """Of calls in order, each kind together."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for kind, num_bytes in calls:
            counts[kind] += 1
            sizes[kind] += num_bytes
        return tuple(
            Traffic(kind=kind, count=counts[kind], num_bytes=sizes[kind]) for kind in sorted(counts)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Bytes of rank 0, the rank whose pieces are largest, and its collectives."""

    batch: Batch
    weights: int
    """Of the frozen base, scales of quantised layers included."""
    factors: int
    gradients: int
    optimizer: int
    """AdamW's two moments."""
    kept: int
    """Activations that forward keeps for backward, once it has reached the head."""
    loss: int
    """The most that head and loss take on top of what is kept."""
    working: int
    """The most that lives at once of what a step makes: activations, loss, gradients."""
    forward: tuple[Traffic, ...]
    """Of one micro-batch on the tp group, as the others."""
    backward: tuple[Traffic, ...]
    """What activation checkpointing repeats is among them."""
    bucket: tuple[Traffic, ...]
    """Once per optimizer step."""

    @property
    def resident(self) -> int:
        """What lives from step to step."""
        return self.weights + self.factors + self.optimizer

    @property
    def peak(self) -> int:
        """The most that lives at once."""
        return self.resident + max(self.working, self.gradients)


def resident_bytes(plan: Plan, *, has_reference: bool = False) -> dict[str, int]:
    """What a rank holds from step to step, and its gradients, by the names of ``StepCost``.

    Args:
        plan: Of the model and its adapter.
        has_reference: Whether there is a frozen copy of the adapter beside it.
    """
    trained = factor_bytes(plan, 0, only_trained=True)
    copies = 2 if has_reference else 1
    return {
        "weights": base_bytes(plan, 0, bytes_per_element=plan.base_dtype_bytes),
        "factors": copies * factor_bytes(plan, 0),
        "gradients": trained,
        "optimizer": 2 * trained,
    }
