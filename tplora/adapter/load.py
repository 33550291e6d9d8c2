"""Read a saved adapter's factors into an attached model: each rank reads its own pieces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from tplora.errors import ArtifactError
from tplora.plan.style import shard_range
from tplora.upstream import local_shard

if TYPE_CHECKING:
    from tplora.adapter.attach import TploraModel
    from tplora.adapter.factor import Factor

__all__ = ["load_factors"]


def load_factors(model: TploraModel, folder: str | Path, *, adapter_name: str = "default") -> None:
    """Fill the factors of ``adapter_name`` from PEFT's folder. No communication.

    Args:
        model: A model with the adapter of the folder's own config attached.
        folder: Holds ``adapter_model.safetensors``, from any tool and any tp_size.
        adapter_name: Which adapter of the model.

    Raises:
        ArtifactError: If the file's tensors are not exactly this adapter's factors, by name.
    """
    path = Path(folder) / "adapter_model.safetensors"
    factors = {
        name.replace(f".{adapter_name}", ""): factor
        for name, factor in model.factors(adapter_name).items()
    }
    with safe_open(path, framework="pt") as file:
        wrong = sorted(set(file.keys()) ^ set(factors))
        if wrong:
            raise ArtifactError(
                f"{path}: {wrong[0]} and {len(wrong) - 1} more are in the file or in the model but "
                "not in both; attach the adapter_config.json that lies beside it"
            )
        for name, factor in factors.items():
            _fill(factor, file.get_slice(name), f"{path}: {name}")


def _fill(factor: Factor, piece: object, where: str) -> None:
    shape = tuple(piece.get_shape())  # type: ignore[attr-defined]
    if shape != factor.plan.shape:
        raise ArtifactError(
            f"{where}: has shape {shape}, this model's factor is {factor.plan.shape}; take the "
            "base the adapter was trained on"
        )
    ranges = [slice(None), slice(None)]
    if factor.plan.shard_dim is not None and factor.mesh is not None:
        dim = factor.plan.shard_dim
        ranges[dim] = slice(
            *shard_range(shape[dim], factor.mesh.get_local_rank(), factor.mesh.size())
        )
    with torch.no_grad():
        local_shard(factor.parameter).copy_(piece[tuple(ranges)])  # type: ignore[index]
