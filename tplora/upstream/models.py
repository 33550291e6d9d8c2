"""Private names of transformers: what a model is, how it is cut, what a style does around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "MENDED_STYLES",
    "auto_class",
    "auto_class_of",
    "build_meta_model",
    "expanded_tp_plan",
    "experts_implementation",
    "grouped_mm",
    "own_forward",
    "tp_mesh",
    "transform_output",
]


def auto_class(config: PretrainedConfig) -> Any:
    """What a user of transformers would load a model of ``config`` with.

    ``AutoModelForCausalLM`` where it knows the config; for a class with a text model and towers it
    gives the whole class (gemma3) or the text model alone (llama4). Where it does not (qwen2_5_vl),
    ``AutoModelForImageTextToText``, which gives the whole class. The mappings are public; their
    contents were read in transformers 5.24.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    is_causal |= "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not is_causal and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def auto_class_of(path: str, **from_pretrained: Any) -> Any:
    """``auto_class`` of the model at ``path``, found as ``from_pretrained`` with these would."""
    from transformers import AutoConfig

    where = ("revision", "cache_dir", "local_files_only", "subfolder", "token", "trust_remote_code")
    config = from_pretrained.get("config") or AutoConfig.from_pretrained(
        path, **{key: from_pretrained[key] for key in where if key in from_pretrained}
    )
    return auto_class(config)


def build_meta_model(config: PretrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """The architecture of ``config`` without weights: parameters on the meta device.

    ``from_config`` is public; that ``tp_plan`` is filled in by the constructor was read in
    transformers 5.24.
    """
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            config, trust_remote_code=trust_remote_code
        )
    return model


# What a loaded base really holds where transformers 5.24 says otherwise; see base/mends.py. Norms
# of cut heads have partial gradients, as the plans of all models but two say.
_NORMS_OF_CUT_HEADS = {
    f"model.layers.*.self_attn.{norm}": "replicated_with_grad_allreduce"
    for norm in ("q_norm", "k_norm")
}
MENDED_STYLES = {
    "doge": _NORMS_OF_CUT_HEADS,
    "sarvam_moe": _NORMS_OF_CUT_HEADS,
    "inkling_text": {
        "model.embed_tokens": "replicate",
        "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "model.layers.*.mlp.shared_experts": "moe_tp_experts",
    },
    "inkling2_text": {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    "inkling2_loop_text": {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    "qwen3_vl": {  # qwen3's
        f"model.language_model.layers.*.{name}": style
        for name, style in (
            *((f"self_attn.{name}_proj", "colwise") for name in "qkv"),
            *((f"self_attn.{name}_norm", "replicated_with_grad_allreduce") for name in "qk"),
            ("self_attn.o_proj", "rowwise"),
            ("mlp.gate_proj", "colwise"),
            ("mlp.up_proj", "colwise"),
            ("mlp.down_proj", "rowwise"),
        )
    },
}


def expanded_tp_plan(model: PreTrainedModel, *, is_own: bool = False) -> dict[str, str]:
    """The style of every module and parameter that has one, by its full name, after mending.

    Args:
        model: On any device.
        is_own: The plan of the model's class and config, whatever this model was given.

    ``PreTrainedModel._expand_parallel_plan``, ``init_parallel_plans`` and the four plans it sets
    (transformers 5.24, distributed/mixin.py).
    """
    kept = {
        name: getattr(model, name) for name in ("_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan")
    }
    try:
        if is_own:
            model.init_parallel_plans()
        rules = dict(model.tp_plan or {}) | MENDED_STYLES.get(model.config.model_type, {})
    finally:
        for name, plan in kept.items():
            setattr(model, name, plan)
    expanded: dict[str, str] = model._expand_parallel_plan(rules)
    return expanded


def experts_implementation(model: PreTrainedModel) -> str | None:
    """The kernel that a mixture of experts runs with; None where nothing was chosen.

    ``config._experts_implementation`` (transformers 5.24, integrations/moe.py).
    """
    config = model.config.get_text_config(decoder=True)
    chosen: str | None = getattr(config, "_experts_implementation", None)
    return chosen


def tp_mesh(model: PreTrainedModel) -> DeviceMesh | None:
    """The one-dimensional tp mesh of a model loaded with ``DistributedConfig``, or None.

    ``model._device_mesh`` has axes (pp, fsdp, tp) even for tp alone (transformers 5.24), and a
    DTensor on it would need three placements.
    """
    mesh: DeviceMesh | None = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    return mesh["tp"] if mesh.ndim > 1 else mesh


def own_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """A module's forward as its class wrote it, without what a style put around it.

    A style sets ``module.forward`` on the instance (transformers 5.24, ``install_forward`` in
    distributed/tensor_parallel.py).
    """
    forward: Callable[..., torch.Tensor] = type(module).forward.__get__(module)
    return forward


def transform_output(
    style: str, module: nn.Module, output: torch.Tensor, mesh: DeviceMesh
) -> torch.Tensor:
    """What a style does to a module's output after its forward.

    ``ALL_PARALLEL_STYLES`` and ``transform_output_post_forward`` (transformers 5.24,
    distributed/tensor_parallel.py).
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    transformed: torch.Tensor = ALL_PARALLEL_STYLES[style].transform_output_post_forward(
        module, output, mesh
    )
    return transformed


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """One matmul per group of rows: ``x`` sorted by expert, ``offs`` where each expert's rows end.

    ``_grouped_mm`` (transformers 5.24, integrations/moe.py) chooses the kernel.
    """
    from transformers.integrations.moe import _grouped_mm

    product: torch.Tensor = _grouped_mm(x, weight, offs)
    return product
