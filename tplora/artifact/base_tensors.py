"""Where a merge reads the base's tensors from."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO, Protocol

from tplora.artifact.tensor_file import read_rows

if TYPE_CHECKING:
    import torch

    from tplora.artifact.checkpoint import Checkpoint
    from tplora.artifact.tensor_file import Memory

__all__ = ["BaseTensors", "FileTensors"]


class BaseTensors(Protocol):
    """The base's tensors by the names of its files."""

    def is_as_in_file(self, name: str) -> bool:
        """Whether the tensor is what the file holds, so that its bytes can be copied."""
        ...

    def rows(self, name: str, rows: slice, *, memory: Memory | None = None) -> torch.Tensor:
        """Some entries of dim 0, in the dtype of the file; the caller may write over them.

        They lie in ``memory`` if it is given, until it is given again.
        """
        ...

    def stream(self, name: str) -> BinaryIO:
        """The file that holds the tensor, open for reading."""
        ...


class FileTensors:
    """The files as they are; each stays open until the merge ends."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._streams: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> FileTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def is_as_in_file(self, name: str) -> bool:
        """Always."""
        return True

    def rows(self, name: str, rows: slice, *, memory: Memory | None = None) -> torch.Tensor:
        """Read them."""
        place = self._checkpoint.tensors[name][1]
        return read_rows(self.stream(name), place, rows, memory=memory)

    def stream(self, name: str) -> BinaryIO:
        """Opened once."""
        file = self._checkpoint.tensors[name][0]
        if file not in self._streams:
            path = self._checkpoint.folder / file
            self._streams[file] = self._stack.enter_context(path.open("rb", buffering=0))
        return self._streams[file]
