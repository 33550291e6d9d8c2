"""Parameters adapted inside their module's own forward: expert stacks, routers, special linears.

PEFT's ParamWrapper adapts W of shape ``[E, out, in]``, ``[E, in, out]`` where the module says
``is_transposed``, or ``[out, in]``. On models whose code multiplies by ``[E, in, out]`` without
saying so (llama4), PEFT puts A on what the code uses as the output; its file is ours, so that
stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.plan.layer import LayerPlan, known_styles, plan_weight
from tplora.plan.style import STYLES

if TYPE_CHECKING:
    from peft import LoraConfig

    from tplora.plan.facts import ModelFacts, ParameterFacts

__all__ = ["parameter_problem", "plan_parameter"]

_ROLES = ("experts", "router", "linear", "head", "embedding")
# Kernels that multiply with what stands in W's place (transformers 5.24, integrations/moe.py).
_EXPERT_KERNELS = (None, "eager", "batched_mm", "grouped_mm")
# What a module may do around a forward that uses its own cut parameters.
_EXPERT_STYLES = (None, "moe_tp_experts", "all_reduce")


def plan_parameter(parameter: ParameterFacts, r: int, tp_size: int) -> LayerPlan:
    """Place one parameter and its factors."""
    num_dims = len(parameter.shape)
    in_dim, out_dim = num_dims - 1, num_dims - 2
    if num_dims == 3 and parameter.is_transposed:
        in_dim, out_dim = out_dim, in_dim
    return plan_weight(
        parameter.name,
        "parameter",
        parameter.style,
        parameter.shape,
        (in_dim, out_dim),
        r=r,
        tp_size=tp_size,
    )


def parameter_problem(
    parameter: ParameterFacts | None,
    name: str,
    lora: LoraConfig,
    facts: ModelFacts,
    tp_size: int,
) -> str | None:
    """Why this parameter cannot be adapted exactly, or None."""
    where = f"lora.target_parameters: {name}"
    if parameter is None or parameter.role not in _ROLES:
        shape = "no parameter" if parameter is None else f"of shape {list(parameter.shape)}"
        return (
            f"{where} is {shape}; only weights of linear layers, embeddings, routers and experts "
            "can be adapted; leave it out"
        )
    if lora.lora_dropout:
        return (
            f"{where} is adapted inside its module's forward, where peft has no dropout, and "
            f"lora.lora_dropout = {lora.lora_dropout}; set lora.lora_dropout = 0"
        )
    if parameter.role == "experts" and facts.experts_implementation not in _EXPERT_KERNELS:
        return (
            f"{where}: experts run by {facts.experts_implementation!r}, a kernel that reads the "
            "weights itself and would leave the adapter out; load the model with "
            'experts_implementation = "grouped_mm"'
        )
    if parameter.role == "experts" and parameter.is_transposed and parameter.shape[0] == 1:
        return f"{where} is a stack of one transposed expert, which peft adds wrongly; leave it out"
    return _cut_problem(parameter, where) if tp_size > 1 else None


def _cut_problem(parameter: ParameterFacts, where: str) -> str | None:
    style = parameter.style
    if style not in STYLES["parameter"]:
        return (
            f"{where} has style {style!r}, which is not exact with an adapter "
            f"({known_styles('parameter')} are); leave it out"
        )
    is_cut = STYLES["parameter"][style].weight_shard_dim is not None
    if parameter.role == "experts":
        is_known = parameter.module_style in _EXPERT_STYLES
        is_known &= is_cut == (parameter.module_style is not None)
    else:
        is_known = parameter.module_style == style and "rowwise" not in str(style)
    if is_known:
        return None
    return (
        f"{where} is cut as {style!r} in a module that runs as {parameter.module_style!r}, which "
        "is not exact with an adapter; leave it out"
    )
