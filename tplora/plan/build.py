"""Recipe and facts to a plan: every "can this be cut exactly?" is settled here, before any weight.

Later stages do not ask again; they check that what they got is what the plan says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tplora.errors import PlanError
from tplora.plan.beside import plan_beside
from tplora.plan.block_diagonal import block_problem, plan_blocks
from tplora.plan.facts import ModelFacts, ModuleFacts, read_facts
from tplora.plan.initial import (
    find_dtype_problems,
    find_init_problems,
    layer_init_problem,
    plan_trained,
)
from tplora.plan.layer import LayerPlan, known_styles, plan_weight
from tplora.plan.lora import find_config_problems
from tplora.plan.model import find_model_problems
from tplora.plan.options import find_option_problems, option_problem, wanted_extras
from tplora.plan.parameter import parameter_problem, plan_parameter
from tplora.plan.quantization import (
    QuantizationPlan,
    adapter_problems,
    plan_quantization,
    quantization_problems,
)
from tplora.plan.quantized_options import find_adapter_config_problems
from tplora.plan.sequence import SequencePlan, modules_of, with_token_gradients
from tplora.plan.sequence_proof import plan_sequence
from tplora.plan.style import STYLES
from tplora.plan.target import Targets, match_targets
from tplora.upstream import build_meta_model, lora_rank_of

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

    from tplora.plan.trained import TrainedPlan

__all__ = ["Plan", "build_plan", "plan_layers", "plan_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be done with one model at one tp_size. A value: it prints and compares."""

    class_name: str
    tp_size: int
    layers: tuple[LayerPlan, ...]
    facts: ModelFacts
    base_dtype: str
    """What the frozen base is held in, such as "bfloat16"; what is quantised, before it is."""
    quantization: QuantizationPlan | None = None
    """Which linear layers are held in 4 or 8 bits."""
    trained: tuple[TrainedPlan, ...] = ()
    """What is trained of the base itself, beside LoRA's factors."""
    sequence: SequencePlan | None = None
    """How the decoder runs on each rank's tokens, if it does."""

    def layer(self, name: str) -> LayerPlan | None:
        """The plan of the module called ``name``, or None when it is not adapted."""
        return next((layer for layer in self.layers if layer.name == name), None)

    @property
    def has_experts(self) -> bool:
        """Whether a stack of expert weights is adapted."""
        return any(layer.num_matrices > 1 for layer in self.layers)

    @property
    def base_dtype_bytes(self) -> int:
        """Bytes of one element of the base."""
        return {"float64": 8, "float32": 4}.get(self.base_dtype, 2)

    @property
    def num_trainable(self) -> int:
        """Trainable elements in full."""
        beside = sum(factor.numel for part in self.trained for _, factor in part.factors)
        factors = (factor for layer in self.layers for factor in layer.factors)
        return beside + sum(factor.numel for factor in factors if factor.is_trained)


def build_plan(
    config: PretrainedConfig,
    lora: LoraConfig,
    *,
    tp_size: int,
    dtype: str = "auto",
    quantization: BitsAndBytesConfig | None = None,
    trust_remote_code: bool = False,
    sequence_parallel: bool = False,
) -> Plan:
    """The plan for ``config``'s architecture with adapter ``lora`` on ``tp_size`` ranks.

    Args:
        config: The model's transformers config. No weight is read and no process is needed.
        lora: PEFT's config, used as it is.
        tp_size: Ranks of one tensor-parallel group.
        dtype: What the base will be held in; "auto" is the dtype it was saved in.
        quantization: What ``from_pretrained`` gets as ``quantization_config``; a checkpoint that is
            quantised says so itself.
        trust_remote_code: Whether the architecture may come from the model's own code.
        sequence_parallel: Whether ranks share out the tokens between attention and MLP.

    Raises:
        PlanError: Every target that cannot be exact, by name, with what would work.
    """
    saved_in = str(config.dtype or "float32").removeprefix("torch.")
    return plan_model(
        build_meta_model(config, trust_remote_code=trust_remote_code),
        lora,
        tp_size=tp_size,
        base_dtype=saved_in if dtype == "auto" else dtype,
        quantization=quantization,
        sequence_parallel=sequence_parallel,
    )


def plan_model(
    model: PreTrainedModel,
    lora: LoraConfig,
    *,
    tp_size: int,
    base_dtype: str,
    quantization: BitsAndBytesConfig | None = None,
    sequence_parallel: bool = False,
) -> Plan:
    """The plan for a model that is there already, loaded or on the meta device.

    Raises:
        PlanError: As ``build_plan``.
    """
    if lora.peft_type != "LORA":
        raise PlanError(find_config_problems(lora))
    facts = read_facts(model)
    problems = find_model_problems(facts, tp_size) + find_dtype_problems(lora, base_dtype)
    quantized, found = plan_quantization(model, quantization)
    problems += found
    if quantized is not None:
        problems += find_adapter_config_problems(quantized, lora)
        problems += quantization_problems(quantized, facts, tp_size=tp_size, base_dtype=base_dtype)
    try:
        targets = match_targets(model, lora, facts)
    except PlanError as error:
        raise PlanError([*problems, *error.problems]) from None
    layers = plan_layers(facts, lora, targets, tp_size=tp_size, problems=problems)
    trained, problems = plan_beside(facts, lora, layers, tp_size=tp_size)
    if quantized is not None:
        problems += adapter_problems(quantized, layers, trained, facts)
    if problems:
        raise PlanError(problems)
    plan = Plan(
        class_name=facts.class_name,
        tp_size=tp_size,
        layers=layers,
        facts=facts,
        base_dtype=base_dtype,
        trained=trained,
        quantization=quantized,
    )
    if not sequence_parallel or tp_size == 1:
        return plan
    sequence = plan_sequence(model, facts, tp_size).without_rows(modules_of(trained))
    layers, trained = with_token_gradients(sequence, layers, trained)
    return replace(plan, layers=layers, trained=trained, sequence=sequence)


def plan_layers(
    facts: ModelFacts,
    lora: LoraConfig,
    targets: Targets,
    *,
    tp_size: int,
    problems: list[str],
) -> tuple[LayerPlan, ...]:
    """Plan each weight of ``targets``; raise all of ``problems`` and those found here together."""
    problems += _config_problems(facts, lora, targets)
    modules = {module.name: module for module in facts.modules}
    parameters = {parameter.name: parameter for parameter in facts.parameters}
    layers = []
    for name in targets.modules:
        problem = _module_problem(modules.get(name), name)
        problem = problem or _option_problem(facts, lora, modules[name])
        if problem is None:
            layer = _plan_module(modules[name], lora, tp_size)
            problem = lora.use_bdlora and block_problem(lora.use_bdlora, layer, tp_size)
            is_tied = f"{name}.weight" not in parameters
            problem = problem or layer_init_problem(lora, layer, is_tied=is_tied)
        if problem:
            problems.append(problem)
        else:
            layer = plan_trained(lora, layer)
            layers.append(plan_blocks(lora.use_bdlora, layer) if lora.use_bdlora else layer)
    for name in targets.parameters:
        problem = parameter_problem(parameters.get(name), name, lora, facts, tp_size)
        problem = problem or option_problem(lora, "parameter", name, is_head=False)
        if problem is None:
            layer = plan_parameter(parameters[name], lora_rank_of(lora, name), tp_size)
            problem = layer_init_problem(lora, layer, is_tied=False)
        if problem:
            problems.append(problem)
        else:
            layers.append(layer)
    if problems:
        raise PlanError(problems)
    return tuple(layers)


def _config_problems(facts: ModelFacts, lora: LoraConfig, targets: Targets) -> list[str]:
    """What is wrong with the config as a whole, whatever it adapts."""
    problems = find_config_problems(lora) or find_init_problems(lora)
    if problems or lora.inference_mode:  # a saved adapter's patterns may name it another way
        return problems
    names = (*targets.modules, *targets.parameters)
    return find_option_problems(lora, names, vocab_size=facts.vocab_size)


def _option_problem(facts: ModelFacts, lora: LoraConfig, module: ModuleFacts) -> str | None:
    assert module.kind is not None  # _module_problem refused the others
    is_head = any(head.module_name == module.name for head in facts.with_role("head"))
    return option_problem(lora, module.kind, module.name, is_head=is_head)


def _plan_module(module: ModuleFacts, lora: LoraConfig, tp_size: int) -> LayerPlan:
    kind = module.kind
    assert kind is not None  # _module_problem refused the others
    in_dim = 1 if kind == "linear" else 0
    return plan_weight(
        module.name,
        kind,
        module.style,
        module.weight_shape,
        (in_dim, 1 - in_dim),
        has_bias=module.has_bias,
        r=lora_rank_of(lora, module.name),
        tp_size=tp_size,
        extras=wanted_extras(lora),
    )


def _module_problem(module: ModuleFacts | None, name: str) -> str | None:
    """Why this module cannot be adapted exactly, or None."""
    where = f"lora.target_modules: {name}"
    if module is None or module.kind is None:
        found = "a module without a 2-D weight" if module is None else f"a {module.type_name}"
        return f"{where} is {found}; only linear layers and embeddings can be adapted; exclude it"
    if module.style not in STYLES[module.kind]:
        return (
            f"{where} has style {module.style!r}, which is not exact with an adapter "
            f"({known_styles(module.kind)} are); add it to lora.exclude_modules"
        )
    return None
