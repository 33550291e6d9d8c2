"""Have PEFT build tplora's layers: from one seed, with full sizes, as it does in one process.

So the full factors are bit for bit those of plain PEFT after ``torch.manual_seed(seed)``, at every
tp_size. Then each factor is replaced by this rank's piece.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners import lora
from torch import nn

from tplora.adapter.dropout import ShardedDropout
from tplora.adapter.embedding import TploraEmbedding
from tplora.adapter.initial import check_preprocessed
from tplora.adapter.linear import (
    ColumnParallelLoraLinear,
    ReplicatedLoraLinear,
    RowParallelLoraLinear,
    TploraLinear,
)
from tplora.adapter.parameter import ParamWrapper
from tplora.upstream import (
    peft_without_moved_names,
    peft_without_tensor_parallelism,
    register_lora_layers,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peft import LoraConfig
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from tplora.adapter.factor import Factor
    from tplora.collectives.shared_input import SharedInput
    from tplora.plan.layer import LayerPlan

__all__ = ["ADAPTED", "LINEAR_BY_CUT", "building_layers", "cut_factors", "shard_dropout"]

LINEAR_BY_CUT: dict[int | None, type[TploraLinear]] = {
    None: ReplicatedLoraLinear,
    0: ColumnParallelLoraLinear,
    1: RowParallelLoraLinear,
}
ADAPTED = (TploraLinear, TploraEmbedding, ParamWrapper)
"""The classes that hold factors, for ``isinstance``."""


@contextlib.contextmanager
def building_layers(
    model: PreTrainedModel,
    config: LoraConfig,
    layers: Iterable[LayerPlan],
    mesh: DeviceMesh | None,
    shared_input: SharedInput,
    seed: int,
) -> Iterator[None]:
    """While open, PEFT builds our layers, sees no mesh, moves no name and draws from ``seed``."""
    plans = {layer.name: layer for layer in layers}
    check_preprocessed(model, config, plans.values())
    device = next(model.parameters()).device

    def build(target: nn.Module, adapter: str, *, target_name: str, **kw: Any) -> nn.Module:
        plan = plans[target_name]
        common = {"plan": plan, "mesh": mesh, **kw}
        if plan.kind == "embedding":
            return TploraEmbedding(target, adapter, **common)
        if plan.kind == "parameter":
            return ParamWrapper(target, adapter, shared_input=shared_input, **common)
        layer = LINEAR_BY_CUT[plan.weight.shard_dim]
        # BD-LoRA chooses its factor by the name
        return layer(target, adapter, shared_input=shared_input, target_name=target_name, **common)

    with (
        peft_without_tensor_parallelism(model),
        peft_without_moved_names(),
        register_lora_layers(config, {nn.Module: build}),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":  # inits that compute from W draw where W is
            torch.cuda.manual_seed(seed)
        yield


def cut_factors(
    base: PreTrainedModel, adapter_name: str, layers: Iterable[LayerPlan]
) -> Iterator[Factor]:
    """Replace the full factors of one adapter by this rank's pieces; yield them."""
    for plan in layers:
        name, module = _adapted_module(base, plan)
        if not isinstance(module, ParamWrapper):
            shard_dropout(module, adapter_name, plan)
        yield from module.make_factors(adapter_name, f"base_model.model.{name}", plan).values()


def _adapted_module(
    base: PreTrainedModel, plan: LayerPlan
) -> tuple[str, TploraLinear | TploraEmbedding | ParamWrapper]:
    """The layer PEFT built by ``plan``, and its name; wrappers of one module lie in each other."""
    name, module = plan.module_name, base.get_submodule(plan.module_name)
    if plan.kind == "parameter":
        leaf = plan.name.rpartition(".")[2]
        while isinstance(module, lora.ParamWrapper) and module.parameter_name != leaf:
            name, module = f"{name}.base_layer", module.base_layer
    assert isinstance(module, ADAPTED)
    return name, module


def shard_dropout(
    module: TploraLinear | TploraEmbedding, adapter_name: str, plan: LayerPlan
) -> None:
    """Swap PEFT's dropout for one whose masks do not depend on tp_size."""
    dropout = module.lora_dropout[adapter_name]
    if isinstance(dropout, nn.Dropout):
        is_input_cut = plan.weight.shard_dim == 1
        module.lora_dropout[adapter_name] = ShardedDropout(
            dropout.p,
            in_features=plan.weight.shape[1],
            mesh=module.mesh if is_input_cut else None,
        )
