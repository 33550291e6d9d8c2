"""LoftQ: B and A begin as the best approximation, of rank r, of what 4 bits lose of W.

    W - Q = U S V^T,   B = U[:, :R] sqrt(S[:R]),   A = sqrt(S[:R]) V^T[:R]

# I in_features   O out_features   R LoRA rank r   P tp_size

The base stays as it was quantised, so the saved adapter is plain LoRA for it. As in PEFT, B A is
not divided by the scaling: choose lora_alpha = r for W to be met as nearly as r allows.

Source: Li et al. 2023, algorithm 1 with one step; PEFT's ``replace_lora_weights_loftq`` (0.21).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from tplora.adapter.factor import shard_full
from tplora.adapter.linear import TploraLinear
from tplora.adapter.save import raise_everywhere
from tplora.base.checkpoint_files import find_safetensors
from tplora.base.quantized import cut_of_loaded
from tplora.base.quantized_product import dequantize
from tplora.errors import PlanError
from tplora.upstream import local_shard
from tplora.upstream.quantization import is_four_bit, is_quantized_linear

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tplora.adapter.factor import Factor
    from tplora.adapter.model import TploraModel

__all__ = ["replace_lora_weights_loftq"]

_PLAIN = ("F64", "F32", "BF16", "F16")
_WHERE = "replace_lora_weights_loftq"


def replace_lora_weights_loftq(
    model: TploraModel, model_path: str | Path | None = None, *, adapter_name: str = "default"
) -> None:
    """Give every adapter on a 4-bit linear the factors that LoftQ begins with.

    Call it before training. What is adapted and not quantised keeps its factors.

    Shapes: W and Q ``[O, I]`` in full while one layer is made, on the first rank of the world, and
    Q on the others of its tp group.

    Communication, collective over the world: for each layer one all-gather of Q, and one broadcast
    of A ``[R, I]`` and of B ``[O, R]``.

    Args:
        model: What ``attach_adapter`` gave, on a base in 4 bits.
        model_path: Folder of the base before it was quantised; where the base was loaded from when
            left out.
        adapter_name: Whose factors.

    Raises:
        PlanError: If no adapted layer is in 4 bits, or r is more than a weight can have.
        ArtifactError: On every rank, if the base's weights are not found, are packed, or are other
            ones.
    """
    base = model.get_base_model()
    layers = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, TploraLinear)
        and adapter_name in module.factors
        and is_quantized_linear(module.get_base_layer())
    }
    _check_layers(layers, adapter_name)
    is_maker = not dist.is_initialized() or dist.get_rank() == 0
    folder = str(model_path or base.config._name_or_path)
    files, problem = _find(layers, folder) if is_maker else ({}, "")
    raise_everywhere(problem)
    for name, layer in layers.items():
        file = files.get(f"{name}.weight")
        _replace(layer, adapter_name, None if file is None else _read(file, name))


def _check_layers(layers: Mapping[str, TploraLinear], adapter_name: str) -> None:
    if not layers or not all(is_four_bit(layer.get_base_layer()) for layer in layers.values()):
        raise PlanError(
            [
                f"{_WHERE}: adapter {adapter_name!r} is on no layer in 4 bits, of which alone peft "
                "has it; load the base with load_in_4bit"
            ]
        )
    for name, layer in layers.items():
        if layer.r[adapter_name] > min(layer.plan.weight.shape):
            raise PlanError(
                [
                    f"{_WHERE}: {name} has r = {layer.r[adapter_name]}; at most "
                    f"{min(layer.plan.weight.shape)} of its weight's vectors can be had"
                ]
            )


def _find(layers: Mapping[str, TploraLinear], folder: str) -> tuple[Mapping[str, Path], str]:
    """The files of the base's weights, and what is wrong with them, if anything is."""
    try:
        files = find_safetensors(folder, {})
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        found = str(error).strip().partition("\n")[0]
        return {}, f"{folder}: is no folder of a base ({type(error).__name__}: {found})"
    return files, _problem(layers, files, folder)


def _problem(layers: Mapping[str, TploraLinear], files: Mapping[str, Path], folder: str) -> str:
    """What is wrong with the base's files, or nothing; no weight is read."""
    for name, layer in layers.items():
        file = files.get(f"{name}.weight")
        if file is None:
            return (
                f"{folder}: holds no {name}.weight in safetensors; name the folder of the base "
                "before it was quantised"
            )
        try:
            with safe_open(file, framework="pt") as opened:
                lazy = opened.get_slice(f"{name}.weight")
                shape, stored_as = tuple(lazy.get_shape()), lazy.get_dtype()
        except (OSError, SafetensorError) as error:
            return f"{file}: is damaged ({error}); get it again"
        if shape != tuple(layer.plan.weight.shape) or stored_as not in _PLAIN:
            return (
                f"{file}: {name}.weight is {list(shape)} in {stored_as}, and "
                f"{list(layer.plan.weight.shape)} in 16 or 32 bits is needed; name the folder of "
                "the base before it was quantised"
            )
    return ""


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as opened:
        weight: torch.Tensor = opened.get_tensor(f"{name}.weight")
    return weight


def _replace(layer: TploraLinear, adapter_name: str, weight: torch.Tensor | None) -> None:
    """``weight`` is W in full on the rank that makes the factors, None on the others."""
    base, factors = layer.get_base_layer(), layer.factors[adapter_name]
    held = cut_of_loaded(base).gather(dequantize(base, torch.float32))
    a = torch.empty(factors["A"].plan.shape, device=held.device)
    b = torch.empty(factors["B"].plan.shape, device=held.device)
    if weight is not None:
        left, values, right = torch.linalg.svd(
            weight.to(held.device, torch.float32) - held, full_matrices=False
        )
        roots = values[: a.shape[0]].sqrt()
        a.copy_(roots[:, None] * right[: a.shape[0]])
        b.copy_(left[:, : a.shape[0]] * roots)
    for factor, full in ((factors["A"], a), (factors["B"], b)):
        if dist.is_initialized():
            dist.broadcast(full, src=0)
        _put(factor, full)


def _put(factor: Factor, full: torch.Tensor) -> None:
    piece = full if factor.mesh is None else shard_full(full, factor.plan, factor.mesh)
    with torch.no_grad():
        local_shard(factor.parameter).copy_(piece)
