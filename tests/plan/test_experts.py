"""What a plan says of experts, routers and names; no processes, no weights."""

import pytest
from peft import LoraConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from tests.tiny import tiny_config
from tests.zoo.build import tiny_config as zoo_config
from tplora.errors import PlanError
from tplora.plan.build import build_plan, plan_model
from tplora.plan.coverage import count_coverage, say_missed_experts
from tplora.plan.style import AROUND_EXPERTS, STYLES
from tplora.upstream import build_meta_model


def test_every_style_that_transformers_registers_is_known_or_refused():
    known = {style for styles in STYLES.values() for style in styles} | AROUND_EXPERTS
    refused = {"sequence_parallel", "ep_dispatch_experts", "grouped_gemm"}
    assert set(ALL_PARALLEL_STYLES.keys()) - known <= refused


@pytest.mark.parametrize("kernel", ["deepgemm", "sonicmoe"])
def test_kernels_that_would_leave_the_experts_adapter_out_are_refused(monkeypatch, kernel):
    model = build_meta_model(zoo_config("qwen3_moe"), trust_remote_code=False)
    model.config._experts_implementation = kernel
    lora = LoraConfig(target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(PlanError, match=f"experts run by '{kernel}', a kernel that"):
        plan_model(model, lora, tp_size=2, base_dtype="float32")


def test_a_name_that_peft_would_move_means_the_modules_that_have_it():
    lora = LoraConfig(target_modules=["gate_proj", "down_proj"])
    plan = build_plan(zoo_config("dots1"), lora, tp_size=2)
    assert {layer.kind for layer in plan.layers} == {"linear"}
    owners = {layer.name.split(".")[-2] for layer in plan.layers}
    assert owners == {"mlp", "shared_experts"}
    with pytest.raises(PlanError, match=r"its expert weights are parameters: set lora\.experts"):
        build_plan(zoo_config("qwen3_moe"), lora, tp_size=2)


def test_a_router_named_as_a_module_is_adapted_by_its_weight():
    plan = build_plan(zoo_config("qwen3_moe"), LoraConfig(target_modules=["gate"]), tp_size=2)
    assert {layer.kind for layer in plan.layers} == {"parameter"}
    assert plan.layers[0].name == "model.layers.0.mlp.gate.weight"


def test_what_an_adapter_reaches_is_counted_and_missed_experts_are_said():
    all_linear = LoraConfig(target_modules="all-linear")
    plan = build_plan(zoo_config("qwen3_moe"), all_linear, tp_size=2)
    rows = {row.role: (row.num_adapted, row.num_weights) for row in count_coverage(plan)}
    assert rows["linear"] == (8, 8)
    assert rows["experts"] == (0, 4)
    assert rows["router"] == (0, 2)
    assert "lora.experts = true" in say_missed_experts(plan)
    assert say_missed_experts(build_plan(tiny_config("llama"), all_linear, tp_size=2)) is None
