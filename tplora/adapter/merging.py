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
from peft.tuners.tuners_utils import check_adapters_to_merge

from tplora.adapter.sharded_base import check_merge_target
from tplora.errors import PlanError, ShardError
from tplora.upstream import local_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tplora.adapter.factor import Factors

__all__ = ["MergesLocally"]


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
        """The parameter that takes the delta in."""
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
