"""The collectives themselves: out of place, group given, no gradient.

No function writes to a tensor it was given: an all-reduce in place would change what somebody else
still reads (the gradient of ``f(x) + x`` on P ranks is P + 1, not 2 P).

Pieces of a dim are those of ``shard_range``: the last ranks' may be shorter or empty, and travel
padded to the longest. Every rank of ``group`` calls, in the same order, with the same full shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tplora.collectives.kept_sums import kept_or_taken
from tplora.plan.style import shard_range

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["all_gather", "all_reduce", "own_piece", "reduce_scatter"]


def all_reduce(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum of ``x`` over the ranks of ``group``, a new tensor. One all-reduce of x's bytes.

    None where activation checkpointing computes again what it has kept; see ``kept_sums.py``.
    """

    def take() -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    return kept_or_taken(take)


def all_gather(x: torch.Tensor, size: int, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    """The whole, ``size`` along ``dim``, of which every rank holds its piece. One all-gather."""
    num_ranks = dist.get_world_size(group)
    padded = _padded(x, -(-size // num_ranks), dim)
    pieces = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(pieces, padded, group=group)
    whole = torch.cat(pieces, dim=dim)
    return whole if whole.shape[dim] == size else whole.narrow(dim, 0, size).contiguous()


def reduce_scatter(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    """This rank's piece of the sum of ``x``. One reduce-scatter of x's bytes, padded."""
    num_ranks, size = dist.get_world_size(group), x.shape[dim]
    longest = -(-size // num_ranks)
    padded = _padded(x, longest * num_ranks, dim)
    pieces = [part.contiguous() for part in torch.tensor_split(padded, num_ranks, dim=dim)]
    total = torch.empty_like(pieces[0])
    dist.reduce_scatter(total, pieces, group=group)
    start, stop = shard_range(size, dist.get_rank(group), num_ranks)
    own = stop - start
    return total if own == longest else total.narrow(dim, 0, own).contiguous()


def own_piece(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    """This rank's piece of a whole, a new tensor. No communication."""
    start, stop = shard_range(x.shape[dim], dist.get_rank(group), dist.get_world_size(group))
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _padded(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim=dim)
