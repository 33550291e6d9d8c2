"""What a merge will write, decided from names and shapes before a byte is copied."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tplora.artifact.adapter_dir import AdapterFiles, FactorPair, check_fits_base
from tplora.artifact.checkpoint import SINGLE, Checkpoint, TiedPair, find_tied_pair
from tplora.artifact.mergeable import check_mergeable, name_mismatch
from tplora.artifact.tensor_file import read_rows, row_chunks
from tplora.errors import ArtifactError

__all__ = ["MergeJob", "MergePlan", "plan_merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeJob:
    """One tensor of the result that is not just a copy under the same name."""

    name: str
    source: str
    """Its name in the base; another one where a tied weight becomes two."""
    pair: FactorPair | None
    """None for the untouched half of a tied weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """Tensors to be written and files to hold them."""

    jobs: tuple[MergeJob, ...]
    is_untied: bool
    """Whether embedding and head were one weight in the base and are two in the result."""
    file_names: Mapping[str, str]
    """Weight file of the base to its name in the result; the same but for a single file untied."""
    new_files: Mapping[str, str]
    """Tensor that the base does not hold to the file made for it."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Tensor of the result to tensor of the base."""
        return {job.name: job.source for job in self.jobs}


def plan_merge(adapter: AdapterFiles, checkpoint: Checkpoint) -> MergePlan:
    """Match every tensor of the adapter with a weight of the base.

    Raises:
        ArtifactError: If one does not fit, is not plain LoRA, or the weight is not a plain float.
    """
    check_mergeable(adapter)
    tied = _find_touched_tie(adapter, checkpoint)
    aliases = _aliases(checkpoint, tied)
    _check_weights(adapter, checkpoint, aliases)
    _check_saved_bases(adapter, checkpoint, aliases)
    jobs = [
        MergeJob(name=name, source=aliases.get(name, name), pair=pair)
        for pair in adapter.pairs
        for name in (f"{pair.module}.weight",)
    ]
    adapted = {job.name for job in jobs}
    jobs += [
        MergeJob(name=name, source=source, pair=None)
        for name, source in aliases.items()
        if name not in adapted
    ]
    file_names, new_files = _name_files(checkpoint, aliases)
    return MergePlan(
        jobs=tuple(jobs), is_untied=tied is not None, file_names=file_names, new_files=new_files
    )


def _find_touched_tie(adapter: AdapterFiles, checkpoint: Checkpoint) -> TiedPair | None:
    """Embedding and head if they are one weight and the adapter changes one of them.

    Building the model to ask is spared where all adapted modules are in numbered layers: neither
    embedding nor head ever is.
    """
    outside = {
        f"{pair.module}.weight"
        for pair in adapter.pairs
        if not any(part.isdigit() for part in pair.module.split("."))
    }
    tied = find_tied_pair(checkpoint.folder) if outside else None
    return tied if tied is not None and outside & {tied.embedding, tied.head} else None


def _aliases(checkpoint: Checkpoint, tied: TiedPair | None) -> dict[str, str]:
    """The half of a tied weight that the base's files leave out, to the half that they hold."""
    if tied is None:
        return {}
    halves = ((tied.head, tied.embedding), (tied.embedding, tied.head))
    return {
        name: other
        for name, other in halves
        if name not in checkpoint.tensors and other in checkpoint.tensors
    }


def _check_weights(
    adapter: AdapterFiles, checkpoint: Checkpoint, aliases: Mapping[str, str]
) -> None:
    shapes = {}
    for pair in adapter.pairs:
        name = f"{pair.module}.weight"
        source = aliases.get(name, name)
        if source not in checkpoint.tensors:
            raise name_mismatch(adapter, pair.module, checkpoint.tensors)
        file, place = checkpoint.tensors[source]
        if place.dtype is None:
            raise ArtifactError(
                f"{checkpoint.folder / file}: {source} is stored as {place.stored_as}; "
                "only F16, BF16, F32 and F64 can be merged into, name the base in one of them"
            )
        shapes[name] = place.shape
    check_fits_base(adapter, shapes)


def _check_saved_bases(
    adapter: AdapterFiles, checkpoint: Checkpoint, aliases: Mapping[str, str]
) -> None:
    """A base weight saved with the adapter has to be the base's, or something else was trained."""
    for module, key in adapter.saved_bases.items():
        name = f"{module}.weight"
        source = aliases.get(name, name)
        if source not in checkpoint.tensors:
            raise name_mismatch(adapter, module, checkpoint.tensors)
        file, place = checkpoint.tensors[source]
        saved = adapter.tensor(key)
        with (checkpoint.folder / file).open("rb") as stream:
            is_same = tuple(saved.shape) == place.shape and all(
                torch.equal(saved[rows].to(place.dtype), read_rows(stream, place, rows))
                for rows in row_chunks(place)
            )
        if not is_same:
            raise ArtifactError(
                f"{adapter.folder}: {key} {list(saved.shape)} is not the base's {source} "
                f"{list(place.shape)}; a resized or trained weight was saved, or this is "
                "another base"
            )


def _name_files(
    checkpoint: Checkpoint, aliases: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    same = {file: file for file in checkpoint.files}
    if not aliases:
        return same, {}
    (new,) = aliases  # one half of one pair
    if checkpoint.index is None:  # a file of this name would be taken for the whole model
        return {SINGLE: "model-00001-of-00002.safetensors"}, {
            new: "model-00002-of-00002.safetensors"
        }
    return same, {new: "model-untied.safetensors"}
