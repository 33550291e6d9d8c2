"""A smaller rank: of each delta weight the best approximation of that rank, and what it loses.

    B = Q_B R_B,   A^T = Q_A R_A,   R_B R_A^T = U S V^T        S of at most r values
    B' = Q_B U_n sqrt(S_n),   A' = sqrt(S_n) V_n^T Q_A^T       the first n

No delta weight is built: the SVD is that of an r x r matrix. The error is measured on what is
written, its rounding included: ``|delta - delta'| / |delta|``, Frobenius.

Source: Eckart and Young 1936; the QR form is folklore.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tplora.artifact.low_rank_norm import Delta, distance, norm
from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tplora.artifact.convert.layers import LoadedAdapter, LoraLayer

__all__ = ["Loss", "reduce_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a reduction has lost of one layer."""

    r: tuple[int, int]
    """Before and after."""
    norm: float
    """Of the delta weight before."""
    distance: float
    """Norm of the difference to the one after."""

    @property
    def relative(self) -> float:
        """The distance in parts of the norm."""
        return self.distance / self.norm if self.norm else 0.0


def reduce_rank(
    adapter: LoadedAdapter, r: int, *, on_layer: Callable[[int, int], None] = lambda done, of: None
) -> tuple[LoadedAdapter, Mapping[str, Loss]]:
    """Bring every layer to rank ``r``; a layer that has no more stays as it is.

    Args:
        adapter: Without DoRA, whose norms are not those of the delta weight alone.
        r: Of the result.
        on_layer: Called with layers done and layers to do.

    Raises:
        ArtifactError: If no layer has a larger rank.
    """
    largest = max((layer.r for layer in adapter.layers.values()), default=0)
    if r >= largest:
        raise ArtifactError(
            f"--rank {r}: {adapter.folder} has rank {largest}; a rank can be reduced, not raised"
        )
    layers, losses = {}, {}
    for number, (module, layer) in enumerate(adapter.layers.items(), start=1):
        layers[module] = _reduced(layer, r) if layer.r > r else layer
        losses[module] = _loss(layer, layers[module])
        on_layer(number, len(adapter.layers))
    return replace(adapter, layers=layers), losses


def _reduced(layer: LoraLayer, r: int) -> LoraLayer:
    q_b, r_b = torch.linalg.qr(layer.b.double())
    q_a, r_a = torch.linalg.qr(layer.a.double().mT)
    u, s, vh = torch.linalg.svd(r_b @ r_a.mT, full_matrices=False)
    root = s[:, :r].sqrt()
    b = q_b @ (u[:, :, :r] * root[:, None, :])
    a = (root[:, :, None] * vh[:, :r]) @ q_a.mT
    return replace(layer, a=a.to(layer.dtype), b=b.to(layer.dtype))


def _loss(before: LoraLayer, after: LoraLayer) -> Loss:
    old, new = _delta(before), _delta(after)
    lost = 0.0 if after is before else distance(old, new)
    return Loss(r=(before.r, after.r), norm=norm(old), distance=lost)


def _delta(layer: LoraLayer) -> Delta:
    return Delta(a=layer.a.double(), b=layer.scaling * layer.b.double())
