"""The ``.bin`` of older tools: a pickle, read with ``weights_only``, which runs nothing of it.

What is left to go wrong is memory: a view can claim more bytes than the file has, and a compressed
archive can hold more than it shows. Neither is what ``torch.save`` writes of an adapter.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import torch

from tplora.errors import ArtifactError
from tplora.saved.files import shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Pickled", "read_pickled"]


class Pickled:
    """A ``.bin`` file in the words of ``safe_open``; bytes stay on the disk until they are used."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._tensors[name].clone()

    def get_slice(self, name: str) -> Any:
        """A tensor with ``get_shape()``, of which ``[...]`` reads a part."""
        return _Slice(self._tensors[name])


class _Slice:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index].clone()


def read_pickled(path: Path) -> Pickled:
    """Map a ``.bin`` file.

    Raises:
        ArtifactError: If it holds more than tensors, or tensors that its bytes do not make.
    """
    is_archive = zipfile.is_zipfile(path)
    try:
        if is_archive:
            _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle that torch has not written
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # a pickle can make anything fail in any way
        raise ArtifactError(
            f"{path}: holds more than tensors, or is damaged ({_say(error)}); take an adapter in "
            "safetensors"
        ) from None
    if not isinstance(found, dict) or not all(_is_entry(*entry) for entry in found.items()):
        raise ArtifactError(f"{path}: is no table of tensors; take an adapter in safetensors")
    for name, tensor in found.items():
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ArtifactError(
                f"{path}: {shown(name)} has shape {list(tensor.shape)[:8]}, which the file has no "
                "bytes for; take an adapter in safetensors"
            )
    return Pickled({name: tensor.detach() for name, tensor in found.items()})


def _say(error: Exception) -> str:
    """What a pickle asks for, if it is that; torch's own text says how to run it all the same."""
    asked = re.search(r"GLOBAL ([\w.]+)", str(error))
    if asked is not None:
        return f"it asks for {asked[1][:100]}, which is not run"
    said = str(error).strip().partition("\n")[0]
    is_advice = isinstance(error, pickle.UnpicklingError) or not said
    return "it is no pickle of tensors" if is_advice else shown(said)


def _check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("its archive is compressed")


def _is_entry(name: object, tensor: object) -> bool:
    return (
        isinstance(name, str)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
    )
