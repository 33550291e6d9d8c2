"""An adapter's tensors, opened and not yet read: safetensors, or the ``.bin`` of older tools.

A ``.bin`` file is a pickle. It is read with ``weights_only``, which makes tensors and runs nothing.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["AdapterTensors", "open_adapter_tensors"]

_SAFE, _PICKLED = "adapter_model.safetensors", "adapter_model.bin"


class AdapterTensors(Protocol):
    """What ``safe_open`` gives; parts of a tensor are read when they are asked for."""

    def keys(self) -> list[str]:
        """The names of all tensors."""
        ...

    def get_slice(self, name: str) -> Any:
        """A tensor with ``get_shape()``, of which ``[...]`` reads a part."""
        ...


class _Pickled:
    """A ``.bin`` file behind the same words; its bytes stay on the disk until they are used."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        return sorted(self._tensors)

    def get_slice(self, name: str) -> Any:
        return _PickledTensor(self._tensors[name])


class _PickledTensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index].clone()


@contextlib.contextmanager
def open_adapter_tensors(folder: Path) -> Iterator[AdapterTensors]:
    """Open the file with an adapter's tensors; safetensors where there are both.

    Raises:
        ArtifactError: If there is none, or it is damaged or holds more than tensors.
    """
    safe, pickled = folder / _SAFE, folder / _PICKLED
    if safe.is_file():
        try:
            with safe_open(safe, framework="pt") as file:
                yield file
        except SafetensorError as error:
            raise ArtifactError(f"{safe}: is damaged ({error}); save the adapter again") from error
        return
    if not pickled.is_file():
        raise ArtifactError(f"{folder}: holds neither {_SAFE} nor {_PICKLED}; name an adapter")
    yield _Pickled(_read_pickled(pickled))


def _read_pickled(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ArtifactError(
            f"{path}: holds more than tensors, or is damaged ({str(error).splitlines()[0]}); take "
            "an adapter in safetensors"
        ) from error
    is_right = isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    )
    if not is_right:
        raise ArtifactError(f"{path}: is no table of tensors; take an adapter in safetensors")
    tensors: Mapping[str, torch.Tensor] = found
    return tensors
