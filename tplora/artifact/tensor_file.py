"""A safetensors file whose tensors are read, and changed in place, a few rows at a time.

The format: eight bytes with the header's length, the header as JSON, the tensors' bytes, row-major
and little-endian. Changing a copy in place keeps names, order, dtypes, metadata and every tensor
that nobody touches, and memory is bounded by the rows in hand, whatever the file's size.

Source: the safetensors format, github.com/huggingface/safetensors, README.md.
"""

import json
import math
import shutil
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
    "Place",
    "copy_file",
    "create_file",
    "read_places",
    "read_rows",
    "row_chunks",
    "write_rows",
]

CHUNK_BYTES = 8 << 20
"""Bytes of a tensor that are held at once."""

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
        return (self.end - self.begin) // self.shape[0]


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


def copy_file(source: Path, target: Path, grown: Mapping[str, int]) -> None:
    """Copy a file; tensors named in ``grown`` get that many rows, of zeros after their own.

    Where nothing grows, the copy is the file byte for byte.
    """
    if not grown:
        shutil.copyfile(source, target)
        return
    places = read_places(source)
    moved, offset = {}, 0
    for name, place in sorted(places.items(), key=lambda item: item[1].begin):
        larger = place.with_rows(grown[name]) if name in grown else place
        moved[name] = (place, larger, offset)
        offset += larger.end - larger.begin
    entries = {
        name: {
            "dtype": larger.stored_as,
            "shape": larger.shape,
            "data_offsets": [begin, begin + larger.end - larger.begin],
        }
        for name, (_, larger, begin) in moved.items()
    }
    with source.open("rb") as old, target.open("wb") as new:
        start = _write_header(new, entries)
        for place, _, begin in moved.values():
            old.seek(place.begin)
            new.seek(start + begin)
            _copy_bytes(old, new, place.end - place.begin)
        new.truncate(start + offset)


def _copy_bytes(old: BinaryIO, new: BinaryIO, num_bytes: int) -> None:
    while num_bytes:
        data = old.read(min(CHUNK_BYTES, num_bytes))
        new.write(data)
        num_bytes -= len(data)


def _write_header(stream: BinaryIO, entries: Mapping[str, Any]) -> int:
    """Write a file's header; return where the tensors begin."""
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    stream.write(len(header).to_bytes(8, "little") + header)
    return stream.tell()


def create_file(file: Path, name: str, like: Place) -> Place:
    """Make a file with one tensor of zeros, called ``name``, of the dtype and shape of ``like``."""
    num_bytes = like.end - like.begin
    entry = {"dtype": like.stored_as, "shape": like.shape, "data_offsets": [0, num_bytes]}
    with file.open("wb") as stream:
        begin = _write_header(stream, {name: entry})
        stream.truncate(begin + num_bytes)
    return Place(stored_as=like.stored_as, shape=like.shape, begin=begin, end=begin + num_bytes)


def row_chunks(place: Place) -> Iterator[slice]:
    """Slices of dim 0 that together cover the tensor, each of ``CHUNK_BYTES`` at most."""
    step = max(1, CHUNK_BYTES // max(1, place.row_bytes))
    for start in range(0, place.shape[0], step):
        yield slice(start, min(start + step, place.shape[0]))


def read_rows(stream: BinaryIO, place: Place, rows: slice) -> torch.Tensor:
    """Rows of a tensor whose dtype is a plain float, in that dtype."""
    stream.seek(place.begin + rows.start * place.row_bytes)
    data = bytearray((rows.stop - rows.start) * place.row_bytes)
    stream.readinto(data)  # type: ignore[attr-defined]  # typeshed: a BinaryIO opened "rb" has it
    assert place.dtype is not None, "the caller has checked the dtype"
    tensor = torch.frombuffer(data, dtype=place.dtype)
    return tensor.view(rows.stop - rows.start, *place.shape[1:])


def write_rows(stream: BinaryIO, place: Place, rows: slice, tensor: torch.Tensor) -> None:
    """Put ``tensor`` in the place of ``rows``; dtype and shape have to be theirs."""
    assert tensor.dtype == place.dtype, "the caller has cast it"
    assert math.prod(tensor.shape[1:]) == math.prod(place.shape[1:]), "the caller has checked it"
    stream.seek(place.begin + rows.start * place.row_bytes)
    stream.write(tensor.contiguous().view(torch.uint8).numpy().data)
