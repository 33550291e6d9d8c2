"""Gather an adapter's factors and write PEFT's own folder, whole or not at all.

bytes gathered = bytes of the cut factors, one tensor at a time; the base is never touched
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tplora.adapter.base_record import write_base_record
from tplora.adapter.original import for_loaded_base, write_probes
from tplora.base.fingerprint import BASE, take_fingerprint
from tplora.errors import ArtifactError
from tplora.mesh import tell_all
from tplora.upstream.peft_keys import adapter_file_key, peft_file_keys
from tplora.upstream.peft_wrappers import saving_own_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tplora.adapter.model import TploraModel

__all__ = ["check_factors", "gather_factors", "raise_everywhere", "save_adapter", "write_adapter"]


def gather_factors(model: TploraModel, *, is_writer: bool) -> dict[str, torch.Tensor]:
    """Every full factor of every adapter, on the CPU of the writer; nothing elsewhere.

    Collective: every rank calls it. One all-gather per cut factor, of its own bytes; a replicated
    factor is copied from the writer's rank without communication.
    """
    gathered = {}
    for name, factor in sorted(
        (name, factor)
        for adapter in model.peft_config
        for name, factor in model.factors(adapter).items()
    ):
        full = factor.full()
        if is_writer:
            gathered[name] = full.to("cpu", copy=True).contiguous()
            gathered |= dict.fromkeys(factor.other_names, gathered[name])
    return gathered


def save_adapter(
    model: TploraModel,
    folder: str | Path,
    *,
    adapter_names: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    is_writer: bool = True,
) -> None:
    """Write a normal PEFT adapter folder: full shapes, ``adapter_config.json``, model card.

    It is for the base as it was loaded. An adapter whose init changed the base (PiSSA and the like)
    becomes plain LoRA of twice the rank for that.

    Collective: every rank calls it with the same folder; the first rank of the world writes. Files
    are written aside and renamed into place, the weights before the config that makes the folder
    an adapter.

    Args:
        model: The model whose factors are saved.
        folder: Where to; made if it is not there, added to if it is.
        adapter_names: Which adapters; all of them when left out.
        dtype: What the factors are rounded to; written as they were trained when left out.
        is_writer: False keeps this rank from writing even if it is the first.

    Raises:
        ArtifactError: On every rank, if a factor is not finite or not whole, or nothing can be
            written; then no file of the folder has changed.
    """
    is_writer = is_writer and (not dist.is_initialized() or dist.get_rank() == 0)
    factors = gather_factors(model, is_writer=is_writer)
    if dtype is not None:
        factors = {name: factor.to(dtype) for name, factor in factors.items()}
    problem = ""
    if is_writer:
        try:
            write_adapter(model, folder, factors, adapter_names=adapter_names)
        except Exception as error:  # whatever it is, the other ranks wait to be told
            problem = f"{folder}: {error}"
    raise_everywhere(problem)


def write_adapter(
    model: TploraModel,
    folder: str | Path,
    factors: dict[str, torch.Tensor],
    *,
    adapter_names: Sequence[str] | None = None,
    as_trained: bool = False,
) -> None:
    """The writer's part of ``save_adapter``, over what ``gather_factors`` gave it.

    Args:
        model: The model whose factors these are.
        folder: Where to.
        factors: Every full factor.
        adapter_names: Which adapters; all of them when left out.
        as_trained: Write the factors that an optimizer's state belongs to, also where they are for
            a base that their init has changed; see ``original.py``.

    Raises:
        ArtifactError: If a factor is not finite or not whole; then nothing is written.
    """
    check_factors(model, factors)
    if as_trained:
        _write(model, Path(folder), factors, adapter_names)
        write_probes(model, Path(folder))
        return
    with for_loaded_base(model, factors) as widened:
        _write(model, Path(folder), widened, adapter_names)


def check_factors(model: TploraModel, factors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what no file may hold, and what would lack a factor.

    Raises:
        ArtifactError: Naming the first factor that is not there, not whole, or not finite.
    """
    shapes = {
        name: factor.plan.shape
        for adapter in model.peft_config
        for factor in model.factors(adapter).values()
        for name in factor.names
    }
    lost = sorted(shapes.keys() - factors.keys())
    if lost:
        raise ArtifactError(
            f"{lost[0]} is not among the {len(factors)} of {len(shapes)} factors that were "
            "gathered; nothing was written; report this"
        )
    for name, tensor in factors.items():
        if tuple(tensor.shape) != shapes[name] or tensor.numel() == 0:
            raise ArtifactError(
                f"{name} has shape {tuple(tensor.shape)} after gathering, the full factor is "
                f"{shapes[name]}; nothing was written; report this"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(
                f"{name} holds NaN or infinity; nothing was written; go back to the last saved "
                "adapter and lower train.learning_rate"
            )


def _write(
    model: TploraModel,
    folder: Path,
    factors: dict[str, torch.Tensor],
    adapter_names: Sequence[str] | None,
) -> None:
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside:
        with saving_own_tokens():
            PeftModel.save_pretrained(
                model,
                aside,
                state_dict=factors,
                selected_adapters=None if adapter_names is None else list(adapter_names),
                save_embedding_layers=False,  # only factors are trained, so only factors are saved
            )
        for path in Path(aside).rglob("adapter_model.safetensors"):
            is_first = path.parent == Path(aside)
            _rename_for_peft(model, "default" if is_first else path.parent.name, path)
            write_base_record(model, path.parent)
        _write_fingerprint(model, Path(aside))
        files = [path for path in Path(aside).rglob("*") if path.is_file()]
        mode = (Path(aside) / "README.md").stat().st_mode  # safetensors writes for the owner alone
        for path in sorted(files, key=lambda path: path.name == "adapter_config.json"):
            path.chmod(mode)
            _sync(path)
            target = folder / path.relative_to(aside)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)


def _write_fingerprint(model: TploraModel, folder: Path) -> None:
    """Beside each adapter, what its base is told by."""
    config = model.get_base_model().config
    found = take_fingerprint(str(config.name_or_path), model.peft_config["default"].revision)
    if found is not None:
        for path in list(folder.rglob("adapter_config.json")):
            path.with_name(BASE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _rename_for_peft(model: TploraModel, adapter: str, path: Path) -> None:
    """Put each factor under the name from which plain PEFT will read it back."""
    factors = model.factors(adapter).values()
    keys = [adapter_file_key(name, adapter) for factor in factors for name in factor.names]
    found = peft_file_keys(model.get_base_model(), model.peft_config[adapter], keys)
    new_names = {key: name for key, name in found.items() if name not in (None, key)}
    if new_names:
        tensors = {new_names.get(key) or key: tensor for key, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def raise_everywhere(problem: str) -> None:
    """Raise the writer's problem on every rank, and let none go on before the writer is done.

    Collective: every rank calls it; what the first rank gives counts, and "" is no problem. The
    wait is as long as the writer's disk takes.

    Raises:
        ArtifactError: The problem.
    """
    problem = tell_all(problem)
    if problem:
        raise ArtifactError(problem)
