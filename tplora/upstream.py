"""Every private name of torch, transformers, peft, accelerate and trl that tplora uses.

Each function says which version its private name was read in. Public names are imported where they
are used. When a new release moves one of these, this is the only file that changes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from accelerate import ParallelismConfig
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peft import LoraConfig
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "MENDED_STYLES",
    "CpuParallelismConfig",
    "adapter_target_names",
    "auto_class",
    "auto_class_of",
    "build_meta_model",
    "expanded_tp_plan",
    "grouped_mm",
    "local_shard",
    "lora_alpha_of",
    "lora_rank_of",
    "own_forward",
    "peft_moved_names",
    "peft_refusal",
    "peft_without_moved_names",
    "peft_without_tensor_parallelism",
    "placement_of",
    "queue_after_backward",
    "register_lora_layers",
    "tp_mesh",
    "transform_output",
    "trl_fused_head_settings",
    "trl_without_head_check",
    "with_all_linear_named",
]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a DTensor, outside autograd; a plain tensor is its own piece.

    ``DTensor._local_tensor`` (torch 2.11 to 2.14): ``to_local()`` would add a node to the graph and
    costs ten times as much, once per factor and forward.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor


def placement_of(shard_dim: int | None, split_factor: int = 1) -> Placement:
    """DTensor's word for a cut: on a dim that holds ``split_factor`` fused weights, or none.

    ``_StridedShard`` (torch 2.11 to 2.14).
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    if shard_dim is None:
        return Replicate()
    if split_factor == 1:
        return Shard(shard_dim)
    return _StridedShard(shard_dim, split_factor=split_factor)


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` once, when the backward pass that is running now has finished.

    ``Variable._execution_engine.queue_callback`` (torch 2.11 to 2.14), as FSDP2 and DDP use it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


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


# What a loaded base really holds where transformers 5.24 says otherwise; see base/mends.py.
MENDED_STYLES = {
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


def tp_mesh(model: PreTrainedModel) -> DeviceMesh | None:
    """The one-dimensional tp mesh of a model loaded with ``DistributedConfig``, or None.

    ``model._device_mesh`` has axes (pp, fsdp, tp) even for tp alone (transformers 5.24), and a
    DTensor on it would need three placements.
    """
    mesh: DeviceMesh | None = getattr(model, "_device_mesh", None)
    if mesh is None:
        return None
    return mesh["tp"] if mesh.ndim > 1 else mesh


@contextlib.contextmanager
def peft_without_tensor_parallelism(model: PreTrainedModel) -> Iterator[None]:
    """PEFT sees a model without a mesh, so its own tensor-parallel path stays out of the way.

    peft 0.21 asks ``model._device_mesh`` (lora/model.py, get_tp_plan_and_mesh) and would register
    collectives of its own on colwise and rowwise layers, after the style's transforms.
    """
    has_own = "_device_mesh" in model.__dict__
    mesh = getattr(model, "_device_mesh", None)
    model._device_mesh = None
    try:
        yield
    finally:
        if has_own:
            model._device_mesh = mesh
        else:
            del model._device_mesh


@contextlib.contextmanager
def register_lora_layers(
    config: LoraConfig, layers: dict[type[nn.Module], Callable[..., nn.Module]]
) -> Iterator[None]:
    """While open, PEFT builds ``layers[type]`` for a target of that type instead of its own layer.

    ``LoraConfig._register_custom_module`` (peft 0.21). Taken back afterwards, so that the config
    stays an ordinary one that can be copied and saved.
    """
    before = config._custom_modules
    config._register_custom_module(dict(layers))
    try:
        yield
    finally:
        config._custom_modules = before


def adapter_target_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """The modules that PEFT would adapt, in its own order, by its own rules.

    ``_maybe_include_all_linear_layers`` and ``check_target_module_exists`` (peft 0.21,
    tuners_utils.py). ``config`` is left as it is.
    """
    import copy

    from peft.tuners.tuners_utils import (
        _maybe_include_all_linear_layers,
        check_target_module_exists,
    )

    config = _maybe_include_all_linear_layers(copy.copy(config), model)
    return [
        name
        for name, _ in model.named_modules()
        if name and bool(check_target_module_exists(config, name))
    ]


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


def peft_moved_names(model_type: str) -> frozenset[str]:
    """Names that PEFT moves onto a model's expert parameters, whatever module carries them.

    ``_convert_peft_config_moe`` (peft 0.21, utils/transformers_weight_conversion.py) does so for
    models whose experts were linear layers in transformers 4, on attaching and on loading, and
    takes dense and shared ``gate_proj`` along.
    """
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    if not conversion._MOE_FUSED_TARGETS.get(pattern):
        return frozenset()
    return frozenset(conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, {}))


@contextlib.contextmanager
def peft_without_moved_names() -> Iterator[None]:
    """While open, PEFT adapts the modules a config names and moves none of them onto experts.

    ``convert_peft_config_for_transformers`` (peft 0.21, utils/transformers_weight_conversion.py),
    which is looked up there each time a model is adapted.
    """
    from peft.utils import transformers_weight_conversion as conversion

    original = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *args, **kwargs: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = original


def peft_refusal(config: LoraConfig, model: PreTrainedModel, name: str) -> str | None:
    """Why PEFT itself would not adapt module ``name``, or None.

    ``_check_lora_target_modules_mamba`` (peft 0.21, tuners/tuners_utils.py).
    """
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(config, model, name.rpartition(".")[2])
    except ValueError as error:
        return str(error)
    return None


def lora_rank_of(config: LoraConfig, name: str) -> int:
    """The LoRA rank r of module ``name``: ``rank_pattern`` where it matches, else ``r``.

    ``get_pattern_key`` (peft 0.21, utils/other.py).
    """
    from peft.utils.other import get_pattern_key

    key = get_pattern_key(config.rank_pattern.keys(), name)
    r: int = config.rank_pattern.get(key, config.r)
    return r


def lora_alpha_of(config: LoraConfig, name: str) -> int:
    """``lora_alpha`` of module ``name``, or ``alpha_pattern``'s where one matches."""
    from peft.utils.other import get_pattern_key

    key = get_pattern_key(config.alpha_pattern.keys(), name)
    alpha: int = config.alpha_pattern.get(key, config.lora_alpha)
    return alpha


def with_all_linear_named(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """A copy of ``config`` with "all-linear" spelled out, as PEFT does on attaching.

    ``_maybe_include_all_linear_layers`` (peft 0.21, tuners_utils.py).
    """
    import copy

    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    return _maybe_include_all_linear_layers(copy.copy(config), model)


def trl_fused_head_settings(forward: Callable[..., Any]) -> dict[str, Any] | None:
    """What trl's fused head was installed with, or None if ``forward`` is not that head.

    ``add_fused_lm_head`` (trl 1.16, trainer/utils.py) keeps temperature, outputs,
    cast_lm_head_to_fp32, final_logit_softcapping and logit_scale in its closure and nowhere else.
    """
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    if code is None or "final_logit_softcapping" not in code.co_freevars:
        return None
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


class CpuParallelismConfig(ParallelismConfig):  # type: ignore[misc]
    """accelerate's ``ParallelismConfig`` without the one check that refuses CPU processes.

    ``ParallelismConfig._validate_accelerator`` (accelerate 1.15) has no MULTI_CPU in its list,
    though everything behind it works on gloo. Only this check is skipped.
    """

    def _validate_accelerator(self, accelerator: Any) -> None:
        if self.total_size != accelerator.num_processes:
            super()._validate_accelerator(accelerator)


@contextlib.contextmanager
def trl_without_head_check(model: PreTrainedModel) -> Iterator[None]:
    """trl sees the frozen head below an adapted one, and builds its trainer.

    ``SFTTrainer.__init__`` (trl 1.16) refuses an adapter on the output embeddings, because its own
    fused head multiplies by ``lm_head.weight`` and would ignore the adapter. Ours does not.
    """
    head = model.get_output_embeddings()
    base_layer = getattr(head, "base_layer", None)
    if base_layer is None:
        yield
        return
    model.get_output_embeddings = lambda: base_layer
    try:
        yield
    finally:
        del model.get_output_embeddings
