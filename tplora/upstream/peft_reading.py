"""Adapters as PEFT reads them, on a model without weights: which layer changes which parameter.

``PeftModel.from_pretrained`` decides it all: how an adapter's keys are renamed, which module a
pattern means, in which order several parameters of a module nest, what is tied.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, TypeGuard
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import nn
    from transformers import PreTrainedModel

__all__ = [
    "adapters_on_meta",
    "base_parameter_name",
    "is_lora_layer",
    "lora_variant_name",
    "stack_is_transposed",
]


def adapters_on_meta(
    model: PreTrainedModel, folders: Mapping[str, Path]
) -> tuple[Any, dict[str, tuple[list[str], list[str]]]]:
    """PEFT's model over ``model``, on the meta device, with the factors of all adapters in memory.

    Returns:
        The model; for each adapter what its file lacks and what it holds that has no place.
    """
    from peft import PeftModel

    loaded: list[Any] = []
    load = PeftModel.load_adapter

    def load_and_note(*args: Any, **options: Any) -> Any:  # from_pretrained returns the model alone
        loaded.append(load(*args, **options))
        return loaded[-1]

    with (
        _factors_staying_where_they_are(),
        warnings.catch_warnings(),
        mock.patch.object(PeftModel, "load_adapter", load_and_note),
    ):
        warnings.simplefilter("ignore")  # what they say is looked at below
        peft_model: Any = None
        options = {
            "low_cpu_mem_usage": True,
            "torch_device": "cpu",
            "autocast_adapter_dtype": False,
        }
        for name, folder in folders.items():
            if peft_model is None:
                peft_model = PeftModel.from_pretrained(
                    model, str(folder), adapter_name=name, **options
                )
            else:
                peft_model.load_adapter(str(folder), name, **options)
    return peft_model, {
        name: (list(found.missing_keys), list(found.unexpected_keys))
        for name, found in zip(folders, loaded, strict=True)
    }


@contextlib.contextmanager
def _factors_staying_where_they_are() -> Iterator[None]:
    """PEFT moves a layer's factors to the device of its weight, which here is meta (peft 0.21).

    Before that it draws them, on the meta device: nothing, for a tenth of the time of it all.
    """
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.nn import init

    name = "_move_adapter_to_device_of_base_layer"
    with contextlib.ExitStack() as stack:
        for owner in (BaseTunerLayer, ParamWrapper):
            stack.enter_context(mock.patch.object(owner, name))
        stack.enter_context(mock.patch.object(init, "kaiming_uniform_", _as_it_is))
        yield


def _as_it_is(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor


def is_lora_layer(module: nn.Module) -> TypeGuard[Any]:
    """Whether PEFT has put factors of LoRA on this module."""
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer)


def lora_variant_name(layer: Any, adapter: str) -> str | None:
    """The class that PEFT computes this adapter with, where it is not plain LoRA.

    ``LoraLayer.lora_variant`` (peft 0.21).
    """
    variant = layer.lora_variant.get(adapter, None)
    return None if variant is None else type(variant).__name__


def base_parameter_name(name: str) -> str:
    """A name inside PEFT's model as the base's own ``named_parameters`` calls it."""
    inner = ("base_layer", "original_module", "token_adapter")
    parts = name.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in inner)


def stack_is_transposed(layer: Any) -> bool:
    """Whether PEFT takes a stack of experts for ``[E, in, out]``.

    ``ParamWrapper._did_swap_in_out_features`` (peft 0.21).
    """
    return not layer._did_swap_in_out_features
