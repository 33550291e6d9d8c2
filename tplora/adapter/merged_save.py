"""Save a live model that its adapters are merged into: every tensor goes once to one rank.

bytes sent = bytes of the cut weights that the writer does not hold; one file in memory at a time
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate

from tplora.adapter.merging import is_merged
from tplora.adapter.save import raise_everywhere
from tplora.adapter.sharded_base import check_merge_target
from tplora.errors import ArtifactError
from tplora.files import written_aside
from tplora.upstream import local_shard, placement_of, tp_mesh
from tplora.upstream.dtensor import split_factor_of
from tplora.upstream.loading import Conversions, names_joined_in_files
from tplora.upstream.peft_reading import base_parameter_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tplora.adapter.model import TploraModel

__all__ = ["save_merged"]


def save_merged(
    model: TploraModel,
    folder: str | Path,
    *,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write the merged model as ``save_pretrained`` would, in the names of the base's own files.

    Collective: every rank calls it with the same folder; the first rank of the world writes. Each
    cut tensor is sent to that rank once, whole ones are its own. Memory there: one file.

    Args:
        model: With its adapters merged by ``merge_adapter``.
        folder: Where to; it appears whole.
        max_file_bytes: A file holds no more, unless a single tensor is larger.
        overwrite: Replace what is there.

    Raises:
        ArtifactError: On every rank, if nothing is merged or nothing can be written.
        ShardError: If the base is shared out over data ranks.
    """
    if not is_merged(model):
        raise ArtifactError(
            f"{folder}: the model's adapters are not merged; call tplora.merge_adapter(model) first"
        )
    weights = _weights(model)
    for weight in weights.values():
        check_merge_target(weight)
    files = _files(model, weights, max_file_bytes)
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    if is_writer:
        raise_everywhere(_write(model, weights, files, Path(folder), overwrite=overwrite))
        return
    if tp_mesh(model.get_base_model()) is None or _is_of_first_group(model):
        for names in files:
            for name in names:
                _gather(weights[name])
    raise_everywhere("")


def _is_of_first_group(model: TploraModel) -> bool:
    mesh = tp_mesh(model.get_base_model())
    return mesh is not None and 0 in dist.get_process_group_ranks(mesh.get_group())


def _write(
    model: TploraModel,
    weights: Mapping[str, torch.Tensor],
    files: Sequence[Sequence[str]],
    folder: Path,
    *,
    overwrite: bool,
) -> str:
    """What went wrong, if anything; the others send all they have either way."""
    waiting = [name for names in files for name in names]
    try:
        with written_aside(folder, overwrite=overwrite) as aside:
            index: dict[str, str] = {}
            for k, names in enumerate(files, 1):
                gathered = {}
                for name in names:
                    waiting.remove(name)
                    gathered[name] = _gather(weights[name])
                file = _file_name(k, len(files))
                found = Conversions(model.get_base_model()).reverted(gathered)
                found = {name: tensor.contiguous() for name, tensor in found.items()}
                save_file(found, aside / file, metadata={"format": "pt"})
                index |= dict.fromkeys(found, file)
            _write_beside(model, weights, index, aside)
    except Exception as error:  # whatever it is, the other ranks wait to be told
        for name in waiting:
            _gather(weights[name])
        return f"{folder}: {error}"
    return ""


def _write_beside(
    model: TploraModel, weights: Mapping[str, torch.Tensor], index: dict[str, str], aside: Path
) -> None:
    base = model.get_base_model()
    head = base.get_output_embeddings()
    was_tied = base.config.tie_word_embeddings
    names = {name for name, module in base.named_modules() if module is head}
    if was_tied and {f"{base_parameter_name(name)}.weight" for name in names} & weights.keys():
        base.config.tie_word_embeddings = False
    try:
        base.config.save_pretrained(aside)
    finally:
        base.config.tie_word_embeddings = was_tied
    if base.generation_config is not None:
        base.generation_config.save_pretrained(aside)
    if len(set(index.values())) > 1:
        size = sum(weight.numel() * weight.element_size() for weight in weights.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
        (aside / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def _weights(model: TploraModel) -> dict[str, torch.Tensor]:
    """Every tensor of the merged model by the base's own names, and one that is shared once."""
    found: dict[str, torch.Tensor] = {}
    held: set[int] = set()
    active = model.active_adapter
    state = model.get_base_model().state_dict()
    trained = {name for name in state if f".modules_to_save.{active}." in name}
    plain = {name.replace(f".modules_to_save.{active}.", ".") for name in trained}
    for name, tensor in state.items():
        is_own = any(part in name for part in (".lora_", "trainable_tokens", ".token_indices"))
        is_other = ".modules_to_save." in name and name not in trained
        is_replaced = name.replace(".original_module.", ".") in plain and name not in trained
        address = local_shard(tensor).data_ptr()
        if is_own or is_other or is_replaced or (address and address in held):
            continue
        held.add(address)
        found[base_parameter_name(name.replace(f".modules_to_save.{active}.", "."))] = tensor
    return found


def _files(
    model: TploraModel, weights: Mapping[str, torch.Tensor], max_file_bytes: int
) -> list[list[str]]:
    """Names by file; what is one tensor in the files, or many of one, stays together."""
    files: list[list[str]] = [[]]
    held = 0
    for names in names_joined_in_files(model.get_base_model(), list(weights)):
        size = sum(weights[name].numel() * weights[name].element_size() for name in names)
        if files[-1] and held + size > max_file_bytes:
            files.append([])
            held = 0
        files[-1] += names
        held += size
    return files


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _gather(weight: torch.Tensor) -> torch.Tensor:
    """The full tensor on the CPU of the writer, empty elsewhere; each piece is sent once."""
    local = local_shard(weight.detach()).contiguous()
    if not isinstance(weight, DTensor) or isinstance(weight.placements[0], Replicate):
        return local.cpu() if not dist.is_initialized() or dist.get_rank() == 0 else local[:0]
    placement: Any = weight.placements[0]
    mesh = weight.device_mesh
    dim, ranks = placement.dim, dist.get_process_group_ranks(mesh.get_group())
    index = local_shard(
        distribute_tensor(
            torch.arange(weight.shape[dim], device=local.device),
            mesh,
            [placement_of(0, split_factor_of(placement))],
            src_data_rank=None,
        )
    ).contiguous()
    if dist.get_rank() != ranks[0]:
        dist.send(torch.tensor([len(index)], device=local.device), ranks[0])
        dist.send(index, ranks[0])
        dist.send(local, ranks[0])
        return local[:0]
    full = torch.empty(weight.shape, dtype=local.dtype)
    full.index_copy_(dim, index.cpu(), local.cpu())
    for rank in ranks[1:]:
        full.index_copy_(dim, *_received(rank, local, dim))
    return full


def _received(rank: int, like: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = torch.zeros(1, dtype=torch.int64, device=like.device)
    dist.recv(count, rank)
    index = torch.empty(int(count), dtype=torch.int64, device=like.device)
    dist.recv(index, rank)
    shape = list(like.shape)
    shape[dim] = int(count)
    piece = like.new_empty(shape)
    dist.recv(piece, rank)
    return index.cpu(), piece.cpu()
