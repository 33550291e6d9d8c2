"""What an export starts from, found from what a person names: adapters, weights, base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from tplora.artifact.merge import MergeReport, merge_into
from tplora.base.fingerprint import check_same_base
from tplora.errors import ArtifactError
from tplora.run.base import Base, find_base, named_base
from tplora.run.folder import find_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tplora.artifact.base_tensors import BaseTensors

__all__ = ["DTYPES", "Parts", "find_parts", "merge_parts"]

_ADAPTER_FILES = ["adapter_*", "tokenizer*", "*.jinja", "*.model", "vocab.*", "merges.txt",
                  "added_tokens.json", "special_tokens_map.json"]  # fmt: skip
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is to be put together."""

    base: Base
    adapters: Mapping[Path, float]
    """Folder to the weight of its delta; the first is the one that was named."""

    @property
    def adapter(self) -> Path:
        """The one that was named."""
        return next(iter(self.adapters))


def find_parts(
    named: str,
    *,
    base: str | None = None,
    weight: float = 1.0,
    others: Sequence[str] = (),
    progress: Callable[[str], None] = lambda message: None,
) -> Parts:
    """Adapters and base from words on a command line.

    Args:
        named: A run's folder, an adapter's folder, or a hub id of one.
        base: Folder or hub id; what the run or the adapter names when left out.
        weight: Of the adapter that was named.
        others: ``PATH=WEIGHT`` each; a path alone has the weight 1.
        progress: Called with one line before each long step.

    Raises:
        ArtifactError: If there is no such adapter, a weight is no number, or an adapter was
            trained on another base.
    """
    run, adapter = _adapter_of(named)
    adapters = {adapter: weight}
    for other in others:
        path, value = _weighed(other)
        folder = _adapter_of(path)[1]
        if folder in adapters:
            raise ArtifactError(f"--adapter {other}: is named twice; name each adapter once")
        adapters[folder] = value
    found = (
        find_base(run, adapter, progress=progress)
        if base is None
        else named_base(base, progress=progress)
    )
    for folder in adapters:
        check_same_base(folder, found.path, revision=found.revision)
    return Parts(base=found, adapters=adapters)


def merge_parts(
    parts: Parts,
    source: BaseTensors,
    out: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda message: None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> MergeReport:
    """``merge_into``, with a dtype as a person writes it.

    Raises:
        ArtifactError: If the dtype is none that a merge can write, or the merge fails.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ArtifactError(f"--dtype {dtype}: is none of {', '.join(DTYPES)}; choose one of them")
    return merge_into(
        source,
        parts.adapters,
        out,
        dtype=None if dtype is None else DTYPES[dtype],
        overwrite=overwrite,
        progress=progress,
        on_bytes=on_bytes,
    )


def _weighed(text: str) -> tuple[str, float]:
    path, equals, value = text.rpartition("=")
    if not equals:
        return text, 1.0
    try:
        return path, float(value)
    except ValueError:
        raise ArtifactError(
            f"--adapter {text}: {value!r} is no number; write PATH=WEIGHT, as runs/a=0.5"
        ) from None


def _adapter_of(named: str) -> tuple[Path, Path]:
    """The folder that was named, and the adapter in it; a hub id is fetched."""
    path = Path(named).expanduser()
    if path.exists() or named.startswith((".", "/", "~")) or named.count("/") != 1:
        return path, find_adapter(path)
    try:
        fetched = Path(snapshot_download(named, allow_patterns=_ADAPTER_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ArtifactError(
            f"{named}: no such folder, and the hub does not give it "
            f"({str(error).strip().partition(chr(10))[0]}); name a run's or an adapter's folder"
        ) from error
    return fetched, find_adapter(fetched)
