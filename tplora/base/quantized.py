"""Load a base with its linears in 4 or 8 bits: each rank quantises its own pieces as it reads them.

    slice of W on disk -> this rank's piece, 16 or 32 bits -> quantised piece, one weight at a time

No rank holds the model unquantised, nor another rank's pieces.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tplora.base.cut import Cut, cut_of
from tplora.errors import ShardError
from tplora.plan.quantization import method_problem
from tplora.upstream.quantization import (
    full_linear_shape,
    is_four_bit,
    is_quantized_linear,
    quantization_method,
)
from tplora.upstream.quantized_loading import quantized_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import BitsAndBytesConfig, PreTrainedModel

    from tplora.plan.style import TensorPlan

__all__ = [
    "check_method",
    "check_quantized",
    "check_quantized_shard",
    "cut_of_loaded",
    "quantizing_shards",
]


@contextlib.contextmanager
def quantizing_shards() -> Iterator[None]:
    """While open, what transformers loads cut and quantised is made of exact pieces.

    Collective while a model loads: every rank quantises the same weights in the same order.

    Raises:
        ShardError: Naming the first weight that could not be made.
    """
    problems: list[str] = []
    try:
        with quantized_by(_quantize, _cut, lambda name, error: problems.append(f"{name}: {error}")):
            yield
    except RuntimeError as error:  # in which transformers says that it has logged something
        if not problems:
            raise
        raise ShardError(
            f"{problems[0]}; use another tp_size or, if the plan is content with this one, take a "
            "whole copy of the checkpoint"
        ) from error


def _quantize(
    module: nn.Module, leaf: str, piece: torch.Tensor, config: BitsAndBytesConfig
) -> nn.Parameter:
    from tplora.base.quantized_shard import quantize_shard  # noqa: PLC0415  (bitsandbytes)

    return quantize_shard(module, piece, _take_place(module, leaf), config)


def _cut(module: nn.Module, leaf: str, held: Mapping[str, torch.Tensor]) -> nn.Parameter:
    from tplora.base.quantized_shard import cut_quantized  # noqa: PLC0415  (bitsandbytes)

    return cut_quantized(module, held, _take_place(module, leaf))


def _take_place(module: nn.Module, leaf: str) -> Cut:
    """Where the piece lies; what is quantised is no DTensor, so its place stops being one."""
    placeholder = module._parameters[leaf]
    assert placeholder is not None
    cut = cut_of(module, placeholder)
    module._parameters[leaf] = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
    vars(module)["tplora_cut"] = cut
    return cut


def check_method(saved: Any) -> None:
    """What is quantised, or is to be, is so by bitsandbytes, whose weights can be cut.

    Raises:
        ShardError: Naming the method.
    """
    if saved is not None and quantization_method(saved) != "bitsandbytes":
        raise ShardError(method_problem(quantization_method(saved)))


def check_quantized(model: PreTrainedModel) -> None:
    """Every linear that was to be quantised is, with its scales.

    Raises:
        ShardError: Naming the first that is not.
    """
    for name, module in model.named_modules():
        if not is_quantized_linear(module):
            continue
        problem = _problem(module)
        if problem is not None:
            raise ShardError(
                f"{name}.weight: {problem} after loading; its checkpoint lacks something of it; "
                "take a whole copy, or leave it out with quantization.llm_int8_skip_modules"
            )


def check_quantized_shard(name: str, module: nn.Module, planned: TensorPlan, tp_size: int) -> None:
    """A quantised weight is, on this rank, the piece that the plan says.

    Raises:
        ShardError: With what was found and what was planned.
    """
    weight: Any = module.weight
    cut = cut_of_loaded(module)
    tp_rank = 0 if cut.mesh is None else cut.mesh.get_local_rank()
    wanted = planned.shard_shape(tp_rank, tp_size)
    found = tuple(weight.quant_state.shape if is_four_bit(module) else weight.shape)
    if found != wanted or (tp_size > 1 and cut.dim != planned.shard_dim):
        raise ShardError(
            f"{name}: this rank holds {found} quantised, cut on dim {cut.dim}; the plan says "
            f"{wanted}, cut on dim {planned.shard_dim}; the installed transformers cuts this model "
            "differently; report this with `tplora report`"
        )


def _problem(module: nn.Module) -> str | None:
    weight: Any = module.weight
    if weight.device.type == "meta" or isinstance(weight, DTensor):
        return "was not quantised"
    if is_four_bit(module):
        if getattr(weight, "quant_state", None) is None:
            return "has no quantization state"
        return None
    return None if getattr(weight, "SCB", None) is not None else "has no scales"


def cut_of_loaded(module: nn.Module) -> Cut:
    """Where the piece of a linear that is loaded lies."""
    found: Cut | None = vars(module).get("tplora_cut")
    return Cut(shape=full_linear_shape(module), dim=None, mesh=None) if found is None else found
