"""The files of a merged model, written in pieces by as many threads as there are cores.

What nobody touches is copied byte for byte; what is changed is made some rows at a time: read,
summed, checked and written by one thread while they are in its core's cache. Memory: the rows in
hand, and of a base in the dtype that is summed in, the delta of a tensor or two.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from tplora.artifact.lanes import Lanes
from tplora.artifact.merge_changes import ChangeReader
from tplora.artifact.merge_groups import GroupMerger
from tplora.artifact.merge_rows import Room, RowsMaker
from tplora.artifact.out_bytes import OutBytes
from tplora.artifact.tensor_file import bytes_of, header_of, read_metadata, row_chunks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tplora.artifact.base_tensors import BaseTensors, TensorRows
    from tplora.artifact.change import Change
    from tplora.artifact.merge_plan import MergePlan, OutFile, OutTensor

__all__ = ["FileMerger"]

_COPIED_BYTES = 16 << 20
"""Of a piece that is copied."""
_SMALL_BYTES = 64 << 20
"""A base's largest file counts as this at least."""
_TIMES = 8
"""Their own bytes, that rows take: as read, summed in float32, rounded, and with DoRA's norm."""
_BEHIND = 1
"""Files that may be on their way to the disk while the next one is begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A tensor whose rows are made next."""

    maker: RowsMaker
    target: OutBytes
    at: int
    """Its first byte there."""
    prepared: tuple[Future[None], ...]
    """What its rows wait for."""
    num_bytes: int
    """That this takes until the last row is there."""


class FileMerger:
    """Writes the files of a plan.

    Args:
        source: Where the base's tensors are read.
        plan: What to write.
        on_bytes: Called with the number of bytes written since the last call.
    """

    def __init__(
        self, source: BaseTensors, plan: MergePlan, on_bytes: Callable[[int], None]
    ) -> None:
        self._checkpoint, self._source, self._plan = source.checkpoint, source, plan
        self._on_bytes = on_bytes
        sizes = [(self._checkpoint.folder / f).stat().st_size for f in self._checkpoint.files]
        self._largest = max(_SMALL_BYTES, *sizes)
        self._reader = ChangeReader(self._checkpoint, plan, self._largest)
        self._groups = GroupMerger(source, plan, self._reader, self._largest // 2)
        self._lanes = Lanes(Room, self._largest // 2)
        self._begun: _Begun | None = None
        self._begun_bytes = 0
        self._open: list[OutBytes] = []
        self._settler = ThreadPoolExecutor(max_workers=1)
        self._files: deque[Future[Future[None]]] = deque()
        self._is_moved: dict[str, bool] = {}

    def __enter__(self) -> FileMerger:
        return self

    def __exit__(self, *_: object) -> None:
        self._lanes.close()
        self._settler.shutdown(wait=True, cancel_futures=True)
        for target in self._open:
            target.close()

    @property
    def unchanged(self) -> list[str]:
        """Tensors that came out as they were: the delta is lost in rounding, or zero."""
        return [name for name, is_moved in self._is_moved.items() if not is_moved]

    def write(self, file: OutFile, path: Path, whole: Callable[[], None]) -> None:
        """Have one file written, and ``whole`` called when it is on the disk: soon, or later."""
        metadata = (
            {"format": "pt"}
            if file.source is None
            else read_metadata(self._checkpoint.folder / file.source)
        )
        header = header_of({tensor.name: tensor.place for tensor in file.tensors}, metadata)
        target = OutBytes(path, header)
        self._open.append(target)
        at = len(header)
        for tensor in file.tensors:
            self._put(tensor, target, at)
            at += tensor.num_bytes
        self._make_begun()
        settle = partial(self._settler.submit, _settle, target, whole)
        self._files.append(self._lanes.call(settle))
        self._settle_all_but(_BEHIND)

    def finish(self) -> None:
        """Wait for everything that is still being written."""
        self._settle_all_but(0)

    def _settle_all_but(self, count: int) -> None:
        while len(self._files) > count:
            file = self._files.popleft()
            self._lanes.finish(file)
            file.result().result()

    def _put(self, tensor: OutTensor, target: OutBytes, at: int) -> None:
        if not tensor.is_changed and self._is_verbatim(tensor):
            self._copy(tensor, target, at)
        elif tensor.groups:
            self._alone()
            target.write(bytes_of(self._groups.tensor(tensor)), at)
            self._wrote(target, tensor.num_bytes)
        else:
            begun = self._begin(tensor, target, at)
            self._make_begun()
            self._begun = begun

    def _alone(self) -> None:
        """What comes now may take all the memory, and torch's own threads."""
        self._make_begun()
        self._lanes.finish()

    def _is_verbatim(self, tensor: OutTensor) -> bool:
        held = self._checkpoint.tensors[tensor.source][1]
        return held.stored_as == tensor.place.stored_as and self._source.is_as_in_file(
            tensor.source
        )

    def _copy(self, tensor: OutTensor, target: OutBytes, at: int) -> None:
        place = self._checkpoint.tensors[tensor.source][1]
        stream = self._source.stream(tensor.source)
        for begin in range(place.begin, place.end, _COPIED_BYTES):
            size = min(_COPIED_BYTES, place.end - begin)
            to = at + begin - place.begin
            self._lanes.submit(
                partial(_copy, target, stream, slice(begin, begin + size), to),
                then=partial(self._wrote, target),
            )

    def _begin(self, tensor: OutTensor, target: OutBytes, at: int) -> _Begun:
        """Have made what its rows need, while the rows of the one before are made."""
        maker = RowsMaker(
            tensor=tensor,
            base=self._source.tensor(tensor.source),
            num_base_rows=self._checkpoint.tensors[tensor.source][1].num_rows,
            changes=self._reader.read(tensor.parameter) if tensor.parameter else (),
        )
        num_bytes = maker.base.prepared_bytes
        if tensor.parameter:
            num_bytes += self._reader.prepared_bytes(tensor.parameter) * len(maker.changes)
        if self._begun_bytes + num_bytes > self._largest:
            self._alone()
        self._begun_bytes += num_bytes
        parts: list[TensorRows | Change] = [maker.base, *maker.changes]
        prepared = [self._lanes.submit(partial(_prepare, part)) for part in parts]
        return _Begun(
            maker=maker, target=target, at=at, prepared=tuple(prepared), num_bytes=num_bytes
        )

    def _make_begun(self) -> None:
        """Have the rows of the tensor that was begun made."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        place = self._checkpoint.tensors[begun.maker.tensor.source][1]
        place = place.with_rows(begun.maker.tensor.place.num_rows)
        if begun.maker.needs_whole:
            self._lanes.finish()
            self._made(begun, _make(begun, slice(0, place.num_rows), Room()))
        else:
            for rows in row_chunks(place):
                self._lanes.submit(
                    partial(_make, begun, rows),
                    num_bytes=_TIMES * (rows.stop - rows.start) * place.row_bytes,
                    then=partial(self._made, begun),
                )
        self._lanes.call(partial(self._let_go, begun.num_bytes))

    def _made(self, begun: _Begun, done: tuple[int, bool]) -> None:
        num_bytes, is_moved = done
        tensor = begun.maker.tensor
        if tensor.is_changed:
            self._is_moved[tensor.name] = is_moved or self._is_moved.get(tensor.name, False)
        self._wrote(begun.target, num_bytes)

    def _wrote(self, target: OutBytes, num_bytes: int) -> None:
        """Bytes in the order of the file are there; the disk may begin with them."""
        self._on_bytes(num_bytes)
        part = target.next_part(num_bytes)
        if part is not None:
            self._settler.submit(target.begin_settling, part)

    def _let_go(self, num_bytes: int) -> None:
        self._begun_bytes -= num_bytes


def _settle(target: OutBytes, whole: Callable[[], None]) -> None:
    target.settle()
    whole()


def _copy(target: OutBytes, stream: BinaryIO, part: slice, at: int, _: Room) -> int:
    """Copy a part of a file; its bytes."""
    target.copy(stream, part.start, part.stop - part.start, at)
    return int(part.stop - part.start)


def _prepare(part: TensorRows | Change, _: Room) -> None:
    part.prepare()


def _make(begun: _Begun, rows: slice, room: Room) -> tuple[int, bool]:
    """Make some rows and write them; their bytes, and whether the adapters moved them."""
    for each in begun.prepared:
        each.result()
    data, is_moved = begun.maker.make(rows, room)
    begun.target.write(data, begun.at + rows.start * begun.maker.tensor.place.row_bytes)
    return len(data), is_moved
