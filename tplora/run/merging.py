"""Which base a run's adapter is merged into, where it was trained on a quantised one.

"dequantized" is the base as the model multiplied by it, so what comes out is the model that was
trained; "original" is the base as it was before it was quantised, which the adapter has not seen.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tplora.artifact.checkpoint import find_base_folder
from tplora.artifact.dequantized import is_packed, write_dequantized
from tplora.artifact.merge import merge_adapter
from tplora.errors import ArtifactError
from tplora.files import written_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tplora.run.base import Base

__all__ = ["MergeInto", "MergeSource", "base_to_merge_into", "merge_into_base"]

MergeInto = Literal["auto", "dequantized", "original"]
"""What a user may ask for; "auto" is the dequantised base of what was quantised."""


def merge_into_base(base: Base, adapter: Path, out: Path, *, overwrite: bool = False) -> None:
    """Merge an adapter into its base, the dequantised one of a base that was quantised.

    Raises:
        ArtifactError: As ``merge_adapter``.
    """
    with base_to_merge_into(base, out) as source:
        merge_adapter(source.path, adapter, out, overwrite=overwrite)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSource:
    """The base that is merged into."""

    path: str
    """A folder."""
    note: str = ""
    """What a person has to know of a base that was quantised; empty of any other."""


@contextlib.contextmanager
def base_to_merge_into(
    base: Base,
    out: Path,
    *,
    into: MergeInto = "auto",
    progress: Callable[[str], None] = lambda message: None,
) -> Iterator[MergeSource]:
    """The base that an adapter of ``base`` is merged into.

    A dequantised base is written beside ``out`` and removed when the block ends.

    Raises:
        ArtifactError: If "original" is asked of a checkpoint that is packed in its files, or
            anything of a base that is not quantised.
    """
    folder = find_base_folder(base.path, revision=base.revision)
    packed = is_packed(folder)
    if not packed and base.quantization is None:
        if into != "auto":
            raise ArtifactError(
                f"{folder}: the adapter was not trained on a quantised base; leave out "
                f"{into!r}, it has one form"
            )
        yield MergeSource(path=str(folder))
        return
    if into == "original":
        if packed:
            raise ArtifactError(
                f"{folder}: the base's weights are packed (bitsandbytes), and what they were "
                'before is not there; merge into their "dequantized" form'
            )
        yield MergeSource(
            path=str(folder),
            note="it holds the base as it was before it was quantised, which the adapter has not "
            "seen; --into dequantized is the model that was trained",
        )
        return
    place = out.expanduser().absolute()
    place = place.with_name(f".{place.name}.base-{secrets.token_hex(4)}")
    given = None if packed else base.quantization
    try:
        with written_aside(place) as aside:
            write_dequantized(folder, aside, dtype=base.dtype, given=given, progress=progress)
        yield MergeSource(
            path=str(place),
            note="it holds the base's weights as the model saw them, quantised and unpacked: the "
            "model that was trained",
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
