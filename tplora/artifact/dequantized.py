"""A quantised base's weights as the model multiplied by them, written as a plain checkpoint.

    W on disk -> rounded to 4 or 8 bits as in training -> unpacked       one tensor at a time
    packed W and its scales on disk -> unpacked

Every other tensor is copied byte for byte. Merged into this base, an adapter gives the model that
was trained, to the rounding of the dtype; the weights that were quantised are not what they were.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import AutoConfig

from tplora.artifact.checkpoint import INDEX, SINGLE
from tplora.artifact.side_files import copy_side_files
from tplora.artifact.tensor_file import DTYPES, read_places
from tplora.errors import ArtifactError
from tplora.upstream import build_meta_model
from tplora.upstream.quantization import (
    full_linear_shape,
    names_to_quantize,
    quantization_given,
    quantization_method,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from transformers import BitsAndBytesConfig

    from tplora.artifact.tensor_file import Place

__all__ = ["is_packed", "write_dequantized"]

_CHUNK_BYTES = 8 << 20
_BESIDE = (".SCB", ".weight_format", ".weight.absmax", ".weight.quant_map",
           ".weight.nested_absmax", ".weight.nested_quant_map", ".weight.quant_state.")  # fmt: skip


def is_packed(folder: Path) -> bool:
    """Whether a checkpoint's weights are quantised in its files.

    Raises:
        ArtifactError: If they are so by another method than bitsandbytes.
    """
    saved = quantization_given(AutoConfig.from_pretrained(folder))
    if saved is not None and quantization_method(saved) != "bitsandbytes":
        raise ArtifactError(
            f"{folder}: the base's weights are packed ({quantization_method(saved)}), and only "
            "bitsandbytes' are unpacked here; name the base in 16 or 32 bits"
        )
    return saved is not None


def write_dequantized(
    folder: Path,
    out: Path,
    *,
    dtype: torch.dtype,
    given: BitsAndBytesConfig | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> None:
    """Write the base in ``folder`` into the folder ``out``, unpacked.

    Memory: one tensor and what it is made from. The rounding is the CPU's.

    Args:
        folder: The checkpoint, in 16 or 32 bits, or packed by bitsandbytes.
        out: An empty folder.
        dtype: What the base was held in before it was quantised; of the unpacked tensors.
        given: How it was quantised on its way; a packed checkpoint says so itself.
        progress: Called with one line per weight file.

    Raises:
        ArtifactError: If a linear that was quantised is in no file under its own name, or the
            scales of a packed one are missing or damaged.
    """
    files = _Files.read(folder)
    quantized = _quantized_linears(folder, given)
    missing = [name for name in quantized if f"{name}.weight" not in files.places]
    if missing:
        raise ArtifactError(
            f"{folder}: holds no {missing[0]}.weight, nor {len(missing) - 1} more weights that "
            "were quantised, under the names that the model has for them; load the base with "
            "transformers, save it with save_pretrained(..., save_original_format=False) and "
            "name that"
        )
    for file, names in files.by_file.items():
        progress(f"dequantizing {file}")
        kept = [name for name in names if given is not None or not _is_beside(name, quantized)]
        _write_file(files, out / file, kept, quantized, given, dtype)
    copy_side_files(folder, folder, out)
    _write_index(folder, out, files, quantized, is_packed=given is None)
    _say_plain(out / "config.json", dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The weight files of a folder: which tensor is where."""

    folder: Path
    by_file: Mapping[str, tuple[str, ...]]
    places: Mapping[str, tuple[str, Place]]

    @classmethod
    def read(cls, folder: Path) -> _Files:
        names = [SINGLE]
        if not (folder / SINGLE).is_file():
            if not (folder / INDEX).is_file():
                raise ArtifactError(f"{folder}: holds neither {SINGLE} nor {INDEX}; get it again")
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
        by_file, places = {}, {}
        for file in names:
            if not (folder / file).is_file():
                raise ArtifactError(f"{folder}: {INDEX} names {file}, which is missing")
            found = read_places(folder / file)
            by_file[file] = tuple(sorted(found, key=lambda name: found[name].begin))
            places.update({name: (file, place) for name, place in found.items()})
        return cls(folder=folder, by_file=by_file, places=places)

    def tensor(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / self.places[name][0], framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
        return found

    def held(self, module: str) -> dict[str, torch.Tensor]:
        """The packed weight of a linear and what lies beside it, by the names behind its own."""
        return {
            name.removeprefix(f"{module}."): self.tensor(name)
            for name in self.places
            if name == f"{module}.weight" or _is_beside(name, {module: (0, 0)})
        }


def _quantized_linears(
    folder: Path, given: BitsAndBytesConfig | None
) -> dict[str, tuple[int, int]]:
    """Linears that are held quantised, by name, with the shape of their weight."""
    config = AutoConfig.from_pretrained(folder)
    model = build_meta_model(config, trust_remote_code=False)
    names = names_to_quantize(model, given or quantization_given(config))
    return {name: full_linear_shape(model.get_submodule(name)) for name in names}


def _is_beside(name: str, quantized: Mapping[str, Any]) -> bool:
    """Whether a tensor says how another is to be unpacked."""
    for mark in _BESIDE:
        module, found, _ = name.partition(mark)
        if found and module in quantized:
            return True
    return False


def _write_file(
    files: _Files,
    target: Path,
    names: list[str],
    quantized: Mapping[str, tuple[int, int]],
    given: BitsAndBytesConfig | None,
    dtype: torch.dtype,
) -> None:
    stored_as = next(name for name, found in DTYPES.items() if found == dtype)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        place, shape = files.places[name][1], _shape_of(name, quantized)
        size = place.end - place.begin if shape is None else shape[0] * shape[1] * dtype.itemsize
        entries[name] = {
            "dtype": place.stored_as if shape is None else stored_as,
            "shape": place.shape if shape is None else shape,
            "data_offsets": [end, end + size],
        }
        end += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with target.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            shape = _shape_of(name, quantized)
            if shape is None:
                _copy(files, name, stream)
                continue
            values = _values(files, name.removesuffix(".weight"), shape, given, dtype)
            stream.write(values.contiguous().view(torch.uint8).numpy().data)


def _shape_of(name: str, quantized: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
    module, _, leaf = name.rpartition(".")
    return quantized.get(module) if leaf == "weight" else None


def _values(
    files: _Files,
    module: str,
    shape: tuple[int, int],
    given: BitsAndBytesConfig | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    from tplora.base.quantized_whole import rounded, unpacked  # noqa: PLC0415  (bitsandbytes)

    try:
        if given is not None:
            return rounded(files.tensor(f"{module}.weight").to(dtype), given)
        return unpacked(files.held(module), shape, dtype)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ArtifactError(
            f"{files.folder}: {module}.weight cannot be unpacked: {error}; take a whole copy of "
            "the checkpoint"
        ) from error


def _copy(files: _Files, name: str, stream: BinaryIO) -> None:
    file, place = files.places[name]
    with (files.folder / file).open("rb") as source:
        source.seek(place.begin)
        for begin in range(place.begin, place.end, _CHUNK_BYTES):
            stream.write(source.read(min(_CHUNK_BYTES, place.end - begin)))


def _write_index(
    folder: Path, out: Path, files: _Files, quantized: Mapping[str, Any], *, is_packed: bool
) -> None:
    if not (folder / INDEX).is_file():
        return
    held = {
        name: file
        for name, (file, _) in files.places.items()
        if not (is_packed and _is_beside(name, quantized))
    }
    size = sum((out / file).stat().st_size for file in files.by_file)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(held.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _say_plain(path: Path, dtype: torch.dtype) -> None:
    """The config of a model that nothing quantises, in the dtype that it was held in."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in _parts(config):
        part.pop("quantization_config", None)
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    yield from (value for key, value in config.items() if key.endswith("_config") and value)
