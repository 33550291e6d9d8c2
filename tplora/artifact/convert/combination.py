"""Several adapters as one: sums of their delta weights, or PEFT's sums of their factors.

    cat      B' A' = sum of w_i B_i A_i:  A' = [A_1; A_2; ...],  B' = [w_1 B_1, w_2 B_2, ...]
    linear   A' = sum of sign(w_i) sqrt(|w_i|) A_i,  B' = sum of sqrt(|w_i|) B_i

with w_i the weight times the scaling. Only ``cat`` is the sum of what the adapters do: ``linear``
has cross terms B_i A_j, and keeps the rank.

Source: ``LoraModel.add_weighted_adapter`` (peft 0.21); its ``svd`` is ``cat`` at a reduced rank.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tplora.artifact.convert.check import check_plain_layers
from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tplora.artifact.convert.layers import LoadedAdapter, LoraLayer

__all__ = ["combine"]


def combine(
    adapters: Sequence[LoadedAdapter], weights: Sequence[float], *, how: str
) -> LoadedAdapter:
    """One adapter of several, under the first one's config.

    Args:
        adapters: Of one base.
        weights: Of each one's delta weights.
        how: "cat" or "linear".

    Raises:
        ArtifactError: If an adapter holds what no weight can be applied to, or ranks differ where
            they may not.
    """
    check_plain_layers(adapters, "a sum of adapters")
    for weight in weights:
        if weight == 0 or not math.isfinite(weight):
            raise ArtifactError(f"a weight of {weight:g}: a number other than 0 is needed")
    _check_parameters(adapters)
    modules = list(dict.fromkeys(module for one in adapters for module in one.layers))
    layers = {}
    for module in modules:
        held = [
            (one.layers[module], weight)
            for one, weight in zip(adapters, weights, strict=True)
            if module in one.layers
        ]
        _check_alike(module, [layer for layer, _ in held], needs_one_rank=how == "linear")
        layers[module] = _linear(held) if how == "linear" else _cat(held)
    return replace(adapters[0], layers=layers, rest=_rest(adapters))


def _cat(held: Sequence[tuple[LoraLayer, float]]) -> LoraLayer:
    scaling = held[0][0].scaling
    scaled = [_weighted(layer, weight).with_scaling(scaling) for layer, weight in held]
    return replace(
        scaled[0],
        a=torch.cat([_wide(layer.a, scaled) for layer in scaled], dim=1),
        b=torch.cat([_wide(layer.b, scaled) for layer in scaled], dim=2),
        dtype=_stored(held),
    )


def _weighted(layer: LoraLayer, weight: float) -> LoraLayer:
    """A weight is a scaling, and a scaling may be moved into B."""
    return layer if weight == 1 else replace(layer, b=layer.b.double() * weight)


def _linear(held: Sequence[tuple[LoraLayer, float]]) -> LoraLayer:
    """As PEFT, in float64, rounded once."""
    dtype = _stored(held)
    a = b = torch.zeros((), dtype=torch.float64)
    for layer, weight in held:
        root = math.sqrt(abs(weight) * layer.scaling)
        a = a + math.copysign(root, weight) * layer.a.double()
        b = b + root * layer.b.double()
    return replace(held[0][0], a=a.to(dtype), b=b.to(dtype), scaling=1.0, dtype=dtype)


def _stored(held: Sequence[tuple[LoraLayer, float]]) -> torch.dtype:
    dtype = held[0][0].dtype
    for layer, _ in held:
        dtype = torch.promote_types(dtype, layer.dtype)
    return dtype


def _wide(tensor: torch.Tensor, layers: Sequence[LoraLayer]) -> torch.Tensor:
    """``cat`` promotes, too; said here so that two 16-bit formats meet in float32."""
    dtype = tensor.dtype
    for layer in layers:
        dtype = torch.promote_types(dtype, torch.promote_types(layer.a.dtype, layer.b.dtype))
    return tensor.to(dtype)


def _check_alike(module: str, layers: Sequence[LoraLayer], *, needs_one_rank: bool) -> None:
    sizes = {(layer.is_embedding, len(layer.a), layer.a.shape[2], layer.b.shape[1])
             for layer in layers}  # fmt: skip
    if len(sizes) > 1:
        found = [[layer.b.shape[1], layer.a.shape[2]] for layer in layers]
        raise ArtifactError(f"{module}: the adapters have weights {found}; they are of two bases")
    ranks = [layer.r for layer in layers]
    if needs_one_rank and len(set(ranks)) > 1:
        raise ArtifactError(
            f"{module}: the adapters have ranks {ranks}, and a linear combination needs one; use "
            "--combine cat, with --rank to reduce the sum"
        )


def _check_parameters(adapters: Sequence[LoadedAdapter]) -> None:
    """Which parameter of a module a pair belongs to is in the config alone."""
    found = [sorted(one.config.target_parameters or ()) for one in adapters]
    if any(names != found[0] for names in found):
        raise ArtifactError(
            f"target_parameters of the adapters are {found}; a sum needs the same in all of them"
        )


def _rest(adapters: Sequence[LoadedAdapter]) -> dict[str, torch.Tensor]:
    """Copies of the base, if they are of one base; nothing else has a sum."""
    rest: dict[str, torch.Tensor] = {}
    for one in adapters:
        for key, tensor in one.rest.items():
            if not key.endswith(".base_layer.weight"):
                raise ArtifactError(
                    f"{one.folder}: holds {key}, which is no factor of LoRA and cannot be summed; "
                    "merge the adapters into their base instead: tplora export --adapter"
                )
            if key in rest and not torch.equal(rest[key], tensor):
                raise ArtifactError(
                    f"{one.folder}: {key} differs from the other adapter's; they are of two bases"
                )
            rest[key] = tensor
    return rest
