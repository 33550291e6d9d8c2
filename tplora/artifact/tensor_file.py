"""A safetensors file whose tensors are read a few rows at a time.

The format: eight bytes with the header's length, the header as JSON, the tensors' bytes, row-major
and little-endian. Memory is bounded by the rows in hand, whatever the file's size.

Source: the safetensors format, github.com/huggingface/safetensors, README.md.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tplora.errors import ArtifactError
from tplora.saved.files import parse_json

__all__ = [
    "CHUNK_BYTES",
    "DTYPES",
    "Memory",
    "Place",
    "bytes_of",
    "cast_place",
    "header_of",
    "is_finite",
    "read_into",
    "read_metadata",
    "read_places",
    "read_rows",
    "row_chunks",
]

CHUNK_BYTES = 512 << 10
"""Bytes of a tensor that are held at once; with their sums they stay in a core's cache."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The format's names of the dtypes that can be computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in its file a tensor is."""

    stored_as: str
    """The format's own name of the dtype."""
    shape: tuple[int, ...]
    begin: int
    """Byte in the file."""
    end: int

    @property
    def dtype(self) -> torch.dtype | None:
        """None for what is not a plain float: packed, 8-bit or integer."""
        return DTYPES.get(self.stored_as)

    def with_rows(self, num_rows: int) -> "Place":
        """The same tensor with another number of rows, from the same byte on."""
        end = self.begin + num_rows * self.row_bytes
        return replace(self, shape=(num_rows, *self.shape[1:]), end=end)

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dim 0."""
        return (self.end - self.begin) // max(1, self.num_rows)

    @property
    def num_rows(self) -> int:
        """Entries of dim 0; a single number is one row."""
        return self.shape[0] if self.shape else 1


def read_places(file: Path) -> dict[str, Place]:
    """Name to place of every tensor in ``file``.

    Raises:
        ArtifactError: If the file is not safetensors, or shorter than its header says.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(min(length, size)))
        start = 8 + length
        places = {
            name: Place(
                stored_as=entry["dtype"],
                shape=tuple(entry["shape"]),
                begin=start + entry["data_offsets"][0],
                end=start + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{file}: is not a safetensors file ({error}); get it again") from error
    if max((place.end for place in places.values()), default=0) > size:
        raise ArtifactError(f"{file}: is cut short, {size} bytes; get it again")
    _check_places(file, places, start)
    return places


def _check_places(file: Path, places: Mapping[str, Place], start: int) -> None:
    """Each tensor has the bytes that its shape needs, and none has another's."""
    end = start
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        num_bytes = place.end - place.begin
        itemsize = place.dtype.itemsize if place.dtype is not None else None
        is_whole = itemsize is None or num_bytes == math.prod(place.shape) * itemsize
        is_shape = all(isinstance(dim, int) and dim >= 0 for dim in place.shape)
        if place.begin < end or num_bytes < 0 or not is_shape or not is_whole:
            raise ArtifactError(
                f"{file}: {name} has shape {list(place.shape)} in bytes {place.begin} to "
                f"{place.end}, which are not its own; get it again"
            )
        end = place.end


def cast_place(place: Place, dtype: torch.dtype) -> Place:
    """The same tensor in another dtype; one that is no plain float stays as it is."""
    if place.dtype is None:
        return place
    names = {found: name for name, found in DTYPES.items()}
    num_bytes = math.prod(place.shape) * dtype.itemsize
    return replace(place, stored_as=names[dtype], end=place.begin + num_bytes)


def read_metadata(file: Path) -> dict[str, str]:
    """What a file says of itself."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        found: dict[str, str] = json.loads(stream.read(length)).get("__metadata__", {})
    return found


def header_of(tensors: Mapping[str, Place], metadata: Mapping[str, str]) -> bytes:
    """The head of a file that holds ``tensors`` one after the other, in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, place in tensors.items():
        end = offset + place.end - place.begin
        entries[name] = {
            "dtype": place.stored_as,
            "shape": list(place.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def row_chunks(place: Place) -> Iterator[slice]:
    """Slices of dim 0 that together cover the tensor, each of ``CHUNK_BYTES`` at most."""
    step = max(1, CHUNK_BYTES // max(1, place.row_bytes))
    for start in range(0, place.num_rows, step):
        yield slice(start, min(start + step, place.num_rows))


class Memory:
    """Memory that is used again: fresh pages cost more than the numbers in them.

    Args:
        count: A tensor stays as it is until as many more have been asked for.
    """

    def __init__(self, count: int = 1) -> None:
        self._pieces = [torch.empty(0, dtype=torch.uint8) for _ in range(count)]
        self._next = 0

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of any numbers."""
        num_bytes = math.prod(shape) * dtype.itemsize
        self._next = (self._next + 1) % len(self._pieces)
        if self._pieces[self._next].numel() < num_bytes:
            self._pieces[self._next] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._pieces[self._next][:num_bytes].view(dtype).view(shape)


def read_rows(
    stream: BinaryIO, place: Place, rows: slice, *, memory: Memory | None = None
) -> torch.Tensor:
    """Rows of a tensor whose dtype is a plain float, in that dtype; in ``memory`` if given."""
    assert place.dtype is not None, "the caller has checked the dtype"
    if not place.shape:
        rows = slice(0, 1)
    shape = (rows.stop - rows.start, *place.shape[1:])
    tensor = (memory or Memory()).tensor(place.dtype, shape)
    read_into(stream, bytes_of(tensor), place.begin + rows.start * place.row_bytes)
    return tensor


def read_into(stream: BinaryIO, target: memoryview, at: int) -> None:
    """Fill ``target`` with the bytes from ``at`` on; where the stream stands does not matter."""
    while target:
        count = os.preadv(stream.fileno(), [target], at)
        if not count:
            raise ArtifactError(f"{stream.name}: ends before byte {at + len(target)}; get it again")
        target, at = target[count:], at + count


def is_finite(tensor: torch.Tensor) -> bool:
    """By the sum, in a fraction of the time; only one that overflows leaves it to be looked up."""
    return math.isfinite(tensor.sum()) or all(math.isfinite(end) for end in torch.aminmax(tensor))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    found: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return found
