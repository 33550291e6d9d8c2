"""Quantised weights held to the checkpoint: what it holds, quantised here again, is what they are.

Compared are the whole numbers before scaling, which say where each value came from; what they are
scaled by is of the same blocks or rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from tplora.base.quantized import cut_of_loaded
from tplora.upstream import placement_of
from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

__all__ = ["codes_are_equal", "codes_of"]

_CHUNK_BYTES = 2 << 20


def codes_of(model: PreTrainedModel, name: str) -> torch.Tensor | None:
    """The numbers of a quantised weight, placed as W is; None for any other parameter."""
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    if leaf != "weight" or not is_quantized_linear(module):
        return None
    from tplora.base.quantized_shard import held_codes  # noqa: PLC0415  (bitsandbytes)

    codes, cut = held_codes(module), cut_of_loaded(module)
    if cut.mesh is None:
        return codes
    return DTensor.from_local(
        codes,
        cut.mesh,
        [placement_of(cut.dim)],
        run_check=False,
        shape=torch.Size(cut.shape),
        stride=(cut.shape[1], 1),
    )


def codes_are_equal(model: PreTrainedModel, codes: torch.Tensor, name: str, file: Path) -> bool:
    """Whether tensor ``name`` of the checkpoint has these numbers, as far as they go.

    Args:
        model: As it was loaded; says how it was quantised.
        codes: Gathered, ``[O, I]`` or the first rows or columns of it.
        name: What the checkpoint calls the weight.
        file: Where it is.
    """
    with safe_open(file, framework="pt") as opened:
        lazy = opened.get_slice(name)
        rows, columns = lazy.get_shape()
        if columns == 1 != codes.shape[1]:
            return _is_in_packed(codes, opened.get_tensor(name))
        if rows < codes.shape[0]:
            return False
        width = _columns_for(codes.shape[1], columns, model)
        step = 64 * max(1, _CHUNK_BYTES // (64 * 4 * width))  # rows that end where blocks do
        for start in range(0, codes.shape[0], step):
            found = codes[start : start + step]
            there = _quantize(lazy[start : start + len(found), :width], model)
            if not torch.equal(there[:, : codes.shape[1]], found):
                return False
    return True


def _columns_for(num_compared: int, num_columns: int, model: PreTrainedModel) -> int:
    """Of each row so many columns say what the first are, once they are quantised.

    In 4 bits whole blocks do, where these end with the rows; in 8 bits a row has one scale.
    """
    if _config_of(model).load_in_8bit or num_columns % 64:
        return num_columns
    return min(num_columns, -(-num_compared // 64) * 64)


def _quantize(there: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """Numbers of whole rows, on the device whose rounding made the model's."""
    from bitsandbytes import functional as bnb  # noqa: PLC0415  (slow)

    from tplora.base.quantized_shard import quantize_blocks  # noqa: PLC0415  (bitsandbytes)

    if not there.is_floating_point():
        return there
    config, shape = _config_of(model), there.shape
    there = there.to(device=model.device, dtype=model.dtype)
    if config.load_in_8bit:
        codes: torch.Tensor = bnb.int8_vectorwise_quant(there.to(torch.float16))[0]
        return codes.cpu()
    packed, _ = quantize_blocks(there.contiguous(), config.bnb_4bit_quant_type)
    return _unpack(packed.cpu()).view(shape)


def _config_of(model: PreTrainedModel) -> Any:
    return model.config.quantization_config


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    values = packed.contiguous().view(torch.uint8).flatten()
    return torch.stack([values >> 4, values & 15], dim=1).flatten()


def _is_in_packed(codes: torch.Tensor, packed: torch.Tensor) -> bool:
    """Whether the first rows, or the first columns, of a packed weight are these."""
    there = _unpack(packed)
    if torch.equal(there[: codes.numel()], codes.flatten()):
        return True
    rows, columns = codes.shape
    if len(there) % rows or len(there) // rows < columns:
        return False
    return torch.equal(there.view(rows, -1)[:, :columns], codes)
