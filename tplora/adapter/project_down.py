"""``dropout(x) A^T``, which keeps x for backward as it is, not what it became on the way.

    # T tokens   I in_features   R LoRA rank r

The input of an adapter is cast to A's dtype and dropped before it is multiplied. Autograd would
keep for each layer its own cast and dropped copy, and the mask in that dtype: of q, k and v over a
bfloat16 base with float32 factors 3 x 8 bytes a number, where x itself, which they share, has 2.
Here backward computes them again: x is kept once for all layers that read it, of a mask a byte.

    bytes kept for backward a layer:  T R of A's dtype (x A^T, for B), and T I bytes with dropout
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tplora.adapter.dropout import ShardedDropout, drop

__all__ = ["can_project_down", "project_down"]


def can_project_down(dropout: nn.Module, x: torch.Tensor) -> bool:
    """Whether the dropout is one of ours or none, and nothing casts on the way."""
    kind = x.device.type  # meta has no autocast, and is asked for it in a rehearsal
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return isinstance(dropout, (nn.Identity, ShardedDropout)) and not is_cast


def project_down(x: torch.Tensor, a: torch.Tensor, dropout: nn.Module) -> torch.Tensor:
    """``dropout(x) A^T`` in A's dtype, ``[..., R]``.

    Args:
        x: ``[..., I]``, this rank's piece, in any dtype.
        a: ``[R, I]``, this rank's piece.
        dropout: None of ours acts outside training.
    """
    keep = dropout.draw(x) if isinstance(dropout, ShardedDropout) else None
    if keep is None and x.dtype == a.dtype:
        return F.linear(x, a)
    p = dropout.p if isinstance(dropout, ShardedDropout) else 0.0
    down: torch.Tensor = _ProjectDown.apply(x, a, keep, p)  # type: ignore[no-untyped-call]
    return down


class _ProjectDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, keep: torch.Tensor | None, p: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, a, keep)
        ctx.p = p
        return F.linear(_dropped(x, a.dtype, keep, p), a)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, keep = ctx.saved_tensors
        grad_x = grad_a = None
        if ctx.needs_input_grad[1]:
            # In the dtype of the product, which is A's unless something raised it in forward.
            rows = _dropped(x, grad.dtype, keep, ctx.p).reshape(-1, x.shape[-1])
            grad_a = (grad.reshape(-1, grad.shape[-1]).t() @ rows).to(a.dtype)
        if ctx.needs_input_grad[0]:
            grad_x = grad @ a.to(grad.dtype)
            if keep is not None:
                grad_x = grad_x / (1.0 - ctx.p) * keep.to(grad.dtype)
            grad_x = grad_x.to(x.dtype)
        return grad_x, grad_a, None, None


def _dropped(
    x: torch.Tensor, dtype: torch.dtype, keep: torch.Tensor | None, p: float
) -> torch.Tensor:
    x = x.to(dtype)
    return x if keep is None else drop(x, keep, p)
