"""What a kind of LoRA that computes more than ``scaling * B A`` is, to a layer on local shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from peft.tuners.lora.layer import LoraVariant

from tplora.errors import PlanError
from tplora.upstream import local_shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["LocalVariant", "take_context"]


class LocalVariant(LoraVariant):  # type: ignore[misc]
    """PEFT's variant of a layer, with a forward on this rank's pieces.

    PEFT makes one for each adapter of a layer and calls its ``init`` once A and B are drawn in
    full, before they are cut.
    """

    def constants(
        self, module: Any, name: str, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What ``apply`` needs beside the factors and takes no gradient; once per forward."""
        return {}

    def apply(
        self,
        module: Any,
        name: str,
        result: torch.Tensor,
        dropped: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        **context: Any,
    ) -> torch.Tensor:
        """As ``TploraLinear.apply_adapter``: ``result`` with this adapter's part; plain LoRA's."""
        scaling: float = module.scaling[name]
        return result + F.linear(F.linear(dropped, tensors["A"]), tensors["B"]) * scaling

    def merged(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """This rank's piece of W with the adapter in it; W + delta."""
        return weight + local_shard(module.get_delta_weight(name))

    def unmerged(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """What ``merged`` undoes; W - delta."""
        return weight - local_shard(module.get_delta_weight(name))


def take_context(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take out of a forward's arguments what PEFT's hooks put in for the adapter.

    Raises:
        PlanError: If rows of one batch are to be run with different adapters.
    """
    if kwargs.pop("adapter_names", None) is not None:
        raise PlanError(
            [
                "adapter_names: a batch whose rows take different adapters cannot be run on cut "
                "factors; run one batch per adapter, with model.set_adapter"
            ]
        )
    return {key: kwargs.pop(key) for key in ("alora_offsets",) if key in kwargs}
