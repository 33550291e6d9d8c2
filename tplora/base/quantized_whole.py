"""A whole weight as a quantised linear multiplies by it, on the device that it is on.

In one process, and of one weight at a time: for what is done with files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitsandbytes.nn import Linear4bit, Linear8bitLt

from tplora.base.cut import Cut
from tplora.base.quantized_product import dequantize
from tplora.base.quantized_shard import cut_quantized, quantize_shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from transformers import BitsAndBytesConfig

__all__ = ["rounded", "unpacked"]


def rounded(weight: torch.Tensor, config: BitsAndBytesConfig) -> torch.Tensor:
    """``weight`` quantised and unpacked again, in its own dtype: what a model holds of it."""
    rows, columns = weight.shape
    linear = _empty_linear((rows, columns), eight_bits=config.load_in_8bit)
    linear.weight = quantize_shard(linear, weight, _whole((rows, columns)), config)
    return dequantize(linear, weight.dtype)


def unpacked(
    held: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """What a checkpoint holds of a quantised weight, unpacked.

    Args:
        held: By the names behind the module's: ``weight`` and what was saved beside it.
        shape: ``[O, I]``.
        dtype: Of the result.

    Raises:
        ValueError: If something of it is missing or of another size.
    """
    linear = _empty_linear(shape, eight_bits=f"{held['weight'].dtype}" == "torch.int8")
    linear.weight = cut_quantized(linear, held, _whole(shape))
    return dequantize(linear, dtype)


def _empty_linear(shape: tuple[int, int], *, eight_bits: bool) -> Any:
    rows, columns = shape
    options = {"has_fp16_weights": False} if eight_bits else {}
    kind = Linear8bitLt if eight_bits else Linear4bit
    return kind(columns, rows, bias=False, device="meta", **options)


def _whole(shape: tuple[int, int]) -> Cut:
    return Cut(shape=shape, dim=None, mesh=None)
