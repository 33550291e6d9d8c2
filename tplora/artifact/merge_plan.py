"""What a merge will write, decided from names and shapes before a byte is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.artifact.checkpoint import SINGLE, Checkpoint
from tplora.artifact.tensor_file import Place, cast_place
from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from tplora.artifact.peft_changes import ParameterChange
    from tplora.artifact.reading import MetaBase
    from tplora.upstream.checkpoint_layout import WeightGroup

__all__ = ["MergePlan", "OutFile", "OutTensor", "plan_merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutTensor:
    """One tensor of the result."""

    name: str
    source: str
    """Its name in the base; another one where a tied weight becomes two."""
    place: Place
    """Dtype and shape in the result; where it lies is known when its file is written."""
    parameter: str | None
    """Of the model, where it is changed and lies in the file as it is in the model."""
    groups: tuple[WeightGroup, ...] = ()
    """The one that holds it, where it is changed and lies in the file in another form."""

    @property
    def num_bytes(self) -> int:
        """Of its numbers."""
        return self.place.end - self.place.begin

    @property
    def is_changed(self) -> bool:
        """Whether the adapters touch it."""
        return self.parameter is not None or bool(self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutFile:
    """One file of the result."""

    name: str
    source: str | None
    """The base's file that it follows in order and metadata; None for a new one."""
    tensors: tuple[OutTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """Files to be written."""

    files: tuple[OutFile, ...]
    changes: Mapping[str, ParameterChange]
    is_untied: bool
    """Whether embedding and head were one weight in the base and are two in the result."""
    vocab_size: int | None
    """Of the result, if tokens were added."""
    dtype: torch.dtype | None
    """Of the result's floats, where it is not the base's."""

    names: Mapping[str, tuple[str, ...]]
    """Parameter that is changed to the files' tensors that hold it."""

    def names_of(self, parameter: str) -> tuple[str, ...]:
        """The base's tensors that hold a parameter."""
        return self.names[parameter]

    @property
    def num_bytes(self) -> int:
        """Of all tensors of the result."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[OutTensor]:
        """All of them."""
        return [tensor for file in self.files for tensor in file.tensors]


def plan_merge(
    base: MetaBase,
    checkpoint: Checkpoint,
    changes: Mapping[str, ParameterChange],
    *,
    dtype: torch.dtype | None = None,
) -> MergePlan:
    """Match every change with tensors of the base's files.

    Args:
        base: The model that the files hold, without weights.
        checkpoint: The files.
        changes: By parameter of the model.
        dtype: Of the result; the base's own for each tensor when left out.

    Raises:
        ArtifactError: If one has no place, or the tensor there is not a plain float.
    """
    changes = _without_tied_copies(base, changes)
    alias = _alias(base, changes)
    touched = {name: base.groups_of(name) for name in changes if name in base.layout.groups}
    by_source = {
        name: group for groups in touched.values() for group in groups for name in group.names
    }
    plain = {base.layout.plain[name]: name for name in changes if name in base.layout.plain}
    missing = [
        name
        for name in changes
        if name not in touched and name not in alias and name not in base.layout.plain
    ]
    if missing:
        raise base.mismatch(missing[0], checkpoint.tensors)
    files, renamed = [], {}
    if alias and checkpoint.index is None:  # a file of this name would be the whole model
        renamed = {SINGLE: "model-00001-of-00002.safetensors"}
    for file in checkpoint.files:
        held = [name for name, (at, _) in checkpoint.tensors.items() if at == file]
        held.sort(key=lambda name: checkpoint.tensors[name][1].begin)
        tensors = tuple(
            _out_tensor(
                checkpoint,
                changes,
                name=name,
                source=name,
                parameter=plain.get(name),
                group=by_source.get(name),
                dtype=dtype,
            )
            for name in held
        )
        files.append(OutFile(name=renamed.get(file, file), source=file, tensors=tensors))
    for new, source in alias.items():
        tensor = _out_tensor(
            checkpoint,
            changes,
            name=base.file_name_of(new),
            source=source,
            parameter=new if new in changes else None,
            group=None,
            dtype=dtype,
        )
        name = "model-00002-of-00002.safetensors" if renamed else "model-untied.safetensors"
        files.append(OutFile(name=name, source=None, tensors=(tensor,)))
    plan = MergePlan(
        files=tuple(files),
        changes=changes,
        is_untied=_is_untied(base, changes),
        vocab_size=_vocab_size(base, changes),
        dtype=dtype,
        names={
            name: tuple(part for group in touched[name] for part in group.names)
            if name in touched
            else (alias.get(name) or base.layout.plain[name],)
            for name in changes
        },
    )
    _check_vocabulary(base, plan)
    return plan


def _out_tensor(
    checkpoint: Checkpoint,
    changes: Mapping[str, ParameterChange],
    *,
    name: str,
    source: str,
    parameter: str | None,
    group: WeightGroup | None,
    dtype: torch.dtype | None,
) -> OutTensor:
    file, place = checkpoint.tensors[source]
    if place.dtype is None and (parameter is not None or group is not None):
        raise ArtifactError(
            f"{checkpoint.folder / file}: {source} is stored as {place.stored_as}; "
            "only F16, BF16, F32 and F64 can be merged into, name the base in one of them"
        )
    if parameter is not None and place.shape:
        num_rows = changes[parameter].num_rows
        if num_rows > place.shape[0]:
            place = place.with_rows(num_rows)
    return OutTensor(
        name=name,
        source=source,
        place=place if dtype is None else cast_place(place, dtype),
        parameter=parameter,
        groups=() if group is None else (group,),
    )


def _without_tied_copies(
    base: MetaBase, changes: Mapping[str, ParameterChange]
) -> dict[str, ParameterChange]:
    """What was trained as one weight is there under both names, in the base under one."""
    tied = base.tied
    if tied is None or not base.keeps_ties or not {tied.embedding, tied.head} <= changes.keys():
        return dict(changes)
    return {
        name: change
        for name, change in changes.items()
        if name not in (tied.embedding, tied.head) or name in base.layout.plain
    }


def _is_untied(base: MetaBase, changes: Mapping[str, ParameterChange]) -> bool:
    """Whether one half of a tie changes and the other does not follow it.

    A head follows the embedding's tokens, unless it was given its own.
    """
    if base.tied is None or base.keeps_ties:
        return False
    touched = {base.tied.embedding, base.tied.head} & changes.keys()
    only_tokens = all(changes[name].tokens and len(changes[name].reads) == 1 for name in touched)
    return bool(touched) and not (touched == {base.tied.embedding} and only_tokens)


def _alias(base: MetaBase, changes: Mapping[str, ParameterChange]) -> dict[str, str]:
    """The half of a tie that the files leave out and the result holds, to the half they hold."""
    if not _is_untied(base, changes):
        return {}
    assert base.tied is not None, "what is untied was tied"
    halves = (base.tied.embedding, base.tied.head)
    return {
        name: base.layout.plain[other]
        for name, other in (halves, halves[::-1])
        if name not in base.layout.plain and other in base.layout.plain
    }


def _vocab_size(base: MetaBase, changes: Mapping[str, ParameterChange]) -> int | None:
    rows = [changes[name].num_rows for name in base.vocabulary if name in changes]
    return max((found for found in rows if found > base.vocab_size), default=None)


def _check_vocabulary(base: MetaBase, plan: MergePlan) -> None:
    """Where tokens were added, embedding and head have both to have rows for them."""
    if plan.vocab_size is None:
        return
    for tensor in plan.tensors:
        name = base.parameter_of(tensor.name)
        if name in base.vocabulary and tensor.place.shape[0] < plan.vocab_size:
            ties = "which the base ties" if plan.is_untied else "which is a weight of its own"
            raise ArtifactError(
                f"{base.adapter_folder}: holds {plan.vocab_size} tokens, and {tensor.name}, "
                f"{ties}, would keep {tensor.place.shape[0]} rows; train its new tokens too, or "
                "use the adapter unmerged"
            )
