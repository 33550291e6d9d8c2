"""What a merge will write, decided from names and shapes before a byte is copied."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from tplora.artifact.adapter_dir import AdapterFiles, check_fits_base
from tplora.artifact.change import AddedBias, Change, Delta, Replaced, ReplacedRows
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
    read: Callable[[torch.dtype], Change] | None
    """Reads what changes it; None for the untouched half of a tied weight."""
    num_rows: int
    """Of the result; more than the base's where tokens were added."""


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
    grown: Mapping[str, int]
    """Tensor of the result to its rows, where they are more than the base's."""

    @property
    def vocab_size(self) -> int | None:
        """Of the result, if tokens were added."""
        return max(self.grown.values(), default=None)

    @property
    def sources(self) -> Mapping[str, str]:
        """Tensor of the result to tensor of the base."""
        return {job.name: job.source for job in self.jobs}


def plan_merge(adapter: AdapterFiles, checkpoint: Checkpoint) -> MergePlan:
    """Match every tensor of the adapter with a tensor of the base.

    Raises:
        ArtifactError: If one does not fit, cannot be merged, or the base's is not a plain float.
    """
    check_mergeable(adapter)
    changes = _without_tied_copies(adapter, checkpoint, _changes(adapter))
    tied = _find_touched_tie(adapter, checkpoint, changes)
    aliases = _aliases(checkpoint, tied)
    _check_tensors(adapter, checkpoint, aliases, changes)
    _check_saved_bases(adapter, checkpoint, aliases)
    jobs = [
        MergeJob(
            name=name,
            source=aliases.get(name, name),
            read=change.read,
            num_rows=max(change.num_rows, checkpoint.tensors[aliases.get(name, name)][1].shape[0]),
        )
        for name, change in changes.items()
    ]
    jobs += [
        MergeJob(
            name=name, source=source, read=None, num_rows=checkpoint.tensors[source][1].shape[0]
        )
        for name, source in aliases.items()
        if name not in changes
    ]
    file_names, new_files = _name_files(checkpoint, aliases)
    grown = {
        job.name: job.num_rows
        for job in jobs
        if job.num_rows > checkpoint.tensors[job.source][1].shape[0]
    }
    _check_halves_grow(adapter, checkpoint, tied, jobs, max(grown.values(), default=0))
    return MergePlan(
        jobs=tuple(jobs),
        is_untied=tied is not None,
        file_names=file_names,
        new_files=new_files,
        grown=grown,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What changes one tensor of the base."""

    key: str
    """Of the adapter's file; for messages."""
    read: Callable[[torch.dtype], Change]
    shape: tuple[int, ...] | None
    """That the base's tensor has to have; None where its rows alone are looked at."""
    num_rows: int = 0
    """Of the result, where the adapter says so."""


def _changes(adapter: AdapterFiles) -> dict[str, _Planned]:
    """Every tensor of the base that the adapter changes, by its name."""
    found: dict[str, _Planned] = {}
    for pair in adapter.pairs:
        found[f"{pair.module}.weight"] = _Planned(
            key=pair.a, read=partial(Delta.read, adapter, pair), shape=pair.weight_shape
        )
        if pair.bias is not None:
            found[f"{pair.module}.bias"] = _Planned(
                key=pair.bias,
                read=partial(AddedBias.read, adapter, pair),
                shape=adapter.shapes[pair.bias],
            )
    for module, key in adapter.trained_tokens.items():
        indices = _token_indices(adapter, module, key)
        found[f"{module}.weight"] = _Planned(
            key=key,
            read=partial(ReplacedRows.read, adapter, key, indices),
            shape=None,
            num_rows=max(indices) + 1,
        )
    for name, key in adapter.others.items():
        shape = adapter.shapes[key]
        found[name] = _Planned(
            key=key, read=partial(Replaced.read, adapter, key), shape=shape, num_rows=shape[0]
        )
    return found


def _token_indices(adapter: AdapterFiles, module: str, key: str) -> tuple[int, ...]:
    """Which rows of a module's weight were trained, by PEFT's rule for names.

    Raises:
        ArtifactError: If the config does not say, or says another number of them.
    """
    given = adapter.config.trainable_token_indices
    if isinstance(given, dict):
        given = next((found for name, found in given.items() if module.endswith(name)), None)
    num_rows = adapter.shapes[key][0]
    if given is None or len(given) != num_rows:
        raise ArtifactError(
            f"{adapter.folder}: {key} holds {num_rows} tokens' rows, trainable_token_indices names "
            f"{0 if given is None else len(given)}; save the adapter again"
        )
    return tuple(given)


def _find_touched_tie(
    adapter: AdapterFiles, checkpoint: Checkpoint, changes: Mapping[str, _Planned]
) -> TiedPair | None:
    """Embedding and head if they are one weight and the adapter changes one of them alone.

    Building the model to ask is spared where all changes are in numbered layers: neither embedding
    nor head ever is. A head follows the embedding's tokens, unless it was given its own.
    """
    outside = {name for name in changes if not any(part.isdigit() for part in name.split("."))}
    if adapter.config.ensure_weight_tying:
        return None
    tied = find_tied_pair(checkpoint.folder) if outside else None
    if tied is None:
        return None
    tokens = {f"{module}.weight" for module in adapter.trained_tokens}
    touched = outside & {tied.embedding, tied.head}
    follows = touched == {tied.embedding} <= tokens
    return None if follows or not touched else tied


def _without_tied_copies(
    adapter: AdapterFiles, checkpoint: Checkpoint, changes: Mapping[str, _Planned]
) -> dict[str, _Planned]:
    """What was trained as one weight is in the adapter under both names, in the base under one."""
    tied = find_tied_pair(checkpoint.folder) if adapter.config.ensure_weight_tying else None
    halves = {tied.embedding, tied.head} if tied is not None else set()
    copies = {name for name in halves & changes.keys() if name not in checkpoint.tensors}
    if len(halves & changes.keys()) < 2:
        return dict(changes)
    return {name: change for name, change in changes.items() if name not in copies}


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


def _check_halves_grow(
    adapter: AdapterFiles,
    checkpoint: Checkpoint,
    tied: TiedPair | None,
    jobs: list[MergeJob],
    vocab_size: int,
) -> None:
    """Where a tie becomes two weights and one of them grows, so does the other."""
    if tied is None or not vocab_size:
        return
    rows = {job.name: job.num_rows for job in jobs}
    for half in (tied.embedding, tied.head):
        found = rows[half] if half in rows else checkpoint.tensors[half][1].shape[0]
        if found < vocab_size:
            raise ArtifactError(
                f"{adapter.folder}: holds {vocab_size} tokens, and {half}, which the base ties, "
                f"would keep {found}; train new tokens of both (ensure_weight_tying = true)"
            )


def _check_tensors(
    adapter: AdapterFiles,
    checkpoint: Checkpoint,
    aliases: Mapping[str, str],
    changes: Mapping[str, _Planned],
) -> None:
    shapes = {}
    for name, change in changes.items():
        source = aliases.get(name, name)
        if source not in checkpoint.tensors:
            raise name_mismatch(adapter, name, checkpoint.tensors)
        file, place = checkpoint.tensors[source]
        if place.dtype is None:
            raise ArtifactError(
                f"{checkpoint.folder / file}: {source} is stored as {place.stored_as}; "
                "only F16, BF16, F32 and F64 can be merged into, name the base in one of them"
            )
        shapes[name] = place.shape
        _check_shape(adapter, name, change, place.shape)
    check_fits_base(adapter, shapes)


def _check_shape(
    adapter: AdapterFiles, name: str, change: _Planned, found: tuple[int, ...]
) -> None:
    """Of what is put in a tensor's place; the factors' shapes are ``check_fits_base``'s."""
    shape = adapter.shapes[change.key]
    is_grown = change.num_rows > found[0] and len(shape) == 2
    is_factor = change.num_rows == 0 and len(found) == 2
    if not is_factor and shape[1:] != found[1:]:
        is_grown = False
    elif is_factor or change.shape in (None, found) or is_grown:
        return
    raise ArtifactError(
        f"{adapter.folder}: {change.key} has shape {list(shape)}, {name} of the base has "
        f"{list(found)}; name the base that this adapter was trained on"
    )


def _check_saved_bases(
    adapter: AdapterFiles, checkpoint: Checkpoint, aliases: Mapping[str, str]
) -> None:
    """A base weight saved with the adapter has to be the base's, or something else was trained."""
    for module, key in adapter.saved_bases.items():
        name = f"{module}.weight"
        source = aliases.get(name, name)
        if source not in checkpoint.tensors:
            raise name_mismatch(adapter, name, checkpoint.tensors)
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
