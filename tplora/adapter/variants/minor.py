"""MiCA: B holds the smallest left singular vectors of W and stays as it is; A alone is trained.

    y = x W^T + s (x' A^T) B^T,   B = the last R of U in W = U S V^T,   A = 0 at first

# I in_features   O out_features   R LoRA rank r   P tp_size

What a rank computes and holds is that of plain LoRA; B has no gradient. The singular vectors are
found by ``FromWholeWeight.mica_init``, of all of W.

Source: PEFT's ``init_lora_weights="mica"`` (peft 0.21), arXiv 2604.01694.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.variants import MiCAEmbeddingVariant, MiCALinearVariant

from tplora.adapter.variants.local import LocalVariant

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EmbeddingMinor", "LinearMinor"]


class LinearMinor(LocalVariant):
    """Plain LoRA on a linear whose B PEFT freezes. Communication: none."""

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        """PEFT's, which freezes B."""
        MiCALinearVariant.init(module, adapter_name, **kwargs)


class EmbeddingMinor(LinearMinor):
    """Plain LoRA on an embedding whose B PEFT freezes. Communication: none."""

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        """PEFT's, which freezes B."""
        MiCAEmbeddingVariant.init(module, adapter_name, **kwargs)

    def apply(
        self,
        module: Any,
        name: str,
        result: torch.Tensor,
        dropped: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """``dropped`` is A's rows of the tokens."""
        scaling: float = module.scaling[name]
        return result + F.linear(dropped, tensors["B"]) * scaling
