"""Read a saved adapter's factors into an attached model: each rank reads its own pieces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from tplora.adapter.original import check_probes
from tplora.base.fingerprint import check_same_base
from tplora.errors import ArtifactError
from tplora.plan.style import shard_range
from tplora.saved.prefixes import moved_names
from tplora.saved.tensors import find_tensors
from tplora.upstream import local_shard
from tplora.upstream.peft_keys import adapter_file_key, is_second_copy, peft_file_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tplora.adapter.factor import Factor
    from tplora.adapter.model import TploraModel

__all__ = ["load_factors"]

_SAVED_BASE = ".base_layer.weight"


def load_factors(model: TploraModel, folder: str | Path, *, adapter_name: str = "default") -> None:
    """Fill the factors of ``adapter_name`` from PEFT's folder. No communication.

    Args:
        model: A model with the adapter of the folder's own config attached.
        folder: An adapter of any tool and any tp_size, in safetensors or an older ``.bin``; its
            modules may be called as in another class of the same model.
        adapter_name: Which adapter of the model.

    Raises:
        ArtifactError: If the file's tensors are not exactly this adapter's factors, by name, or are
            for a base that the adapter's init has changed otherwise, or for another base.
    """
    check_probes(model, Path(folder), adapter_name)
    config = model.peft_config[adapter_name]
    check_same_base(
        Path(folder), str(model.get_base_model().config.name_or_path), revision=config.revision
    )
    by_key = {
        adapter_file_key(name, adapter_name): factor
        for factor in model.factors(adapter_name).values()
        for name in factor.names
    }
    keys = peft_file_keys(model.get_base_model(), config, by_key)
    factors = {keys[key] or key: factor for key, factor in by_key.items()}
    with find_tensors(Path(folder)).open() as file:
        held = set(file.keys())
        names = {name for name in held if not is_second_copy(name, held)}
        copies = {name for name in names - set(factors) if _is_of_base(model, name)}
        names -= copies
        moved = moved_names(names - set(factors), set(factors) - names) or {}
        wrong = sorted((names - set(moved.values())) ^ (set(factors) - set(moved)))
        if wrong:
            raise ArtifactError(
                f"{folder}: {wrong[0]} and {len(wrong) - 1} more are in the file or in the model "
                "but not in both; attach the adapter_config.json that lies beside it"
            )
        for key in sorted(copies, key=lambda key: (not key.endswith(_SAVED_BASE), key)):
            _check_copy(model.get_parameter(key), file.slice(key), f"{folder}: {key}")
        for name, factor in factors.items():
            key = moved.get(name, name)
            _fill(factor, file.slice(key), f"{folder}: {key}")


def _is_of_base(model: TploraModel, key: str) -> bool:
    """Whether a tensor is the base's own: PEFT adds embedding and head when they are adapted."""
    owner, _, leaf = key.rpartition(".")
    try:
        return leaf == "weight" and leaf in model.get_submodule(owner)._parameters
    except AttributeError:
        return False


def _check_copy(parameter: torch.Tensor, piece: Any, where: str) -> None:
    """The copy of a base weight has to be that of this base, or something else was trained."""
    own = local_shard(parameter).detach().cpu()
    saved = piece[:] if tuple(piece.get_shape()) == tuple(parameter.shape) else None
    if saved is not None and isinstance(parameter, DTensor):
        saved = _piece_like(saved, parameter)
    if saved is None or not torch.equal(saved.to(own.dtype), own):
        raise ArtifactError(f"{where}: {_say_copy(where, piece.get_shape(), parameter.shape)}")


def _say_copy(key: str, saved: Sequence[int], has: Sequence[int]) -> str:
    """What a copy of embedding or head that is not the base's says, and what can be done."""
    what_to_do = (
        "load the base that it was trained on, with its rows"
        if key.endswith(_SAVED_BASE)
        else "write base and adapter into one model with tplora export and take that as the base"
    )
    if list(saved) == list(has):
        return (
            "was saved whole and its values are not the base's: it was resized or trained, or "
            f"this is another base; {what_to_do}, or name it in modules_to_save to train it"
        )
    if list(saved[1:]) == list(has[1:]):
        return (
            f"was saved with a vocabulary of {saved[0]} tokens, the base has {has[0]}; {what_to_do}"
        )
    return f"{list(saved)} is not the base's weight {list(has)}; load the base it was trained on"


def _piece_like(whole: torch.Tensor, placed: DTensor) -> torch.Tensor:
    """This rank's piece of ``whole``, cut as ``placed`` is."""
    (placement,) = placed.placements
    if not placement.is_shard():
        return whole
    dim = placement.dim  # type: ignore[attr-defined]
    mesh = placed.device_mesh
    start, stop = shard_range(whole.shape[dim], mesh.get_local_rank(), mesh.size())
    return whole.narrow(dim, start, stop - start)


def _fill(factor: Factor, piece: Any, where: str) -> None:
    shape = tuple(piece.get_shape())
    if shape != factor.plan.shape and _is_of_more_tokens(factor, shape):
        raise ArtifactError(
            f"{where}: was trained with other tokens, {max(shape)} of them, the base has "
            f"{max(factor.plan.shape)}; resize the base as it was in training, and save it, and "
            "load that"
        )
    if shape != factor.plan.shape and _is_of_tokens(factor, shape):
        raise ArtifactError(
            f"{where}: was saved with a vocabulary of {shape[0]} tokens, the base has "
            f"{factor.plan.shape[0]}; before attaching, resize the base with "
            f"tplora.base.resize.resize_tokens(model, {shape[0]}, seed=0)"
        )
    if shape != factor.plan.shape:
        raise ArtifactError(
            f"{where}: has shape {shape}, this model's factor is {factor.plan.shape}; take the "
            "base the adapter was trained on"
        )
    with torch.no_grad():
        local_shard(factor.parameter).copy_(_own_part(factor, piece))


def _is_of_more_tokens(factor: Factor, saved: tuple[int, ...]) -> bool:
    """Whether it is a factor on embedding or head, as long as a larger vocabulary."""
    is_end = not any(part.isdigit() for part in factor.name.split("."))
    is_long = ".lora_B." in factor.name or ".lora_embedding_A." in factor.name
    return is_end and is_long and len(saved) == 2 and max(saved) > max(factor.plan.shape)


def _is_of_tokens(factor: Factor, saved: tuple[int, ...]) -> bool:
    """Whether a factor is embedding or head, trained whole, and the file has other rows of it."""
    is_whole = ".modules_to_save." in factor.name
    is_end = is_whole and not any(part.isdigit() for part in factor.name.split("."))
    return is_end and len(saved) == 2 and saved[1:] == factor.plan.shape[1:]


def _own_part(factor: Factor, piece: Any) -> torch.Tensor:
    """This rank's part of a tensor in a file; only its bytes are read."""
    dim = factor.plan.shard_dim
    if dim is None or factor.mesh is None:
        whole: torch.Tensor = piece[:]
        return whole
    ranges = factor.plan.shard_ranges(factor.mesh.get_local_rank(), factor.mesh.size())
    pieces = [piece[start:stop] if dim == 0 else piece[:, start:stop] for start, stop in ranges]
    return torch.cat(pieces, dim=dim)
