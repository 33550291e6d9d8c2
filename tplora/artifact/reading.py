"""A base without weights, and adapters on it as PEFT reads them: what a merge is planned from."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from tplora.artifact.adapter_dir import AdapterFiles, read_adapter
from tplora.artifact.adapter_fit import check_fits_base
from tplora.artifact.base_tensors import read_whole
from tplora.artifact.checkpoint import Checkpoint, TiedPair, tied_pair
from tplora.artifact.mergeable import check_mergeable, check_saved, name_mismatch
from tplora.artifact.peft_changes import ParameterChange, changes_of
from tplora.artifact.plain_folder import plain_folder
from tplora.artifact.tensor_file import row_chunks
from tplora.errors import ArtifactError
from tplora.upstream import build_meta_model
from tplora.upstream.checkpoint_layout import (
    CheckpointLayout,
    WeightGroup,
    read_checkpoint_layout,
)
from tplora.upstream.peft_keys import is_second_copy
from tplora.upstream.peft_reading import adapters_on_meta, base_parameter_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from transformers import PreTrainedModel

    from tplora.artifact.base_tensors import BaseTensors

__all__ = ["MetaBase", "read_base_and_adapters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaBase:
    """What the files of a base make together, by name and shape."""

    layout: CheckpointLayout
    shapes: Mapping[str, tuple[int, ...]]
    """Of every parameter and buffer of the model."""
    tied: TiedPair | None
    keeps_ties: bool
    """Whether the adapters train what is tied as one weight."""
    vocabulary: tuple[str, ...]
    """Embedding and head."""
    vocab_size: int
    """Rows of the embedding, as the files hold it."""
    adapter_folder: Path
    """Of the first adapter; for messages."""

    def groups_of(self, parameter: str) -> tuple[WeightGroup, ...]:
        """The groups of file tensors that hold a parameter in another form."""
        return self.layout.groups[parameter]

    def parameter_of(self, file_name: str) -> str:
        """The parameter that a tensor of the files is; its own name if it is none."""
        found = (name for name, held in self.layout.plain.items() if held == file_name)
        return next(found, file_name)

    def file_name_of(self, parameter: str) -> str:
        """What a file would call a parameter that it does not hold: its other half's way."""
        for name, held in self.layout.plain.items():
            if name in self.vocabulary and held.endswith(name):
                return held.removesuffix(name) + parameter
        return parameter

    def mismatch(self, parameter: str, names: Collection[str]) -> ArtifactError:
        """The error for a parameter that the files do not hold."""
        return name_mismatch(self.adapter_folder, parameter, names)


def read_base_and_adapters(
    source: BaseTensors, adapters: Mapping[Path, float]
) -> tuple[MetaBase, dict[str, ParameterChange]]:
    """Build the base without weights, put the adapters on it, and see what they change.

    Args:
        source: The base's tensors.
        adapters: Folder to the weight that its delta is taken with.

    Raises:
        ArtifactError: If transformers cannot build the model, or an adapter does not fit it.
    """
    checkpoint = source.checkpoint
    read = [read_adapter(folder) for folder in adapters]
    for one in read:
        check_mergeable(one, is_alone=len(read) == 1)
    model = _build(checkpoint)
    layout = read_checkpoint_layout(
        model, {name: place.shape for name, (_, place) in checkpoint.tensors.items()}
    )
    tied, vocab_size = tied_pair(model), model.get_input_embeddings().weight.shape[0]
    _check_files(checkpoint, layout, model)
    num_tokens = max(one.num_tokens for one in read)
    if num_tokens > vocab_size:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    vocabulary = _vocabulary(model)
    base = MetaBase(
        layout=layout,
        shapes=shapes,
        tied=tied,
        keeps_ties=any(one.config.ensure_weight_tying for one in read),
        vocabulary=vocabulary,
        vocab_size=vocab_size,
        adapter_folder=read[0].folder,
    )
    for one in read:
        _check_fits(one, base, checkpoint)
        _check_saved_bases(one, base, source)
    return base, _changes(model, read, list(adapters.values()), base, checkpoint)


def _build(checkpoint: Checkpoint) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder)
        return build_meta_model(config, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ArtifactError(
            f"{checkpoint.folder}: transformers cannot build this model "
            f"({str(error).partition(chr(10))[0]}), so it is not known which tensor of the files "
            "is which weight; merge with peft's merge_and_unload"
        ) from error


def _vocabulary(model: PreTrainedModel) -> tuple[str, ...]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(f"{names[id(end)]}.weight" for end in ends if end is not None)


def _check_files(checkpoint: Checkpoint, layout: CheckpointLayout, model: PreTrainedModel) -> None:
    """The files have to hold what the config says."""
    state = model.state_dict()
    for name, held in layout.plain.items():
        found = checkpoint.tensors[held][1].shape
        if tuple(found) != tuple(state[name].shape):
            raise ArtifactError(
                f"{checkpoint.folder}: {held} has shape {list(found)}, its config.json makes a "
                f"model of {list(state[name].shape)} there; the two do not belong together, get "
                "them again"
            )


def _check_fits(adapter: AdapterFiles, base: MetaBase, checkpoint: Checkpoint) -> None:
    """Shapes of the factors, of those that the model knows by the name that the file gives them."""
    known = [
        pair
        for pair in adapter.pairs
        if f"{pair.module}.weight" in base.shapes and pair.num_matrices == 1
    ]
    for pair in known:
        name = f"{pair.module}.weight"
        check_fits_base(replace(adapter, pairs=(pair,)), {name: base.shapes[name]})


def _check_saved_bases(adapter: AdapterFiles, base: MetaBase, source: BaseTensors) -> None:
    """A base weight saved with the adapter has to be the base's, or something else was trained."""
    for module, key in adapter.saved_bases.items():
        name = f"{module}.weight"
        tied = base.tied
        is_held = name in base.layout.plain or name in base.layout.groups
        if not is_held and tied is not None and name == tied.head:
            name = tied.embedding
        if name not in base.layout.plain and name not in base.layout.groups:
            raise base.mismatch(name, source.checkpoint.tensors)
        saved = adapter.tensor(key)
        if not _holds(source, base, name, saved):
            raise ArtifactError(
                f"{adapter.folder}: {key} {list(saved.shape)} is not the base's {name} "
                f"{list(base.shapes[name])}; a resized or trained weight was saved, or this is "
                "another base"
            )


def _holds(source: BaseTensors, base: MetaBase, name: str, saved: torch.Tensor) -> bool:
    """Whether the base holds ``saved`` as a parameter, rounded to its dtype."""
    if name in base.layout.groups:
        (group,) = base.layout.groups[name]
        parts = {part: read_whole(source, part) for part in group.names}
        found = group.to_model(parts)[name]
        return torch.equal(saved.to(found.dtype), found)
    held = base.layout.plain[name]
    place = source.checkpoint.tensors[held][1]
    if tuple(saved.shape) != place.shape:
        return False
    tensor = source.tensor(held)
    tensor.prepare()
    return all(
        torch.equal(saved[rows].to(place.dtype), tensor.rows(rows)) for rows in row_chunks(place)
    )


def _changes(
    model: PreTrainedModel,
    adapters: list[AdapterFiles],
    weights: list[float],
    base: MetaBase,
    checkpoint: Checkpoint,
) -> dict[str, ParameterChange]:
    names = {f"adapter{k}": one for k, one in enumerate(adapters)}
    filled = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    try:
        with ExitStack() as stack:
            plain = {name: stack.enter_context(plain_folder(one)) for name, one in names.items()}
            peft_model, problems = adapters_on_meta(model, plain)
    except (ValueError, RuntimeError, KeyError, TypeError, NotImplementedError) as error:
        raise ArtifactError(
            f"{adapters[0].folder}: peft cannot put this adapter on the base "
            f"({' '.join(str(error).split())[:300]}); name the base that it was trained on"
        ) from error
    for name, (missing, unexpected) in problems.items():
        _check_read(names[name], missing, unexpected, base, checkpoint)
    for one in adapters:
        check_saved(one)
    return changes_of(peft_model, dict(zip(names, weights, strict=True)), filled=filled)


def _check_read(
    adapter: AdapterFiles,
    missing: list[str],
    unexpected: list[str],
    base: MetaBase,
    checkpoint: Checkpoint,
) -> None:
    """Nothing that PEFT leaves out, and nothing that it would leave as it was drawn."""
    unexpected = [key for key in unexpected if not is_second_copy(key, adapter.shapes)]
    for pair in adapter.pairs:
        module = pair.module.replace(".base_layer", "")
        if not any(name.startswith(f"{module}.") for name in base.shapes) and unexpected:
            raise name_mismatch(adapter.folder, f"{module}.weight", checkpoint.tensors)
    if unexpected:
        raise name_mismatch(adapter.folder, base_parameter_name(unexpected[0]), checkpoint.tensors)
    if missing:
        raise ArtifactError(
            f"{adapter.folder}: peft finds nothing for {base_parameter_name(missing[0])} and "
            f"{len(missing) - 1} more that its config asks for; save the adapter again"
        )
