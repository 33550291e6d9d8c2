"""A quantised base's weights as the model multiplied by them, made while a merge reads them.

    W on disk -> rounded to 4 or 8 bits as in training -> unpacked       one tensor at a time
    packed W and its scales on disk -> unpacked

Every other tensor is what the files hold. Merged into this base, an adapter gives the model that
was trained, to the rounding of the dtype; the weights that were quantised are not what they were.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import safe_open
from transformers import AutoConfig

from tplora.artifact.base_tensors import FileTensors, read_whole
from tplora.artifact.checkpoint import read_checkpoint
from tplora.artifact.tensor_file import DTYPES
from tplora.errors import ArtifactError
from tplora.upstream import build_meta_model
from tplora.upstream.quantization import (
    full_linear_shape,
    names_to_quantize,
    quantization_given,
    quantization_method,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    import torch
    from transformers import BitsAndBytesConfig

    from tplora.artifact.base_tensors import TensorRows
    from tplora.artifact.checkpoint import Checkpoint
    from tplora.artifact.tensor_file import Memory, Place

__all__ = ["DequantizedTensors", "is_packed"]

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


class DequantizedTensors:
    """Where a merge reads them: as ``FileTensors``, but what is quantised is unpacked on its way.

    Memory: of each tensor in hand, itself and what it is made from. The rounding is the CPU's.

    Args:
        folder: The checkpoint, in 16 or 32 bits, or packed by bitsandbytes.
        dtype: What the base was held in before it was quantised; of the unpacked tensors.
        given: How it was quantised on its way; a packed checkpoint says so itself.

    Raises:
        ArtifactError: If a file is missing or damaged, or a linear that was quantised is in none
            under its own name. Later, if the scales of a packed one are missing or damaged.
    """

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, given: BitsAndBytesConfig | None = None
    ) -> None:
        self._files = FileTensors(read_checkpoint(folder, may_be_packed=given is None))
        self._quantized = _quantized_linears(folder, given)
        self._dtype, self._given = dtype, given
        _check_names(self._files.checkpoint, self._quantized)
        self._beside = _beside(self._files.checkpoint, self._quantized) if given is None else {}
        self.checkpoint = _unpacked_checkpoint(
            self._files.checkpoint, self._quantized, self._beside, dtype
        )
        self.form = f"dequantized {dtype} {None if given is None else given.to_dict()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def is_as_in_file(self, name: str) -> bool:
        """Whether nothing has quantised it."""
        return self._module(name) is None

    def tensor(self, name: str) -> TensorRows:
        """A weight that is unpacked as it is prepared; any other where it lies."""
        module = self._module(name)
        if module is None:
            return self._files.tensor(name)
        return _Unpacked(self, module)

    def stream(self, name: str) -> BinaryIO:
        """The file that holds it, as it lies there."""
        return self._files.stream(name)

    def finish(self, folder: Path) -> None:
        """The config of a model that nothing quantises, in the dtype that it was held in."""
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        for part in _parts(config):
            part.pop("quantization_config", None)
            for key in ("dtype", "torch_dtype"):
                if key in part:
                    part[key] = str(self._dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def unpacked(self, module: str) -> torch.Tensor:
        """All of a quantised linear's weight, ``[out, in]``."""
        from tplora.base.quantized_whole import rounded, unpacked  # noqa: PLC0415  (bitsandbytes)

        name = f"{module}.weight"
        try:
            if self._given is not None:
                return rounded(read_whole(self._files, name).to(self._dtype), self._given)
            held = {one: self._packed(one) for one in (name, *self._beside.get(module, ()))}
            return unpacked(
                {one.removeprefix(f"{module}."): tensor for one, tensor in held.items()},
                self._quantized[module],
                self._dtype,
            )
        except (ValueError, KeyError, RuntimeError) as error:
            raise ArtifactError(
                f"{self.checkpoint.folder}: {name} cannot be unpacked: {error}; take a whole copy "
                "of the checkpoint"
            ) from error

    def num_bytes_of(self, module: str) -> int:
        """That a weight takes while it is unpacked: what is read, both ends, and a step between."""
        rows, columns = self._quantized[module]
        place = self._files.checkpoint.tensors[f"{module}.weight"][1]
        return place.end - place.begin + 3 * rows * columns * self._dtype.itemsize

    def _packed(self, name: str) -> torch.Tensor:
        checkpoint = self._files.checkpoint
        file = checkpoint.folder / checkpoint.tensors[name][0]
        with safe_open(file, framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
        return found

    def _module(self, name: str) -> str | None:
        module, _, leaf = name.rpartition(".")
        return module if leaf == "weight" and module in self._quantized else None


class _Unpacked:
    """One weight, from when it is prepared until it is let go of."""

    def __init__(self, source: DequantizedTensors, module: str) -> None:
        self._source, self._module = source, module
        self._values: torch.Tensor | None = None
        self.prepared_bytes = source.num_bytes_of(module)

    def prepare(self) -> None:
        """Unpack it."""
        self._values = self._source.unpacked(self._module)

    def rows(self, rows: slice, *, memory: Memory | None = None) -> torch.Tensor:
        """A copy of some."""
        assert self._values is not None, "prepare was called"
        found = self._values[rows]
        if memory is None:
            return found.clone()
        return memory.tensor(found.dtype, tuple(found.shape)).copy_(found)


def _quantized_linears(
    folder: Path, given: BitsAndBytesConfig | None
) -> dict[str, tuple[int, int]]:
    """Linears that are held quantised, by name, with the shape of their weight."""
    config = AutoConfig.from_pretrained(folder)
    model = build_meta_model(config, trust_remote_code=False)
    names = names_to_quantize(model, given or quantization_given(config))
    return {name: full_linear_shape(model.get_submodule(name)) for name in names}


def _check_names(checkpoint: Checkpoint, quantized: Mapping[str, object]) -> None:
    missing = [name for name in quantized if f"{name}.weight" not in checkpoint.tensors]
    if missing:
        raise ArtifactError(
            f"{checkpoint.folder}: holds no {missing[0]}.weight, nor {len(missing) - 1} more "
            "weights that were quantised, under the names that the model has for them; load the "
            "base with transformers, save it with save_pretrained(..., "
            "save_original_format=False) and name that"
        )


def _beside(checkpoint: Checkpoint, quantized: Mapping[str, object]) -> dict[str, list[str]]:
    """Module to the tensors that say how its weight is to be unpacked."""
    found: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        for mark in _BESIDE:
            module, is_there, _ = name.partition(mark)
            if is_there and module in quantized:
                found.setdefault(module, []).append(name)
                break
    return found


def _unpacked_checkpoint(
    held: Checkpoint,
    quantized: Mapping[str, tuple[int, int]],
    beside: Mapping[str, list[str]],
    dtype: torch.dtype,
) -> Checkpoint:
    """The same without what lies beside, each weight that is unpacked in its own shape."""
    gone = {name for names in beside.values() for name in names}
    shapes = {f"{module}.weight": shape for module, shape in quantized.items()}
    tensors = {
        name: (file, _unpacked_place(place, shapes[name], dtype) if name in shapes else place)
        for name, (file, place) in held.tensors.items()
        if name not in gone
    }
    index = held.index
    if index is not None:
        files = {name: file for name, file in index["weight_map"].items() if name not in gone}
        index = {**index, "weight_map": files}
    return replace(held, tensors=tensors, index=index)


def _unpacked_place(place: Place, shape: tuple[int, int], dtype: torch.dtype) -> Place:
    stored_as = next(name for name, found in DTYPES.items() if found == dtype)
    end = place.begin + shape[0] * shape[1] * dtype.itemsize
    return replace(place, stored_as=stored_as, shape=shape, end=end)


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    yield from (value for key, value in config.items() if key.endswith("_config") and value)
