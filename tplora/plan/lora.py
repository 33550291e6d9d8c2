"""What of a ``LoraConfig`` object is exact: the recipe's rules, for who comes with the class."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tplora.recipe.lora_rules import say_value

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["find_config_problems"]

# What an adapter is and where it comes from, not what it computes.
_NOT_OPTIONS = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_type",
    "peft_version",
    "revision",
}


def find_config_problems(config: LoraConfig) -> list[str]:
    """Every field of ``config`` that is set to something that cannot be done exactly, by name."""
    problems = []
    default = type(config)()
    defaults = {field.name: getattr(default, field.name) for field in dataclasses.fields(config)}
    for name, usual in defaults.items():
        value = getattr(config, name)
        if name in _NOT_OPTIONS or value == usual or not value:
            continue
        message = say_value(name, value, defaults)
        if message:
            problems.append(f"lora.{name} = {value!r}: {message}")
    return problems
