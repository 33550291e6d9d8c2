"""Private names of transformers' loader and quantizers: how a model is quantised while it loads.

transformers 5.24 throughout.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch

from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

__all__ = ["quantized_by"]


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
