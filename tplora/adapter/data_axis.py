"""Over the data axes: other rows on each rank, one adapter.

    grad(factor) = mean over data ranks of the gradient of each rank's own rows

Trainers scale a rank's loss by the number of data ranks over the tokens of all of them, so the mean
is the gradient of the loss per token of the whole step, as one process has it.

A replicated factor's gradient is summed over the tp group and averaged over the data ranks in one
all-reduce over the world, which gives every rank the same bits. A cut factor's is averaged over
the ranks that hold the same piece. The frozen base has no gradient, and none is sent.

Source: Li et al. 2020, section 3.2 (buckets of gradients).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tplora.upstream.axes import data_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

    from tplora.adapter.factor import Factor

__all__ = ["DataAxis", "data_axis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAxis:
    """The ranks that hold the same pieces as this one, and get other rows."""

    group: ProcessGroup
    tp_size: int

    @property
    def size(self) -> int:
        """Data ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self.group)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[n]`` of every data rank in their order, ``[n * size]``; scalars count as ``[1]``.

        Communication: one all-gather over the data ranks.
        """
        own = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach().contiguous()
        pieces = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(pieces, own, group=self.group)
        return torch.cat(pieces)

    def average(self, factors: Iterable[Factor]) -> int:
        """Replace each leaf's gradient by the mean of those of all data ranks.

        Partial ones are summed over the tp group as well. A factor that had a gradient on some data
        ranks only, as an expert may, counts as zero on the others; one that had none anywhere has
        none.

        Communication: one all-reduce of the replicated factors' bytes over the world, one of the
        cut ones' over the data ranks, for each dtype. Returns how many there were.
        """
        trained = [factor for factor in factors if factor.parameter.requires_grad]
        num_buckets = 0
        for dtype in sorted({factor.local().dtype for factor in trained}, key=str):
            ours = [factor for factor in trained if factor.local().dtype == dtype]
            whole = [factor for factor in ours if factor.plan.shard_dim is None]
            cut = [factor for factor in ours if factor.plan.shard_dim is not None]
            if whole:
                _reduce_bucket(whole, self._average_over_world)
            if cut:
                _reduce_bucket(cut, self._average_over_data)
            num_buckets += bool(whole) + bool(cut)
        return num_buckets

    def _average_over_world(self, factors: list[Factor], flat: torch.Tensor) -> None:
        dist.all_reduce(flat)
        for factor, view in _views(factors, flat):
            # A gradient that is whole on each rank of a tp group was counted once for each.
            view.div_(self.size if factor.is_partial else self.size * self.tp_size)

    def _average_over_data(self, _factors: list[Factor], flat: torch.Tensor) -> None:
        dist.all_reduce(flat, group=self.group)
        flat.div_(self.size)


def data_axis(model: PreTrainedModel, *, tp_size: int) -> DataAxis | None:
    """The data axis of a loaded model, or None where it has one data rank. Collective."""
    group = data_group(model)
    return None if group is None else DataAxis(group=group, tp_size=tp_size)


def _reduce_bucket(
    factors: list[Factor], average: Callable[[list[Factor], torch.Tensor], None]
) -> None:
    """One flat bucket of gradients, and behind them one number each: who has one."""
    grads = [factor.leaf_grad for factor in factors]
    pieces = [
        torch.zeros_like(factor.local()).reshape(-1) if grad is None else grad.reshape(-1)
        for factor, grad in zip(factors, grads, strict=True)
    ]
    is_there = pieces[0].new_tensor([grad is not None for grad in grads])
    flat = torch.cat([*pieces, is_there])
    average(factors, flat)
    has_grad = flat[-len(factors) :].tolist()
    for (factor, view), anywhere in zip(_views(factors, flat), has_grad, strict=True):
        factor.leaf_grad = view if anywhere else None


def _views(factors: list[Factor], flat: torch.Tensor) -> list[tuple[Factor, torch.Tensor]]:
    """Of a bucket, the part of each factor in the factor's shape."""
    views, offset = [], 0
    for factor in factors:
        shape = factor.local().shape
        views.append((factor, flat[offset : offset + shape.numel()].view(shape)))
        offset += shape.numel()
    return views
