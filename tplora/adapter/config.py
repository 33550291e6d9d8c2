"""The two forms of a ``LoraConfig``: the one PEFT attaches from here, the one a file carries.

PEFT decides anew from the config what to adapt whenever it attaches or loads an adapter. For most
models the user's own config says it right both times. Where something is adapted by its parameter,
or where PEFT would move a module's name onto the experts on loading, both forms spell out full
names: the file form gives modules with such names as parameters (``...gate_proj.weight``), which
PEFT leaves alone and reads from the same keys.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING

from tplora.upstream import lora_alpha_of, peft_moved_names, with_all_linear_named

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peft import LoraConfig
    from transformers import PreTrainedModel

    from tplora.plan.layer import LayerPlan

__all__ = ["attach_config", "file_config", "with_layers_named"]


def attach_config(config: LoraConfig, layers: Iterable[LayerPlan]) -> LoraConfig:
    """A copy of ``config`` that names exactly ``layers``, each by the way it is adapted."""
    layers = tuple(layers)
    if not config.target_parameters and all(layer.kind != "parameter" for layer in layers):
        return _copy(config)
    return _named(
        config,
        modules=[layer.name for layer in layers if layer.kind != "parameter"],
        parameters=[layer.name for layer in layers if layer.kind == "parameter"],
    )


def file_config(
    config: LoraConfig, layers: Iterable[LayerPlan], model: PreTrainedModel
) -> LoraConfig:
    """A copy of ``config`` from which plain PEFT adapts exactly ``layers``."""
    layers = tuple(layers)
    moved = peft_moved_names(model.config.model_type)
    at_risk = [
        layer
        for layer in layers
        if layer.kind != "parameter" and layer.name.rpartition(".")[2] in moved
    ]
    is_by_parameter = any(layer.kind == "parameter" for layer in layers)
    is_special = at_risk or is_by_parameter or config.target_parameters
    if not is_special and not (moved and isinstance(config.target_modules, str)):
        return with_all_linear_named(config, model)
    safe = [layer for layer in layers if layer.kind != "parameter" and layer not in at_risk]
    named = _named(
        config,
        modules=[layer.name for layer in safe],
        parameters=[
            *(layer.name for layer in layers if layer.kind == "parameter"),
            *(f"{layer.name}.weight" for layer in at_risk),
        ],
    )
    _keep_ranks(config, named, at_risk)
    return named


def with_layers_named(config: LoraConfig, layers: Iterable[LayerPlan]) -> LoraConfig:
    """A copy of ``config`` in which "all-linear" is spelled out as ``layers``.

    Of a model that has adapters PEFT would take in what other adapters hold beside the base.
    """
    copied = _copy(config)
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        copied.target_modules = {layer.name for layer in layers if layer.kind != "parameter"}
    return copied


def _copy(config: LoraConfig) -> LoraConfig:
    """PEFT adds to the lists of a config that it attaches."""
    copied = copy.copy(config)
    if config.modules_to_save is not None:
        copied.modules_to_save = list(config.modules_to_save)
    return copied


def _named(config: LoraConfig, *, modules: list[str], parameters: list[str]) -> LoraConfig:
    """What is chosen is spelled out; nothing that chooses stays."""
    named = _copy(config)
    named.target_modules = set(modules)
    named.target_parameters = sorted(parameters)
    named.exclude_modules = named.layers_to_transform = named.layers_pattern = None
    named.rank_pattern, named.alpha_pattern = dict(config.rank_pattern), dict(config.alpha_pattern)
    if parameters:
        named.lora_dropout = 0.0  # a file's dropout has no use, and peft refuses it on parameters
    return named


def _keep_ranks(config: LoraConfig, named: LoraConfig, at_risk: Iterable[LayerPlan]) -> None:
    """Patterns that matched a module's name are to match its parameter's."""
    for layer in at_risk:
        key = re.escape(f"{layer.name}.weight")
        alpha = lora_alpha_of(config, layer.name)
        if layer.r != config.r:
            named.rank_pattern[key] = layer.r
        if alpha != config.lora_alpha:
            named.alpha_pattern[key] = alpha
