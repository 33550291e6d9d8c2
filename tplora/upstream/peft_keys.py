"""Under which key of a file plain PEFT finds a factor: its loading renames keys.

PEFT 0.21 applies to an adapter's keys the renamings that transformers has for the model's own
checkpoint (``convert_peft_adapter_state_dict_for_transformers``, utils/
transformers_weight_conversion.py; transformers 5.24, core_model_loading.py). Patterns that are not
anchored hit names that are right already: ``mlp.shared_expert.`` matches ``mlp.shared_experts``,
and such a factor would be read as missing, which PEFT does not say.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from peft import LoraConfig
    from transformers import PreTrainedModel

__all__ = ["adapter_file_key", "is_second_copy", "peft_file_keys"]

_TRAINED, _ORIGINAL = ".modules_to_save.", ".original_module."
_NUMBER = re.compile(r"\.\d+(?=\.)")


def adapter_file_key(name: str, adapter_name: str) -> str:
    """The key under which PEFT saves parameter ``name`` of one adapter, before any renaming.

    ``_remove_adapter_name_from_key``, the renaming of DoRA's vector in ``LoraModel`` and
    ``ModulesToSaveWrapper.adapter_state_dict`` (peft 0.21).
    """
    name = name.replace(f".modules_to_save.{adapter_name}.", ".")
    magnitude = f".lora_magnitude_vector.{adapter_name}.weight"
    if name.endswith(magnitude):
        return name.removesuffix(magnitude) + ".lora_magnitude_vector"
    return name.replace(f".{adapter_name}", "")


def is_second_copy(key: str, keys: Collection[str]) -> bool:
    """Whether a key is one that PEFT adds to a module that is trained whole, and does not read.

    With a resized vocabulary it saves embedding and head a second time, as its wrapper names them:
    the trained weight, and what it was before (``get_peft_model_state_dict``, peft 0.21).
    """
    trained = key.replace(_ORIGINAL, _TRAINED)
    plain = trained.replace(_TRAINED, ".")
    return plain != key and (plain in keys or (trained != key and trained in keys))


def peft_file_keys(
    model: PreTrainedModel, config: LoraConfig, keys: Iterable[str]
) -> dict[str, str | None]:
    """For each key (``base_model.model.x.lora_A.weight``) the one PEFT reads as it, or None."""
    found: dict[str, str | None] = {}
    unchanged: dict[str, bool] = {}  # by the key without its numbers, which no renaming looks at
    for key in keys:
        pattern = _NUMBER.sub(".*", key)
        if pattern not in unchanged:
            unchanged[pattern] = _reads(model, config, key) == key
        found[key] = key if unchanged[pattern] else _undone(model, config, key)
    return found


def _undone(model: PreTrainedModel, config: LoraConfig, key: str) -> str | None:
    names = (name for name in _candidates(model, key) if _reads(model, config, name) == key)
    return next(names, None)


def _reads(model: PreTrainedModel, config: LoraConfig, key: str) -> str | None:
    """What PEFT makes of a file's key; None where it cannot make anything."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers as convert,
    )

    try:
        read = convert(model, config, {key: torch.zeros(1, 1)})
    except Exception:  # a conversion that wants tensors which are not there
        return None
    return str(next(iter(read))) if len(read) == 1 else None


def _candidates(model: PreTrainedModel, key: str) -> Iterator[str]:
    """The key with one renaming undone, and with all of them, last first."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    prefix, name = "base_model.model.", key.removeprefix("base_model.model.")
    renamings = [
        one.reverse_transform()
        for one in get_model_conversion_mapping(model)
        if isinstance(one, WeightRenaming)
    ]
    for renaming in renamings:
        yield prefix + str(renaming.rename_source_key(name)[0])
    for renaming in reversed(renamings):
        name = renaming.rename_source_key(name)[0]
    yield prefix + name
