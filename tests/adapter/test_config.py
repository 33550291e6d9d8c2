"""The form of a config that a file carries: plain PEFT adapts the same weights by it."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from tests.zoo.build import build_model, tiny_config
from tplora.adapter.attach import attach_adapter
from tplora.adapter.config import attach_config, file_config
from tplora.adapter.load import load_factors
from tplora.plan.build import build_plan
from tplora.upstream import build_meta_model
from tplora.upstream.peft_keys import peft_file_keys

# peft 0.21 applies patterns to parameters too, and looks among modules alone when it warns.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

SHARED = "model.layers.1.mlp.shared_experts"
MOE = LoraConfig(
    task_type="CAUSAL_LM",
    r=4,
    lora_alpha=8,
    use_rslora=True,
    init_lora_weights=False,
    target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    rank_pattern={"shared_experts.up_proj": 5, "layers.1.self_attn.q_proj": 2},
    alpha_pattern={"shared_experts.down_proj": 3, "self_attn.q_proj": 7},
)


def _plan(name: str, lora: LoraConfig):
    config = tiny_config(name)
    plan = build_plan(config, copy.deepcopy(lora), tp_size=1)
    return plan, build_meta_model(config, trust_remote_code=False)


def test_shared_experts_are_named_as_parameters_in_the_file_alone():
    """PEFT moves their names onto the experts of models it knows as qwen2_moe's kin."""
    plan, model = _plan("dots1", MOE)
    here, there = attach_config(MOE, plan.layers), file_config(MOE, plan.layers, model)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert f"{SHARED}.{name}" in here.target_modules
        assert f"{SHARED}.{name}.weight" not in here.target_parameters
        assert f"{SHARED}.{name}" not in there.target_modules
        assert f"{SHARED}.{name}.weight" in there.target_parameters
    for config in (here, there):
        assert "model.layers.1.mlp.experts.down_proj" in config.target_parameters
        assert "model.layers.1.self_attn.q_proj" in config.target_modules
        assert config.use_rslora
    assert MOE.target_modules == {"q_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(MOE.rank_pattern) == {"shared_experts.up_proj", "layers.1.self_attn.q_proj"}


def _ranks(model) -> dict[str, tuple[int, float]]:
    """r and scaling of everything adapted."""
    return {
        name: (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def test_plain_peft_gives_each_weight_the_same_rank_and_scaling(tmp_path):
    build_model("dots1").save_pretrained(tmp_path / "base")
    base, plain = (
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.float64, experts_implementation="eager"
        )
        for _ in range(2)
    )
    ours = attach_adapter(base, copy.deepcopy(MOE), autocast_adapter_dtype=False).eval()
    ours.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter", autocast_adapter_dtype=False)
    wanted = _ranks(ours)
    assert _ranks(loaded) == wanted
    assert wanted[f"base_model.model.{SHARED}.up_proj"] == (5, 8 / 5**0.5)
    assert wanted[f"base_model.model.{SHARED}.down_proj"] == (4, 3 / 2)
    assert wanted["base_model.model.model.layers.1.self_attn.q_proj"] == (2, 7 / 2**0.5)
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.eval()(tokens).logits, ours(tokens).logits, rtol=0, atol=1e-5
        )


def test_a_dense_models_config_stays_what_the_user_gave():
    lora = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    plan, model = _plan("llama", lora)
    given = lora.to_dict()
    assert attach_config(lora, plan.layers).to_dict() == given
    assert file_config(lora, plan.layers, model).to_dict() == given


def _keys(model, part: str) -> list[str]:
    names = [name for name, _ in model.named_modules() if part in name]
    assert names
    return [f"base_model.model.{name}.lora_A.weight" for name in names]


def test_keys_that_peft_would_rename_are_written_as_it_reads_them():
    """transformers renames laguna's ``shared_expert``, and with it what is right already."""
    model = build_meta_model(tiny_config("laguna"), trust_remote_code=False)
    keys = _keys(model, "shared_experts.up_proj")
    found = peft_file_keys(model, LoraConfig(target_modules=["x"]), keys)
    assert set(found) == set(keys)
    for key, in_file in found.items():
        assert in_file == key.replace("shared_experts", "shared_expert")


def test_a_key_that_peft_cannot_read_has_none():
    model = build_meta_model(tiny_config("inkling2_text"), trust_remote_code=False)
    keys = _keys(model, "sconv.weight_proj")
    found = peft_file_keys(model, LoraConfig(target_modules=["x"]), keys)
    assert set(found.values()) == {None}


def test_keys_of_a_dense_model_stay():
    model = build_meta_model(tiny_config("llama"), trust_remote_code=False)
    keys = _keys(model, "_proj")
    assert peft_file_keys(model, LoraConfig(target_modules=["x"]), keys) == dict(
        zip(keys, keys, strict=True)
    )


@pytest.mark.parametrize("model_type", ["dots1", "qwen3"])
def test_a_linear_named_by_its_parameter_is_attached_saved_and_attached_again(model_type, tmp_path):
    asked = LoraConfig(r=2, target_modules=[], target_parameters=["layers.0.mlp.up_proj.weight"])
    first = attach_adapter(build_model(model_type), asked)
    first.save_pretrained(tmp_path)
    saved = LoraConfig.from_pretrained(tmp_path)
    again = attach_adapter(build_model(model_type), saved)
    load_factors(again, tmp_path)
    plain = PeftModel.from_pretrained(build_model(model_type), tmp_path)
    names = {name for name, _ in plain.named_parameters() if "lora_" in name}
    assert set(again.factors()) == set(first.factors()) == names
    assert len(names) == 2
