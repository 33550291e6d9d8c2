"""PEFT's config for layers that were made anew: r, alpha, patterns and targets that mean them.

What PEFT computes from the config has to be each layer's own r and scaling, so patterns are written
where layers differ, and alpha such that ``alpha / r`` is the scaling to the last bit where a float
can say it.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from peft import LoraConfig

    from tplora.artifact.convert.layers import LoadedAdapter, LoraLayer

__all__ = ["config_of"]


def config_of(
    adapter: LoadedAdapter, before: Mapping[str, LoraLayer], *, linears: Collection[str] = ()
) -> LoraConfig:
    """The config for an adapter's layers as they are now.

    Args:
        adapter: With the config that it was read with.
        before: The layers that this config was for; what it says of those stays.
        linears: All modules of the base that can be adapted, if the base is known: then targets
            are written as short as they can be.

    Raises:
        ArtifactError: If no config of PEFT means these layers.
    """
    config = copy.deepcopy(adapter.config)
    layers = adapter.layers
    if isinstance(config.target_modules, set):  # as PEFT holds names; in one order in the file
        config.target_modules = sorted(config.target_modules)
    if _facts(layers) == _facts(before):
        return config
    _set_sizes(config, layers)
    if config.target_parameters and (config.rank_pattern or config.alpha_pattern):
        raise ArtifactError(
            f"{adapter.folder}: target_parameters are adapted, and its layers would have several "
            "ranks or scalings, which PEFT tells apart by module alone; convert without this"
        )
    if config.target_parameters and isinstance(config.target_modules, str):
        raise ArtifactError(
            f"{adapter.folder}: target_modules is a pattern beside target_parameters; write the "
            "modules' names there"
        )
    if set(layers) != set(before) and not config.target_parameters:
        _set_targets(config, layers, linears)
    return config


def _facts(layers: Mapping[str, LoraLayer]) -> dict[str, tuple[int, float]]:
    return {module: (layer.r, layer.scaling) for module, layer in layers.items()}


def _set_sizes(config: LoraConfig, layers: Mapping[str, LoraLayer]) -> None:
    is_rslora = config.use_rslora
    alpha_of = {
        module: _alpha(layer.scaling, layer.r, is_rslora=is_rslora)
        for module, layer in layers.items()
    }
    r_of = {module: layer.r for module, layer in layers.items()}
    config.r, config.rank_pattern = _usual_and_pattern(r_of)
    config.lora_alpha, config.alpha_pattern = _usual_and_pattern(alpha_of)


def _set_targets(config: LoraConfig, modules: Collection[str], linears: Collection[str]) -> None:
    short = {module.rpartition(".")[2] for module in modules}
    meant = {module for module in linears if module.rpartition(".")[2] in short}
    config.target_modules = sorted(short if meant == set(modules) else modules)
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None


def _alpha(scaling: float, r: int, *, is_rslora: bool) -> float | int:
    """The alpha that PEFT makes ``scaling`` of, or the next to it."""
    divisor = math.sqrt(r) if is_rslora else r
    near = scaling * divisor
    tried = (float(round(near)), near, math.nextafter(near, math.inf), math.nextafter(near, 0))
    alpha = next((one for one in tried if one > 0 and one / divisor == scaling), near)
    return int(alpha) if alpha == int(alpha) else alpha


def _usual_and_pattern(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What most layers have, and a pattern for the others.

    A last name stands for its layers where these are alike; else each has its own entry, the
    longest first, for PEFT takes the first that a module's name ends with.
    """
    usual = Counter(values.values()).most_common(1)[0][0]
    by_last: dict[str, set[Any]] = {}
    for module, value in values.items():
        by_last.setdefault(module.rpartition(".")[2], set()).add(value)
    if all(len(found) == 1 for found in by_last.values()):
        pattern = {last: found.copy().pop() for last, found in by_last.items() if found != {usual}}
        return usual, {re.escape(last): value for last, value in pattern.items()}
    names = sorted(values, key=len, reverse=True)
    ends = [module for module in names if values[module] != usual]
    hit = [one for one in names if any(one.endswith(f".{end}") for end in ends)]
    wanted = sorted({*ends, *hit}, key=len, reverse=True)
    return usual, {_escaped(module): values[module] for module in wanted}


def _escaped(module: str) -> str:
    return re.escape(module).replace(r"\-", "-")
