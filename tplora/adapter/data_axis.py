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
from typing import TYPE_CHECKING, Any

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

    def average(self, factors: Iterable[Factor], *, is_overlapped: bool = False) -> int:
        """Replace each leaf's gradient by the mean of those of all data ranks.

        Partial ones are summed over the tp group as well. A factor that had a gradient on some data
        ranks only, as an expert may, counts as zero on the others; one that had none anywhere has
        none.

        Communication: one all-reduce of the replicated factors' bytes over the world, one of the
        cut ones' over the data ranks, for each dtype. Returns how many there were.

        Args:
            factors: All of them, in the same order on every rank.
            is_overlapped: Whether these are under way side by side.
        """
        trained = [factor for factor in factors if factor.parameter.requires_grad]
        buckets = []
        for dtype in sorted({factor.local().dtype for factor in trained}, key=str):
            ours = [factor for factor in trained if factor.local().dtype == dtype]
            whole = [factor for factor in ours if factor.plan.shard_dim is None]
            cut = [factor for factor in ours if factor.plan.shard_dim is not None]
            buckets += [_Bucket(whole, None)] if whole else []
            buckets += [_Bucket(cut, self.group)] if cut else []
        for bucket in buckets:
            bucket.start(is_waited_for=not is_overlapped)
        for bucket in buckets:
            bucket.finish(self._divisor)
        return len(buckets)

    def _divisor(self, factor: Factor) -> int:
        """Of a sum over the world where the factor is whole, else over the data ranks."""
        if factor.plan.shard_dim is not None or factor.is_partial:
            return self.size
        return self.size * self.tp_size  # whole on each rank of a tp group, and counted for each


def data_axis(model: PreTrainedModel, *, tp_size: int) -> DataAxis | None:
    """The data axis of a loaded model, or None where it has one data rank. Collective."""
    group = data_group(model)
    return None if group is None else DataAxis(group=group, tp_size=tp_size)


class _Bucket:
    """One flat tensor of gradients, and behind them one number each: who has one.

    Args:
        factors: Of one dtype.
        group: Whom they are summed over; None is the world.
    """

    def __init__(self, factors: list[Factor], group: ProcessGroup | None) -> None:
        self._factors, self._group = factors, group
        self._grads = [factor.leaf_grad for factor in factors]
        self._work: Any = None
        pieces = [
            torch.zeros_like(factor.local()).reshape(-1) if grad is None else grad.reshape(-1)
            for factor, grad in zip(factors, self._grads, strict=True)
        ]
        is_there = pieces[0].new_tensor([grad is not None for grad in self._grads])
        self._flat = torch.cat([*pieces, is_there])

    def start(self, *, is_waited_for: bool) -> None:
        """Sum them. Collective."""
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=not is_waited_for)

    def finish(self, divisor: Callable[[Factor], int]) -> None:
        """Put the means in the leaves' places."""
        if self._work is not None:
            self._work.wait()
        for factor, view in zip(self._factors, self._views(), strict=True):
            factor.leaf_grad = view.div_(divisor(factor))
        # Only where this rank has none it has to ask the device whether anyone has.
        if any(grad is None for grad in self._grads):
            anywhere = self._flat[-len(self._factors) :].tolist()
            for factor, count in zip(self._factors, anywhere, strict=True):
                factor.leaf_grad = factor.leaf_grad if count else None

    def _views(self) -> list[torch.Tensor]:
        """The part of each factor in the factor's shape."""
        views, offset = [], 0
        for factor in self._factors:
            shape = factor.local().shape
            views.append(self._flat[offset : offset + shape.numel()].view(shape))
            offset += shape.numel()
        return views
