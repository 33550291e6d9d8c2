"""The names and types that ``[lora]`` and ``[train]`` may hold: the upstream classes' own.

peft and trl take seconds to import, so they are imported when a recipe is checked, not before.
"""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tplora.recipe.methods import DEFAULT_METHOD, METHODS
from tplora.recipe.wording import say_type

__all__ = ["OWN_TRAIN_KEYS", "UpstreamField", "check_lora_config", "lora_fields", "train_fields"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamField:
    """One field of an upstream dataclass."""

    hint: Any
    default: Any

    def say_need(self, value: object) -> str | None:
        """What ``value`` would have to be, in words; None when it is that already."""
        inner = _inner_class(self.hint)
        if inner is not None and isinstance(value, dict):
            return _say_inner_need(inner, value)
        adapter = TypeAdapter(self.hint, config=ConfigDict(arbitrary_types_allowed=True))
        try:
            # Strict: true is no number and 60.0 no whole one, but a whole number is a number.
            adapter.validate_python(value, strict=True)
        except ValidationError:
            return say_type(self.hint)
        names = _enum_names(self.hint)
        return say_type(self.hint) if names and value not in names else None


_OURS = {
    "experts": UpstreamField(hint=bool, default=False),
    "loftq": UpstreamField(hint=bool, default=False),
    "adapter_name_or_path": UpstreamField(hint=str | None, default=None),
    "autocast_adapter_dtype": UpstreamField(hint=bool, default=True),
    "loraplus_lr_ratio": UpstreamField(hint=float | None, default=None),
    "loraplus_lr_embedding": UpstreamField(hint=float | None, default=None),
}


_OUR_TRAIN = {
    "method": UpstreamField(hint=str, default=DEFAULT_METHOD),
    "early_stopping_patience": UpstreamField(hint=int | None, default=None),
    "early_stopping_threshold": UpstreamField(hint=float, default=0.0),
}
OWN_TRAIN_KEYS = tuple(_OUR_TRAIN)
"""Keys of ``[train]`` that trl's configs do not have; the last two are a callback's arguments."""


def lora_fields() -> Mapping[str, UpstreamField]:
    """The fields of peft's ``LoraConfig``, and ours."""
    from peft import LoraConfig  # noqa: PLC0415  (slow, see the module's docstring)

    return {**_fields(LoraConfig), **_OURS}


def train_fields(method: str = DEFAULT_METHOD) -> Mapping[str, UpstreamField]:
    """The fields of trl's config for a method, of ``TrainingArguments`` among them, and ours."""
    import trl  # noqa: PLC0415  (slow, see the module's docstring)

    fields = dict(_fields(getattr(trl, METHODS[method].config)))
    if get_args(fields["loss_type"].hint):  # trl takes one name for a list of one
        found = fields["loss_type"]
        fields["loss_type"] = UpstreamField(hint=found.hint | str, default=found.default)
    return {**fields, **_OUR_TRAIN}


def check_lora_config(lora: Mapping[str, Any]) -> None:
    """Build peft's own ``LoraConfig`` once and drop it; its rules between fields are peft's.

    Raises:
        ValueError: In peft's words.
        TypeError: In peft's words.
    """
    from peft import LoraConfig  # noqa: PLC0415  (slow, see the module's docstring)

    if "adapter_name_or_path" in lora:
        return
    theirs = {key: value for key, value in lora.items() if key not in _OURS}
    LoraConfig(**{"task_type": "CAUSAL_LM", **theirs})


@cache
def _fields(cls: type) -> Mapping[str, UpstreamField]:
    hints = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[field.name] = UpstreamField(hint=hints[field.name], default=default)
    return found


def _inner_class(hint: object) -> type | None:
    """The config inside a config that a table of the recipe fills, such as ``BdLoraConfig``."""
    kinds = (kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


def _say_inner_need(inner: type, values: Mapping[str, Any]) -> str | None:
    fields = _fields(inner)
    for key, value in values.items():
        if key not in fields:
            return f"a table of {', '.join(fields)}; {key} is none of them"
        need = fields[key].say_need(value)
        if need is not None:
            return f"a table whose {key} is {need}"
    return None


def _enum_names(hint: object) -> set[str]:
    """The strings that an enum in ``hint`` allows; beside it, upstream's hint takes any string."""
    kinds = (hint, *typing.get_args(hint))
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    return {str(member.value) for kind in enums for member in kind}
