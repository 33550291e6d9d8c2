"""Where a merge reads the base's tensors from."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO, Protocol

from tplora.artifact.tensor_file import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tplora.artifact.checkpoint import Checkpoint
    from tplora.artifact.tensor_file import Memory, Place

__all__ = ["BaseTensors", "FileTensors", "TensorRows", "read_whole"]


class TensorRows(Protocol):
    """One tensor of the base, read some rows at a time by several threads."""

    prepared_bytes: int
    """That it takes from ``prepare`` until it is let go of."""

    def prepare(self) -> None:
        """Make what all rows need; called once, before any of them is asked for."""
        ...

    def rows(self, rows: slice, *, memory: Memory | None = None) -> torch.Tensor:
        """Some entries of dim 0, in the dtype of the checkpoint; the caller may write over them.

        They lie in ``memory`` if it is given, until it is given again.
        """
        ...


class BaseTensors(Protocol):
    """The base's tensors by the names of its files."""

    checkpoint: Checkpoint
    """Names, shapes and dtypes as they are read from here."""
    form: str
    """All that makes these tensors others than the files hold."""

    def is_as_in_file(self, name: str) -> bool:
        """Whether the tensor is what the file holds, so that its bytes can be copied."""
        ...

    def tensor(self, name: str) -> TensorRows:
        """To be read."""
        ...

    def stream(self, name: str) -> BinaryIO:
        """The file that holds the tensor, open for reading."""
        ...

    def finish(self, folder: Path) -> None:
        """Say in the config of the result what the base's own does not say of these tensors."""
        ...


def read_whole(source: BaseTensors, name: str) -> torch.Tensor:
    """All of one tensor, in memory of its own."""
    found = source.tensor(name)
    found.prepare()
    return found.rows(slice(0, source.checkpoint.tensors[name][1].num_rows))


class FileTensors:
    """The files as they are; each stays open until the merge ends."""

    form = ""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._streams: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> FileTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def is_as_in_file(self, name: str) -> bool:
        """Always."""
        return True

    def tensor(self, name: str) -> TensorRows:
        """Read where it lies."""
        return _RowsOfFile(self.stream(name), self.checkpoint.tensors[name][1])

    def stream(self, name: str) -> BinaryIO:
        """Opened once."""
        file = self.checkpoint.tensors[name][0]
        if file not in self._streams:
            path = self.checkpoint.folder / file
            self._streams[file] = self._stack.enter_context(path.open("rb", buffering=0))
        return self._streams[file]

    def finish(self, folder: Path) -> None:
        """The config says what it said."""


class _RowsOfFile:
    prepared_bytes = 0

    def __init__(self, stream: BinaryIO, place: Place) -> None:
        self._stream, self._place = stream, place

    def prepare(self) -> None:
        """Nothing to make."""

    def rows(self, rows: slice, *, memory: Memory | None = None) -> torch.Tensor:
        """Read them."""
        return read_rows(self._stream, self._place, rows, memory=memory)
