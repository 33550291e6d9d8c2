"""A quantised linear on this rank's piece of its weight: the product alone, and inside its style.

    # T tokens   I in_features   O out_features   P tp_size

The weight is dequantised for one product and dropped; backward dequantises it again. Nothing of it
is saved in the graph, so activation checkpointing has nothing to repeat but the product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tplora.collectives.operators import (
    gather_last_dim,
    reduce_partial,
    replicate_input,
    split_last_dim,
)
from tplora.plan.style import STYLES
from tplora.upstream import expanded_tp_plan, local_shard, transform_output
from tplora.upstream.quantization import (
    four_bit_product,
    four_bit_values,
    is_four_bit,
    is_quantized_linear,
    keep_packing,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

__all__ = ["dequantize", "hold_exact", "local_bias", "multiply"]


def multiply(
    module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, *, computes_in_own: bool = False
) -> torch.Tensor:
    """``x W^T + bias`` with this rank's piece of W, in x's dtype. No communication.

    In 4 bits it is computed in the module's ``compute_dtype``, as by bitsandbytes. In 8 bits the
    input keeps its dtype: bitsandbytes does so when it trains on a CPU, while on a GPU it rounds
    each row of x to 8 bits by its largest value, which on a rank that has a slice of the row is
    another one.

    Args:
        module: The linear.
        x: ``[..., I]``, or this rank's piece of I.
        bias: This rank's piece, or None.
        computes_in_own: Compute in x's dtype in 4 bits, too, as DoRA does with W unpacked.
    """
    if is_four_bit(module):
        return four_bit_product(module, x, bias, x.dtype if computes_in_own else None)
    weight: Any = module.weight
    product: torch.Tensor = _EightBitProduct.apply(  # type: ignore[no-untyped-call]
        x, weight.data, weight.SCB, None if bias is None else bias.to(x.dtype)
    )
    return product


def dequantize(module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """This rank's piece of W ``[O, I]`` as it is multiplied by. No communication."""
    if is_four_bit(module):
        return four_bit_values(module).to(dtype)
    weight: Any = module.weight
    return _dequantize(weight.data, weight.SCB, dtype)


class _EightBitProduct(torch.autograd.Function):
    """``x (W * scale / 127)^T + b`` for int8 W ``[O, I]`` and a scale for each row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        values: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.values, ctx.scales = values, scales
        return F.linear(x, _dequantize(values, scales, x.dtype), bias)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, None, torch.Tensor | None]:
        of_input, _, _, of_bias = ctx.needs_input_grad
        return (
            grad @ _dequantize(ctx.values, ctx.scales, grad.dtype) if of_input else None,
            None,
            None,
            grad.flatten(0, -2).sum(dim=0) if of_bias else None,
        )


def _dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


def local_bias(module: nn.Module) -> torch.Tensor | None:
    """This rank's piece of the bias, if there is one."""
    bias: Any = module.bias
    return None if bias is None else local_shard(bias)


def hold_exact(model: PreTrainedModel, mesh: DeviceMesh | None) -> None:
    """Give each quantised linear the forward of its style, on local pieces; whole in one process.

    transformers' own forward of a style would wrap the input of a packed weight in a DTensor.
    """
    styles = {} if mesh is None else expanded_tp_plan(model)
    for name, module in model.named_modules():
        if not is_quantized_linear(module):
            continue
        keep_packing(module)
        if mesh is not None:
            vars(module)["forward"] = _cut_forward(module, styles.get(name), mesh)
        elif not is_four_bit(module):
            vars(module)["forward"] = _whole_forward(module)


def _whole_forward(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return multiply(module, x, local_bias(module))

    return forward


def _cut_forward(
    module: nn.Module, style_name: str | None, mesh: DeviceMesh
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a linear without an adapter, as ``adapter/linear.py`` has it with one."""
    style, group = STYLES["linear"][style_name], mesh.get_group()

    def column(x: torch.Tensor) -> torch.Tensor:
        y = multiply(module, replicate_input(x, group), local_bias(module))
        return gather_last_dim(y, module.out_features, group) if style.gathers_output else y  # type: ignore[arg-type]

    def row(x: torch.Tensor) -> torch.Tensor:
        x = split_last_dim(x, group) if style.splits_input else x
        y, bias = reduce_partial(multiply(module, x, None), group), local_bias(module)
        return y if bias is None else y + bias.to(y.dtype)

    def whole(x: torch.Tensor) -> torch.Tensor:
        y = multiply(module, x, local_bias(module))
        if not style.transforms_output:
            return y
        assert style_name is not None
        return transform_output(style_name, module, y, mesh)

    return {0: column, 1: row, None: whole}[style.weight_shard_dim]
