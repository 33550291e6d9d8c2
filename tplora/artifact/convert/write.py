"""A converted adapter as a folder of plain PEFT, whole or not at all."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from tplora.adapter.base_record import BASE_RECORD
from tplora.artifact.adapter_dir import read_adapter
from tplora.artifact.side_files import copy_tokenizer
from tplora.base.fingerprint import BASE, take_fingerprint
from tplora.errors import ArtifactError
from tplora.files import written_aside
from tplora.saved.files import find_file, read_json
from tplora.saved.tensors import SAFE

if TYPE_CHECKING:
    from pathlib import Path

    from peft import LoraConfig

    from tplora.artifact.adapter_dir import FactorPair
    from tplora.artifact.convert.layers import LoadedAdapter, LoraLayer
    from tplora.artifact.convert.target import TargetBase

__all__ = ["write_converted"]

_ROUNDED_IF_ASKED = (torch.float16, torch.bfloat16)


def write_converted(
    adapter: LoadedAdapter,
    config: LoraConfig,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    base: TargetBase | None = None,
    is_same_base: bool = True,
    overwrite: bool = False,
) -> None:
    """Write it, and read it back before it takes its place.

    Args:
        adapter: Layers as they are to be.
        config: That means them.
        out: The folder to be.
        dtype: Of every tensor; each one's own when left out.
        base: That PEFT has to find all of it on.
        is_same_base: Whether it is the base that the adapter was read with.
        overwrite: Replace what ``out`` holds.

    Raises:
        ArtifactError: If 16 bits cannot hold what was to stay exact and ``dtype`` does not ask for
            them, a number is too large for ``dtype``, or nothing can be written.
    """
    tensors = _tensors(adapter, dtype)
    with written_aside(out, overwrite=overwrite) as folder:
        save_file(tensors, folder / SAFE, metadata={"format": "pt"})
        config.inference_mode = True
        config.save_pretrained(str(folder))
        copy_tokenizer(adapter.folder, folder)
        _write_base_facts(adapter.folder, folder, base, is_same_base=is_same_base)
        _check_same(adapter, folder)
        if base is not None:
            base.check_loads(folder)


def _tensors(adapter: LoadedAdapter, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    tensors = {}
    for module, layer in adapter.layers.items():
        for key, tensor in layer.tensors(module).items():
            is_held_wider = tensor.dtype == torch.float64
            own = layer.dtype if is_held_wider else tensor.dtype
            tensors[key] = _cast(adapter, key, tensor, dtype, own)
    for key, tensor in adapter.rest.items():
        tensors[key] = _cast(adapter, key, tensor, dtype, tensor.dtype)
    return tensors


def _cast(
    adapter: LoadedAdapter,
    key: str,
    tensor: torch.Tensor,
    asked: torch.dtype | None,
    own: torch.dtype,
) -> torch.Tensor:
    dtype = asked or own
    cast = tensor.to(dtype).contiguous().clone()
    if (
        asked is None
        and own in _ROUNDED_IF_ASKED
        and not torch.equal(cast.to(tensor.dtype), tensor)
    ):
        name = str(own).removeprefix("torch.")
        raise ArtifactError(
            f"{adapter.folder}: {key} was multiplied by a ratio of scalings or weights, which "
            f"{name} cannot hold; keep it with --dtype float32, or have it rounded with "
            f"--dtype {name}"
        )
    if not torch.isfinite(cast).all():
        raise ArtifactError(
            f"{adapter.folder}: {key} has values up to {tensor.abs().max():.3g}, which is too "
            f"large for {str(dtype).removeprefix('torch.')}; name another --dtype"
        )
    return cast


def _write_base_facts(
    source: Path, folder: Path, base: TargetBase | None, *, is_same_base: bool
) -> None:
    """Those of the base to fit; the old ones where the base stays; none where it is not known."""
    found = {} if base is None else {BASE: take_fingerprint(base.name)}
    if is_same_base:
        names = [name for name in (BASE, BASE_RECORD) if find_file(source, [name]) is not None]
        found = {name: read_json(source / name) for name in names}
    for name, values in found.items():
        if values is not None:
            text = json.dumps(values, indent=2) + "\n"
            (folder / name).write_text(text, encoding="utf-8")


def _check_same(adapter: LoadedAdapter, folder: Path) -> None:
    """What the written config makes of each layer is what the layer is."""
    pairs = {pair.module: pair for pair in read_adapter(folder).pairs}
    wrong = set(pairs) ^ set(adapter.layers)

    def is_same(pair: FactorPair, layer: LoraLayer) -> bool:
        is_near = math.isclose(pair.scaling, layer.scaling, rel_tol=1e-14)
        return is_near and pair.num_matrices == layer.a.shape[0]

    wrong |= {
        module
        for module, layer in adapter.layers.items()
        if module in pairs and not is_same(pairs[module], layer)
    }
    if wrong:
        raise ArtifactError(
            f"{adapter.folder}: no config of PEFT says the r and the scaling of "
            f"{min(wrong)} and {len(wrong) - 1} more; convert without the last option"
        )
