"""An adapter whose every pair has one scaling, or one rank and one scaling: the same products.

For readers of one ``r`` and one ``lora_alpha``: ``delta = s B A = s0 (s / s0 B) A``, and rows of
zeros below A beside columns of zeros in B change no product.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from tplora.artifact.adapter_dir import AdapterFiles, FactorPair

__all__ = ["OneScaling", "read_pairs", "shared_alpha", "shared_scaling"]


@dataclass(frozen=True, slots=True)
class OneScaling:
    """A pair in its new form."""

    pair: FactorPair
    a: torch.Tensor
    """[r, in]"""
    b: torch.Tensor
    """[out, r]"""


def shared_scaling(adapter: AdapterFiles) -> tuple[int, float]:
    """The largest rank, and the scaling that most pairs have already; never 0."""
    ranks = [_rank(adapter, pair) for pair in adapter.pairs]
    return max(ranks), _most_common([pair.scaling for pair in adapter.pairs])


def shared_alpha(adapter: AdapterFiles) -> float:
    """The ``scaling * r`` that most pairs have already; never 0, which llama.cpp takes for none."""
    return _most_common([pair.scaling * _rank(adapter, pair) for pair in adapter.pairs])


def read_pairs(
    adapter: AdapterFiles,
    *,
    scaling: float | None = None,
    alpha: float | None = None,
    rank: int = 0,
) -> Iterator[OneScaling]:
    """Read pair after pair; a B whose factor rounds is widened to float32 at least.

    Args:
        adapter: With one matrix a pair.
        scaling: That every pair is to have; one of this and ``alpha``.
        alpha: That every pair is to have, each with its own rank.
        rank: To fill up to, with zeros; 0 keeps each pair's own.
    """
    with adapter.tensors.open() as file:
        for pair in adapter.pairs:
            a, b = file.tensor(pair.a), file.tensor(pair.b)
            own = _rank(adapter, pair)
            target = scaling if scaling is not None else (alpha or 1.0) / own
            missing = max(0, rank - own)
            yield OneScaling(
                pair, pad(a, (0, 0, 0, missing)), pad(_times(b, pair.scaling, target), (0, missing))
            )


def _times(b: torch.Tensor, scaling: float, target: float) -> torch.Tensor:
    factor = scaling / target
    if math.isclose(factor, 1.0, rel_tol=1e-12):
        return b
    wide = torch.promote_types(b.dtype, torch.float32)
    return (b.double() * factor).to(wide)


def _most_common(values: list[float]) -> float:
    found = Counter(value for value in values if value)
    return found.most_common(1)[0][0] if found else 1.0


def _rank(adapter: AdapterFiles, pair: FactorPair) -> int:
    return adapter.shapes[pair.b][1]
