"""What a head multiplies with on this rank, whatever is trained of it.

z = h W^T + b,  then the logits of trained tokens anew,  then what each adapter makes of it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

from tplora.adapter.linear import TploraLinear
from tplora.adapter.local_module import local_tensor
from tplora.adapter.tokens import TploraTokens

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Projection", "head_module"]


def head_module(head: nn.Module) -> nn.Module:
    """The module that holds the weight that is used now, under PEFT's wrappers."""
    if isinstance(head, ModulesToSaveWrapper):
        name = next(iter(head.active_adapters), None)
        is_used = not head.disable_adapters and name in head.modules_to_save
        return head_module(head.modules_to_save[name] if is_used else head.original_module)
    if isinstance(head, TrainableTokensWrapper):
        return head_module(head.token_adapter.base_layer)
    if isinstance(head, TploraLinear):
        base: nn.Module = head.get_base_layer()
        return base
    return head


@dataclass(frozen=True, slots=True)
class Projection:
    """This rank's logits as a function of tensors, for who computes them chunk by chunk."""

    inputs: tuple[torch.Tensor, ...]
    """``[N, H]``: the hidden states, and what each adapter's dropout makes of them. Dropped once,
    here, so that computing a chunk again drops the same."""
    parameters: tuple[torch.Tensor, ...]
    """Everything else that may take a gradient."""
    head: Any
    has_bias: bool
    columns: tuple[torch.Tensor, ...]
    """Where the logits of trained tokens lie, for each adapter that trains some."""
    adapters: dict[str, tuple[str, ...]]
    """The names of an adapter's tensors."""

    @classmethod
    def of(cls, head: Any, hidden: torch.Tensor) -> Projection:
        """The head as it is now: its active adapters, its trained weight, tokens and bias."""
        base = head_module(head)
        weight, bias = local_tensor(base, "weight"), local_tensor(base, "bias")
        assert weight is not None
        adapters = head.applied_adapters() if isinstance(head, TploraLinear) else []
        tensors = {name: head.adapter_tensors(name) for name in adapters}
        replaced = _trained_tokens(head)
        if replaced:
            bias = None  # as in PEFT
        return cls(
            inputs=(hidden, *(head.drop(name, hidden) for name in adapters)),
            parameters=(
                weight,
                *(() if bias is None else (bias,)),
                *(rows for _, rows in replaced),
                *(tensor for name in adapters for tensor in tensors[name].values()),
            ),
            head=head,
            has_bias=bias is not None,
            columns=tuple(columns for columns, _ in replaced),
            adapters={name: tuple(tensors[name]) for name in adapters},
        )

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, V/P]`` of some rows of the inputs, with the parameters."""
        num_inputs = len(self.inputs)
        rows, rest = given[:num_inputs], iter(given[num_inputs:])
        weight = next(rest)
        bias = next(rest) if self.has_bias else None
        hidden = rows[0].to(weight.dtype)  # hy_v4 holds its head in float32, whatever the rest is
        z = F.linear(hidden, weight, bias)
        for columns in self.columns:
            z = z.index_copy(-1, columns, F.linear(hidden, next(rest)))
        dtype = z.dtype
        for (name, what), dropped in zip(self.adapters.items(), rows[1:], strict=True):
            own = {one: next(rest) for one in what}
            row = dropped.to(own["A"].dtype)
            z = self.head.apply_adapter(name, z, row, own, bias=bias)
        return z.to(dtype)


def _trained_tokens(head: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not isinstance(head, TrainableTokensWrapper):
        return []
    layer = head.token_adapter
    assert isinstance(layer, TploraTokens)
    return [layer.own_columns(name) for name in layer.applied_adapters()]
