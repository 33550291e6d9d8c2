"""Private names of bitsandbytes and transformers: quantised linears, their weights and states.

bitsandbytes 0.50 and transformers 5.24 throughout. Importing bitsandbytes takes time, so it is
imported by who meets a quantised linear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "BLOCK_SIZE",
    "four_bit_product",
    "four_bit_values",
    "full_linear_shape",
    "is_four_bit",
    "is_plain_linear",
    "is_quantized_linear",
    "keep_packing",
    "names_to_quantize",
    "new_four_bit_weight",
    "quantization_given",
    "quantization_method",
    "quantized_on_its_way",
    "serialized_state",
    "weight_shape",
]

BLOCK_SIZE = 64
"""Values of one scale in 4 bits: what ``Params4bit`` takes when, as in transformers, none is given.

The blocks are consecutive values of the row-major weight.
"""

_CLASSES = {"Linear4bit": 4, "Linear8bitLt": 8}


def is_quantized_linear(module: object) -> bool:
    """Whether ``module`` is a linear of bitsandbytes, by its class's name: nothing is imported."""
    kind = type(module)
    return kind.__name__ in _CLASSES and kind.__module__.startswith("bitsandbytes.")


def full_linear_shape(module: nn.Module) -> tuple[int, int]:
    """``[out, in]`` in full. The weight's own shape is packed, and on one rank it is a piece."""
    linear: Any = module
    return int(linear.out_features), int(linear.in_features)


def quantization_given(config: PretrainedConfig) -> Any:
    """The quantization that a checkpoint's config names, or None.

    As transformers' ``BitsAndBytesConfig`` where it is that; else the dict, or the object that a
    load has put in its place (``get_hf_quantizer``, quantizers/auto.py).
    """
    from transformers import BitsAndBytesConfig

    text = config.get_text_config(decoder=True)
    given = getattr(config, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )
    if not isinstance(given, dict):
        return given
    is_ours = given.get("load_in_4bit") or given.get("load_in_8bit")
    return BitsAndBytesConfig.from_dict(dict(given)) if is_ours else given


def quantized_on_its_way(model: PreTrainedModel) -> Any:
    """The config by which a load has quantised ``model``; None where its checkpoint was that.

    ``hf_quantizer.pre_quantized`` (quantizers/base.py).
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.pre_quantized:
        return None
    return quantizer.quantization_config


def quantization_method(config: Any) -> str:
    """What transformers calls the method of a quantization config, be it a dict."""
    found = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    return str(getattr(found, "value", found))


def names_to_quantize(model: PreTrainedModel, config: Any) -> list[str]:
    """The linears of a model that is not quantised yet which transformers would quantise.

    ``get_modules_to_not_convert`` (quantizers/base.py), ``should_convert_module`` (quantizers_utils
    .py) and ``replace_with_bnb_linear`` (integrations/bitsandbytes.py).
    """
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(
        model, config.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and should_convert_module(name, kept)
    ]


def serialized_state(held: Mapping[str, torch.Tensor]) -> Any:
    """The ``QuantState`` of a 4-bit weight in a checkpoint, from the tensors beside it.

    ``QuantState.from_dict`` (functional.py), which takes the dict apart.

    Raises:
        ValueError: If a tensor is missing.
    """
    from bitsandbytes.functional import QuantState

    beside = {name: tensor for name, tensor in held.items() if name != "weight"}
    try:
        return QuantState.from_dict(beside, device=held["weight"].device)
    except (KeyError, AssertionError) as error:
        raise ValueError(f"its quantization state is not whole: {error}") from None


def keep_packing(module: nn.Module) -> None:
    """Have a ``Linear4bit`` multiply by the weight that it was given, out of training as well.

    On a CPU with AVX512-BF16 it would pack the weight anew, in place, and multiply in bfloat16 from
    then on, in training without a gradient (``support_avx512bf16_for_cpu``, nn/modules.py).
    """
    vars(module)["support_avx512bf16_for_cpu"] = False


def is_four_bit(module: nn.Module) -> bool:
    """Whether a quantised linear holds 4 bits; 8 otherwise."""
    return _CLASSES[type(module).__name__] == 4


def new_four_bit_weight(
    module: nn.Module, packed: torch.Tensor, state: Any, *, is_double: bool
) -> nn.Parameter:
    """What a ``Linear4bit`` holds once it is quantised: ``Params4bit`` with its state.

    The module keeps the state as well, where a framework has lost it on the way (nn/modules.py).
    """
    from bitsandbytes.nn import Params4bit

    linear: Any = module
    linear.quant_state = state
    weight: nn.Parameter = Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=is_double,
        quant_type=state.quant_type,
        quant_storage=packed.dtype,
        module=linear,
        bnb_quantized=True,
    )
    return weight


def four_bit_product(
    module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x W^T + bias`` by a ``Linear4bit``'s weight as it is held, in ``dtype`` or its own.

    ``Linear4bit.forward`` (nn/modules.py), without the packing that it does out of training.
    """
    import bitsandbytes

    linear: Any = module
    dtype = dtype or linear.compute_dtype or x.dtype
    y: torch.Tensor = bitsandbytes.matmul_4bit(
        x.to(dtype),
        linear.weight,
        bias=None if bias is None else bias.to(dtype),
        quant_state=linear.weight.quant_state,
    )
    return y.to(x.dtype)


def four_bit_values(module: nn.Module) -> torch.Tensor:
    """``[O, I]``: what a ``Linear4bit`` holds, unpacked and scaled, in the dtype that W had."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Any = module.weight
    values: torch.Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return values


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a linear only multiplies; one of bitsandbytes does, by a weight that it unpacks."""
    return is_quantized_linear(module) or (
        isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    )


def weight_shape(module: nn.Module, leaf: str) -> tuple[int, ...]:
    """Of a parameter, in full: a quantised weight's own shape is another."""
    if leaf == "weight" and is_quantized_linear(module):
        return full_linear_shape(module)
    return tuple(map(int, module.get_parameter(leaf).shape))
