"""BD-LoRA: one of the factors is block-diagonal, and cut along its blocks where W is.

# I in_features   O out_features   R LoRA rank r   N nblocks   P tp_size
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.variants import BdLoraLinearVariant

from tplora.adapter.factor import factors_of
from tplora.adapter.variants.local import LocalVariant

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BlockDiagonal"]


class BlockDiagonal(LocalVariant):
    """LoRA with a block-diagonal A or B.

        y = x W^T + s (x' A^T) B^T,   A or B = diag(block 1, ..., block N)

    A factor has blocks where its stored columns are fewer than the features it reads.

    Shapes, per rank, where the blocks follow W's cut:
        A block-diagonal, W cut on in     A [R/P, I/N], B [O, R/P]
        B block-diagonal, W cut on out    A [R/P, I],   B [O/P, R/N]

    Communication: none.

    Source: PEFT's ``use_bdlora`` (peft 0.21).
    """

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        """PEFT's own, with full sizes; A and B are not cut yet."""
        BdLoraLinearVariant.init(module, adapter_name, **kwargs)

    def apply(
        self,
        module: Any,
        name: str,
        result: torch.Tensor,
        dropped: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """Blocks multiply their own features; plain factors all of them."""
        scaling: float = module.scaling[name]
        down = _blockwise(dropped, tensors["A"])
        return result + _blockwise(down, tensors["B"]) * scaling

    def merged(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """``W + scaling * B A``, blocks filled up with zeros."""
        return weight + self._delta(module, name, weight)

    def unmerged(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """``W - scaling * B A``."""
        return weight - self._delta(module, name, weight)

    def _delta(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        factors = factors_of(module.factors, name)
        scaling: float = module.scaling[name]
        a = _with_zeros(factors["A"].local().detach(), weight.shape[1])
        b = _with_zeros(factors["B"].local().detach(), a.shape[0])
        return b @ a * scaling


def _blockwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x diag(blocks)^T``; ``weight`` is the blocks below each other, or one that reads all."""
    num_blocks = x.shape[-1] // max(weight.shape[1], 1)
    if num_blocks <= 1:
        return F.linear(x, weight)
    blocks = weight.view(num_blocks, -1, weight.shape[1])
    pieces = x.reshape(*x.shape[:-1], num_blocks, -1)
    return torch.einsum("...nm,nom->...no", pieces, blocks).flatten(-2)


def _with_zeros(weight: torch.Tensor, num_in: int) -> torch.Tensor:
    num_blocks = num_in // max(weight.shape[1], 1)
    if num_blocks <= 1:
        return weight
    whole: torch.Tensor = torch.block_diag(*weight.chunk(num_blocks))  # type: ignore[no-untyped-call]
    return whole
