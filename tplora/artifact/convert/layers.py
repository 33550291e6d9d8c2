"""An adapter in memory, one layer at a time to be worked on: what conversions take and give.

    delta weight = scaling * B @ A

Shapes: ``a [E, r, in]``, ``b [E, out, r]``, for E experts that are stacked in one module, or E = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tplora.artifact.adapter_dir import AdapterFiles, FactorPair, read_adapter
from tplora.saved.keys import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from peft import LoraConfig

__all__ = ["LoadedAdapter", "LoraLayer", "load_adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayer:
    """One module's factors. A value: conversions make new ones."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    dtype: torch.dtype
    """In which to write those factors that are held in float64, which may be for their digits."""
    is_embedding: bool = False
    magnitude: torch.Tensor | None = None
    """DoRA's, ``[out]``."""
    bias: torch.Tensor | None = None
    """Of B, ``[out]``; scaled as the delta weight is."""

    @property
    def r(self) -> int:
        """Of each expert."""
        return self.a.shape[1]

    def with_scaling(self, scaling: float) -> LoraLayer:
        """The same delta weight and bias with another scaling: B takes the rest.

        Where that is no power of two, B is held in float64 from here.
        """
        ratio = self.scaling / scaling
        if ratio == 1:
            return self
        return replace(
            self,
            b=self.b.double() * ratio,
            bias=None if self.bias is None else self.bias.double() * ratio,
            scaling=scaling,
        )

    def tensors(self, module: str) -> dict[str, torch.Tensor]:
        """By PEFT's keys, as PEFT stacks the experts: A by expert, B by rank."""
        num_experts, r, in_features = self.a.shape
        a = self.a.reshape(num_experts * r, in_features)
        b = self.b.permute(1, 2, 0).reshape(-1, r * num_experts)
        ends = ("lora_A.weight", "lora_B.weight")
        if self.is_embedding:
            ends = ("lora_embedding_A", "lora_embedding_B")
        found = dict(zip(ends, (a, b), strict=True))
        if self.magnitude is not None:
            found["lora_magnitude_vector"] = self.magnitude
        if self.bias is not None:
            found["lora_B.bias"] = self.bias
        return {f"{PREFIX}{module}.{end}": tensor for end, tensor in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """All of an adapter."""

    folder: Path
    """Where it was read; for messages."""
    config: LoraConfig
    """As it was read: r, alpha, patterns and targets may be those of other layers by now."""
    layers: Mapping[str, LoraLayer]
    """By the base's name of the module."""
    rest: Mapping[str, torch.Tensor]
    """By PEFT's key: modules trained as a whole, rows of tokens, copies of the base."""


def load_adapter(folder: Path) -> LoadedAdapter:
    """Read an adapter with all of its tensors.

    Raises:
        ArtifactError: As ``read_adapter``.
    """
    adapter = read_adapter(folder)
    layers = {pair.module: _layer(adapter, pair) for pair in adapter.pairs}
    taken = {key for pair in adapter.pairs for key in (pair.a, pair.b, pair.magnitude, pair.bias)}
    rest = {key: adapter.tensor(key) for key in adapter.shapes if key not in taken}
    return LoadedAdapter(folder=folder, config=adapter.config, layers=layers, rest=rest)


def _layer(adapter: AdapterFiles, pair: FactorPair) -> LoraLayer:
    a, b = adapter.tensor(pair.a), adapter.tensor(pair.b)
    num_experts, r = pair.num_matrices, b.shape[1] // pair.num_matrices
    return LoraLayer(
        a=a.reshape(num_experts, -1, a.shape[1]),
        b=b.reshape(b.shape[0], r, num_experts).permute(2, 0, 1),
        scaling=pair.scaling,
        dtype=torch.promote_types(a.dtype, b.dtype),
        is_embedding=pair.is_embedding,
        magnitude=None if pair.magnitude is None else adapter.tensor(pair.magnitude),
        bias=None if pair.bias is None else adapter.tensor(pair.bias),
    )
