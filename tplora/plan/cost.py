"""What a plan costs: bytes on each rank and collectives of each training step.

Counts are of one micro-batch without activation checkpointing, which repeats the forward ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.plan.style import STYLES, Style, TensorPlan

if TYPE_CHECKING:
    from tplora.plan.build import Plan
    from tplora.plan.facts import ModuleFacts

__all__ = ["CollectiveCount", "base_bytes", "count_collectives", "factor_bytes"]

# Styles of weights that are cut though an adapter on them is refused; on which dim does not matter
# for the number of bytes.
_OTHER_CUTS = ("packed_colwise", "packed_rowwise", "moe_tp_experts", "embedding_colwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """Collectives of one training step on one tp group."""

    forward: int
    backward: int
    bucket: int
    """All-reduces of the factors' partial gradients, once per optimizer step."""


def base_bytes(plan: Plan, tp_rank: int, *, bytes_per_element: int) -> int:
    """Bytes of the frozen base's parameters on ``tp_rank``."""
    elements = sum(
        TensorPlan(shape=shape, shard_dim=_parameter_cut(name, len(shape), style)).shard_numel(
            tp_rank, plan.tp_size
        )
        for name, shape, style in plan.facts.parameter_shapes
    )
    return elements * bytes_per_element


def _parameter_cut(name: str, num_dims: int, style: str | None) -> int | None:
    """The cut dim of a parameter under the style of its module."""
    known = STYLES["linear"].get(style) or STYLES["embedding"].get(style)
    if known is None:
        return 0 if style in _OTHER_CUTS else None
    dim = known.weight_shard_dim
    if dim is None or num_dims == 2:
        return dim
    return 0 if dim == 0 and name.endswith("bias") else None  # a row-parallel bias is whole


def factor_bytes(plan: Plan, tp_rank: int, *, bytes_per_element: int = 4) -> int:
    """Bytes of the factors on ``tp_rank``; their gradients take as much, AdamW's state twice."""
    return bytes_per_element * sum(
        factor.shard_numel(tp_rank, plan.tp_size)
        for layer in plan.layers
        for factor in (layer.a, layer.b)
    )


def count_collectives(plan: Plan) -> CollectiveCount:
    """Collectives of one step, head and embedding included.

    Adapted layers under one parent that read inputs of one width share their input's reduction;
    other column-parallel layers reduce their own. Nothing flows back into a frozen embedding, so
    the first layers that read it reduce nothing.
    """
    if plan.tp_size == 1:
        return CollectiveCount(forward=0, backward=0, bucket=0)
    adapted = {layer.name for layer in plan.layers}
    modules = [(module, _style_of(module)) for module in plan.facts.modules]
    cut = [
        (module, style)
        for module, style in modules
        if style is not None and style.weight_shard_dim is not None
    ]
    forward = sum(_forward_collectives(module, style) for module, style in cut)
    readers: dict[tuple[object, ...], bool] = {}
    for module, style in cut:
        if module.kind == "linear" and style.weight_shard_dim == 0:
            readers[_reader(module, is_adapted=module.name in adapted)] = True
    reads_embedding = 0 if _is_embedding_adapted(plan) else _num_first_readers(readers)
    backward = len(readers) - reads_embedding + sum(style.splits_input for _, style in cut)
    has_partial = any(f.is_grad_partial for layer in plan.layers for f in (layer.a, layer.b))
    return CollectiveCount(forward=forward, backward=backward, bucket=int(has_partial))


def _style_of(module: ModuleFacts) -> Style | None:
    return None if module.kind is None else STYLES[module.kind].get(module.style)


def _forward_collectives(module: ModuleFacts, style: Style) -> int:
    is_summed = module.kind == "embedding" or style.weight_shard_dim == 1
    return int(is_summed or style.gathers_output)


def _reader(module: ModuleFacts, *, is_adapted: bool) -> tuple[object, ...]:
    """Modules with an equal reader share one reduction of their input's gradient."""
    parent = module.name.rpartition(".")[0]
    return (parent, module.weight_shape[1]) if is_adapted else (module.name,)


def _is_embedding_adapted(plan: Plan) -> bool:
    return any(layer.kind == "embedding" for layer in plan.layers)


def _num_first_readers(readers: dict[tuple[object, ...], bool]) -> int:
    """Readers in the first block's first group: what reads the normed embedding."""
    first = next(iter(readers), None)
    if first is None:
        return 0
    parent = str(first[0]) if len(first) == 2 else str(first[0]).rpartition(".")[0]
    return sum(
        (str(r[0]) if len(r) == 2 else str(r[0]).rpartition(".")[0]) == parent for r in readers
    )
