"""Files of a folder from elsewhere: in that folder, plain, and no larger than they can be."""

import json
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tplora.errors import ArtifactError

__all__ = ["check_file_name", "find_file", "parse_json", "read_json", "shown"]

MAX_JSON_BYTES = 16 << 20
"""A config that names every module of the largest models has 1 MiB."""

MAX_BYTES = 1 << 40
"""No adapter has a TiB: rank 64 on every expert of 10^12 parameters is a tenth of that."""


def find_file(folder: Path, names: Sequence[str], *, max_bytes: int = MAX_BYTES) -> Path | None:
    """The first of ``names`` that ``folder`` holds as a plain file; None if it holds none.

    A link may lead to another file of the folder, or as the hub's cache has it from its snapshots
    to its blobs; not elsewhere, for what is read here is copied on.

    Raises:
        ArtifactError: If there is something of the name and it is not such a file.
    """
    for name in names:
        path = folder / name
        try:
            info = path.stat()
        except (OSError, ValueError):
            if path.is_symlink():
                raise ArtifactError(f"{path}: is a link to nothing; copy the file here") from None
            continue
        _check_place(folder, path)
        if not stat.S_ISREG(info.st_mode):
            raise ArtifactError(f"{path}: is no plain file; copy the file here")
        if info.st_size > max_bytes:
            raise ArtifactError(
                f"{path}: has {info.st_size:,} bytes, {max_bytes:,} at most are read; get it again "
                "from where it was made"
            )
        return path
    return None


def shown(value: object) -> str:
    """Text from elsewhere for an error's one line: short, and without what a terminal obeys."""
    text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 160 else text[:120] + "..." + text[-30:]


def _check_place(folder: Path, path: Path) -> None:
    try:
        home, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:
        raise ArtifactError(f"{path}: cannot be followed ({error}); copy the file here") from None
    if home.parent.name == "snapshots":
        home = home.parent.parent
    if not real.is_relative_to(home):
        raise ArtifactError(f"{path}: is a link out of its folder, to {real}; copy the file here")


def check_file_name(name: object, *, where: str) -> str:
    """``name`` if it is that of a file right beside the one that names it.

    Raises:
        ArtifactError: If it leads anywhere else.
    """
    is_plain = isinstance(name, str) and 0 < len(name) < 256 and name.isprintable()
    if not isinstance(name, str) or not is_plain or name in (".", "..") or set(name) & set("/\\:"):
        raise ArtifactError(
            f"{where}: names the file {str(name)[:80]!r}; the plain name of a file beside it is "
            "needed, get it again from where it was made"
        )
    return name


def read_json(path: Path) -> Any:
    """What a JSON file of a folder from elsewhere says.

    Raises:
        ArtifactError: If it is no JSON, too large, names a key twice, or holds NaN or infinity.
    """
    if find_file(path.parent, [path.name], max_bytes=MAX_JSON_BYTES) is None:
        raise ArtifactError(f"{path}: is missing; get it again from where it was made")
    try:
        return parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ArtifactError(
            f"{path}: is not JSON ({shown(error)}); save the adapter again"
        ) from None


def parse_json(text: bytes) -> Any:
    """JSON of which every reader makes the same.

    Raises:
        ValueError: If it is no such JSON.
    """
    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_doubles, parse_constant=_no_constant
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _without_doubles(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Python takes the last of two, others the first."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it holds {name[:80]!r} twice")
        found[name] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is no number of JSON")
