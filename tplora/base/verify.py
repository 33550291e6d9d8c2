"""After loading: a sample of the gathered weights is, bit for bit, what the checkpoint holds.

Transformers renames, splits, fuses and cuts weights by rules of each architecture, and a rule that
goes wrong raises nothing: the model is another one. So of every kind of parameter the one of the
first and of the last layer is gathered, taken back to the checkpoint's own names and form, and
compared there.

The ranks divide the weights among them, and of a large one compare a part; see ``sample.py``.

A weight that was quantised on its way is compared with the checkpoint's, quantised again.

Not compared, because nothing is there to compare with: folders without safetensors (GGUF,
``pytorch_model.bin``, a variant), weights that the checkpoint has quantised otherwise than the
model, and weights made in a way that cannot be taken back.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from tplora.base import sample
from tplora.base.checkpoint_files import find_safetensors
from tplora.base.sample import CODE_DTYPES, PLAIN_DTYPES
from tplora.base.verify_quantized import codes_are_equal, codes_of
from tplora.errors import ShardError
from tplora.upstream import local_shard
from tplora.upstream.fsdp import gathered_over_data
from tplora.upstream.loading import Conversions, names_joined_in_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

T = TypeVar("T")

__all__ = ["check_against_checkpoint"]


def check_against_checkpoint(
    model: PreTrainedModel, path: str, options: Mapping[str, Any], group: ProcessGroup
) -> None:
    """Gather a sample of the weights and hold it to the checkpoint.

    Collective over ``group``: one all-gather for each weight, three of a few words.

    Args:
        model: As loaded, cut over the ranks of ``group``.
        path: What ``from_pretrained`` has loaded.
        options: The arguments of ``from_pretrained``.
        group: The ranks that hold the model.

    Raises:
        ShardError: On every rank, naming the first weight that differs.
    """
    conversions = Conversions(model)
    gathered = _gathered(model, conversions, group)
    found, problem = _attempt(path, lambda: _as_saved(conversions, gathered, path, options))
    weights, files = found or ({}, {})
    told = _told((list(weights), problem), group)
    problem = next((one for _, one in told if one), None)
    if problem is None:
        names = sorted({name for names, _ in told for name in names})
        differs, problem = _attempt(
            path, lambda: _difference(model, weights, _names_there(names, files), files)
        )
        problem = next((one for one in _told(problem or _said(path, differs), group) if one), None)
    if problem is not None:
        raise ShardError(
            f"{problem}; use parallel.tp_size = 1 for {model.config.model_type} and report this "
            "with `tplora report`"
        )


def _told(own: Any, group: ProcessGroup) -> list[Any]:
    """What every rank has to say. Collective over ``group``."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group=group)
    return told


def _attempt(path: str, work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, or what went wrong, for the other ranks are waiting to hear of it."""
    try:
        return work(), None
    except Exception as error:  # whatever it is
        found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return None, f"{path}: what the ranks hold cannot be compared with it ({found})"


def _said(path: str, name: str | None) -> str | None:
    if name is None:
        return None
    return f"{name}: what the ranks hold of it, gathered, is not what {path} holds"


def _gathered(
    model: PreTrainedModel, conversions: Conversions, group: ProcessGroup
) -> dict[str, torch.Tensor]:
    """The weights that fall to this rank, or parts of them, on the CPU. Collective."""
    sampled, num_ranks = sample.sampled_names(model), dist.get_world_size(group)
    held = min(_told(sum(local_shard(p).nbytes for p in model.parameters()), group))
    joined = names_joined_in_files(model, sampled)
    limit = sample.part_bytes(held, joined, num_ranks)
    parts: dict[str, tuple[int, ...]] = {}
    for names in joined:
        parts |= sample.compared_parts(
            {name: _compared(model, name) for name in names}, conversions, limit
        )
    owners = sample.divide(joined, parts, num_ranks)
    gathered = {}
    for name, part in parts.items():
        found = _gather(_compared(model, name), part)
        if owners[name] == dist.get_rank(group):
            gathered[name] = found.cpu()
    return gathered


def _compared(model: PreTrainedModel, name: str) -> torch.Tensor:
    """A parameter, or the numbers of a quantised one."""
    codes = codes_of(model, name)
    return model.get_parameter(name).detach() if codes is None else codes


def _gather(parameter: torch.Tensor, part: Sequence[int]) -> torch.Tensor:
    """The full tensor, of each dim the first ``part`` rows. Collective: one all-gather."""
    parameter = gathered_over_data(parameter)
    local = local_shard(parameter)
    for dim, (size, full) in enumerate(zip(part, parameter.shape, strict=True)):
        if size < full:  # so it is not cut
            local = local.narrow(dim, 0, size)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local.contiguous(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(part),
        stride=torch.empty(tuple(part), device="meta").stride(),
    ).full_tensor()


def _as_saved(
    conversions: Conversions,
    gathered: Mapping[str, torch.Tensor],
    path: str,
    options: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, Path]]:
    """This rank's weights as the checkpoint has them, and its files; none where it has no files."""
    files = find_safetensors(path, options)
    return conversions.reverted(gathered) if files and gathered else {}, files


def _difference(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    there: Mapping[str, str],
    files: Mapping[str, Path],
) -> str | None:
    """The first of this rank's weights that the checkpoint has otherwise, by its name there."""
    for name in sorted(weights.keys() & there.keys()):
        found, weight = there[name], weights[name]
        if weight.dtype in CODE_DTYPES:
            is_equal = codes_are_equal(model, weight, found, files[found])
        else:
            is_equal = _is_equal(weight, found, files[found])
        if not is_equal:
            return found
    return None


def _names_there(names: Sequence[str], files: Mapping[str, Path]) -> dict[str, str]:
    """What the checkpoint calls these weights, all that are compared; tied and new ones are not.

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
    if names and not any(found.values()):
        raise LookupError(f"it has none of {', '.join(names[:3])}, ...")
    return {name: there[0] for name, there in found.items() if there}


def _is_equal(weight: torch.Tensor, name: str, file: Path) -> bool:
    """Whether they are bit for bit, as far as both go, once the checkpoint's is cast."""
    with safe_open(file, framework="pt") as opened:
        lazy = opened.get_slice(name)
        sizes = zip(lazy.get_shape(), weight.shape, strict=True)
        ranges = tuple(slice(0, min(pair)) for pair in sizes)
        there = lazy[ranges] if ranges else opened.get_tensor(name)
    return there.dtype not in PLAIN_DTYPES or torch.equal(there.to(weight.dtype), weight[ranges])
