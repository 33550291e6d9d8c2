"""From a recipe's table to a ``LoraConfig``; what of one is exact, for who comes with the class."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tplora.errors import ArtifactError, PlanError
from tplora.plan.facts import read_facts
from tplora.plan.initial import as_loaded
from tplora.plan.target import expert_names
from tplora.recipe.lora_fields import OWN_KEYS
from tplora.recipe.lora_rules import say_method, say_value
from tplora.saved.config import read_saved_config
from tplora.saved.hub import fetch_adapter, is_on_hub
from tplora.upstream import build_meta_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peft import LoraConfig
    from transformers import PretrainedConfig

__all__ = ["build_lora_config", "expert_parameters", "find_config_problems", "started_from"]


def expert_parameters(config: PretrainedConfig, *, trust_remote_code: bool = False) -> list[str]:
    """What ``LoraConfig(target_parameters=...)`` takes to adapt every expert of a model.

    Args:
        config: The model's transformers config; no weight is read.
        trust_remote_code: Whether the architecture may come from the model's own code.

    Raises:
        PlanError: If the model has no expert weights.
    """
    facts = read_facts(build_meta_model(config, trust_remote_code=trust_remote_code))
    names = list(expert_names(facts))
    if not names:
        raise PlanError(
            [f"lora.experts = true: {facts.class_name} has no expert weights; leave it out"]
        )
    return names


def build_lora_config(
    lora: Mapping[str, Any], config: PretrainedConfig, *, trust_remote_code: bool = False
) -> LoraConfig:
    """The ``LoraConfig`` of a recipe's ``[lora]`` table; ``experts = true`` names the experts.

    Raises:
        PlanError: If experts are asked for and the model has none.
    """
    from peft import LoraConfig  # noqa: PLC0415  (slow; the plan of a config needs it only here)

    if "adapter_name_or_path" in lora:
        return _config_of(lora["adapter_name_or_path"])
    fields = {key: value for key, value in lora.items() if key not in OWN_KEYS}
    if lora.get("experts"):
        names = expert_parameters(config, trust_remote_code=trust_remote_code)
        fields["target_parameters"] = sorted({*names, *fields.get("target_parameters", ())})
    return LoraConfig(**fields)


def started_from(folder: str) -> Path:
    """Where the files of an adapter to start from lie: in a run's folder, right there, or fetched.

    Raises:
        ArtifactError: If it is a hub id, and the hub does not give it.
    """
    if is_on_hub(folder):
        return fetch_adapter(folder)
    inside = Path(folder) / "adapter"
    return inside if (inside / "adapter_config.json").is_file() else Path(folder)


def _config_of(folder: str) -> LoraConfig:
    """The config of a saved adapter, to be trained on."""
    where = f"lora.adapter_name_or_path = {folder!r}"
    try:
        config = read_saved_config(started_from(folder))
    except ArtifactError as error:
        raise PlanError([f"{where}: {error}"]) from None
    config.inference_mode = False
    return as_loaded(config)


def find_config_problems(config: LoraConfig) -> list[str]:
    """Every field of ``config`` that is set to something that cannot be done exactly, by name."""
    if config.peft_type != "LORA":
        return [f"{type(config).__name__}: {say_method(config.peft_type)}"]
    problems = []
    config = as_loaded(config) if config.inference_mode else config
    default = type(config)()
    defaults = {field.name: getattr(default, field.name) for field in dataclasses.fields(config)}
    for name, usual in defaults.items():
        value = getattr(config, name)
        if value == usual or not value:
            continue
        message = say_value(name, value, defaults)
        if message:
            problems.append(f"lora.{name} = {value!r}: {message}")
    return problems
