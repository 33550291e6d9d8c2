"""A base's files and adapters to a merged model's files, on the CPU, for any tp_size.

Names, order, dtypes, shards, index and every tensor that nobody touches stay the base's. No model
is built but its outline, without weights, which says which tensor of the files is which parameter.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tplora.artifact.base_tensors import FileTensors
from tplora.artifact.checkpoint import find_base_folder, read_checkpoint
from tplora.artifact.merge_file import FileMerger
from tplora.artifact.merge_plan import MergePlan, OutFile, plan_merge
from tplora.artifact.reading import read_base_and_adapters
from tplora.artifact.side_files import (
    cast_in_config,
    copy_side_files,
    grow_in_config,
    untie_in_config,
    write_index,
)
from tplora.errors import ArtifactError
from tplora.files import kept_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from tplora.artifact.base_tensors import BaseTensors

__all__ = ["MergeReport", "merge_adapters", "merge_into"]

_JOURNAL = "merging.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge wrote."""

    folder: Path
    changed: tuple[str, ...]
    """Tensors of the files that the adapters touch."""
    unchanged: tuple[str, ...]
    """Those of them that came out as they were: their delta is zero, or lost in rounding."""
    is_untied: bool
    """Whether embedding and head were one weight in the base and are two in the result."""
    num_kept: int
    """Files that an interrupted merge had left, and that were taken as they were."""


def merge_adapters(
    base: str,
    adapters: Mapping[Path, float],
    out: Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda message: None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> MergeReport:
    """Write the model that base and adapters make together, in the base's files.

        W  becomes  round(W + sum of weight * scaling * B @ A)

    What PEFT's ``merge_and_unload`` makes of the base in float32, rounded once to the dtype of the
    result: bit for bit PEFT's own for a float32 result. Every tensor of the adapters is used. If
    embedding and head are one weight and an adapter changes one of them, the result holds both, and
    ``tie_word_embeddings`` is false.

    Memory: a few rows of a tensor for each core, and for a float32 base the deltas of one or two;
    never a file. The cores are shared out by rows, so the result does not depend on their number.

    Args:
        base: Folder or hub id.
        adapters: Folder of a PEFT adapter to the weight of its delta. The tokenizer of the first,
            if it has one, goes into the result.
        out: The folder to be; it appears whole. What a killed merge left beside it is used, where
            base, adapters and options are the same.
        revision: Of the hub id.
        dtype: Of the result; each tensor keeps its own when left out.
        overwrite: Replace ``out`` if it exists.
        progress: Called with one line before each long step.
        on_bytes: Called with bytes written and bytes to write.

    Raises:
        ArtifactError: If an adapter is damaged, does not fit or cannot be merged, the base is
            quantised, the sum is not finite, or the disk has no room.
    """
    with FileTensors(read_checkpoint(find_base_folder(base, revision=revision))) as source:
        return merge_into(
            source,
            adapters,
            out,
            dtype=dtype,
            overwrite=overwrite,
            progress=progress,
            on_bytes=on_bytes,
        )


def merge_into(
    source: BaseTensors,
    adapters: Mapping[Path, float],
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda message: None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> MergeReport:
    """``merge_adapters`` into tensors from a source; the rest and its errors are as there."""
    if not adapters:
        raise ArtifactError(f"{out}: no adapter was named; name one folder at least")
    progress("reading names and shapes")
    checkpoint = source.checkpoint
    found, changes = read_base_and_adapters(source, adapters)
    plan = plan_merge(found, checkpoint, changes, dtype=dtype)
    with kept_aside(out, overwrite=overwrite) as aside:
        journal = _Journal(aside, _fingerprint(source, adapters, dtype))
        _check_room(aside, plan, journal)
        with FileMerger(source, plan, _counted(plan, on_bytes)) as merger:
            for file in plan.files:
                if not journal.has(file):
                    progress(f"writing {file.name}")
                    merger.write(file, journal.part(file), partial(journal.note, file))
            merger.finish()
        _write_beside(source, next(iter(adapters)), plan, aside)
        journal.close()
    return MergeReport(
        folder=out,
        changed=tuple(tensor.name for tensor in plan.tensors if tensor.is_changed),
        unchanged=tuple(merger.unchanged),
        is_untied=plan.is_untied,
        num_kept=journal.num_kept,
    )


class _Journal:
    """Which files of a merge are whole, so that a killed one goes on where it was."""

    def __init__(self, folder: Path, fingerprint: list[object]) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self._done: dict[str, list[int]] = {}
        self.num_kept = 0
        if not self._read():
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def has(self, file: OutFile) -> bool:
        """Whether a file is there and nobody has written to it since it was brought to disk."""
        path = self._folder / file.name
        is_whole = path.is_file() and self._done.get(file.name) == _state(path)
        self.num_kept += is_whole
        return is_whole

    def part(self, file: OutFile) -> Path:
        """Where it is written until it is whole."""
        return self._folder / f"{file.name}.part"

    def note(self, file: OutFile) -> None:
        """A file is whole, and on the disk: give it its name, then say so."""
        path = self._folder / file.name
        self.part(file).replace(path)
        self._done[file.name] = _state(path)
        text = json.dumps({"of": self._fingerprint, "done": self._done})
        draft = self._folder / f"{_JOURNAL}.part"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self._folder / _JOURNAL)

    def close(self) -> None:
        """Leave nothing of it in the result."""
        for path in (self._folder / _JOURNAL, *self._folder.glob("*.part")):
            path.unlink(missing_ok=True)

    def _read(self) -> bool:
        try:
            held = json.loads((self._folder / _JOURNAL).read_text(encoding="utf-8"))
            self._done = dict(held["done"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(held["of"] == self._fingerprint)


def _state(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


def _fingerprint(
    source: BaseTensors, adapters: Mapping[Path, float], dtype: torch.dtype | None
) -> list[object]:
    """What a merge is made from; one that differs in any of it starts anew."""
    checkpoint = source.checkpoint
    paths = [checkpoint.folder / file for file in checkpoint.files]
    paths += [path for folder in adapters for path in sorted(folder.glob("adapter_*"))]
    read = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in paths]
    return [read, list(adapters.values()), str(dtype), source.form]


def _counted(plan: MergePlan, on_bytes: Callable[[int, int], None]) -> Callable[[int], None]:
    total, done = plan.num_bytes, 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_bytes(min(done, total), total)

    return count


def _check_room(aside: Path, plan: MergePlan, journal: _Journal) -> None:
    held = sum(path.stat().st_size for path in aside.iterdir() if path.is_file())
    free = shutil.disk_usage(aside).free
    if free + held < plan.num_bytes:
        raise ArtifactError(
            f"{aside.parent}: {free:,} bytes are free, the merged model takes "
            f"{plan.num_bytes:,}; make room or name another place"
        )


def _write_beside(source: BaseTensors, adapter: Path, plan: MergePlan, aside: Path) -> None:
    """Index, config, generation config, tokenizer, template, licence."""
    checkpoint = source.checkpoint
    copy_side_files(checkpoint.folder, adapter, aside)
    if len(plan.files) > 1 or checkpoint.index is not None:
        names = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
        write_index(aside, names, checkpoint.index, plan.num_bytes)
    source.finish(aside)
    if plan.is_untied:
        untie_in_config(aside)
    if plan.vocab_size is not None:
        grow_in_config(aside, plan.vocab_size)
    if plan.dtype is not None:
        cast_in_config(aside, plan.dtype)
