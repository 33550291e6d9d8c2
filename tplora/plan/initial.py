"""Inits that PEFT computes from W: what they ask of a config and of a layer, before anything loads.

What an init does to W decides what can be had beside it: W' = W - s B0 A0 serves one adapter, and
has to be told apart from the W that other modules share.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from peft import LoraConfig

    from tplora.plan.layer import LayerPlan

__all__ = [
    "alone_problem",
    "as_loaded",
    "changes_base",
    "find_dtype_problems",
    "find_init_problems",
    "layer_init_problem",
    "plan_trained",
]

_TAKES_FROM_BASE = re.compile(r"pissa(_niter_[1-9]\d*)?|olora|corda|lora_ga")
_NEEDS_DTYPE = re.compile(r"pissa.*|olora|corda|mica")
_DTYPES = ("float32", "bfloat16", "float16")
_NEEDS_RANK = re.compile(r"pissa.*|olora|corda|mica|lora_ga")
_VARIANTS = ("use_dora", "use_bdlora", "alora_invocation_tokens", "kasa_config")


def changes_base(config: LoraConfig) -> bool:
    """Whether attaching this adapter changes the base's weights."""
    return _takes_from_base(config.init_lora_weights) or bool(config.kasa_config)


def _takes_from_base(init: object) -> bool:
    return isinstance(init, str) and _TAKES_FROM_BASE.fullmatch(init) is not None


def as_loaded(config: LoraConfig) -> LoraConfig:
    """The config of a saved adapter, whose factors the file overwrites once they are there.

    EVA says how they began, and leaves the base as it is; what changes the base does so again.
    """
    if config.init_lora_weights != "eva":
        return config
    loaded = copy.copy(config)
    loaded.init_lora_weights, loaded.eva_config = True, None
    return loaded


def alone_problem(config: LoraConfig, others: Iterable[LoraConfig]) -> str | None:
    """Why an adapter cannot be put beside those that a model has, or None."""
    others = list(others)
    if not others or not any(map(changes_base, (config, *others))):
        return None
    which = next(one for one in (config, *others) if changes_base(one))
    field = "kasa_config" if which.kasa_config else "init_lora_weights"
    return (
        f"lora.{field} = {getattr(which, field)!r}: changes the base's weights, which adapters "
        "beside it were not trained on; save it (the file is plain LoRA for the base as it was), "
        "and load that beside the others on a fresh base"
    )


def find_init_problems(config: LoraConfig) -> list[str]:
    """Why this init, or these kinds of LoRA together, cannot be had with the config's others."""
    init = config.init_lora_weights
    kinds = [name for name in _VARIANTS if getattr(config, name)]
    kinds += ["init_lora_weights = 'mica'"] if init == "mica" else []
    problems = []
    if len(kinds) > 1:
        problems.append(f"lora.{kinds[0]}: peft has it without {kinds[1]} alone; leave one out")
    elif kinds and kinds[0] != "use_dora" and _takes_from_base(init):
        problems.append(
            f"lora.init_lora_weights = {init!r}: cannot be had with {kinds[0]}: what it takes out "
            'of the base is not put back everywhere; use "orthogonal" or true'
        )
    if init == "lora_ga" and config.lora_ga_config is None:
        problems.append("lora.lora_ga_config: missing; init_lora_weights = 'lora_ga' reads it")
    for reader in ("corda", "lora_ga"):
        if getattr(config, f"{reader}_config") and init != reader:
            problems.append(
                f"lora.{reader}_config: is read by init_lora_weights = {reader!r} alone; "
                "set that, or leave it out"
            )
    return problems


def find_dtype_problems(config: LoraConfig, base_dtype: str) -> list[str]:
    """Why this init cannot be computed from a base that is held in ``base_dtype``."""
    init = config.init_lora_weights
    if not isinstance(init, str) or not _NEEDS_DTYPE.fullmatch(init) or base_dtype in _DTYPES:
        return []
    return [
        f"lora.init_lora_weights = {init!r}: peft computes it from weights in "
        f"{', '.join(_DTYPES)}, and the base is held in {base_dtype}; set model.dtype to one of "
        'them, or use "orthogonal" or true'
    ]


def plan_trained(config: LoraConfig, layer: LayerPlan) -> LayerPlan:
    """``layer`` with what the init leaves untrained: MiCA's B."""
    if config.init_lora_weights != "mica":
        return layer
    return replace(layer, b=replace(layer.b, is_trained=False, is_grad_partial=False))


def layer_init_problem(config: LoraConfig, layer: LayerPlan, *, is_tied: bool) -> str | None:
    """Why this init cannot be had on this layer, or None.

    Args:
        config: PEFT's config.
        layer: The layer's plan.
        is_tied: Whether the layer's weight is another module's as well.
    """
    init = config.init_lora_weights
    where = f"lora.init_lora_weights = {init!r}: {layer.name}"
    if layer.kind == "parameter" and init not in (True, False, "gaussian"):
        return (
            f"{where} is a parameter, where peft does not have it; "
            'leave it out of target_parameters, or use true, false or "gaussian"'
        )
    if layer.kind == "embedding" and init != "mica":
        return None  # peft draws these as usual
    if is_tied and changes_base(config):
        return (
            f"{where} shares its weight with the embedding, which would change as well, and no "
            "saved adapter could say so; leave it out of lora.target_modules"
        )
    return _rank_problem(config, layer, where)


def _rank_problem(config: LoraConfig, layer: LayerPlan, where: str) -> str | None:
    init, smaller = config.init_lora_weights, min(layer.weight.shape)
    if init == "orthogonal" and layer.r % 2:
        return f"{where} has r = {layer.r}; an even r is needed"
    if config.kasa_config and layer.r >= smaller:
        return (
            f"lora.kasa_config: {layer.name} has r = {layer.r}, its weight's smaller side is "
            f"{smaller}; a smaller r is needed"
        )
    if isinstance(init, str) and _NEEDS_RANK.fullmatch(init):
        most = smaller // 2 if init == "lora_ga" else smaller
        if layer.r > most:
            return f"{where} has r = {layer.r}; at most {most} of its weight's vectors can be had"
    return None
