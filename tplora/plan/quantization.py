"""Which linears of a base are quantised, whether their pieces are exact, and what they weigh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tplora.plan.style import STYLES, TensorPlan
from tplora.upstream import peft_moved_names
from tplora.upstream.quantization import (
    BLOCK_SIZE,
    is_quantized_linear,
    names_to_quantize,
    quantization_given,
    quantization_method,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import BitsAndBytesConfig, PreTrainedModel

    from tplora.plan.facts import ModelFacts, ModuleFacts
    from tplora.plan.layer import LayerPlan
    from tplora.plan.trained import TrainedPlan
    from tplora.recipe.schema import QuantizationTable

__all__ = [
    "QuantizationPlan",
    "adapter_problems",
    "build_quantization_config",
    "method_problem",
    "plan_quantization",
    "quantization_problems",
]

_READ_PACKED = ("dots3_note_text", "gemma3n_text", "hy_v4", "inkling2_loop_text")
"""Models that cast an input to a weight's dtype or clamp a weight (transformers 5.24)."""
_GROUP_SIZE = 256
"""Scales that double quantisation rounds together."""
_OTHER_METHODS = {
    "torchao": "whose int8 weights transformers 5.24 scales on each rank by its piece of a row, "
    "which gives another model than one process has; its saved files it cannot cut, and int4 it "
    "does not train"
}
"""What was tried of them, with torchao 0.18."""
_UNSET: dict[str, tuple[Any, str]] = {
    "llm_int8_threshold": (
        6.0,
        "the input of a layer keeps its dtype here, so that it has no outliers to hold apart",
    ),
    "llm_int8_has_fp16_weight": (False, "it holds 16-bit weights, which are trained"),
    "llm_int8_enable_fp32_cpu_offload": (False, "every rank holds its pieces on its device"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationPlan:
    """What is quantised, and how. A value."""

    method: str
    """"nf4", "fp4" or "int8"."""
    is_double: bool
    """Whether the scales of 4 bits are rounded to 8 bits themselves."""
    compute_dtype: str
    """What 4-bit layers multiply in, such as "bfloat16"."""
    names: frozenset[str]
    """The linear layers whose weights are quantised."""
    storage: str = "uint8"
    """The dtype that packed 4-bit weights pretend to have."""

    def __str__(self) -> str:
        """As a person calls it."""
        return f"{self.method} with double quantization" if self.is_double else self.method

    def holds(self, parameter_name: str) -> bool:
        """Whether a parameter is a quantised weight."""
        module, _, leaf = parameter_name.rpartition(".")
        return leaf == "weight" and module in self.names

    def weight_bytes(self, weight: TensorPlan, tp_rank: int, tp_size: int) -> int:
        """Bytes of one quantised weight and its scales on ``tp_rank``."""
        numel = weight.shard_numel(tp_rank, tp_size)
        if self.method == "int8":
            return numel + 4 * weight.shard_shape(tp_rank, tp_size)[0]
        num_scales = -(-numel // BLOCK_SIZE)
        if not self.is_double:
            return -(-numel // 2) + 4 * num_scales
        num_groups = -(-weight.numel // (BLOCK_SIZE * _GROUP_SIZE))
        return -(-numel // 2) + num_scales + 4 * num_groups


def build_quantization_config(table: QuantizationTable) -> BitsAndBytesConfig | None:
    """What ``from_pretrained`` gets for a recipe's ``[quantization]``; None if nothing is asked."""
    if not table.is_asked:
        return None
    from transformers import BitsAndBytesConfig  # noqa: PLC0415  (slow, and not always needed)

    return BitsAndBytesConfig(**table.model_dump(exclude_none=True))


def plan_quantization(
    model: PreTrainedModel, given: BitsAndBytesConfig | None
) -> tuple[QuantizationPlan | None, list[str]]:
    """How the linears of ``model`` are quantised, or will be, and why they cannot be.

    Args:
        model: Loaded, or on the meta device and not quantised yet.
        given: What ``from_pretrained`` gets; None where the checkpoint says it, or nothing does.
    """
    saved = quantization_given(model.config)
    loaded = [name for name, module in model.named_modules() if is_quantized_linear(module)]
    if saved is not None and given is not None and not loaded:
        return None, [
            "quantization: the checkpoint is quantised already, by "
            f"{quantization_method(saved)}; leave [quantization] out, or name the model that it "
            "was made from"
        ]
    config: Any = given if saved is None else saved
    if config is None:
        return None, []
    if quantization_method(config) != "bitsandbytes":
        return None, [method_problem(quantization_method(config))]
    plan = QuantizationPlan(
        method="int8" if config.load_in_8bit else config.bnb_4bit_quant_type,
        is_double=not config.load_in_8bit and config.bnb_4bit_use_double_quant,
        compute_dtype=str(config.bnb_4bit_compute_dtype).removeprefix("torch."),
        names=frozenset(loaded or names_to_quantize(model, config)),
        storage=str(config.bnb_4bit_quant_storage).removeprefix("torch."),
    )
    return plan, [
        *_config_problems(config),
        *_model_problems(model, is_saved=saved is not None and not loaded),
    ]


def method_problem(method: str) -> str:
    """Why weights that are quantised by another method than bitsandbytes are not loaded."""
    why = _OTHER_METHODS.get(method, "which is not known to be exact when cut")
    return (
        f"model: quantised by {method}, {why}; take the unquantised model and quantise it with "
        "[quantization], or a checkpoint that bitsandbytes quantised"
    )


def _config_problems(config: BitsAndBytesConfig) -> list[str]:
    found = {name: getattr(config, name) for name in _UNSET}
    return [
        f"quantization.{name} = {value!r}: {_UNSET[name][1]}; leave it out"
        for name, value in found.items()
        if value != _UNSET[name][0]
    ]


def _model_problems(model: PreTrainedModel, *, is_saved: bool) -> list[str]:
    text_type = model.config.get_text_config(decoder=True).model_type
    if text_type in _READ_PACKED:
        return [
            f"quantization: the code of {text_type} takes a packed weight for numbers, in one "
            "process as well; leave [quantization] out"
        ]
    is_other = any(
        type(module).__name__ == "SequentialLlama4TextExperts" for module in model.modules()
    )
    if is_other or (is_saved and "llama4" in model.config.model_type):
        return [
            "model: a quantised llama4 has another class of experts, which is not cut; quantise "
            "the unquantised model with [quantization]"
        ]
    return []


def quantization_problems(
    plan: QuantizationPlan, facts: ModelFacts, *, tp_size: int, base_dtype: str
) -> list[str]:
    """Why the pieces of the ranks would not be those of the full quantisation."""
    problems = []
    if not plan.names:
        problems.append(
            f"quantization: {facts.class_name} has no linear layer to quantise that "
            "llm_int8_skip_modules leaves; leave [quantization] out"
        )
    if base_dtype == "float64" and plan.method != "int8":
        problems.append(
            f"quantization: bitsandbytes has no {plan.method} of float64; load the base in another "
            "dtype"
        )
    heads = [p.module_name for p in facts.with_role("head") if plan.holds(p.name)]
    if heads:
        problems.append(
            f"quantization: {heads[0]} would be quantised, and the loss is computed on its pieces "
            f"as they are; add {heads[0]!r} to quantization.llm_int8_skip_modules"
        )
    quantized = [module for module in facts.modules if module.name in plan.names]
    return problems + (_cut_problems(plan, quantized, tp_size) if tp_size > 1 else [])


def _cut_problems(plan: QuantizationPlan, modules: list[ModuleFacts], tp_size: int) -> list[str]:
    problems = [
        f"quantization: {module.name} has style {module.style!r}, which is not exact on a "
        "quantised weight; add it to quantization.llm_int8_skip_modules"
        for module in modules
        if module.style not in STYLES["linear"]
    ][:1]
    broken = [module for module in modules if not _has_whole_blocks(plan, module, tp_size)]
    if not problems and broken:
        width = broken[0].weight_shape[1]
        most = max(module.weight_shape[1] // BLOCK_SIZE for module in modules)
        works = [
            str(size)
            for size in range(1, min(most, 64) + 1)
            if all(_has_whole_blocks(plan, module, size) for module in modules)
        ]
        problems.append(
            f"quantization: {plan.method} has blocks of {BLOCK_SIZE} values, and the rows of "
            f"{broken[0].name}, {width} wide in full, are no whole blocks at parallel.tp_size = "
            f"{tp_size} ({len(broken)} such layers); "
            + (f"use a tp_size of {', '.join(works)}, " if works else "use ")
            + "load_in_8bit, or leave these layers out with quantization.llm_int8_skip_modules"
        )
    return problems


def adapter_problems(
    plan: QuantizationPlan,
    layers: Iterable[LayerPlan],
    trained: Iterable[TrainedPlan],
    facts: ModelFacts,
) -> list[str]:
    """Adapters that plain PEFT would not find again on a quantised base, and what it would train.

    PEFT takes some names for the experts of a mixture, so an adapter on another layer of that name
    is saved by its parameter (``adapter/config.py``); and a parameter it does not adapt in 4 bits.
    """
    moved = peft_moved_names(facts.model_type)
    unread = [
        f"lora.target_modules: {layer.module_name} is quantised, and peft reads an adapter of that "
        "name only from an unquantised layer; add it to lora.exclude_modules, or to "
        "quantization.llm_int8_skip_modules"
        for layer in layers
        if layer.module_name in plan.names
        and (layer.kind == "parameter" or layer.name.rpartition(".")[2] in moved)
    ]
    packed = [
        f"lora.modules_to_save: {part.name} is quantised and cannot be trained; add it to "
        "quantization.llm_int8_skip_modules"
        for part in trained
        if part.name in plan.names and part.what != "bias"
    ]
    return unread[:1] + packed[:1]


def _has_whole_blocks(plan: QuantizationPlan, module: ModuleFacts, tp_size: int) -> bool:
    if plan.method == "int8" or tp_size == 1:
        return True
    dim = STYLES["linear"][module.style].weight_shard_dim
    width = module.weight_shape[1]
    pieces = tp_size if dim == 1 else 1
    return dim is None or (width % pieces == 0 and (width // pieces) % BLOCK_SIZE == 0)
