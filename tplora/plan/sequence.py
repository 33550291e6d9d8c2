"""Where a sequence is cut over ranks inside a decoder, and what this changes in a plan; pure data.

    embedding   whole          [B, T, H]
    split       before the first decoder layer
    between     tokens         [B, T/P, H]     residual stream, norms, dropout
    unit        whole inside   [B, T, ...]     attention, MLP, experts: whatever holds matrices
    gather      after the decoder's last norm
    head        whole          [B, T, H]

A unit gathers its input and gives back this rank's tokens of its output. Inside it all is as it is
without a cut sequence, to the bit of each mask and each partial gradient: its input is whole, the
gradient of its output is whole. So only what works on tokens has another gradient, the part of this
rank's tokens, and takes it to the bucket: norms, and biases that are added after a row-parallel sum
where that is scattered.

    collectives of a unit        forward                      backward
    row-parallel at its end      all-gather, reduce-scatter   all-gather, reduce-scatter
    another end (experts)        all-gather, its own          all-gather, its own
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tplora.plan.layer import LayerPlan
    from tplora.plan.trained import TrainedPlan

__all__ = ["SequencePlan", "UnitPlan", "modules_of", "with_token_gradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """A module that is given whole sequences."""

    name: str
    inputs: tuple[int | str, ...]
    """Which of its arguments are tokens: places, and names of keywords."""
    outputs: tuple[tuple[int | None, tuple[int, ...]], ...]
    """Which of its outputs are, and their shape behind ``[B, T]``; None for all that it returns."""
    row: str | None
    """The row-parallel layer whose sum is the first of these outputs, and is scattered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """How a decoder runs on each rank's tokens."""

    decoder: str
    entry: str
    """The first layer, before which the sequence is cut."""
    output: str
    """Which output of the decoder is gathered."""
    units: tuple[UnitPlan, ...]
    on_tokens: tuple[str, ...]
    """Modules with parameters that run on tokens."""
    dropouts: tuple[str, ...]
    """Dropouts that run on tokens."""

    @property
    def rows(self) -> frozenset[str]:
        """The row-parallel layers that scatter their sums."""
        return frozenset(unit.row for unit in self.units if unit.row is not None)

    def without_rows(self, names: Iterable[str]) -> SequencePlan:
        """The same, with these row-parallel layers summed for all tokens."""
        left = frozenset(names)
        units = (replace(unit, row=None if unit.row in left else unit.row) for unit in self.units)
        return replace(self, units=tuple(units))


def modules_of(trained: Iterable[TrainedPlan]) -> set[str]:
    """What is trained whole: PEFT switches between it and the base's own, which sums by itself."""
    return {part.name for part in trained if part.what == "module"}


def with_token_gradients(
    sequence: SequencePlan, layers: Iterable[LayerPlan], trained: Iterable[TrainedPlan]
) -> tuple[tuple[LayerPlan, ...], tuple[TrainedPlan, ...]]:
    """Plans in which the gradient of what works on tokens is partial."""
    return (
        tuple(_layer(layer) if layer.name in sequence.rows else layer for layer in layers),
        tuple(_part(part) if _works_on_tokens(part, sequence) else part for part in trained),
    )


def _layer(layer: LayerPlan) -> LayerPlan:
    extras = (
        (extra, replace(plan, is_grad_partial=True) if extra == "bias" else plan)
        for extra, plan in layer.extras
    )
    return replace(layer, extras=tuple(extras))


def _works_on_tokens(part: TrainedPlan, sequence: SequencePlan) -> bool:
    return part.name in sequence.on_tokens or (part.what == "bias" and part.name in sequence.rows)


def _part(part: TrainedPlan) -> TrainedPlan:
    factors = ((leaf, replace(plan, is_grad_partial=True)) for leaf, plan in part.factors)
    return replace(part, factors=tuple(factors))
