"""Partial gradients, summed once per optimizer step in one flat bucket per dtype.

    grad(replicated factor) = sum over tp ranks of the gradients that their shards produced

Gradients accumulate on the leaves over micro-batches without communication. When accelerate says
that this backward is the last of the step (``GradientState().sync_gradients``; always true outside
accelerate), a callback at the end of backward sums all partial ones in one all-reduce and publishes
every leaf's gradient as its parameter's, a DTensor in the parameter's placement.

The callback is queued from a hook on the model's output tensors. Hooks on parameters alone would do
for ordinary backward passes, but fire once per nested backward under reentrant checkpointing, and
would reduce block by block; they remain as a second trigger, for a loss that was computed from
something other than the model's output.

Communication: one all-reduce of the partial factors' bytes per optimizer step; over data axes, see
``data_axis.py``, which sums and averages in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.state import GradientState
from torch.utils._pytree import tree_leaves

from tplora.upstream import local_shard, queue_after_backward

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.distributed import ProcessGroup

    from tplora.adapter.data_axis import DataAxis
    from tplora.adapter.factor import Factor
    from tplora.collectives.shared_input import SharedInput

__all__ = ["GradientSync"]


class GradientSync:
    """Publishes the factors' gradients at the end of each backward pass.

    Args:
        group: The tensor-parallel process group.
        shared_input: The memo to clear once a backward pass is over.
        data: The ranks that get other rows; None if there are none.
        is_overlapped: Whether several buckets are under way side by side.
    """

    def __init__(
        self,
        group: ProcessGroup,
        shared_input: SharedInput,
        data: DataAxis | None = None,
        *,
        is_overlapped: bool = False,
    ) -> None:
        self._group, self._data, self._is_overlapped = group, data, is_overlapped
        self._shared_input = shared_input
        self._factors: dict[str, Factor] = {}
        self._is_queued = False
        self.num_buckets = 0
        """Buckets reduced so far; tests and ``metrics`` read it."""

    def add(self, factor: Factor) -> None:
        """Watch one more factor. Factors are reduced in the order of their names."""
        factor.on_grad = self._on_grad
        self._factors[factor.name] = factor
        self._factors = dict(sorted(self._factors.items()))

    def remove(self, names: Iterable[str]) -> None:
        """Forget the factors called ``names``."""
        for name in names:
            self._factors.pop(name, None)

    def watch_outputs(self, module: nn.Module, _args: Any, outputs: Any) -> None:
        """Forward hook of the root modules: backward starts at one of these tensors."""
        self._shared_input.clear()
        self._is_queued = False  # a backward that raised never came to its end
        for leaf in tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_grad)  # type: ignore[no-untyped-call]

    def _on_grad(self, _grad: torch.Tensor) -> None:
        if self._is_queued:
            return
        self._is_queued = True
        queue_after_backward(self._finish)
        for factor in self._factors.values():
            _begin(factor)

    def _finish(self) -> None:
        self._is_queued = False
        self._shared_input.clear()
        fresh = [f for f in self._factors.values() if f.leaf_grad is not None]
        if GradientState().sync_gradients and self._data is not None:
            self.num_buckets += self._data.average(
                self._factors.values(), is_overlapped=self._is_overlapped
            )
        elif GradientState().sync_gradients:
            self._reduce([f for f in fresh if f.is_partial])
        for factor in self._factors.values():
            _publish(factor, is_reduced=bool(GradientState().sync_gradients))

    def _reduce(self, factors: list[Factor]) -> None:
        """Sum the leaves' gradients over the group: one flat bucket per dtype, views back out."""
        grads = {f.name: f.leaf_grad for f in factors}
        for dtype in sorted({g.dtype for g in grads.values() if g is not None}, key=str):
            bucket = [f for f in factors if (g := grads[f.name]) is not None and g.dtype == dtype]
            flat = torch.cat([f.leaf_grad.reshape(-1) for f in bucket])  # type: ignore[union-attr]
            dist.all_reduce(flat, group=self._group)
            self.num_buckets += 1
            offset = 0
            for factor in bucket:
                shape = local_shard(factor.parameter).shape
                factor.leaf_grad = flat[offset : offset + shape.numel()].view(shape)
                offset += shape.numel()


def _begin(factor: Factor) -> None:
    """Before anything accumulates: drop what the optimizer dropped, set aside what is reduced.

    A gradient that was already summed over ranks must not be summed again when a second backward
    of the same step adds to it.
    """
    published = factor.parameter.grad
    if published is None:
        factor.leaf_grad = factor.stash = None
    elif factor.is_reduced:
        factor.stash, factor.leaf_grad = local_shard(published), None
    factor.is_reduced = False


def _publish(factor: Factor, *, is_reduced: bool) -> None:
    """Make the leaf's gradient, with what was set aside, the parameter's."""
    if factor.stash is not None and (is_reduced or factor.leaf_grad is None):
        fresh = factor.leaf_grad
        factor.leaf_grad = factor.stash if fresh is None else fresh + factor.stash
        factor.stash = None
        is_reduced = True
    if factor.leaf_grad is None:
        return
    factor.is_reduced = is_reduced
    factor.publish_grad(factor.leaf_grad, is_partial=factor.is_partial and not is_reduced)
