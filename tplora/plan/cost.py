"""What a plan costs: bytes on each rank and collectives of each training step.

Counts are of one micro-batch without activation checkpointing, which repeats the forward ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.plan.style import AROUND_EXPERTS, STYLES, Style, TensorPlan

if TYPE_CHECKING:
    from tplora.plan.build import Plan
    from tplora.plan.facts import ModuleFacts, ParameterFacts

__all__ = [
    "CollectiveCount",
    "base_bytes",
    "count_collectives",
    "factor_bytes",
    "loading_bytes",
    "shard_shape_of",
]

_WHOLE = Style(weight_shard_dim=None)
_UNCOUNTED = AROUND_EXPERTS | {"mla_kv_a_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """Collectives of one training step on one tp group."""

    forward: int
    backward: int
    bucket: int
    """All-reduces of the factors' partial gradients, once per optimizer step."""


def base_bytes(plan: Plan, tp_rank: int, *, bytes_per_element: int) -> int:
    """Bytes of the base's parameters on ``tp_rank`` that stay frozen, scales included."""
    held = sum(
        _weight_bytes(plan, parameter, tp_rank, bytes_per_element)
        for parameter in plan.facts.parameters
    )
    trained = _shard_numel(plan, tp_rank, _trained_of_base(plan, ("bias",)))
    return held - trained * bytes_per_element


def loading_bytes(plan: Plan, tp_rank: int, *, bytes_per_element: int) -> int:
    """What quantising takes on top of ``base_bytes`` while the base loads, at most.

    Two of the largest pieces before they are quantised: as it is read, and as it is rounded.
    """
    if plan.quantization is None:
        return 0
    pieces = (
        _tensor_plan(parameter).shard_numel(tp_rank, plan.tp_size)
        for parameter in plan.facts.parameters
        if plan.quantization.holds(parameter.name)
    )
    return 2 * bytes_per_element * max(pieces, default=0)


def _weight_bytes(
    plan: Plan, parameter: ParameterFacts, tp_rank: int, bytes_per_element: int
) -> int:
    tensor = _tensor_plan(parameter)
    if plan.quantization is not None and plan.quantization.holds(parameter.name):
        return plan.quantization.weight_bytes(tensor, tp_rank, plan.tp_size)
    return bytes_per_element * tensor.shard_numel(tp_rank, plan.tp_size)


def _tensor_plan(parameter: ParameterFacts) -> TensorPlan:
    """How a parameter is cut by its style."""
    styles = STYLES["embedding"] if parameter.role == "embedding" else STYLES["parameter"]
    style = styles.get(parameter.style) or STYLES["linear"].get(parameter.style, _WHOLE)
    num_dims, dim = len(parameter.shape), style.weight_shard_dim
    if dim is None or (num_dims == 1 and dim == 1):  # a row-parallel bias is whole
        return TensorPlan(shape=parameter.shape, shard_dim=None)
    if num_dims == 1:
        return TensorPlan(shape=parameter.shape, shard_dim=0)
    return TensorPlan(
        shape=parameter.shape, shard_dim=dim + num_dims - 2, split_factor=style.split_factor
    )


def factor_bytes(
    plan: Plan, tp_rank: int, *, bytes_per_element: int = 4, only_trained: bool = False
) -> int:
    """Bytes of the factors on ``tp_rank``.

    The gradients of those that are trained take as much as these, AdamW's state twice that. What is
    trained of the base itself keeps the base's dtype.
    """
    factors: list[TensorPlan] = [
        factor
        for layer in plan.layers
        for factor in layer.factors
        if factor.is_trained or not only_trained
    ]
    num_elements = _shard_numel(plan, tp_rank, factors) + _shard_numel(
        plan, tp_rank, _trained_of_base(plan, ("tokens",))
    )
    copied = _shard_numel(plan, tp_rank, _trained_of_base(plan, ("module", "bias")))
    return num_elements * bytes_per_element + copied * plan.base_dtype_bytes


def _trained_of_base(plan: Plan, what: tuple[str, ...]) -> list[TensorPlan]:
    return [factor for part in plan.trained if part.what in what for _, factor in part.factors]


def _shard_numel(plan: Plan, tp_rank: int, tensors: list[TensorPlan]) -> int:
    return sum(tensor.shard_numel(tp_rank, plan.tp_size) for tensor in tensors)


def count_collectives(plan: Plan) -> CollectiveCount | None:
    """Collectives of one step, head and embedding included; None where that is not known.

    It is not where a style communicates by what its module is given, as those around experts do,
    where the sequence is cut, and where a norm is trained: its place among the layers says what
    flows back to which of them.

    Column-parallel layers that read one tensor share the reduction of its gradient; those without
    an adapter that are quantised, or compute more than a linear, reduce their own. Nothing flows
    back to where nothing is trained: a layer has no gradient of its input to reduce before the
    first adapted layer, nor does that one.
    """
    if plan.tp_size == 1:
        return CollectiveCount(forward=0, backward=0, bucket=0)
    is_counted = plan.sequence is None and not any(
        style in _UNCOUNTED for _, style in plan.facts.styles
    )
    if not is_counted or any(part.kind not in ("linear", "embedding") for part in plan.trained):
        return None
    adapted = {layer.module_name for layer in plan.layers} | {part.name for part in plan.trained}
    sharing = adapted | {module.name for module in plan.facts.modules if _is_shared(plan, module)}
    forward = backward = 0
    is_trained_below = False
    for group in _in_order(plan.facts.modules):
        styles = [(module, _style_of(module)) for module in group]
        forward += sum(_forward_collectives(module, style) for module, style in styles)
        if is_trained_below:
            backward += _backward_collectives(styles, sharing)
        is_trained_below |= any(module.name in adapted for module in group)
    factors = [f for layer in plan.layers for f in layer.factors]
    factors += [f for part in plan.trained for _, f in part.factors]
    has_partial = any(factor.is_grad_partial for factor in factors)
    return CollectiveCount(forward=forward, backward=backward, bucket=int(has_partial))


def _in_order(modules: tuple[ModuleFacts, ...]) -> list[list[ModuleFacts]]:
    """Modules that read one tensor together, in the order in which a decoder runs them.

    Within a parent, what reads its input comes before the row-parallel layer that ends it, whatever
    order they were declared in.
    """
    groups: dict[tuple[str, bool, int], list[ModuleFacts]] = {}
    for module in modules:
        parent = module.name.rpartition(".")[0]
        ends = _style_of(module).weight_shard_dim == 1
        groups.setdefault((parent, ends, module.weight_shape[-1]), []).append(module)
    places = {parent: place for place, (parent, _, _) in reversed(list(enumerate(groups)))}
    return [groups[key] for key in sorted(groups, key=lambda key: (places[key[0]], key[1]))]


def _style_of(module: ModuleFacts) -> Style:
    return _WHOLE if module.kind is None else STYLES[module.kind].get(module.style, _WHOLE)


def _forward_collectives(module: ModuleFacts, style: Style) -> int:
    if style.weight_shard_dim is None:
        return 0
    is_summed = module.kind == "embedding" or style.weight_shard_dim == 1
    return int(is_summed or style.gathers_output)


def _is_shared(plan: Plan, module: ModuleFacts) -> bool:
    """Whether a layer without an adapter shares the reduction of its input's gradient."""
    is_packed = plan.quantization is not None and plan.quantization.holds(f"{module.name}.weight")
    return module.has_plain_forward and not is_packed


def _backward_collectives(styles: list[tuple[ModuleFacts, Style]], sharing: set[str]) -> int:
    readers = [
        module.name in sharing
        for module, style in styles
        if module.kind == "linear" and style.weight_shard_dim == 0
    ]
    splits = sum(style.splits_input for _, style in styles)
    return int(any(readers)) + readers.count(False) + splits


def shard_shape_of(plan: Plan, parameter: ParameterFacts, tp_rank: int) -> tuple[int, ...]:
    """The shape of the base's parameter on ``tp_rank``."""
    return _tensor_plan(parameter).shard_shape(tp_rank, plan.tp_size)
