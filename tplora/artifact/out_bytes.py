"""A file that is written in pieces, in any order, by several threads."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, BinaryIO

from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OutBytes"]

_NOT_HERE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""Said where the system cannot copy between these two files by itself."""
_COPIED_AT_ONCE = 1 << 20
_SETTLED_AT_ONCE = 32 << 20


class OutBytes:
    """The bytes of one file, by their place.

    Args:
        path: Of the file; what is there goes.
        head: Its first bytes.
    """

    def __init__(self, path: Path, head: bytes) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._written = self._settling = 0
        self.write(head, 0)
        self.next_part(len(head))

    def write(self, data: bytes | memoryview, at: int) -> None:
        """Put bytes in their place."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptor, view, at)
            view, at = view[count:], at + count

    def copy(self, source: BinaryIO, begin: int, num_bytes: int, at: int) -> None:
        """Put another open file's bytes in their place, by the system where it can."""
        while num_bytes:
            count = self._copy_some(source, begin, num_bytes, at)
            if not count:
                raise ArtifactError(
                    f"{source.name}: has become shorter while it was read; get it again"
                )
            begin, num_bytes, at = begin + count, num_bytes - count, at + count

    def _copy_some(self, source: BinaryIO, begin: int, num_bytes: int, at: int) -> int:
        try:
            return os.copy_file_range(source.fileno(), self._descriptor, num_bytes, begin, at)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
        data = os.pread(source.fileno(), min(num_bytes, _COPIED_AT_ONCE), begin)
        self.write(data, at)
        return len(data)

    def next_part(self, num_bytes: int) -> slice | None:
        """Note that the next bytes are there; a part that the disk may begin with, if it is time.

        Args:
            num_bytes: Behind those that were there before.
        """
        self._written += num_bytes
        if self._written - self._settling < _SETTLED_AT_ONCE:
            return None
        part = slice(self._settling, self._written)
        self._settling = self._written
        return part

    def begin_settling(self, part: slice) -> None:
        """Have a part brought to disk without waiting for it, so that ``settle`` finds it there.

        Left alone, the system would begin when it is asked to ``settle``, and nothing be done
        meanwhile. What the advice is named for, it does to pages that the disk already has.
        """
        os.posix_fadvise(
            self._descriptor, part.start, part.stop - part.start, os.POSIX_FADV_DONTNEED
        )

    def settle(self) -> None:
        """Bring all of it to disk, and close it."""
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Let go of it, whatever state it is in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
