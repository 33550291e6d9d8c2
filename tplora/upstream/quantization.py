"""Private names of bitsandbytes and of transformers' quantizers: quantised linears and their state.

bitsandbytes 0.50 and transformers 5.24 throughout. Importing bitsandbytes takes time, so it is
imported by who meets a quantised linear.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "BLOCK_SIZE",
    "four_bit_product",
    "full_linear_shape",
    "is_four_bit",
    "is_quantized_linear",
    "keep_packing",
    "names_to_quantize",
    "new_four_bit_weight",
    "quantization_given",
    "quantization_method",
    "quantized_by",
    "serialized_state",
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


@contextlib.contextmanager
def quantized_by(
    quantize: Callable[[nn.Module, str, torch.Tensor, Any], nn.Parameter],
    cut: Callable[[nn.Module, str, Mapping[str, torch.Tensor]], nn.Parameter],
    tell: Callable[[str, Exception], None],
) -> Iterator[None]:
    """While open, bitsandbytes' linears of a model that loads cut are made by these two.

    transformers reads this rank's slice of a weight and calls the quantizer's operation for it,
    weight by weight. Its own operation then leaves what it made to be wrapped in a DTensor of the
    full shape, without scales.

    Entries of ``AUTO_QUANTIZER_MAPPING`` (quantizers/auto.py), ``get_quantize_ops`` and
    ``get_load_operations`` (quantizers/base.py), ``ConversionOps`` and ``DtensorShardOperation``
    (core_model_loading.py).

    Args:
        quantize: From a linear, its parameter's name, this rank's slice of the weight and the
            config of the quantization.
        cut: From a linear, its parameter's name and what a quantised checkpoint holds of it, whole.
        tell: Called with a weight's full name and what went wrong with it, which transformers
            itself only logs.
    """
    from transformers import core_model_loading as loading
    from transformers.quantizers import auto

    class Quantize(loading.ConversionOps):  # type: ignore[misc]
        def __init__(self, quantizer: Any) -> None:
            self.hf_quantizer = quantizer

        def convert(self, input_dict: Any, *, model: Any, **_settings: Any) -> Any:
            config, made = self.hf_quantizer.quantization_config, {}
            for name, value in input_dict.items():
                with _telling(name, tell):
                    made[name] = quantize(*_owner(model, name), _first(value), config)
            return made

    class Cut(loading.ConversionOps):  # type: ignore[misc]
        def __init__(self, quantizer: Any) -> None:
            self.hf_quantizer = quantizer  # asked for by get_new_dtype (quantizers/base.py)

        def convert(
            self, input_dict: Any, *, model: Any, full_layer_name: str, **_settings: Any
        ) -> Any:
            module, leaf = _owner(model, full_layer_name)
            held = {name: _first(value) for name, value in input_dict.items()}
            if not is_quantized_linear(module):
                return held
            with _telling(full_layer_name, tell):
                return {"weight": cut(module, leaf, held)}

    before = dict(auto.AUTO_QUANTIZER_MAPPING)
    for method in ("bitsandbytes_4bit", "bitsandbytes_8bit"):
        auto.AUTO_QUANTIZER_MAPPING[method] = _quantizer(before[method], Quantize, Cut)
    try:
        with _reading_packed_weights_whole(loading):
            yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING.update(before)


@contextlib.contextmanager
def _telling(name: str, tell: Callable[[str, Exception], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        tell(name, error)
        raise


def _quantizer(base: Any, quantize: type, cut: type) -> type:
    class CutQuantizer(base):  # type: ignore[misc]
        def get_quantize_ops(self) -> Any:
            return quantize(self)

        def get_load_operations(self) -> Any:
            return {"deserialize": cut}

    return CutQuantizer


@contextlib.contextmanager
def _reading_packed_weights_whole(loading: Any) -> Iterator[None]:
    """A 4-bit weight of a checkpoint and the scales beside it come whole, one after the other.

    Packed, a weight has no dims that a DTensor's placement could mean. With its threads
    transformers would read all of them before the first is cut (HF_DEACTIVATE_ASYNC_LOAD).
    """
    before, name = loading.DtensorShardOperation, "HF_DEACTIVATE_ASYNC_LOAD"
    was = os.environ.get(name)

    class ReadPackedWhole(before):  # type: ignore[misc, valid-type]
        def __init__(self, param: Any) -> None:
            super().__init__(param)
            self.is_matrix, self.is_column = param.ndim == 2, param.shape[-1] == 1

        def shard_tensor(
            self, source: Any, tensor_idx: Any = None, device: Any = None, dtype: Any = None
        ) -> Any:
            shape = source.shape if isinstance(source, torch.Tensor) else source.get_shape()
            is_packed = len(shape) == 2 and shape[1] == 1 and not self.is_column
            if self.is_matrix and (len(shape) < 2 or is_packed):
                return source[...].to(device=device, dtype=dtype)
            return super().shard_tensor(source, tensor_idx, device, dtype)

    os.environ[name], loading.DtensorShardOperation = "1", ReadPackedWhole
    try:
        yield
    finally:
        loading.DtensorShardOperation = before
        if was is None:
            del os.environ[name]
        else:
            os.environ[name] = was


def _owner(model: Any, name: str) -> tuple[nn.Module, str]:
    module_name, _, leaf = name.rpartition(".")
    return model.get_submodule(module_name), leaf


def _first(value: Any) -> torch.Tensor:
    found: torch.Tensor = value[0] if isinstance(value, list) else value
    return found


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


def four_bit_product(module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x W^T + bias`` by a ``Linear4bit``'s weight as it is held, in its ``compute_dtype``.

    ``Linear4bit.forward`` (nn/modules.py), without the packing that it does out of training.
    """
    import bitsandbytes

    linear: Any = module
    dtype = x.dtype if linear.compute_dtype is None else linear.compute_dtype
    y: torch.Tensor = bitsandbytes.matmul_4bit(
        x.to(dtype),
        linear.weight,
        bias=None if bias is None else bias.to(dtype),
        quant_state=linear.weight.quant_state,
    )
    return y.to(x.dtype)
