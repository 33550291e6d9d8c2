"""Merge a live adapter into its base and take it out again, on this rank's pieces.

    W_k <- W_k + delta_k,   or what the adapter's variant makes of W_k

PEFT's own merge sets ``weight.data``, which leaves the storage of a DTensor as it was: nothing
would be merged. Here the storage is written. No weight is gathered.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge

from tplora.adapter.sharded_base import check_merge_target
from tplora.errors import PlanError, ShardError
from tplora.upstream import local_shard
from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tplora.adapter.factor import Factors
    from tplora.adapter.model import TploraModel

__all__ = ["MergesLocally", "is_merged", "merge_adapter", "refuse_packed", "unmerge_adapter"]

_PACKED = (
    "merge: the base is quantised, and what is merged would be rounded anew; merge the saved "
    "adapter into the unquantised base with `tplora export`"
)


def merge_adapter(
    model: TploraModel, adapter_names: Sequence[str] | None = None, *, safe_merge: bool = False
) -> None:
    """Add the adapters' deltas to this rank's pieces of the base, so that they cost nothing more.

    Every rank calls it. No communication, but for DoRA's norms and for ``safe_merge``.

    Args:
        model: The adapted model; its factors stay, and ``unmerge_adapter`` uses them.
        adapter_names: Those that are active when left out.
        safe_merge: Look for NaN and infinity first, on all ranks.

    Raises:
        PlanError: If an adapter's bias has nowhere to go.
        ShardError: If the base is shared out over data ranks, or a safe merge is not finite.
    """
    names = None if adapter_names is None else list(adapter_names)
    model.merge_adapter(adapter_names=names, safe_merge=safe_merge)


def unmerge_adapter(model: TploraModel) -> None:
    """Take out of the base what ``merge_adapter`` has added; equal to rounding.

    Every rank calls it. No communication.
    """
    model.unmerge_adapter()


def is_merged(model: TploraModel) -> bool:
    """Whether every layer that an active adapter is on has it merged."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    held = [layer for layer in layers if set(layer.active_adapters) & _adapters_of(layer)]
    return all(
        set(layer.active_adapters) & _adapters_of(layer) <= set(layer.merged_adapters)
        for layer in held
    )


def _adapters_of(layer: Any) -> set[str]:
    names = [name for name in layer.adapter_layer_names if hasattr(layer, name)]
    return {adapter for name in names for adapter in getattr(layer, name)}


class MergesLocally:
    """``merge`` and ``unmerge`` for a PEFT layer whose weight may be a DTensor.

    Communication: of a safe merge, one all-reduce of a single number for each adapter; of a DoRA
    adapter, that of its norms.
    """

    factors: dict[str, Factors]
    merged_adapters: list[str]

    def merge(
        self: Any, safe_merge: bool = False, adapter_names: Sequence[str] | None = None
    ) -> None:
        """Merge adapters, those that are active when no names are given. Collective if safe.

        Raises:
            PlanError: If the adapter has a bias and the base has none to take it in.
            ShardError: If the merge is safe and the result is not finite on some rank; then the
                adapter is not merged on any.
        """
        for name in check_adapters_to_merge(self, adapter_names):
            if name not in self.factors:
                continue
            weight = local_shard(self.merge_target())
            merged = self.merged_weight(name, weight)
            if safe_merge:
                self._check_finite(merged, name)
            self._add_bias(name, sign=1)
            with torch.no_grad():
                weight.copy_(merged)
            self.merged_adapters.append(name)

    def unmerge(self: Any) -> None:
        """Take out every adapter that is merged, last first."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            weight = local_shard(self.merge_target())
            with torch.no_grad():
                weight.copy_(self.unmerged_weight(name, weight))
            self._add_bias(name, sign=-1)

    def merge_target(self: Any) -> torch.Tensor:
        """The parameter that takes the delta in.

        Raises:
            PlanError: If it is quantised.
        """
        refuse_packed(self.get_base_layer())
        weight: torch.Tensor = self.get_base_layer().weight
        check_merge_target(weight)
        return weight

    def merged_weight(self: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """This rank's piece of W with the adapter in it; rounded once, when it is stored."""
        variant = self.lora_variant.get(name)
        if variant is not None:
            merged: torch.Tensor = variant.merged(self, name, weight)
            return merged
        return weight + local_shard(self.get_delta_weight(name))

    def unmerged_weight(self: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """What ``merged_weight`` undoes."""
        variant = self.lora_variant.get(name)
        if variant is not None:
            unmerged: torch.Tensor = variant.unmerged(self, name, weight)
            return unmerged
        return weight - local_shard(self.get_delta_weight(name))

    def _add_bias(self: Any, name: str, *, sign: int) -> None:
        bias = self.factors[name].get("bias")
        if bias is None:
            return
        base = self.get_base_layer().bias
        if base is None:
            raise PlanError(
                [
                    f"{bias.name}: cannot be merged, because the base layer has no bias to add it "
                    "to; use the adapter unmerged"
                ]
            )
        local_shard(base.data).add_(sign * self.scaling[name] * bias.local().detach())

    def _check_finite(self: Any, merged: torch.Tensor, name: str) -> None:
        num_bad = (~torch.isfinite(merged)).any().float()
        if self.mesh is not None:
            dist.all_reduce(num_bad, group=self.mesh.get_group())
        if num_bad:
            raise ShardError(
                f"adapter {name!r}: its merged weights hold NaN or infinity; nothing was merged; "
                "go back to an earlier checkpoint"
            )


def refuse_packed(base: object) -> None:
    """Refuse to merge into a quantised weight.

    Raises:
        PlanError: It would be rounded anew, to another model.
    """
    if is_quantized_linear(base):
        raise PlanError([_PACKED])
