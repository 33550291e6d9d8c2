"""What of a quantised base is refused before weights load, and what the rest weighs."""

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig, CordaConfig, KasaConfig, LoraGAConfig
from transformers import BitsAndBytesConfig, LlamaConfig

from tests.quantized import METHODS, WIDE, quantization
from tests.tiny import tiny_config
from tests.zoo.build import tiny_config as zoo_config
from tplora.errors import PlanError
from tplora.plan.build import build_plan
from tplora.plan.cost import base_bytes, loading_bytes
from tplora.plan.lora import build_lora_config
from tplora.plan.quantization import QuantizationPlan, build_quantization_config
from tplora.plan.report import plan_text
from tplora.plan.style import TensorPlan
from tplora.recipe.check import read_recipe

LORA = LoraConfig(target_modules="all-linear")


def _plan(method="nf4", *, tp_size=2, given=None, **changes):
    config = tiny_config("llama", **WIDE | changes)
    given = quantization(method) if given is None else given
    return build_plan(config, LORA, tp_size=tp_size, dtype="bfloat16", quantization=given)


def _refusals(*args, **kwargs):
    with pytest.raises(PlanError) as found:
        _plan(*args, **kwargs)
    assert all("\n" not in problem for problem in found.value.problems)
    return "\n".join(found.value.problems)


def test_every_linear_but_the_head_is_quantised():
    plan = _plan()
    names = {name.rpartition(".")[2] for name in plan.quantization.names}
    wanted = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names == wanted
    assert len(plan.quantization.names) == 2 * len(wanted)
    assert _plan(given=BitsAndBytesConfig()).quantization.method == "fp4"  # as upstream has it


@pytest.mark.parametrize("method", METHODS)
def test_ranks_together_weigh_what_one_process_does(method):
    whole = base_bytes(_plan(method, tp_size=1), 0, bytes_per_element=2)
    plan = _plan(method, tp_size=2)
    pieces = [base_bytes(plan, tp_rank, bytes_per_element=2) for tp_rank in range(2)]
    norms = 5 * 192 * 2  # whole on every rank
    scales = {"int8": 2 * (2 * 192) * 4, "nf4-double": 2 * (4 * 12 + 2 * 36 + 6) * 4 // 2}
    most = norms + scales.get(method, 0) + 1024
    assert whole <= sum(pieces) <= whole + most
    bare = build_plan(tiny_config("llama", **WIDE), LORA, tp_size=1, dtype="bfloat16")
    assert whole < 0.7 * base_bytes(bare, 0, bytes_per_element=2)


def test_bytes_of_one_weight():
    weight = TensorPlan(shape=(8, 128), shard_dim=1)
    names = {"method": "nf4", "compute_dtype": "float32", "names": frozenset()}
    plain = QuantizationPlan(is_double=False, **names)
    assert plain.weight_bytes(weight, 0, 2) == 8 * 64 // 2 + 8 * 4
    double = QuantizationPlan(is_double=True, **names)
    assert double.weight_bytes(weight, 0, 2) == 8 * 64 // 2 + 8 + 4
    eight = QuantizationPlan(is_double=False, **names | {"method": "int8"})
    assert eight.weight_bytes(weight, 0, 2) == 8 * 64 + 8 * 4


def test_loading_takes_two_of_the_largest_unquantised_pieces_more():
    assert loading_bytes(_plan(tp_size=2), 0, bytes_per_element=2) == 2 * 2 * (768 * 192 // 2)


def test_the_table_says_what_is_quantised():
    text = " ".join(plan_text(_plan("nf4-double")).split())
    assert "nf4 with double quantization in 14 linear layers, the rest in bfloat16" in text


def test_rows_that_are_no_whole_blocks_are_refused_with_what_works():
    said = _refusals("nf4", tp_size=2, intermediate_size=64 * 9)
    assert "blocks of 64 values" in said
    assert "model.layers.0.mlp.down_proj, 576 wide in full" in said
    assert "use a tp_size of 1, 3," in said
    assert "load_in_8bit" in said
    _plan("int8", tp_size=2, intermediate_size=64 * 9)
    _plan("nf4", tp_size=3, intermediate_size=64 * 9)
    skipping = quantization("nf4", llm_int8_skip_modules=["lm_head", "down_proj"])
    _plan(given=skipping, tp_size=2, intermediate_size=64 * 9)


def test_a_column_parallel_weight_whose_rows_are_no_whole_blocks_is_refused():
    said = _refusals("fp4", tp_size=2, hidden_size=24 * 10)
    assert "240 wide in full" in said
    assert "use load_in_8bit" in said or "use a tp_size of 1," in said
    _plan("fp4", tp_size=1, hidden_size=24 * 10)


def test_a_head_that_would_be_quantised_is_refused():
    skipping = quantization("nf4", llm_int8_skip_modules=["o_proj"])
    assert "add 'lm_head' to quantization.llm_int8_skip_modules" in _refusals(given=skipping)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llm_int8_threshold", 3.0),
        ("llm_int8_has_fp16_weight", True),
        ("llm_int8_enable_fp32_cpu_offload", True),
    ],
)
def test_what_cannot_be_done_exactly_is_refused_by_name(name, value):
    said = _refusals(given=quantization("int8", **{name: value}))
    assert f"quantization.{name} = {value!r}: " in said


def test_float64_is_refused_in_4_bits():
    with pytest.raises(PlanError, match="has no nf4 of float64"):
        build_plan(
            tiny_config("llama", **WIDE),
            LORA,
            tp_size=1,
            dtype="float64",
            quantization=quantization("nf4"),
        )


def _saved(config, given):
    config.quantization_config = given
    return build_plan(config, LORA, tp_size=2, dtype="bfloat16")


def test_a_checkpoint_says_how_it_is_quantised():
    found = _saved(tiny_config("llama", **WIDE), quantization("nf4-double").to_dict())
    assert (found.quantization.method, found.quantization.is_double) == ("nf4", True)
    config, given = tiny_config("llama", **WIDE), quantization("nf4")
    config.quantization_config = given.to_dict()
    with pytest.raises(PlanError, match="is quantised already, by bitsandbytes"):
        build_plan(config, LORA, tp_size=2, dtype="bfloat16", quantization=given)


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "mxfp4"},
        {"quant_method": "torchao", "quant_type": "int4_weight_only"},
        {"quant_method": "not-known-yet"},
    ],
    ids=lambda given: given["quant_method"],
)
def test_other_methods_are_refused_by_name(given):
    with pytest.raises(PlanError) as found:
        _saved(tiny_config("llama", **WIDE), given)
    assert f"quantised by {given['quant_method']}, whi" in str(found.value) or (
        "quantised by torchao, whose int8 weights" in str(found.value)
    )


def test_nothing_left_to_quantise_is_refused():
    skipping = quantization("nf4", llm_int8_skip_modules=["model", "lm_head"])
    assert "has no linear layer to quantise" in _refusals(given=skipping)


def test_a_plan_without_quantisation_has_none():
    plan = build_plan(tiny_config("llama"), LORA, tp_size=1, dtype=str(torch.float32)[6:])
    assert plan.quantization is None
    assert loading_bytes(plan, 0, bytes_per_element=4) == 0


def test_layers_whose_adapters_peft_would_not_find_on_a_quantised_base_are_refused():
    config = zoo_config("deepseek_v3")
    targets = LoraConfig(target_modules=["shared_experts.gate_proj"])
    with pytest.raises(PlanError, match=r"shared_experts\.gate_proj is quantised, and peft reads"):
        build_plan(config, targets, tp_size=1, quantization=quantization("int8"))
    build_plan(config, targets, tp_size=1)


@pytest.mark.parametrize("name", ["llama-70b-qlora-2x24gb", "llama-70b-qlora-8x80gb"])
def test_a_recipe_for_a_large_model_says_what_its_plan_counts(name):
    recipe = read_recipe(Path("recipes", f"{name}.toml"))
    config = LlamaConfig(  # as the recipe's model has it
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype=torch.bfloat16,
    )
    plan = build_plan(
        config,
        build_lora_config(recipe.lora, config),
        tp_size=recipe.parallel.tp_size,
        quantization=build_quantization_config(recipe.quantization),
    )
    said = dict(re.findall(r"^#   (\w+) +([\d.]+ [MG]iB) ", recipe.path.read_text(), re.MULTILINE))
    kept_tokens = recipe.train["max_length"] * recipe.train["per_device_train_batch_size"]
    kept = 80 * kept_tokens * config.hidden_size * 2
    assert said.pop("kept") == f"{kept / 2**30:.{2 if kept < 2**31 else 1}f} GiB"
    text = " ".join(plan_text(plan).split())
    assert f"base {said['base']} ({plan.quantization} in 560 linear layers" in text
    assert f"{said['loading']} more while it loads" in text
    assert f"factors {said['factors']}," in text
    state = re.search(r"AdamW state ([\d.]+ [MG]iB)\n", recipe.path.read_text())[1]
    assert f"AdamW state {state};" in text


REFUSED = {
    "use_bdlora": (BdLoraConfig(nblocks=2, match_strict=False), "builds plain LoRA of it"),
    "kasa_config": (KasaConfig(), "builds plain LoRA of it"),
    "init_lora_weights": ("pissa", "from weights in 16 or 32 bits alone"),
}


def _on_nf4(method="nf4", *, changes=None, **given):
    lora = LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | given)
    return build_plan(
        tiny_config("llama_bias" if "bias" in given else "llama", **WIDE),
        lora,
        tp_size=2,
        dtype="bfloat16",
        quantization=quantization(method, **changes or {}),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_plain_peft_has_otherwise_on_a_quantised_base_are_refused(name):
    value, reason = REFUSED[name]
    for method in ("nf4", "int8"):
        with pytest.raises(
            PlanError, match=f"where the base is in {method}, peft .*{reason}"
        ) as err:
            _on_nf4(method, **{name: value})
        assert err.value.problems[0].startswith(f"lora.{name} = ")


@pytest.mark.parametrize("init", ["pissa_niter_4", "mica", "lora_ga", "corda"])
def test_inits_that_take_packed_bytes_for_numbers_are_refused(init):
    given = {"init_lora_weights": init}
    if init in ("lora_ga", "corda"):
        given[f"{init}_config"] = {"lora_ga": LoraGAConfig, "corda": CordaConfig}[init]()
    with pytest.raises(PlanError, match="from weights in 16 or 32 bits alone"):
        _on_nf4(changes={"bnb_4bit_quant_storage": "float32"}, **given)


def test_an_init_after_which_the_base_would_be_rounded_anew_is_refused():
    for method in ("nf4", "int8"):
        with pytest.raises(PlanError, match="peft rounds what it leaves of a weight anew"):
            _on_nf4(method, init_lora_weights="olora")


def test_orthogonal_factors_that_would_be_whole_numbers_are_refused():
    for method in ("nf4", "int8"):
        with pytest.raises(PlanError, match="peft rounds it to the packed weights' dtype"):
            _on_nf4(method, init_lora_weights="orthogonal")
    _on_nf4(changes={"bnb_4bit_quant_storage": "bfloat16"}, init_lora_weights="orthogonal")


def test_an_invocation_on_8_bits_is_refused():
    with pytest.raises(PlanError, match="peft writes into an 8-bit layer's product"):
        _on_nf4("int8", alora_invocation_tokens=[3])


@pytest.mark.parametrize("method", ["nf4", "int8"])
@pytest.mark.parametrize(
    "given",
    [{"use_dora": True}, {"lora_bias": True}, {"bias": "all"}, {"init_lora_weights": "gaussian"}],
    ids=str,
)
def test_what_plain_peft_has_on_quantised_layers_is_planned(method, given):
    _on_nf4(method, **given)


def test_a_quantised_module_cannot_be_trained():
    config = tiny_config("llama", **WIDE)
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["o_proj"])
    with pytest.raises(PlanError, match=r"o_proj is quantised and cannot be trained"):
        build_plan(config, lora, tp_size=2, dtype="bfloat16", quantization=quantization("nf4"))
    head = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    build_plan(config, head, tp_size=2, dtype="bfloat16", quantization=quantization("nf4"))


@pytest.mark.parametrize(
    "model_type", ["dots3_note_text", "gemma3n_text", "hy_v4", "inkling2_loop_text"]
)
def test_models_whose_code_reads_packed_weights_are_refused(model_type):
    with pytest.raises(PlanError, match="takes a packed weight for numbers, in one process"):
        build_plan(zoo_config(model_type), LORA, tp_size=1, quantization=quantization("int8"))


def test_a_quantised_llama4_is_refused_and_one_that_is_quantised_on_its_way_is_not():
    config, lora = zoo_config("llama4_text"), LoraConfig(target_modules=["q_proj"])
    build_plan(config, lora, tp_size=2, quantization=quantization("int8"))
    config.quantization_config = quantization("int8").to_dict()
    with pytest.raises(PlanError, match="another class of experts"):
        build_plan(config, lora, tp_size=2)
