"""When a head defers its logits: while its model runs for a loss.

    with labels, or in training:    head(h) -> what stands for [T, V] logits
    else (generation, scoring):     head(h) -> [T, V] logits

Only for the length of the root's forward; between forwards the head is as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tplora.adapter.head.deferred import HeadShard, deferred
from tplora.adapter.head.fused import install_fused_head
from tplora.adapter.head.projection import Projection, head_module
from tplora.adapter.head.reading import token_statistics
from tplora.collectives.operators import replicate_input
from tplora.plan.style import shard_range
from tplora.upstream import local_shard, tp_mesh
from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DefersLogits", "token_statistics"]


class DefersLogits:
    """Hooks of a model's root modules, of which callers may enter any.

    Args:
        base: The base model.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self.base = base
        self.is_asked = False
        """Whether logits without labels are for a loss as well, outside training."""
        self._entered: list[nn.Module | None] = []

    def enter(self, module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook."""
        install_fused_head(self.base)
        has_labels = any(kwargs.get(name) is not None for name in ("labels", "shift_labels"))
        is_for_loss = has_labels or self.is_asked or (module.training and torch.is_grad_enabled())
        is_first = all(one is None for one in self._entered)
        head = self._head() if is_for_loss and is_first else None
        if head is not None:
            vars(head)["forward"] = _DeferredForward(self.base, head)
        self._entered.append(head)

    def leave(self, _module: nn.Module, _args: Any, _outputs: Any) -> None:
        """Forward hook, called even when the forward raised."""
        head = self._entered.pop() if self._entered else None
        if head is not None:
            vars(head)["forward"].put_back()

    def _head(self) -> nn.Module | None:
        """The head, if its logits are ``h W^T`` and no more, cut on the vocabulary or whole."""
        head = self.base.get_output_embeddings()
        if head is None or isinstance(head, nn.ModuleList):
            return None
        linear = head_module(head)
        is_plain = isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
        if not is_plain or is_quantized_linear(linear):
            return None
        weight: Any = linear.weight
        is_cut_on_input = local_shard(weight).shape[1] != weight.shape[1]
        return None if is_cut_on_input else head


class _DeferredForward:
    """Takes the place of a head's forward."""

    def __init__(self, base: PreTrainedModel, head: nn.Module) -> None:
        self.base, self.head = base, head
        self.former = vars(head).get("forward")

    def put_back(self) -> None:
        """The head's forward as it was."""
        del vars(self.head)["forward"]
        if self.former is not None:
            vars(self.head)["forward"] = self.former

    def __call__(self, hidden: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        shard = _shard_of(self.base, self.head)
        if shard.group is not None and torch.is_grad_enabled() and hidden.requires_grad:
            hidden = replicate_input(hidden, shard.group)
        self.put_back()  # the projection asks for what is trained of the head itself
        try:
            project = Projection.of(self.head, hidden)
        finally:
            vars(self.head)["forward"] = self
        return deferred(project, shard, hidden, project.parameters[0].dtype)


def _shard_of(base: PreTrainedModel, head: nn.Module) -> HeadShard:
    weight, mesh = head_module(head).weight, tp_mesh(base)
    assert isinstance(weight, torch.Tensor)
    size = weight.shape[0]
    if mesh is None or local_shard(weight).shape[0] == size:
        return HeadShard(vocab_start=0, vocab_size=size, group=None)
    start, _ = shard_range(size, mesh.get_local_rank(), mesh.size())
    return HeadShard(vocab_start=start, vocab_size=size, group=mesh.get_group())
