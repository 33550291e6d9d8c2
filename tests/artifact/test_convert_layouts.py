"""Adapters on separate and on fused projections say the same in plain PEFT, each on its base."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
)

from tests.artifact.converting import (
    FUSED,
    PATTERNS,
    SEPARATE,
    check_same,
    convert,
    delta_weights,
    logits,
    read_config,
    write_phi3,
)
from tests.artifact.tiny import change_tensors, write_adapter, write_base
from tplora.artifact.convert import fused
from tplora.errors import ArtifactError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("llama"), dtype=torch.float64)


@pytest.fixture(scope="module")
def phi3(llama, tmp_path_factory):
    return write_phi3(llama, tmp_path_factory.mktemp("phi3"))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True, "lora_alpha": 7},
        PATTERNS,
        PATTERNS | {"use_rslora": True},
        {"use_dora": True, **PATTERNS},
        {"lora_bias": True, **PATTERNS},
        {"target_modules": ["q_proj", "gate_proj"]},
        {"target_modules": ["k_proj", "up_proj"]},
        {"target_modules": ["v_proj", "q_proj", "embed_tokens"], "lora_bias": False},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*\.(0\.self_attn\.v|1\.mlp\.up)_proj", "modules_to_save": ["norm"]},
    ],
)  # fmt: skip
def test_separate_becomes_fused_and_says_the_same(llama, phi3, tmp_path, config):
    folder = write_adapter(llama, tmp_path / "in", **({"target_modules": SEPARATE} | config))
    change_tensors(folder, lambda tensors: {k: t.double() for k, t in tensors.items()})
    out, _ = convert(folder, tmp_path, to_base=str(phi3))
    said = logits(llama, folder)
    assert (said - logits(llama)).abs().max() > 0.01
    check_same(logits(phi3, out), said)
    assert read_config(out)["base_model_name_or_path"] == str(phi3)
    back, _ = convert(out, tmp_path, "back", to_base=str(llama))
    check_same(logits(llama, back), said)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True, "use_dora": True},
        {"rank_pattern": {"qkv_proj": 3}, "alpha_pattern": {"layers.1.mlp.gate_up_proj": 5}},
        {"lora_bias": True, "layers_to_transform": [0]},
    ],
)
def test_fused_becomes_separate_and_fused_again_at_its_own_rank(llama, phi3, tmp_path, config):
    folder = write_adapter(phi3, tmp_path / "in", **({"target_modules": FUSED} | config))
    out, found = convert(folder, tmp_path, to_base=str(llama))
    check_same(logits(llama, out), logits(phi3, folder))
    tensors = load_file(out / "adapter_model.safetensors")
    at = "base_model.model.model.layers.0.self_attn"
    shapes = [list(tensors[f"{at}.{part}_proj.lora_B.weight"].shape) for part in "qkv"]
    r = found.ranks[0]
    assert shapes == [[32, r], [16, r], [16, r]]
    if "layers_to_transform" not in config:
        assert sorted(read_config(out)["target_modules"]) == sorted(SEPARATE)
    back, moved = convert(out, tmp_path, "back", to_base=str(phi3))
    assert moved.moved.fused == moved.moved.fused_at_own_rank > 0
    first, last = (load_file(one / "adapter_model.safetensors") for one in (folder, back))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)


def test_a_fused_rank_is_the_sum_of_the_ranks_and_scalings_stay_bit_equal(llama, phi3, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE, lora_alpha=6)
    out, found = convert(folder, tmp_path, to_base=str(phi3))
    config = read_config(out)
    assert found.ranks == (4, 8, 12)
    for module, r in (("qkv_proj", 12), ("gate_up_proj", 8), ("o_proj", 4)):
        assert config["rank_pattern"].get(module, config["r"]) == r
        assert config["alpha_pattern"].get(module, config["lora_alpha"]) / r == 6 / 4


def test_parts_in_another_order_are_another_model(llama, phi3, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE)
    table = {"qkv_proj": ("q_proj", "v_proj", "k_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    out, _ = convert(folder, tmp_path, to_base=str(phi3), fused=table)
    assert (logits(phi3, out) - logits(llama, folder)).abs().max() > 1e-3


def test_blocks_that_share_columns_are_another_model(llama, phi3, tmp_path, monkeypatch):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE)
    monkeypatch.setattr(fused, "_has_one_a", lambda layers: bool(list(layers)))
    out, _ = convert(folder, tmp_path, to_base=str(phi3))
    assert (logits(phi3, out) - logits(llama, folder)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "magnitudes of .*qkv_proj are needed"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["k_proj"]}, "no factor|k_proj"),
    ],
)
def test_what_another_layout_cannot_keep_is_refused(llama, phi3, tmp_path, config, said):
    folder = write_adapter(llama, tmp_path / "in", **config)
    with pytest.raises(ArtifactError, match=said):
        convert(folder, tmp_path, to_base=str(phi3))
    assert not (tmp_path / "out").exists()


def test_factors_that_go_with_a_changed_base_are_refused(llama, phi3, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(read_config(folder) | {"init_lora_weights": "pissa"}))
    for asked in ({"to_base": str(phi3)}, {"r": 2}, {"others": {folder: 1.0}}):
        with pytest.raises(ArtifactError, match="init_lora_weights = 'pissa', with which"):
            convert(folder, tmp_path, **asked)
    convert(folder, tmp_path, dtype="float64")


def test_another_base_is_refused(llama, phi3, tmp_path):
    folder = write_adapter(phi3, tmp_path / "in", target_modules=FUSED)
    other = write_base(tmp_path / "other", num_key_value_heads=1)
    with pytest.raises(ArtifactError, match=r"factors of .* make a weight \[64, 32\]"):
        convert(folder, tmp_path, to_base=str(other))
    fewer = write_base(tmp_path / "fewer", num_hidden_layers=1)
    with pytest.raises(ArtifactError, match=r"adapts model.layers.1.*, and the base has neither"):
        convert(folder, tmp_path, to_base=str(fewer))


def test_an_adapter_with_more_tokens_than_the_base_is_fitted(llama, phi3, tmp_path):
    grown = []
    for base in (llama, phi3):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        model.resize_token_embeddings(53)
        model.save_pretrained(tmp_path / base.name)
        grown.append(tmp_path / base.name)
    trained = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens"]}
    folder = write_adapter(grown[0], tmp_path / "in", **trained)
    out, _ = convert(folder, tmp_path, to_base=str(phi3))
    assert sorted(read_config(out)["target_modules"]) == ["qkv_proj"]
    fitted, _ = convert(folder, tmp_path, "grown", to_base=str(grown[1]))
    first, last = (load_file(one / "adapter_model.safetensors") for one in (out, fitted))
    assert all(torch.equal(first[key], last[key]) for key in first)


def test_adapters_of_both_layouts_are_summed_on_either(llama, phi3, tmp_path):
    one = write_adapter(llama, tmp_path / "one", target_modules=SEPARATE)
    two = write_adapter(phi3, tmp_path / "two", target_modules=FUSED, r=3, use_rslora=True)
    for folder in (one, two):
        change_tensors(folder, lambda tensors: {k: t.double() for k, t in tensors.items()})
    on_llama, _ = convert(one, tmp_path, "llama", others={two: -0.7}, to_base=str(llama))
    on_phi3, found = convert(one, tmp_path, "phi3", others={two: -0.7}, to_base=str(phi3))
    assert (found.moved.fused, found.moved.split, found.ranks) == (4, 0, (7, 11, 15))
    check_same(logits(llama, on_llama), logits(phi3, on_phi3))
    first, _ = convert(one, tmp_path, "first", to_base=str(phi3))
    first, second, whole = (delta_weights(phi3, folder) for folder in (first, two, on_phi3))
    for name, delta in whole.items():
        check_same(delta, first[name] - 0.7 * second[name])


def test_one_weight_that_is_adapted_twice_is_refused(llama, phi3, tmp_path):
    folder = write_adapter(phi3, tmp_path / "in", target_modules=FUSED)
    at = "base_model.model.model.layers.0.self_attn"
    ends = ("lora_A.weight", "lora_B.weight")
    change_tensors(folder, lambda tensors: tensors | {
        f"{at}.k_proj.{end}": tensors[f"{at}.qkv_proj.{end}"][:16].clone() for end in ends
    })  # fmt: skip
    for base in (llama, phi3):
        with pytest.raises(ArtifactError, match=r"adapts .*qkv_proj and .*k_proj, which are one"):
            convert(folder, tmp_path, to_base=str(base))
