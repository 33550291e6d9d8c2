"""How the tensors of a checkpoint's files become the parameters of a model, and the way back.

transformers renames and converts while it loads: the experts of a layer lie one by one in the files
of many models and are one stack in the model. The mapping is its own
(``get_model_conversion_mapping``, conversion_mapping.py, which PEFT uses as well; names are found
as ``convert_and_load_state_dict_in_model`` in core_model_loading.py finds them; transformers 5.24).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

__all__ = ["CheckpointLayout", "WeightGroup", "read_checkpoint_layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Tensors of the files that together are some parameters, or one expert's part of them."""

    model: PreTrainedModel
    converter: Any
    target: str
    """The name that transformers collects the group under."""
    sources: Mapping[str, tuple[str, ...]]
    """Pattern of the converter to names in the files, in the order that it takes them."""
    index: int | None
    """Which entry of dim 0 of the parameters this is; None for all of them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files' tensors."""
        return tuple(name for names in self.sources.values() for name in names)

    def to_model(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters by name, or the one expert of them, from the files' tensors."""
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, tensors[name])
        found = converter.convert(self.target, model=self.model, config=self.model.config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in found.items()
        }

    def to_files(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The files' tensors from the parameters; what ``to_model`` undoes."""
        reverse = self.converter.reverse_transform()
        found: dict[str, Any] = {}
        for name, tensor in parameters.items():
            found[reverse.rename_source_key(name)[1]] = [tensor]
        for operation in reverse.operations:
            found = operation.convert(
                found,
                source_patterns=reverse.source_patterns,
                target_patterns=reverse.target_patterns,
                full_layer_name=next(iter(parameters)),
                model=self.model,
                config=self.model.config,
                missing_keys=None,
            )
        flat = {key: t[0] if isinstance(t, list) else t for key, t in found.items()}
        return {
            name: flat[reverse.target_patterns[place].replace("*", str(k))]
            for place, pattern in enumerate(self.converter.source_patterns)
            for k, name in enumerate(self.sources.get(pattern, ()))
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLayout:
    """Every tensor of the files by what it is in the model."""

    plain: Mapping[str, str]
    """Parameter to the tensor that holds it as it is."""
    groups: Mapping[str, tuple[WeightGroup, ...]]
    """Parameter to the groups that together hold it, in the order of dim 0."""


@dataclass(slots=True)
class _Collected:
    converter: Any
    sources: dict[str, list[str]] = field(default_factory=dict)


def read_checkpoint_layout(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> CheckpointLayout:
    """Match the files' tensors, given by name and shape, with a model on the meta device."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state = model.state_dict()
    plain: dict[str, str] = {}
    collected: dict[str, _Collected] = {}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = _target(name, renamings, converters, model, state)
        if target not in state:
            continue  # nothing of this model
        if pattern is None:
            plain[target] = name
            continue
        found = collected.setdefault(target, _Collected(by_pattern[pattern]))
        found.sources.setdefault(pattern, []).append(name)
    groups: dict[str, tuple[WeightGroup, ...]] = {}
    for target, found in collected.items():
        parts = _split(model, target, found, shapes)
        empty = {name: torch.empty(shapes[name], device="meta") for name in parts[0].names}
        groups |= dict.fromkeys(parts[0].to_model(empty), parts)
    return CheckpointLayout(plain=plain, groups=groups)


def _target(
    name: str, renamings: Any, converters: Any, model: PreTrainedModel, state: Mapping[str, Any]
) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    prefix = model.base_model_prefix
    target, pattern = rename_source_key(name, renamings, converters, prefix, state)
    if target not in state and name in state:
        target, pattern = rename_source_key(
            name, [], [], base_model_prefix=prefix, meta_state_dict=state
        )
    return target, pattern


def _split(
    model: PreTrainedModel, target: str, found: _Collected, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[WeightGroup, ...]:
    """One group for each expert where nothing but stacking brings experts together."""
    whole = {pattern: tuple(names) for pattern, names in found.sources.items()}
    if not _stacks_only(found.converter) or len({len(names) for names in whole.values()}) > 1:
        group = WeightGroup(
            model=model, converter=found.converter, target=target, sources=whole, index=None
        )
        return (group,)
    num_experts = len(next(iter(whole.values())))
    return tuple(
        WeightGroup(
            model=model,
            converter=found.converter,
            target=target,
            sources={pattern: (names[k],) for pattern, names in whole.items()},
            index=k,
        )
        for k in range(num_experts)
    )


def _stacks_only(converter: Any) -> bool:
    from transformers.core_model_loading import (
        Concatenate,
        Interleave,
        MergeModulelist,
        Transpose,
    )

    first, *others = converter.operations
    if not (isinstance(first, MergeModulelist) and first.dim == 0):
        return False
    return all(
        (isinstance(one, Concatenate | Interleave) and one.dim > 0)
        or (isinstance(one, Transpose) and one.dim0 > 0 and one.dim1 > 0 and not one.check_dims)
        for one in others
    )
