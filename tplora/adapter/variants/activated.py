"""aLoRA: the adapter takes part from a row's last invocation sequence on, and not before it.

Source: Greenewald et al. 2025; PEFT's ``alora_invocation_tokens``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tplora.adapter.variants.local import LocalVariant
from tplora.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ActivatedLora"]

_NO_MERGE = (
    "an aLoRA adapter cannot be merged: it leaves the tokens before its invocation as they are; "
    "use it unmerged"
)


class ActivatedLora(LocalVariant):
    """LoRA on the last ``offset`` tokens of each row; PEFT's hooks say how many those are.

    Communication: none. Rows and tokens are whole on every rank, so each chooses the same ones.
    """

    def init(self, module: Any, adapter_name: str, **_: Any) -> None:
        """Nothing to build."""

    def apply(
        self,
        module: Any,
        name: str,
        result: torch.Tensor,
        dropped: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        *,
        alora_offsets: Sequence[int | None] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The delta is added to the chosen tokens alone; gradients are zero if there are none."""
        num_rows, num_tokens = result.shape[0], result.shape[1] if result.ndim == 3 else 1
        offsets = [min(offset or 0, num_tokens) for offset in alora_offsets or [0] * num_rows]
        first = num_tokens - torch.tensor(offsets, device=result.device)
        place = torch.arange(num_tokens, device=result.device)
        chosen = (place >= first[:, None]).flatten().nonzero().squeeze(1)
        rows = dropped.reshape(-1, dropped.shape[-1])[chosen]
        delta = F.linear(F.linear(rows, tensors["A"]), tensors["B"]) * module.scaling[name]
        flat = result.reshape(-1, result.shape[-1])
        dtype = torch.promote_types(flat.dtype, delta.dtype)
        return flat.to(dtype).index_add(0, chosen, delta.to(dtype)).view(result.shape)

    def merged(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Refused.

        Raises:
            PlanError: Always.
        """
        raise PlanError([_NO_MERGE])
