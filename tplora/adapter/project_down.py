"""``dropout(x) A^T``, which keeps x for backward as it is, not what it became on the way.

    # T tokens   I in_features   R LoRA rank r

The input of an adapter is cast to A's dtype and dropped before it is multiplied. Autograd would
keep for each layer its own cast and dropped copy, and the mask in that dtype: of q, k and v over a
bfloat16 base with float32 factors 3 x 8 bytes a number, where x itself, which they share, has 2.
Here backward computes them again: x is kept once for all layers that read it, of a mask a byte.

    bytes kept for backward a layer:  T R of A's dtype (x A^T, for B), and T I bytes with dropout
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tplora.adapter.dropout import ShardedDropout, drop

if TYPE_CHECKING:
    from tplora.collectives.late_gradients import Held, LateGradients

__all__ = ["can_project_down", "project_down", "project_up"]


def can_project_down(dropout: nn.Module, x: torch.Tensor) -> bool:
    """Whether the dropout is one of ours or none, and nothing casts on the way."""
    kind = x.device.type  # meta has no autocast, and is asked for it in a rehearsal
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return isinstance(dropout, (nn.Identity, ShardedDropout)) and not is_cast


def project_down(
    x: torch.Tensor, a: torch.Tensor, dropout: nn.Module, late: LateGradients | None = None
) -> torch.Tensor:
    """``dropout(x) A^T`` in A's dtype, ``[..., R]``.

    Args:
        x: ``[..., I]``, this rank's piece, in any dtype.
        a: ``[R, I]``, this rank's piece.
        dropout: None of ours acts outside training.
        late: Where A's gradient is computed, if that is later than x's.
    """
    keep = dropout.draw(x) if isinstance(dropout, ShardedDropout) else None
    p = dropout.p if isinstance(dropout, ShardedDropout) else 0.0
    return _project(x, a, late, keep, p)


def project_up(down: torch.Tensor, b: torch.Tensor, late: LateGradients | None) -> torch.Tensor:
    """``(x A^T) B^T``, ``[..., O]``; B's gradient is computed with A's.

    Args:
        down: ``[..., R]``.
        b: ``[O, R]``, this rank's piece.
        late: As in ``project_down``.
    """
    return _project(down, b, late)


def _project(
    x: torch.Tensor,
    factor: torch.Tensor,
    late: LateGradients | None,
    keep: torch.Tensor | None = None,
    p: float = 0.0,
) -> torch.Tensor:
    held: Held | None = None
    if late is not None and torch.is_grad_enabled():
        factor, held = late.hold(factor)
    if held is None and keep is None and x.dtype == factor.dtype:
        return F.linear(x, factor)
    y: torch.Tensor = _Project.apply(x, factor, keep, p, held)  # type: ignore[no-untyped-call]
    return y


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        a: torch.Tensor,
        keep: torch.Tensor | None,
        p: float,
        held: Held | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, a, keep)
        ctx.p, ctx.held = p, held
        return F.linear(_dropped(x, a.dtype, keep, p), a)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, keep = ctx.saved_tensors
        grad_x = grad_a = None
        if ctx.needs_input_grad[1]:
            compute = partial(_grad_of_factor, grad, x, a.dtype, keep, ctx.p)
            grad_a = compute() if ctx.held is None else ctx.held.put(compute, a)
        if ctx.needs_input_grad[0]:
            grad_x = grad @ a.to(grad.dtype)
            if keep is not None:
                grad_x = grad_x / (1.0 - ctx.p) * keep.to(grad.dtype)
            grad_x = grad_x.to(x.dtype)
        return grad_x, grad_a, None, None, None


def _grad_of_factor(
    grad: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, keep: torch.Tensor | None, p: float
) -> torch.Tensor:
    # In the dtype of the product, which is the factor's unless something raised it in forward.
    rows = _dropped(x, grad.dtype, keep, p).reshape(-1, x.shape[-1])
    return (grad.reshape(-1, grad.shape[-1]).t() @ rows).to(dtype)


def _dropped(
    x: torch.Tensor, dtype: torch.dtype, keep: torch.Tensor | None, p: float
) -> torch.Tensor:
    x = x.to(dtype)
    return x if keep is None else drop(x, keep, p)
