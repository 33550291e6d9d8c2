"""The differentiable collectives of a tensor-parallel layer, out of place, group given.

Each is one of a conjugate pair: what is free in forward communicates in backward, and the other
way round. The letters are those of Shoeybi et al. 2019, section 3.

    operator            forward          backward
    replicate_input     identity         all-reduce        f: a replicated input feeds shards
    reduce_partial      all-reduce       identity          g: partial sums become a whole output
    gather_last_dim     all-gather       slice             a cut output becomes whole
    split_last_dim      slice            all-gather        a whole input becomes cut

Where a sequence is cut over ranks, on its tokens, dim 1 of ``[B, T, ...]``:

    gather_tokens       all-gather       slice             a rank's tokens become all tokens
    split_tokens        slice            all-gather        all tokens become a rank's
    scatter_partial     reduce-scatter   all-gather        partial sums become tokens of the sum
    share_gathered      identity         reduce-scatter    gathered tokens feed shards

An all-reduce is a reduce-scatter and an all-gather, so what is cut by tokens between them costs no
more bytes on the wire.

Every function is collective in one of its directions: every rank of ``group`` calls it, in the same
order, with the same full shape.

Source: Korthikanti et al. 2022, section 4.2.2, for those of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tplora.collectives.raw import all_gather, all_reduce, own_piece, reduce_scatter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "gather_last_dim",
    "gather_tokens",
    "reduce_partial",
    "replicate_input",
    "scatter_partial",
    "share_gathered",
    "split_last_dim",
    "split_tokens",
]

_TOKENS, _FEATURES = 1, -1
"""The dim that is cut."""


class _ReplicateInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _ReducePartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, size: int, dim: int, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, size, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return own_piece(grad, ctx.group, dim=ctx.dim), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
        ctx.size, ctx.dim, ctx.group = x.shape[dim], dim, group
        return own_piece(x, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.size, ctx.group, dim=ctx.dim), None, None


class _ScatterPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.length, ctx.group = x.shape[_TOKENS], group
        return reduce_scatter(x, group, dim=_TOKENS)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather(grad, ctx.length, ctx.group, dim=_TOKENS), None


class _ShareGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, whole: torch.Tensor, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter(grad, ctx.group, dim=_TOKENS), None, None


def replicate_input(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Hand a replicated input to shards (f): identity; backward, one all-reduce of x's bytes."""
    out: torch.Tensor = _ReplicateInput.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_partial(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sum partial outputs (g): one all-reduce of x's bytes; backward, identity.

    The gradient of a replicated output is the same on every rank, so it is each partial's gradient.
    """
    out: torch.Tensor = _ReducePartial.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gather_last_dim(x: torch.Tensor, size: int, group: ProcessGroup) -> torch.Tensor:
    """Make a cut ``[..., size / P]`` whole: one all-gather; backward, this rank's slice."""
    out: torch.Tensor = _Gather.apply(x, size, _FEATURES, group)  # type: ignore[no-untyped-call]
    return out


def split_last_dim(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's slice of a whole ``[..., size]``; backward, one all-gather."""
    out: torch.Tensor = _Split.apply(x, _FEATURES, group)  # type: ignore[no-untyped-call]
    return out


def gather_tokens(x: torch.Tensor, length: int, group: ProcessGroup) -> torch.Tensor:
    """All tokens ``[B, length, ...]`` of which each rank holds its own: one all-gather.

    Backward, this rank's slice: the gradient of all tokens is whole on every rank.
    """
    out: torch.Tensor = _Gather.apply(x, length, _TOKENS, group)  # type: ignore[no-untyped-call]
    return out


def split_tokens(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's tokens of a whole ``[B, T, ...]``; backward, one all-gather."""
    out: torch.Tensor = _Split.apply(x, _TOKENS, group)  # type: ignore[no-untyped-call]
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
