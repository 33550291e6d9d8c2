"""W + scaling * B @ A, written into a copy of the base's own files, on the CPU, for any tp_size.

Each weight file is copied and the adapted tensors are changed in place in the copy, a few rows at a
time. Names, shards, index, dtype and every other tensor stay the base's, byte for byte.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tplora.artifact.adapter_dir import read_adapter
from tplora.artifact.change import (
    MergedTensor,
    apply_change,
    check_applied,
    copy_tensor,
    sum_dtype,
)
from tplora.artifact.checkpoint import Checkpoint, find_base_folder, read_checkpoint
from tplora.artifact.merge_plan import MergeJob, MergePlan, plan_merge
from tplora.artifact.side_files import (
    copy_side_files,
    grow_in_config,
    untie_in_config,
    write_index,
)
from tplora.artifact.tensor_file import Place, copy_file, create_file, read_places
from tplora.errors import ArtifactError
from tplora.files import written_aside

__all__ = ["MergeReport", "MergedTensor", "merge_adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge wrote."""

    folder: Path
    tensors: tuple[MergedTensor, ...]
    is_untied: bool
    """Whether embedding and head were one weight in the base and are two in the result."""

    @property
    def max_abs_change(self) -> float:
        """Over all tensors; 0 if the adapter changes nothing in the base's dtype."""
        return max(tensor.max_abs_change for tensor in self.tensors)

    @property
    def max_abs_error(self) -> float:
        """Over all tensors: what rounding to the base's dtype costs."""
        return max(tensor.max_abs_error for tensor in self.tensors)


def merge_adapter(
    base: str,
    adapter_folder: Path,
    out: Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> MergeReport:
    """Write the model that base and adapter make together, in the base's dtype and files.

        W  becomes  round(W + scaling * B @ A),  summed in float32 (float64 for a float64 base)

    Every tensor of the adapter is used exactly once. Every merged weight is read back and compared
    with the exact sum. If embedding and head are one weight and the adapter changes one of them,
    the result holds both, and ``tie_word_embeddings`` is false.

    Args:
        base: Folder or hub id.
        adapter_folder: A PEFT adapter; its tokenizer, if it has one, goes into the result.
        out: The folder to be; it appears whole.
        revision: Of the hub id.
        overwrite: Replace ``out`` if it exists.
        progress: Called with one line per weight file.

    Raises:
        ArtifactError: If the adapter is damaged, does not fit, is more than plain LoRA, the base is
            quantised, the sum is not finite, or the disk has no room.
    """
    adapter = read_adapter(adapter_folder)
    checkpoint = read_checkpoint(find_base_folder(base, revision=revision))
    plan = plan_merge(adapter, checkpoint)
    with written_aside(out, overwrite=overwrite) as aside:
        _check_room(aside, checkpoint)
        copy_side_files(checkpoint.folder, adapter_folder, aside)
        places = _copy_weights(checkpoint, plan, aside, progress)
        if plan.is_untied:
            untie_in_config(aside)
        if plan.vocab_size is not None:
            grow_in_config(aside, plan.vocab_size)
        tensors = _merge_jobs(checkpoint, plan, places, progress)
    return MergeReport(folder=out, tensors=tensors, is_untied=plan.is_untied)


def _check_room(aside: Path, checkpoint: Checkpoint) -> None:
    free = shutil.disk_usage(aside).free
    if free < checkpoint.num_bytes:
        raise ArtifactError(
            f"{aside.parent}: {free:,} bytes are free, the merged model takes "
            f"{checkpoint.num_bytes:,}; make room or name another place"
        )


def _copy_weights(
    checkpoint: Checkpoint, plan: MergePlan, aside: Path, progress: Callable[[str], None]
) -> Mapping[str, tuple[Path, Place]]:
    """Copy the base's weight files, add one per new tensor; where each tensor of the result is."""
    places: dict[str, tuple[Path, Place]] = {}
    held: dict[str, set[str]] = {file: set() for file in plan.file_names}
    for name, (file, _) in checkpoint.tensors.items():
        held[file].add(name)
    for file, copy in plan.file_names.items():
        progress(f"copying {file}")
        grown = {name: rows for name, rows in plan.grown.items() if name in held[file]}
        copy_file(checkpoint.folder / file, aside / copy, grown)
        found = read_places(aside / copy)
        places.update({name: (aside / copy, place) for name, place in found.items()})
    for name, file in plan.new_files.items():
        like = checkpoint.tensors[plan.sources[name]][1]
        num_rows = plan.grown.get(name, like.shape[0])
        places[name] = (aside / file, create_file(aside / file, name, like.with_rows(num_rows)))
    if plan.new_files or checkpoint.index is not None:
        write_index(
            aside, {name: place[0].name for name, place in places.items()}, checkpoint.index
        )
    return places


def _merge_jobs(
    checkpoint: Checkpoint,
    plan: MergePlan,
    places: Mapping[str, tuple[Path, Place]],
    progress: Callable[[str], None],
) -> tuple[MergedTensor, ...]:
    progress(f"merging {len(plan.jobs)} tensors")
    merged = (_merge_job(checkpoint, job, places[job.name]) for job in plan.jobs)
    return tuple(tensor for tensor in merged if tensor is not None)


def _merge_job(
    checkpoint: Checkpoint, job: MergeJob, target: tuple[Path, Place]
) -> MergedTensor | None:
    """Write one tensor, then open the file again and check it."""
    file, base = checkpoint.tensors[job.source]
    path, place = target
    with ExitStack() as stack:
        source = stack.enter_context((checkpoint.folder / file).open("rb"))
        if job.read is None:
            copy_tensor(source, base, stack.enter_context(path.open("r+b")), place)
            return None
        change = job.read(sum_dtype(base))
        with path.open("r+b") as stream:
            apply_change(change, job.name, source, base, stream, place)
        return check_applied(
            change, job.name, source, base, stack.enter_context(path.open("rb")), place
        )
