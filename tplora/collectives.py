"""The collectives of a tensor-parallel layer: raw and differentiable, out of place, group given.

Each differentiable operator is one of a conjugate pair: what is free in forward communicates in
backward, and the other way round. The letters are those of Shoeybi et al. 2019, section 3.

    operator            forward      backward
    replicate_input     identity     all-reduce      f: a replicated input feeds shards
    reduce_partial      all-reduce   identity        g: partial sums become a replicated output
    gather_last_dim     all-gather   slice           a cut output becomes whole
    split_last_dim      slice        all-gather      a whole input becomes cut

Those of tokens are in ``token_collectives.py``.

No function writes to a tensor it was given: an all-reduce in place would change what somebody else
still reads (the gradient of ``f(x) + x`` on P ranks is P + 1, not 2 P).

Every function is collective in one of its directions: every rank of ``group`` calls it, in the same
order, with the same full shape.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tplora.kept_sums import kept_or_taken
from tplora.late_gradients import share_input_late
from tplora.plan.style import shard_range
from tplora.token_collectives import share_gathered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tplora.late_gradients import LateGradients

__all__ = [
    "SharedInput",
    "all_gather_last_dim",
    "all_reduce",
    "gather_last_dim",
    "reduce_partial",
    "replicate_input",
    "split_last_dim",
]


def all_reduce(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum of ``x`` over the ranks of ``group``, a new tensor. One all-reduce of x's bytes.

    None where activation checkpointing computes again what it has kept; see ``kept_sums.py``.
    """

    def take() -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    return kept_or_taken(take)


def all_gather_last_dim(x: torch.Tensor, size: int, group: ProcessGroup) -> torch.Tensor:
    """The whole ``[..., size]`` of which every rank holds its ``shard_range``. One all-gather.

    Pieces may be shorter on the last ranks; they travel padded to the longest.
    """
    num_ranks = dist.get_world_size(group)
    piece = -(-size // num_ranks)
    padded = F.pad(x, (0, piece - x.shape[-1])).contiguous()
    pieces = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(pieces, padded, group=group)
    whole = torch.cat(pieces, dim=-1)
    return whole if whole.shape[-1] == size else whole[..., :size].contiguous()


def _own_slice(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    start, stop = shard_range(x.shape[-1], dist.get_rank(group), dist.get_world_size(group))
    return x[..., start:stop].clone(memory_format=torch.contiguous_format)


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


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_gather_last_dim(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own_slice(grad, ctx.group), None, None


class _SplitLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.size, ctx.group = x.shape[-1], group
        return _own_slice(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_last_dim(grad, ctx.size, ctx.group), None


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
    out: torch.Tensor = _GatherLastDim.apply(x, size, group)  # type: ignore[no-untyped-call]
    return out


def split_last_dim(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's slice of a whole ``[..., size]``; backward, one all-gather."""
    out: torch.Tensor = _SplitLastDim.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class SharedInput:
    """``replicate_input``, once for all layers that read the same tensor.

    q, k and v read one tensor, gate and up another; one all-reduce of the summed gradient serves
    them all. A memo of one slot, by the tensor's identity.

    The memo is bypassed when no graph is built: what a custom function returns under ``no_grad``
    says that it requires grad but has no graph, and a later hit would lose its gradient. It misses
    when the tensor was written to (``_version``), since then it is another value. It never keeps
    the tensor alive and is not stored on it (``x -> y -> graph -> x`` would leak). ``clear`` it
    after the root forward and after backward.

    Args:
        group: The tensor-parallel process group, or None in one process.
        is_waited_for_late: Whether factors' gradients are computed while the sum is under way; see
            ``late_gradients.py``.
    """

    def __init__(self, group: ProcessGroup | None, *, is_waited_for_late: bool = False) -> None:
        self._group, self._is_waited_for_late = group, is_waited_for_late
        self.clear()

    def clear(self) -> None:
        """Forget the remembered tensor."""
        self._seen: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._shared: torch.Tensor | None = None
        self._late: LateGradients | None = None
        self._gathered: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None

    def late_gradients(self, x: torch.Tensor) -> LateGradients | None:
        """Where factors that multiply ``x`` leave their gradients, if it is the shared tensor."""
        return self._late if x is self._shared else None

    def note_gathered(self, whole: torch.Tensor, local: torch.Tensor) -> None:
        """``whole`` was gathered from the tokens ``local``: its shared gradient goes there."""
        self._gathered = weakref.ref(whole), whole._version, local

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, whose gradient is summed over the group once."""
        if self._group is None or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        is_seen = self._seen is not None and self._seen() is x and self._version == x._version
        if not is_seen or self._shared is None:
            self._shared, self._late = self._share(x, self._group)
            self._seen, self._version = weakref.ref(x), x._version
        return self._shared

    def _share(
        self, x: torch.Tensor, group: ProcessGroup
    ) -> tuple[torch.Tensor, LateGradients | None]:
        if self._gathered is not None:
            whole, version, local = self._gathered
            if whole() is x and version == x._version:
                return share_gathered(local, x, group), None
        if self._is_waited_for_late:
            return share_input_late(x, group)
        return replicate_input(x, group), None
