"""An adapter's tensors under plain PEFT's keys, whoever saved them; opened, and not yet read.

The format: eight bytes with the header's length, the header as JSON, the tensors' bytes. The
library checks that they cover the file without a gap; what its header says twice is refused here.

Source: the safetensors format, github.com/huggingface/safetensors, README.md.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tplora.errors import ArtifactError
from tplora.saved.files import find_file, parse_json, shown
from tplora.saved.keys import plain_keys
from tplora.saved.pickled import read_pickled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["PICKLED", "SAFE", "OpenTensors", "SavedTensors", "find_tensors"]

SAFE, PICKLED = "adapter_model.safetensors", "adapter_model.bin"

_MAX_HEADER_BYTES = 100_000_000  # the library's own
_MAX_DIM = 1 << 31
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class _File(Protocol):
    """What ``safe_open`` gives."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_slice(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class OpenTensors:
    """The tensors while their file is open."""

    _file: _File
    _names: Mapping[str, str]

    def keys(self) -> list[str]:
        """The plain keys of all tensors."""
        return sorted(self._names)

    def tensor(self, key: str) -> torch.Tensor:
        """Read one tensor."""
        return self._file.get_tensor(self._names[key])

    def slice(self, key: str) -> Any:
        """A tensor with ``get_shape()``, of which ``[...]`` reads a part."""
        return self._file.get_slice(self._names[key])


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """The tensors of one file, checked as far as their names, shapes and dtypes go."""

    path: Path
    names: Mapping[str, str]
    """Plain PEFT's key to the key in the file."""
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    """By plain key."""
    dtypes: Mapping[str, torch.dtype] = field(repr=False)
    """By plain key."""

    @property
    def is_plain(self) -> bool:
        """Whether plain PEFT finds each tensor by the key it has in the file."""
        return all(plain == name for plain, name in self.names.items())

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenTensors]:
        """The file, open.

        Raises:
            ArtifactError: If it cannot be read any more.
        """
        with _opened(self.path) as file:
            yield OpenTensors(file, self.names)


def find_tensors(folder: Path) -> SavedTensors:
    """The file with an adapter's tensors: safetensors where there are both.

    Raises:
        ArtifactError: If there is none, it is damaged or holds more than tensors, or a tensor's
            name, shape or dtype is none of an adapter's.
    """
    path = find_file(folder, [SAFE, PICKLED])
    if path is None:
        found = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
        there = shown(", ".join(found[:8]))
        raise ArtifactError(
            f"{folder}: holds neither {SAFE} nor {PICKLED} but {there or 'nothing'}; name the "
            "folder of a PEFT adapter, or save it again"
        )
    with _opened(path) as file:
        plain_of = plain_keys(file.keys(), where=str(path))
        names = {key: name for name, key in plain_of.items()}
        shapes = {plain: tuple(file.get_slice(name).get_shape()) for plain, name in names.items()}
        for one, shape in shapes.items():
            _check_shape(f"{path}: {one}", shape)
        # A part of a tensor has its dtype, and costs nothing.
        dtypes = {plain: _part(file, name).dtype for plain, name in names.items()}
    for one, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise ArtifactError(
                f"{path}: {one} is stored as {str(dtype).removeprefix('torch.')}; factors in 16, "
                "32 or 64 bits are needed, save the adapter again"
            )
    return SavedTensors(path=path, names=names, shapes=shapes, dtypes=dtypes)


def _part(file: _File, name: str) -> torch.Tensor:
    part: torch.Tensor = file.get_slice(name)[:1]
    return part


def _check_shape(where: str, shape: tuple[int, ...]) -> None:
    if math.prod(shape) == 0:
        raise ArtifactError(f"{where} is empty, shape {list(shape)}; save the adapter again")
    if not 1 <= len(shape) <= 4 or max(shape) > _MAX_DIM:
        raise ArtifactError(
            f"{where} has shape {list(shape)[:8]}, which no tensor of an adapter has; save the "
            "adapter again"
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_File]:
    if path.name == PICKLED:
        yield read_pickled(path)
        return
    _check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{path}: is damaged ({shown(error)}); save the adapter again"
        ) from None


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {length:,} bytes")
            parse_json(stream.read(length))
    except (ValueError, OSError) as error:
        raise ArtifactError(
            f"{path}: is damaged ({shown(error)}); save the adapter again"
        ) from None
