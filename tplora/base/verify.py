"""After loading: a sample of the gathered weights is, bit for bit, what the checkpoint holds.

Transformers renames, splits, fuses and cuts weights by rules of each architecture, and a rule that
goes wrong raises nothing: the model is another one. So of every kind of parameter the one of the
first and of the last layer is gathered, taken back to the checkpoint's own names and form, and
compared there.

A weight that was quantised on its way is compared with the checkpoint's, quantised again.

Not compared, because nothing is there to compare with: folders without safetensors (GGUF,
``pytorch_model.bin``, a variant), weights that the checkpoint has quantised otherwise than the
model, and weights made in a way that cannot be taken back.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from tplora.base.verify_quantized import codes_are_equal, codes_of
from tplora.errors import ShardError
from tplora.saved.files import check_file_name
from tplora.upstream import local_shard
from tplora.upstream.fsdp import gathered_over_data
from tplora.upstream.loading import Conversions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

__all__ = ["check_against_checkpoint", "find_safetensors"]

_PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CODE_DTYPES = (torch.uint8, torch.int8)
"""Of quantised weights; see ``verify_quantized``."""
_LARGE_BYTES = 8 << 20
"""Of a larger weight a part is compared: these bytes, or one expert; every rank has some of it."""
_TOO_LARGE_BYTES = 512 << 20
"""A larger weight that can only be compared whole is not."""


def find_safetensors(path: str, options: Mapping[str, Any]) -> dict[str, Path]:
    """The file of every tensor of a checkpoint in safetensors; empty where there is none.

    Args:
        path: What ``from_pretrained`` has loaded: a folder or a hub id.
        options: The arguments of ``from_pretrained``, some of which say which one of a hub id.
    """
    is_other = options.get("gguf_file") or options.get("variant")
    if is_other or options.get("use_safetensors") is False:
        return {}
    folder = Path(path)
    if not folder.is_dir():
        wanted = {key: options[key] for key in ("revision", "cache_dir") if options.get(key)}
        folder = Path(snapshot_download(path, local_files_only=True, **wanted))
    folder /= options.get("subfolder") or ""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():  # as transformers prefers it
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        where = str(index)
        return {name: folder / check_file_name(file, where=where) for name, file in names.items()}
    return {}


def check_against_checkpoint(
    model: PreTrainedModel, path: str, options: Mapping[str, Any], group: ProcessGroup
) -> None:
    """Gather a sample of the weights and hold it to the checkpoint.

    Collective over ``group``, of which the first rank reads the files.

    Args:
        model: As loaded, cut over the ranks of ``group``.
        path: What ``from_pretrained`` has loaded.
        options: The arguments of ``from_pretrained``.
        group: The ranks that hold the model.

    Raises:
        ShardError: On every rank, naming the first weight that differs.
    """
    conversions = Conversions(model)
    gathered = {
        name: _gather(parameter, part_dim, group)
        for name, found in _sample(model).items()
        for codes in [codes_of(model, name)]
        for parameter in [found if codes is None else codes]
        for is_comparable, part_dim in [_part(name, parameter, conversions)]
        if is_comparable
    }
    problem: list[str | None] = [None]
    if dist.get_rank(group) == 0:
        problem[0] = _problem(model, conversions, gathered, path, options)
    dist.broadcast_object_list(problem, group=group, group_src=0)
    if problem[0] is not None:
        raise ShardError(
            f"{problem[0]}; use parallel.tp_size = 1 for {model.config.model_type} and report this "
            "with `tplora report`"
        )


def _sample(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Of parameters whose names differ in numbers only, the first and the last.

    What falls out of one weight of the checkpoint is of one layer, so it comes together.
    """
    kinds: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append((name, parameter.detach()))
    return {name: one for same in kinds.values() for name, one in (same[0], same[-1])}


def _part(name: str, parameter: torch.Tensor, conversions: Conversions) -> tuple[bool, int | None]:
    """Whether a weight can be compared, and the dim of which the first rows are, if not all are."""
    num_bytes = parameter.numel() * parameter.element_size()
    if parameter.dtype not in (*_PLAIN_DTYPES, *_CODE_DTYPES) or conversions.lose(name):
        return False, None
    if num_bytes <= _LARGE_BYTES:
        return True, None
    cut_dim = _cut_dim(parameter)
    whole_dims = [dim for dim in range(parameter.ndim) if dim != cut_dim]
    if whole_dims and conversions.keep_rows_apart(name, whole_dims[0]):
        return True, whole_dims[0]
    return num_bytes <= _TOO_LARGE_BYTES, None


def _cut_dim(parameter: torch.Tensor) -> int | None:
    if not isinstance(parameter, DTensor):
        return None
    dim: int | None = getattr(parameter.placements[-1], "dim", None)
    return None if dim is None else dim % parameter.ndim


def _gather(parameter: torch.Tensor, part_dim: int | None, group: ProcessGroup) -> torch.Tensor:
    """The full tensor on the CPU of the first rank; of ``part_dim`` only the first rows."""
    parameter = gathered_over_data(parameter)
    local, shape = local_shard(parameter), list(parameter.shape)
    if part_dim is not None:
        num_row_bytes = parameter.numel() * parameter.element_size() // shape[part_dim]
        shape[part_dim] = max(1, _LARGE_BYTES // num_row_bytes) if len(shape) == 2 else 1
        local = local.narrow(part_dim, 0, shape[part_dim])
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local.contiguous(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        ).full_tensor()
    if dist.get_rank(group) != 0:
        return torch.empty(0, dtype=local.dtype)
    return local.cpu()


def _problem(
    model: PreTrainedModel,
    conversions: Conversions,
    gathered: Mapping[str, torch.Tensor],
    path: str,
    options: Mapping[str, Any],
) -> str | None:
    try:
        files = find_safetensors(path, options)
        if not files or not gathered:
            return None
        weights = conversions.reverted(gathered)
        codes = {name: one for name, one in weights.items() if one.dtype in _CODE_DTYPES}
        plain = {name: one for name, one in weights.items() if name not in codes}
        name = _first_difference(plain, files) or _first_other_code(model, codes, files)
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return f"{path}: what the ranks hold cannot be compared with it ({found})"
    if name is None:
        return None
    return f"{name}: what the ranks hold of it, gathered, is not what {path} holds"


def _first_other_code(
    model: PreTrainedModel, codes: Mapping[str, torch.Tensor], files: Mapping[str, Path]
) -> str | None:
    for name, found in _names_there(sorted(codes), files).items():
        if not codes_are_equal(model, codes[name], found, files[found]):
            return found
    return None


def _first_difference(weights: Mapping[str, torch.Tensor], files: Mapping[str, Path]) -> str | None:
    there = _names_there(sorted(weights), files)
    if not there:
        raise LookupError(f"it has none of {', '.join(sorted(weights)[:3])}, ...")
    for name, found in there.items():
        if not _is_equal(weights[name], found, files[found]):
            return found
    return None


def _names_there(names: Sequence[str], files: Mapping[str, Path]) -> dict[str, str]:
    """What the checkpoint calls these weights; tied and new ones are left out.

    A class with towers has its text model's weights below a prefix; a model that was saved without
    its head has no prefix.
    """
    missing = [name for name in names if name not in files]
    prefixes = Counter(
        key.removesuffix(name) for name in missing for key in files if key.endswith(f".{name}")
    )
    prefix = max(prefixes, key=lambda one: prefixes[one], default="")
    candidates = {name: (name, prefix + name, name.partition(".")[2]) for name in names}
    found = {name: [one for one in tried if one in files] for name, tried in candidates.items()}
    return {name: there[0] for name, there in found.items() if there}


def _is_equal(weight: torch.Tensor, name: str, file: Path) -> bool:
    """Whether they are bit for bit, as far as both go, once the checkpoint's is cast."""
    with safe_open(file, framework="pt") as opened:
        lazy = opened.get_slice(name)
        sizes = zip(lazy.get_shape(), weight.shape, strict=True)
        ranges = tuple(slice(0, min(pair)) for pair in sizes)
        there = lazy[ranges] if ranges else opened.get_tensor(name)
    return there.dtype not in _PLAIN_DTYPES or torch.equal(there.to(weight.dtype), weight[ranges])
