"""Private names of transformers: the decoder of a model, its layers, how they are checkpointed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["around_checkpoints", "decoder_of", "fresh_meta_model", "holds_layers", "is_layer"]


def decoder_of(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The module that runs the layers of the language model, and its name.

    ``PreTrainedModel.get_decoder`` (transformers 5.24) gives it on a best effort.
    """
    decoder: nn.Module = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    return name, decoder


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer of a decoder: what transformers checkpoints.

    ``GradientCheckpointingLayer`` (transformers 5.24, modeling_layers.py).
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def holds_layers(module: nn.Module) -> bool:
    """Whether a module is or has such a layer."""
    return any(is_layer(one) for one in module.modules())


def fresh_meta_model(model: PreTrainedModel) -> PreTrainedModel:
    """Another model of the same class and config, without weights and whole, ready to train.

    The attention is the eager one (``config._attn_implementation``, transformers 5.24), which runs
    on tensors without storage.
    """
    import copy

    import torch

    config = copy.deepcopy(model.config)
    for name in ("quantization_config", "distributed_config"):
        if hasattr(config, name):
            delattr(config, name)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        made: PreTrainedModel = type(model)(config)
    return made.train()


def around_checkpoints(
    decoder: nn.Module, at_now: Callable[[], Callable[[], AbstractContextManager[None]]]
) -> None:
    """Run what is checkpointed, and what is computed again of it, as it was when it was called.

    ``_gradient_checkpointing_func`` of a module (transformers 5.24, modeling_layers.py), which
    ``gradient_checkpointing_enable`` sets, is called with the function that is checkpointed.

    Args:
        decoder: The module whose layers are checkpointed.
        at_now: Called when a layer is; gives what opens the same state later.
    """
    for module in decoder.modules():
        func = vars(module).get("_gradient_checkpointing_func")
        if func is not None and not hasattr(func, "around"):
            vars(module)["_gradient_checkpointing_func"] = _bound(func, at_now)


def _bound(
    checkpoint: Callable[..., Any],
    at_now: Callable[[], Callable[[], AbstractContextManager[None]]],
) -> Callable[..., Any]:
    def bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        at = at_now()

        @functools.wraps(function, updated=())
        def run(*given: Any, **named: Any) -> Any:
            with at():
                return function(*given, **named)

        return checkpoint(run, *args, **kwargs)

    bound.around = checkpoint  # type: ignore[attr-defined]
    return bound
