"""Load the frozen base: each rank reads its own pieces onto its device, checked by the plan."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, DistributedConfig

from tplora.base.mends import check_can_shard, mend_loaded, mended_while_loading
from tplora.base.quantized import (
    check_method,
    check_quantized,
    check_quantized_shard,
    quantizing_shards,
)
from tplora.base.quantized_product import hold_exact
from tplora.base.verify import check_against_checkpoint
from tplora.errors import ShardError, SourceError
from tplora.mesh import current_processes
from tplora.plan.axes import Axes
from tplora.upstream import auto_class, auto_class_of, local_shard, placement_of, tp_mesh
from tplora.upstream.axes import make_replicas, placed_on_axes
from tplora.upstream.fsdp import is_piece_over_data, tp_placement
from tplora.upstream.quantization import is_quantized_linear, quantization_given

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from tplora.plan.build import Plan
    from tplora.plan.style import TensorPlan

__all__ = ["check_shards", "load_base"]


def load_base(
    path: str,
    *,
    tp_size: int,
    fsdp_size: int = 1,
    dp_replicate_size: int = 1,
    device: torch.device | None = None,
    model_class: Any = None,
    **from_pretrained: Any,
) -> PreTrainedModel:
    """Load ``path`` frozen, tensor-parallel over ``tp_size`` ranks.

    Collective: every rank of the world calls it. Each rank reads only its slices.

    Args:
        path: What ``from_pretrained`` takes.
        tp_size: Ranks of the tensor-parallel group; 1 loads plainly.
        fsdp_size: Ranks that share the pieces of each layer, and gather them as it runs.
        dp_replicate_size: Copies of the model. The world is the product of the three; tp ranks get
            the same rows, others other ones.
        device: Where a model of one process goes; ranks of a group use their own device.
        model_class: What has the ``from_pretrained``, such as
            ``AutoModelForSequenceClassification``; what generates text when left out.
        from_pretrained: Further arguments of ``from_pretrained``, such as ``dtype``.

    Raises:
        LaunchError: If the world is not the sizes' product.
        ShardError: If ``device_map`` is given, transformers did not cut the model as asked, or
            what the ranks hold is not what the checkpoint holds.
        SourceError: If a file of the weights is damaged, such as cut short.
    """
    axes = Axes(tp_size=tp_size, fsdp_size=fsdp_size, dp_replicate_size=dp_replicate_size)
    if from_pretrained.get("device_map") is not None:
        raise ShardError(
            f"device_map = {from_pretrained['device_map']!r}: tensor parallelism places the "
            "weights itself; leave device_map out"
        )
    if axes.world_size > 1:
        is_in_world = dist.is_initialized()
        axes.check_world(dist.get_world_size() if is_in_world else current_processes().world_size)
    if from_pretrained.get("quantization_config", ()) is None:
        del from_pretrained["quantization_config"]  # None would hide what the checkpoint says
    check_method(from_pretrained.get("quantization_config"))
    try:
        if tp_size > 1 or fsdp_size > 1:
            model = _load_cut(path, axes, model_class, from_pretrained)
        else:
            auto = model_class or auto_class_of(path, **from_pretrained)
            model = _load_whole(path, auto, device, from_pretrained)
    except SafetensorError as error:
        raise SourceError(
            f"{path}: a file of its weights is damaged ({error}); get it again"
        ) from error
    if axes.dp_replicate_size > 1:
        make_replicas(model, axes)
    model.requires_grad_(requires_grad=False)
    return model


def _load_whole(
    path: str, auto: Any, device: torch.device | None, from_pretrained: dict[str, Any]
) -> PreTrainedModel:
    if from_pretrained.get("quantization_config") is not None:
        # Weights are quantised on their way to the device; they would not fit it before.
        from_pretrained |= {"device_map": {"": device or "cpu"}}
    model: PreTrainedModel = auto.from_pretrained(path, **from_pretrained)
    if device is not None:
        model.to(device)
    hold_exact(model, None)
    return model


def _load_cut(
    path: str, axes: Axes, model_class: Any, from_pretrained: dict[str, Any]
) -> PreTrainedModel:
    tp_size = axes.tp_size
    config = from_pretrained.get("config")
    if config is None:
        config = AutoConfig.from_pretrained(path, **from_pretrained)
    saved = quantization_given(config)
    check_method(saved)
    is_quantized = saved is not None or "quantization_config" in from_pretrained
    if axes.fsdp_size > 1:
        check_can_shard(config, tp_size, is_quantized=is_quantized)
    reading = quantizing_shards() if is_quantized else contextlib.nullcontext()
    with mended_while_loading(config, tp_size) as styles, placed_on_axes(axes), reading:
        auto = model_class or auto_class(config)
        model: PreTrainedModel = auto.from_pretrained(
            path,
            distributed_config=DistributedConfig(
                tp_size=tp_size, fsdp_size=axes.fsdp_size, tp_plan=styles or None
            ),
            **from_pretrained,
        )
    mesh = tp_mesh(model)
    found = 1 if mesh is None else mesh.size()
    if mesh is None or found != tp_size:
        raise ShardError(
            f"parallel.tp_size = {tp_size}: transformers cut the model into {found}; report this"
        )
    check_quantized(model)
    hold_exact(model, mesh)
    mend_loaded(model, mesh.get_group())
    check_against_checkpoint(model, path, from_pretrained, mesh.get_group())
    return model


def check_shards(model: PreTrainedModel, plan: Plan) -> None:
    """Every planned weight is, on this rank, the piece that the plan says.

    Raises:
        ShardError: Naming the first weight that is not, what was found and what was planned.
    """
    for layer in plan.layers:
        leaf = layer.name if layer.kind == "parameter" else f"{layer.name}.weight"
        module = _own_module(model, layer.module_name)
        if is_quantized_linear(module):
            check_quantized_shard(leaf, module, layer.weight, plan.tp_size)
        else:
            weight = model.get_parameter(leaf)
            _check_weight(layer.weight, layer.style, leaf, weight, plan.tp_size)
    for part in plan.trained:
        if part.weight is None:
            continue
        module, leaf = _own_module(model, part.name), f"{part.name}.weight"
        if is_quantized_linear(module):  # whose bias is trained
            check_quantized_shard(leaf, module, part.weight, plan.tp_size)
        else:
            _check_weight(part.weight, part.style, leaf, module.weight, plan.tp_size)


def _own_module(model: PreTrainedModel, name: str) -> Any:
    """The base's module, also where an adapter is put around it."""
    module = model.get_submodule(name)
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _check_weight(
    plan: TensorPlan, style: str | None, name: str, weight: torch.Tensor, tp_size: int
) -> None:
    is_shared = is_piece_over_data(weight) and tuple(weight.shape) == plan.shape
    if is_shared and _is_cut_as(weight, plan):
        return  # of which piece of the piece this rank keeps, the plan says nothing
    tp_rank = weight.device_mesh.get_local_rank() if isinstance(weight, DTensor) else 0
    planned = plan.shard_shape(tp_rank, tp_size)
    found = tuple(local_shard(weight).shape)
    if found == planned and _is_cut_as(weight, plan):
        return
    raise ShardError(
        f"{name}: this rank holds {found}, the plan says {planned} "
        f"({'whole' if plan.shard_dim is None else f'cut on dim {plan.shard_dim}'}, style "
        f"{style}); the installed transformers cuts this model differently; report this "
        "with `tplora report`"
    )


def _is_cut_as(weight: torch.Tensor, plan: TensorPlan) -> bool:
    if not isinstance(weight, DTensor):
        return plan.shard_dim is None
    found = tp_placement(weight)
    if plan.shard_dim is None:
        return bool(found.is_replicate())
    placement = placement_of(plan.shard_dim, plan.split_factor)
    from_end = placement_of(plan.shard_dim - weight.ndim, plan.split_factor)
    return found in (placement, from_end)
