"""One file of a merged model, written from its first byte to its last.

What nobody touches is copied byte for byte; what is changed is made some rows at a time. Memory:
the rows in hand, and of a base in the dtype that is summed in, the delta of one tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from tplora.artifact.tensor_file import (
    CHUNK_BYTES,
    Memory,
    bytes_of,
    header_of,
    read_metadata,
    row_chunks,
)
from tplora.artifact.writer import Writer, one_thread
from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tplora.artifact.base_tensors import BaseTensors
    from tplora.artifact.change import Change
    from tplora.artifact.checkpoint import Checkpoint
    from tplora.artifact.merge_plan import MergePlan, OutFile, OutTensor
    from tplora.upstream.checkpoint_layout import WeightGroup

__all__ = ["FileMerger"]

_IN_FLIGHT = 2
"""Pieces that are written while the next one is made."""


class FileMerger:
    """Writes the files of a plan.

    Args:
        checkpoint: The base's files.
        source: Where its tensors are read.
        plan: What to write.
        on_bytes: Called with the number of bytes written since the last call.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: BaseTensors,
        plan: MergePlan,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._checkpoint, self._source, self._plan = checkpoint, source, plan
        self._on_bytes = on_bytes
        self._largest = max((checkpoint.folder / file).stat().st_size for file in checkpoint.files)
        self._changes: OrderedDict[str, list[Change]] = OrderedDict()
        self._read = Memory()
        self._work, self._out = Memory(_IN_FLIGHT + 2), Memory(_IN_FLIGHT + 2)
        self._writer = Writer(_IN_FLIGHT)
        self._made: OrderedDict[str, torch.Tensor] = OrderedDict()
        self.unchanged: list[str] = []
        """Tensors that came out as they were: the delta is lost in rounding, or zero."""

    def __enter__(self) -> FileMerger:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, file: OutFile, path: Path, whole: Callable[[], None]) -> None:
        """Write one file, while the next one is begun; call ``whole`` when it is on the disk."""
        metadata = (
            {"format": "pt"}
            if file.source is None
            else read_metadata(self._checkpoint.folder / file.source)
        )
        self._writer.open(path)
        for data in self._parts(file, metadata):
            self._writer.write(data)
            self._on_bytes(len(data))
        self._writer.settle(whole)

    def finish(self) -> None:
        """Wait for everything that is still being written."""
        self._writer.finish()

    def _parts(self, file: OutFile, metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
        yield header_of({tensor.name: tensor.place for tensor in file.tensors}, metadata)
        for tensor in file.tensors:
            if tensor.is_changed:
                yield from self._changed(tensor)
            elif self._is_verbatim(tensor):
                yield from self._copied(tensor.source)
            else:
                yield from self._cast(tensor)

    def _is_verbatim(self, tensor: OutTensor) -> bool:
        held = self._checkpoint.tensors[tensor.source][1]
        return held.stored_as == tensor.place.stored_as and self._source.is_as_in_file(
            tensor.source
        )

    def _copied(self, name: str) -> Iterator[memoryview]:
        place, stream = self._checkpoint.tensors[name][1], self._source.stream(name)
        for begin in range(place.begin, place.end, CHUNK_BYTES):
            size = min(CHUNK_BYTES, place.end - begin)
            part = bytes_of(self._out.tensor(torch.uint8, (size,)))
            stream.seek(begin)
            stream.readinto(part)  # type: ignore[attr-defined]  # opened "rb", it has it
            yield part

    def _cast(self, tensor: OutTensor) -> Iterator[memoryview]:
        place = self._checkpoint.tensors[tensor.source][1]
        for rows in row_chunks(place):
            found = self._source.rows(tensor.source, rows, memory=self._read)
            yield bytes_of(self._rounded(found, tensor))

    def _changed(self, tensor: OutTensor) -> Iterator[memoryview]:
        if tensor.groups:
            yield bytes_of(self._from_group(tensor))
            return
        assert tensor.parameter is not None, "it is changed and in no group"
        changes = self._read_changes(tensor.parameter, self._sum_dtype(tensor.source))
        place = self._checkpoint.tensors[tensor.source][1].with_rows(tensor.place.num_rows)
        is_whole = any(change.needs_whole for change in changes)
        is_moved = False
        for rows in [slice(0, place.num_rows)] if is_whole else row_chunks(place):
            with contextlib.nullcontext() if is_whole else one_thread():
                base = self._base_rows(tensor.source, rows)
                merged = self._rounded(self._applied(changes, base, rows), tensor)
                is_moved = is_moved or not torch.equal(merged, base)
            yield bytes_of(merged)
        if not is_moved:
            self.unchanged.append(tensor.name)
        self._changes.pop(tensor.parameter)

    def _base_rows(self, name: str, rows: slice) -> torch.Tensor:
        """The base's rows; zeros where the result has more."""
        num_rows = self._checkpoint.tensors[name][1].num_rows
        held = slice(min(rows.start, num_rows), min(rows.stop, num_rows))
        base = self._source.rows(name, held, memory=self._read)
        missing = (rows.stop - rows.start) - (held.stop - held.start)
        return torch.cat([base, base.new_zeros(missing, *base.shape[1:])]) if missing else base

    def _from_group(self, tensor: OutTensor) -> torch.Tensor:
        """One tensor of a group; the others are kept for when they are next, within bounds."""
        if tensor.name not in self._made:
            (group,) = tensor.groups
            self._made.update(self._merged_group(group))
        found = self._made.pop(tensor.name)
        while sum(each.nbytes for each in self._made.values()) > self._largest // 2:
            self._made.popitem(last=False)
        return self._rounded(found, tensor)

    def _merged_group(self, group: WeightGroup) -> dict[str, torch.Tensor]:
        held = {
            name: self._source.rows(name, slice(0, self._checkpoint.tensors[name][1].num_rows))
            for name in group.names
        }
        parameters = group.to_model(held)
        back = group.to_files(parameters)
        if not all(torch.equal(back[name], held[name]) for name in held):
            raise ArtifactError(
                f"{self._checkpoint.folder}: {group.names[0]} and {len(held) - 1} more are in a "
                "form that transformers reads and cannot write again; load the base with "
                "transformers, save it and merge into that"
            )
        del back, held
        dtype = self._sum_dtype(group.names[0])
        merged = {}
        for name in list(parameters):
            base = parameters.pop(name)
            index = group.index or 0
            rows = slice(index, index + base.shape[0])
            merged[name] = (
                self._applied(self._read_changes(name, dtype), base, rows).clone()
                if name in self._plan.changes
                else base.to(dtype)
            )
        return group.to_files(merged)

    def _read_changes(self, parameter: str, dtype: torch.dtype) -> list[Change]:
        """The changes of a parameter; those of the last few are kept, for the experts in turn."""
        if parameter not in self._changes:
            while len(self._changes) > 1:
                self._changes.popitem(last=False)
            found = self._plan.changes[parameter].read(
                dtype, in_one_product=self._in_one_product(parameter, dtype)
            )
            for change in found:
                change.prepare()
            self._changes[parameter] = found
        self._changes.move_to_end(parameter)
        return self._changes[parameter]

    def _in_one_product(self, parameter: str, dtype: torch.dtype) -> bool:
        """Where PEFT's bits can be had: the base is summed in its own dtype, and memory allows."""
        names = self._plan.names_of(parameter)
        places = [self._checkpoint.tensors[name][1] for name in names]
        size = sum(place.end - place.begin for place in places)
        return all(place.dtype == dtype for place in places) and size <= self._largest

    def _sum_dtype(self, name: str) -> torch.dtype:
        """float32, or float64 for a float64 weight."""
        dtype = self._checkpoint.tensors[name][1].dtype
        assert dtype is not None, "the plan has checked the dtype"
        return torch.promote_types(dtype, torch.float32)

    def _rounded(self, total: torch.Tensor, tensor: OutTensor) -> torch.Tensor:
        assert tensor.place.dtype is not None, "the plan has checked the dtype"
        found = total
        if total.dtype != tensor.place.dtype:
            found = self._out.tensor(tensor.place.dtype, tuple(total.shape)).copy_(total)
        if not all(math.isfinite(end) for end in torch.aminmax(found)):
            what = "base plus delta" if tensor.is_changed else "the base"
            raise ArtifactError(
                f"{tensor.name}: {what} is not finite in {tensor.place.dtype}; merge into a wider "
                "dtype with --dtype, or use the adapter unmerged"
            )
        return found.contiguous()

    def _applied(self, changes: list[Change], base: torch.Tensor, rows: slice) -> torch.Tensor:
        """The changes one after the other, in the dtype that is summed in."""
        dtype = torch.promote_types(base.dtype, torch.float32)
        work = self._work.tensor(dtype, tuple(base.shape)).copy_(base)
        for change in changes:
            work = change.applied_to(work, rows, base)
        return work
