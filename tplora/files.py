"""Files that appear whole or not at all: written aside, brought to disk, then renamed.

The aside lies beside its target, on the same file system, so the last step is one rename. A reader
sees what was there before or what is there after; of a folder that is being replaced, for the
moment between two renames, nothing. Never a half.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tplora.errors import ArtifactError, TploraError

__all__ = [
    "check_writable",
    "file_written_aside",
    "kept_aside",
    "write_text_aside",
    "written_aside",
]

# The last is of a file system, or of a user, that may not have files of that size.
_DISK_FULL = {
    errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk is full", errno.EFBIG: "is too large",
}  # fmt: skip


@contextlib.contextmanager
def written_aside(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` when the block ends well, and goes when not.

    Args:
        target: The folder to be. Parents are created. A symbolic link is followed.
        overwrite: Replace what is there; its files go once the new folder is in place.

    Raises:
        ArtifactError: If something is there and may not be replaced, or nothing can be written.
    """
    target = _final_place(target)
    _check_free(target, overwrite=overwrite, folder=True)
    aside = _aside_name(target)
    with _as_artifact_error(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
    try:
        with _disk_full_as_artifact_error(target):
            yield aside
        _put_in_place(aside, target, overwrite=overwrite)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put_in_place(aside: Path, target: Path, *, overwrite: bool) -> None:
    """Give a folder that is whole its name, and have both on the disk."""
    with _as_artifact_error(target):
        _settle_folder(aside)
        _rename_folder(aside, target, overwrite=overwrite)
        _sync(target.parent)


@contextlib.contextmanager
def kept_aside(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """As ``written_aside``, but what a killed process leaves is there for the next one to go on.

    The folder is always the same hidden sibling, and one process at a time has it. It stays when
    the block is interrupted, and goes when the block ends with an error of ours.

    Raises:
        ArtifactError: As ``written_aside``, or if another process is writing.
    """
    target = _final_place(target)
    _check_free(target, overwrite=overwrite, folder=True)
    aside = target.with_name(f".{target.name[:100]}.aside")
    with _as_artifact_error(target):
        aside.mkdir(parents=True, exist_ok=True)
    with _locked(aside, target):
        try:
            with _disk_full_as_artifact_error(target):
                yield aside
            _put_in_place(aside, target, overwrite=overwrite)
        except TploraError:
            shutil.rmtree(aside, ignore_errors=True)
            raise


@contextlib.contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """The system lets go of the lock when the process ends, however it does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ArtifactError(
                f"{target}: another process is writing it; wait for it or name another place"
            ) from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_written_aside(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a path for one file that becomes ``target`` when the block ends well, else goes.

    Raises:
        ArtifactError: If something is there and may not be replaced, nothing can be written, or
            the block wrote nothing.
    """
    target = _final_place(target)
    _check_free(target, overwrite=overwrite, folder=False)
    aside = _aside_name(target)
    with _as_artifact_error(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.touch()
    mode = aside.stat().st_mode & 0o777  # what the umask leaves; some writers make files private
    try:
        with _disk_full_as_artifact_error(target):
            yield aside
        with _as_artifact_error(target):
            aside.chmod(mode)
            _sync(aside)
            _check_free(target, overwrite=overwrite, folder=False)
            aside.replace(target)
            _sync(target.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_text_aside(target: Path, text: str, *, overwrite: bool = False) -> None:
    """Write ``text`` as UTF-8 to ``target``, whole or not at all.

    Raises:
        ArtifactError: As ``file_written_aside``.
    """
    with file_written_aside(target, overwrite=overwrite) as aside:
        aside.write_text(text, encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Prove that ``folder`` can be filled, by writing in it or in its nearest existing parent.

    Mode bits are not asked: they do not bind root, and a read-only file system does not show in
    them. What is made for the proof is removed again.

    Raises:
        ArtifactError: If a file is in the way or the write fails.
    """
    place = Path(os.path.abspath(folder))
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ArtifactError(
            f"{folder}: {place} is in the way and not a folder; "
            "remove it or name another output folder"
        )
    probe = _aside_name(place / "probe")
    try:
        probe.mkdir()
        (probe / "file").write_bytes(b"x")
    except OSError as error:
        raise ArtifactError(
            f"{folder}: nothing can be created in {place} ({error.strerror}); "
            "make it writable for this user or name another output folder"
        ) from error
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _final_place(target: Path) -> Path:
    """``target`` with links followed, so that a linked folder is replaced and not its link."""
    return Path(os.path.realpath(target))


def _aside_name(target: Path) -> Path:
    """A hidden sibling; a file's ending stays, as some writers choose the format by it."""
    own = f"aside-{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.stem[:100]}.{own}{target.suffix[:20]}")


def _check_free(target: Path, *, overwrite: bool, folder: bool) -> None:
    if not os.path.lexists(target):
        return
    if target.is_dir() != folder:
        found, needed = ("a file", "a folder") if folder else ("a folder", "a file")
        raise ArtifactError(f"{target}: is {found}, {needed} is to be written there; move it away")
    if not overwrite:
        raise ArtifactError(f"{target}: exists already; ask to overwrite it or name another place")


def _settle_folder(folder: Path) -> None:
    """Give the files the mode that the folder's umask leaves, and bring all of it to disk."""
    mode = folder.stat().st_mode & 0o666
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | mode)  # safetensors makes its files private
                _sync(path)
        _sync(Path(parent))


def _rename_folder(aside: Path, target: Path, *, overwrite: bool) -> None:
    _check_free(target, overwrite=overwrite, folder=True)
    if not target.exists():
        aside.rename(target)
        return
    old = _aside_name(target)
    target.rename(old)
    try:
        aside.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _as_artifact_error(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(
            f"{target}: cannot be written ({error.strerror} at {error.filename}); "
            "make room or make its folder writable"
        ) from error


@contextlib.contextmanager
def _disk_full_as_artifact_error(target: Path) -> Iterator[None]:
    """Other errors of the caller's block are the caller's own and pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise ArtifactError(
            f"{target}: {_DISK_FULL[error.errno]}; make room or name another place"
        ) from error
