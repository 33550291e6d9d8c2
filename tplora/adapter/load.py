"""Read a saved adapter's factors into an attached model: each rank reads its own pieces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from tplora.adapter.original import check_probes
from tplora.errors import ArtifactError
from tplora.upstream import local_shard
from tplora.upstream.peft_keys import adapter_file_key, peft_file_keys

if TYPE_CHECKING:
    from tplora.adapter.factor import Factor
    from tplora.adapter.model import TploraModel

__all__ = ["load_factors"]


def load_factors(model: TploraModel, folder: str | Path, *, adapter_name: str = "default") -> None:
    """Fill the factors of ``adapter_name`` from PEFT's folder. No communication.

    Args:
        model: A model with the adapter of the folder's own config attached.
        folder: Holds ``adapter_model.safetensors``, from any tool and any tp_size.
        adapter_name: Which adapter of the model.

    Raises:
        ArtifactError: If the file's tensors are not exactly this adapter's factors, by name, or are
            for a base that the adapter's init has changed otherwise.
    """
    check_probes(model, Path(folder), adapter_name)
    path = Path(folder) / "adapter_model.safetensors"
    config = model.peft_config[adapter_name]
    by_key = {
        adapter_file_key(name, adapter_name): factor
        for factor in model.factors(adapter_name).values()
        for name in factor.names
    }
    keys = peft_file_keys(model.get_base_model(), config, by_key)
    factors = {keys[key] or key: factor for key, factor in by_key.items()}
    with safe_open(path, framework="pt") as file:
        wrong = sorted(set(file.keys()) ^ set(factors))
        if wrong:
            raise ArtifactError(
                f"{path}: {wrong[0]} and {len(wrong) - 1} more are in the file or in the model but "
                "not in both; attach the adapter_config.json that lies beside it"
            )
        for name, factor in factors.items():
            _fill(factor, file.get_slice(name), f"{path}: {name}")


def _fill(factor: Factor, piece: Any, where: str) -> None:
    shape = tuple(piece.get_shape())
    if shape != factor.plan.shape:
        raise ArtifactError(
            f"{where}: has shape {shape}, this model's factor is {factor.plan.shape}; take the "
            "base the adapter was trained on"
        )
    with torch.no_grad():
        local_shard(factor.parameter).copy_(_own_part(factor, piece))


def _own_part(factor: Factor, piece: Any) -> torch.Tensor:
    """This rank's part of a tensor in a file; only its bytes are read."""
    dim = factor.plan.shard_dim
    if dim is None or factor.mesh is None:
        whole: torch.Tensor = piece[:]
        return whole
    ranges = factor.plan.shard_ranges(factor.mesh.get_local_rank(), factor.mesh.size())
    pieces = [piece[start:stop] if dim == 0 else piece[:, start:stop] for start, stop in ranges]
    return torch.cat(pieces, dim=dim)
