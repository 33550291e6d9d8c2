"""Which base a run's adapter is merged into, where it was trained on a quantised one.

"dequantized" is the base as the model multiplied by it, so what comes out is the model that was
trained; "original" is the base as it was before it was quantised, which the adapter has not seen.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tplora.artifact.base_tensors import FileTensors
from tplora.artifact.checkpoint import find_base_folder, read_checkpoint
from tplora.artifact.dequantized import DequantizedTensors, is_packed
from tplora.artifact.merge import merge_into
from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tplora.artifact.base_tensors import BaseTensors
    from tplora.run.base import Base

__all__ = ["MergeInto", "MergeSource", "base_to_merge_into", "merge_into_base"]

MergeInto = Literal["auto", "dequantized", "original"]
"""What a user may ask for; "auto" is the dequantised base of what was quantised."""


def merge_into_base(base: Base, adapter: Path, out: Path, *, overwrite: bool = False) -> None:
    """Merge an adapter into its base, the dequantised one of a base that was quantised.

    Raises:
        ArtifactError: As ``merge_adapters``.
    """
    with base_to_merge_into(base) as source:
        merge_into(source.tensors, {adapter: 1.0}, out, overwrite=overwrite)


_DEQUANTIZED = (
    "it holds the base's weights as the model saw them, quantised and unpacked: the model that "
    "was trained"
)
_ORIGINAL = (
    "it holds the base as it was before it was quantised, which the adapter has not seen; "
    "--into dequantized is the model that was trained"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSource:
    """The base that is merged into."""

    tensors: BaseTensors
    note: str = ""
    """What a person has to know of a base that was quantised; empty of any other."""


@contextlib.contextmanager
def base_to_merge_into(base: Base, *, into: MergeInto = "auto") -> Iterator[MergeSource]:
    """The base that an adapter of ``base`` is merged into; its files are open in the block.

    Raises:
        ArtifactError: If "original" is asked of a checkpoint that is packed in its files, or
            anything of a base that is not quantised.
    """
    folder = find_base_folder(base.path, revision=base.revision)
    packed = is_packed(folder)
    is_quantized = packed or base.quantization is not None
    if not is_quantized and into != "auto":
        raise ArtifactError(
            f"{folder}: the adapter was not trained on a quantised base; leave out "
            f"{into!r}, it has one form"
        )
    if packed and into == "original":
        raise ArtifactError(
            f"{folder}: the base's weights are packed (bitsandbytes), and what they were "
            'before is not there; merge into their "dequantized" form'
        )
    if is_quantized and into != "original":
        given = None if packed else base.quantization
        with DequantizedTensors(folder, dtype=base.dtype, given=given) as unpacked:
            yield MergeSource(tensors=unpacked, note=_DEQUANTIZED)
        return
    with FileTensors(read_checkpoint(folder)) as files:
        yield MergeSource(tensors=files, note=_ORIGINAL if is_quantized else "")
