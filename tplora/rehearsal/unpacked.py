"""Quantised linears in a rehearsal: unquantised ones that unpack a weight for each product."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tplora.adapter.linear import TploraLinear

if TYPE_CHECKING:
    from torch import nn

    from tplora.plan.quantization import QuantizationPlan

__all__ = ["unpack_for_each_product"]


def unpack_for_each_product(model: nn.Module, quantization: QuantizationPlan) -> None:
    """Have each adapted layer that is going to be quantised multiply as if it were.

    Of a packed weight nothing is kept for backward: it is unpacked for one product and dropped,
    forward and backward. The layer's own weight, on the meta device, stands for its shape.
    """
    in_four_bits = quantization.method != "int8"
    dtype = getattr(torch, quantization.compute_dtype) if in_four_bits else None
    for module in model.modules():
        if isinstance(module, TploraLinear) and module.plan.name in quantization.names:
            layer: Any = module
            layer.base_product = partial(_product, dtype)


def _product(
    dtype: torch.dtype | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    wide = x if dtype is None else x.to(dtype)
    bias = None if bias is None else bias.to(wide.dtype)
    y: torch.Tensor = _UnpackedProduct.apply(wide, weight.shape, bias)  # type: ignore[no-untyped-call]
    return y.to(x.dtype)


class _UnpackedProduct(torch.autograd.Function):
    """``x W^T + b`` with a W that exists during the product only."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: torch.Size, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.shape = shape
        return F.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad @ grad.new_empty(ctx.shape), None, None
