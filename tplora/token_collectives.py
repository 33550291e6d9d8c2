"""The collectives of a sequence that is cut over ranks: raw and differentiable, out of place.

    operator            forward          backward
    gather_tokens       all-gather       slice             a rank's tokens become all tokens
    split_tokens        slice            all-gather        all tokens become a rank's
    scatter_partial     reduce-scatter   all-gather        partial sums become tokens of the sum
    share_gathered      identity         reduce-scatter    gathered tokens feed shards

Tokens are dim 1 of ``[B, T, ...]``, cut by ``shard_range``; the last pieces may be shorter or
empty, and travel padded to the longest. An all-reduce is a reduce-scatter and an all-gather, so
what is cut by tokens between them costs no more bytes on the wire.

Every function is collective in one of its directions: every rank of ``group`` calls it, in the same
order, with the same full shape.

Source: Korthikanti et al. 2022, section 4.2.2 (the conjugate operators g and g-bar).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tplora.plan.style import shard_range

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["gather_tokens", "scatter_partial", "share_gathered", "split_tokens"]


def _all_gather_tokens(x: torch.Tensor, length: int, group: ProcessGroup) -> torch.Tensor:
    """The whole ``[B, length, ...]`` of which every rank holds its tokens. One all-gather."""
    num_ranks = dist.get_world_size(group)
    padded = _padded_tokens(x, -(-length // num_ranks))
    pieces = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(pieces, padded, group=group)
    whole = torch.cat(pieces, dim=1)
    return whole if whole.shape[1] == length else whole[:, :length].contiguous()


def _reduce_scatter_tokens(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's tokens of the sum of ``x``. One reduce-scatter of x's bytes, padded."""
    num_ranks, length = dist.get_world_size(group), x.shape[1]
    piece = -(-length // num_ranks)
    padded = _padded_tokens(x, piece * num_ranks)
    pieces = [part.contiguous() for part in torch.tensor_split(padded, num_ranks, dim=1)]
    total = torch.empty_like(pieces[0])
    dist.reduce_scatter(total, pieces, group=group)
    start, stop = shard_range(length, dist.get_rank(group), num_ranks)
    return total if stop - start == piece else total[:, : stop - start].contiguous()


def _padded_tokens(x: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - x.shape[1]
    if not missing:
        return x.contiguous()
    return torch.cat([x, x.new_zeros((x.shape[0], missing, *x.shape[2:]))], dim=1)


def _own_tokens(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    start, stop = shard_range(x.shape[1], dist.get_rank(group), dist.get_world_size(group))
    return x[:, start:stop].clone(memory_format=torch.contiguous_format)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, length: int, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather_tokens(x, length, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own_tokens(grad, ctx.group), None, None


class _SplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.length, ctx.group = x.shape[1], group
        return _own_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather_tokens(grad, ctx.length, ctx.group), None


class _ScatterPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.length, ctx.group = x.shape[1], group
        return _reduce_scatter_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather_tokens(grad, ctx.length, ctx.group), None


class _ShareGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, whole: torch.Tensor, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _reduce_scatter_tokens(grad, ctx.group), None, None


def gather_tokens(x: torch.Tensor, length: int, group: ProcessGroup) -> torch.Tensor:
    """All tokens ``[B, length, ...]`` of which each rank holds its own: one all-gather.

    Backward, this rank's slice: the gradient of all tokens is whole on every rank.
    """
    out: torch.Tensor = _GatherTokens.apply(x, length, group)  # type: ignore[no-untyped-call]
    return out


def split_tokens(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's tokens of a whole ``[B, T, ...]``; backward, one all-gather."""
    out: torch.Tensor = _SplitTokens.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def scatter_partial(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's tokens of the sum of partial ``[B, T, ...]``: one reduce-scatter.

    Backward, one all-gather: the gradient of the sum is each partial's gradient.
    """
    out: torch.Tensor = _ScatterPartial.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def share_gathered(local: torch.Tensor, whole: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Hand tokens that were gathered from ``local`` to shards: identity.

    Backward, one reduce-scatter, to ``local``: what ``replicate_input`` of the gathered tensor
    would sum for all tokens, of which each rank then keeps its own.
    """
    given = local, whole.detach(), group
    out: torch.Tensor = _ShareGathered.apply(*given)  # type: ignore[no-untyped-call]
    return out
