"""Private names of peft: which modules it adapts, and with which layers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peft import LoraConfig
    from torch import nn
    from transformers import PreTrainedModel

__all__ = [
    "adapter_target_names",
    "lora_alpha_of",
    "lora_rank_of",
    "matches_pattern",
    "peft_moved_names",
    "peft_refusal",
    "peft_without_moved_names",
    "peft_without_tensor_parallelism",
    "register_lora_layers",
    "with_all_linear_named",
]


@contextlib.contextmanager
def peft_without_tensor_parallelism(model: PreTrainedModel) -> Iterator[None]:
    """PEFT sees a model without a mesh, so its own tensor-parallel path stays out of the way.

    peft 0.21 asks ``model._device_mesh`` (lora/model.py, get_tp_plan_and_mesh) and would register
    collectives of its own on colwise and rowwise layers, after the style's transforms.
    """
    has_own = "_device_mesh" in model.__dict__
    mesh = getattr(model, "_device_mesh", None)
    model._device_mesh = None
    try:
        yield
    finally:
        if has_own:
            model._device_mesh = mesh
        else:
            del model._device_mesh


@contextlib.contextmanager
def register_lora_layers(
    config: LoraConfig, layers: dict[type[nn.Module], Callable[..., nn.Module]]
) -> Iterator[None]:
    """While open, PEFT builds ``layers[type]`` for a target of that type instead of its own layer.

    ``LoraConfig._register_custom_module`` (peft 0.21). Taken back afterwards, so that the config
    stays an ordinary one that can be copied and saved.
    """
    before = config._custom_modules
    config._register_custom_module(dict(layers))
    try:
        yield
    finally:
        config._custom_modules = before


@contextlib.contextmanager
def peft_without_moved_names() -> Iterator[None]:
    """While open, PEFT adapts the modules a config names and moves none of them onto experts.

    ``convert_peft_config_for_transformers`` (peft 0.21, utils/transformers_weight_conversion.py),
    which is looked up there each time a model is adapted.
    """
    from peft.utils import transformers_weight_conversion as conversion

    original = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *args, **kwargs: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = original


def adapter_target_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """The modules that PEFT would adapt, in its own order, by its own rules.

    ``_maybe_include_all_linear_layers`` and ``check_target_module_exists`` (peft 0.21,
    tuners_utils.py). ``config`` is left as it is.
    """
    import copy

    from peft.tuners.tuners_utils import (
        _maybe_include_all_linear_layers,
        check_target_module_exists,
    )

    config = _maybe_include_all_linear_layers(copy.copy(config), model)
    return [
        name
        for name, _ in model.named_modules()
        if name and bool(check_target_module_exists(config, name))
    ]


def peft_moved_names(model_type: str) -> frozenset[str]:
    """Names that PEFT moves onto a model's expert parameters, whatever module carries them.

    ``_convert_peft_config_moe`` (peft 0.21, utils/transformers_weight_conversion.py) does so for
    models whose experts were linear layers in transformers 4, on attaching and on loading, and
    takes dense and shared ``gate_proj`` along.
    """
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    if not conversion._MOE_FUSED_TARGETS.get(pattern):
        return frozenset()
    return frozenset(conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, {}))


def peft_refusal(config: LoraConfig, model: PreTrainedModel, name: str) -> str | None:
    """Why PEFT itself would not adapt module ``name``, or None.

    ``_check_lora_target_modules_mamba`` (peft 0.21, tuners/tuners_utils.py).
    """
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(config, model, name.rpartition(".")[2])
    except ValueError as error:
        return str(error)
    return None


def lora_rank_of(config: LoraConfig, name: str) -> int:
    """The LoRA rank r of module ``name``: ``rank_pattern`` where it matches, else ``r``.

    ``get_pattern_key`` (peft 0.21, utils/other.py).
    """
    from peft.utils.other import get_pattern_key

    key = get_pattern_key(config.rank_pattern.keys(), name)
    r: int = config.rank_pattern.get(key, config.r)
    return r


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether a key of ``rank_pattern`` or ``alpha_pattern`` means module ``name``.

    ``get_pattern_key`` (peft 0.21, utils/other.py).
    """
    from peft.utils.other import get_pattern_key

    return bool(get_pattern_key([pattern], name) == pattern)


def lora_alpha_of(config: LoraConfig, name: str) -> int:
    """``lora_alpha`` of module ``name``, or ``alpha_pattern``'s where one matches."""
    from peft.utils.other import get_pattern_key

    key = get_pattern_key(config.alpha_pattern.keys(), name)
    alpha: int = config.alpha_pattern.get(key, config.lora_alpha)
    return alpha


def with_all_linear_named(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """A copy of ``config`` with "all-linear" spelled out, as PEFT does on attaching.

    ``_maybe_include_all_linear_layers`` (peft 0.21, tuners_utils.py).
    """
    import copy

    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    return _maybe_include_all_linear_layers(copy.copy(config), model)
