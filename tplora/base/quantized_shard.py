"""A rank's piece of a quantised weight, bit for bit the piece of the full weight's quantisation.

    # O out_features   I in_features   P tp_size   64 values a block in 4 bits

4 bits: the scale of a block is the largest of 64 values that follow each other in a row, so a piece
whose rows are whole blocks quantises to the blocks of the full weight. Double quantisation takes
the mean of all scales and rounds them in groups of 256 across rows; so the scales of all ranks are
gathered, rounded as one process would round them, and cut. 8 bits: the scale is the largest value
of a row, so of a weight that is cut on I it is the largest over all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from bitsandbytes import functional as bnb
from bitsandbytes.nn import Int8Params

from tplora.upstream.quantization import (
    BLOCK_SIZE,
    is_four_bit,
    new_four_bit_weight,
    serialized_state,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from transformers import BitsAndBytesConfig

    from tplora.base.cut import Cut

_VALUES_AT_ONCE = BLOCK_SIZE << 10
"""How many are rounded at a time where that takes more bytes than they have."""

__all__ = ["NestedShardState", "cut_quantized", "held_codes", "quantize_blocks", "quantize_shard"]


def quantize_shard(
    module: nn.Module, piece: torch.Tensor, cut: Cut, config: BitsAndBytesConfig
) -> nn.Parameter:
    """Quantise this rank's slice of a weight.

    Collective for 8 bits cut on I (one all-reduce of ``[O]``) and for double quantisation of a cut
    weight (one all-gather of its scales).
    """
    if is_four_bit(module):
        return _quantize_four_bit(module, piece, cut, config)
    return _quantize_eight_bit(piece, cut)


def _quantize_four_bit(
    module: nn.Module, piece: torch.Tensor, cut: Cut, config: BitsAndBytesConfig
) -> nn.Parameter:
    if not cut.has_whole(BLOCK_SIZE):
        raise ValueError(f"its rows on a rank are no whole blocks of {BLOCK_SIZE} values")
    packed, state = quantize_blocks(piece.contiguous(), config.bnb_4bit_quant_type)
    packed = packed.flatten().view(config.bnb_4bit_quant_storage).view(-1, 1)
    is_double = bool(config.bnb_4bit_use_double_quant)
    if is_double:
        own = state.absmax if cut.dim is None else state.absmax.view(cut.local_shape[0], -1)
        full = cut.gather(own, per=BLOCK_SIZE).flatten()
        offset = full.mean()
        codes, groups = bnb.quantize_blockwise(full - offset, blocksize=256)
        state = _nested_state(state, codes, groups, offset, cut)
    return new_four_bit_weight(module, packed, state, is_double=is_double)


def quantize_blocks(piece: torch.Tensor, quant_type: str) -> tuple[Any, Any]:
    """bitsandbytes' ``quantize_4bit``; on a CPU some blocks at a time.

    There it compares every value with all 16 codes in float32, which takes 64 times the bytes of a
    16-bit piece. Blocks do not know of each other.
    """
    most = piece.numel() if piece.device.type != "cpu" else _VALUES_AT_ONCE
    parts = [
        bnb.quantize_4bit(part, blocksize=BLOCK_SIZE, quant_type=quant_type)
        for part in torch.split(piece.flatten(), max(most, BLOCK_SIZE))
    ]
    state = parts[0][1]
    state.absmax = torch.cat([part.absmax for _, part in parts])
    state.shape = piece.shape
    return torch.cat([packed for packed, _ in parts]), state


def _quantize_eight_bit(piece: torch.Tensor, cut: Cut) -> nn.Parameter:
    """bitsandbytes' own rounding, with the scale of the full row, some rows at a time.

    It takes a row's scale from the row it is given, so that is made one longer by the largest value
    that any rank has of it.
    """
    rows = torch.split(piece, max(1, _VALUES_AT_ONCE // piece.shape[1]))
    largest = torch.cat([some.to(torch.float16).abs().amax(dim=1) for some in rows])
    if cut.dim == 1 and cut.mesh is not None:
        largest = largest.float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=cut.mesh.get_group())
        largest = largest.to(torch.float16)
    parts = [
        bnb.int8_vectorwise_quant(torch.cat([some.to(torch.float16), most[:, None]], dim=1))
        for some, most in zip(rows, torch.split(largest, len(rows[0])), strict=True)
    ]
    values = torch.cat([some[:, :-1] for some, *_ in parts])
    return _eight_bit_weight(values, torch.cat([scales for _, scales, *_ in parts]))


def _eight_bit_weight(values: torch.Tensor, scales: torch.Tensor) -> nn.Parameter:
    weight: nn.Parameter = Int8Params(values, requires_grad=False, CB=values, SCB=scales)
    return weight


def cut_quantized(module: nn.Module, held: Mapping[str, torch.Tensor], cut: Cut) -> nn.Parameter:
    """This rank's piece of a weight that the checkpoint holds quantised; nothing is rounded again.

    Args:
        module: The linear.
        held: By the names behind the module's: ``weight`` and what was saved beside it.
        cut: Which piece.

    Raises:
        ValueError: If something of it is missing or of another size.
    """
    if is_four_bit(module):
        return _cut_four_bit(module, held, cut)
    return _cut_eight_bit(held, cut)


def _cut_four_bit(module: nn.Module, held: Mapping[str, torch.Tensor], cut: Cut) -> nn.Parameter:
    state = serialized_state(held)
    if tuple(state.shape) != cut.shape or not cut.has_whole(state.blocksize):
        raise ValueError(
            f"{list(state.shape)} in blocks of {state.blocksize} cannot be cut into whole ones"
        )
    num_values, num_scales = cut.shape[0] * cut.shape[1], state.absmax.numel()
    if num_scales != -(-num_values // state.blocksize):
        raise ValueError(
            f"{num_values:,} values in blocks of {state.blocksize} have not {num_scales:,} scales"
        )
    storage = held["weight"].dtype
    packed = cut.piece_of(held["weight"].contiguous().view(torch.uint8), per=2).view(-1, 1)
    packed = packed.view(storage).view(-1, 1)
    is_double = state.nested
    if is_double:
        state = _nested_state(state, state.absmax, state.state2, state.offset, cut)
    else:
        state.absmax = cut.piece_of(state.absmax, per=state.blocksize).flatten()
        state.shape = torch.Size(cut.local_shape)
    return new_four_bit_weight(module, packed, state, is_double=is_double)


def _cut_eight_bit(held: Mapping[str, torch.Tensor], cut: Cut) -> nn.Parameter:
    """The int8 matrix was read by slices, like any other weight."""
    values, scales = held["weight"].clone(memory_format=torch.contiguous_format), held["SCB"]
    if tuple(values.shape) != cut.local_shape or values.dtype != torch.int8:
        raise ValueError(f"holds {list(values.shape)} in {values.dtype}")
    scales = scales.flatten()[cut.ranges[0]].clone()
    return _eight_bit_weight(values, scales)


def _nested_state(plain: Any, codes: Any, groups: Any, offset: Any, cut: Cut) -> Any:
    if cut.dim is None:
        return bnb.QuantState(
            absmax=codes.flatten(),
            shape=torch.Size(cut.shape),
            dtype=plain.dtype,
            blocksize=plain.blocksize,
            code=plain.code,
            quant_type=plain.quant_type,
            offset=offset,
            state2=groups,
        )
    return NestedShardState(plain, codes, groups, offset, cut)


class NestedShardState(bnb.QuantState):  # type: ignore[misc]
    """The state of a piece whose scales are rounded to 8 bits in groups of the full weight's.

        scale[i, j] = code[ codes[i, j] ] * group[ (i * I/64 + j) // 256 ] + offset

    A group of 256 scales runs across rows and so across ranks: bitsandbytes' own nested state would
    count them from the piece's first. This one computes the scales when they are asked for, and
    otherwise is the state of a weight that was quantised once.

    Shapes, per rank: codes ``[O/P, I/64]`` or ``[O, I/P/64]`` uint8; group ``[O I/64/256]``, whole.
    """

    def __init__(self, plain: Any, codes: Any, groups: Any, offset: Any, cut: Cut) -> None:
        self._codes = cut.piece_of(codes, per=plain.blocksize)
        self._group, self._code2, self._offset = groups.absmax, groups.code, offset
        self._group_size = groups.blocksize
        rows, columns = cut.ranges
        self._width = cut.shape[1] // plain.blocksize
        self._first = (rows.start, columns.start // plain.blocksize)
        super().__init__(
            None,
            shape=torch.Size(cut.local_shape),
            code=plain.code,
            blocksize=plain.blocksize,
            quant_type=plain.quant_type,
            dtype=plain.dtype,
        )

    @property
    def absmax(self) -> torch.Tensor:
        """One float32 scale for each block, in the order of the packed weight."""
        codes = self._codes
        row = torch.arange(codes.shape[0], device=codes.device) + self._first[0]
        column = torch.arange(codes.shape[1], device=codes.device) + self._first[1]
        group = (row[:, None] * self._width + column) // self._group_size
        scales: torch.Tensor = self._code2[codes.int()] * self._group[group] + self._offset
        return scales.flatten()

    @absmax.setter
    def absmax(self, _value: None) -> None:
        """What the base class sets when it is made."""

    def to(self, device: Any) -> None:
        """To another device, in place, as the base class does."""
        for name in ("code", "_codes", "_group", "_code2", "_offset"):
            setattr(self, name, getattr(self, name).to(device))


def held_codes(module: nn.Module) -> torch.Tensor:
    """This rank's piece of W as whole numbers, before scaling: ``[O, I]``, one byte each.

    In 4 bits each is a place in the table of 16, two to a byte of the packed weight.
    """
    weight: Any = module.weight
    if not is_four_bit(module):
        codes: torch.Tensor = weight.data
        return codes
    packed = weight.data.view(torch.uint8).flatten()
    return torch.stack([packed >> 4, packed & 15], dim=1).view(tuple(weight.quant_state.shape))
