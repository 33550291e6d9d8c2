"""Adapters in other forms: plain PEFT says the same with each of them, on the base that it fits."""

import json
import shutil
import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from tests.artifact.tiny import change_tensors, write_adapter, write_base
from tests.command import forked_tplora
from tplora.artifact.convert import fused
from tplora.artifact.convert.conversion import Conversion, convert_adapter
from tplora.base.fingerprint import BASE, take_fingerprint
from tplora.errors import ArtifactError

SEPARATE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
INPUT = torch.arange(2, 26).reshape(2, 12)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("llama"), dtype=torch.float64)


@pytest.fixture(scope="module")
def phi3(llama, tmp_path_factory):
    """The same model with fused projections."""
    config = LlamaForCausalLM.from_pretrained(llama).config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "vocab_size", "rms_norm_eps", "tie_word_embeddings",
             "max_position_embeddings", "rope_parameters")  # fmt: skip
    sizes = {name: getattr(config, name) for name in names}
    model = Phi3ForCausalLM(Phi3Config(**sizes, pad_token_id=0)).double()
    state = load_file(llama / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        for whole, parts in (
            ("self_attn.qkv", ("self_attn.q", "self_attn.k", "self_attn.v")),
            ("mlp.gate_up", ("mlp.gate", "mlp.up")),
        ):
            weights = [state.pop(f"{at}.{part}_proj.weight") for part in parts]
            state[f"{at}.{whole}_proj.weight"] = torch.cat(weights)
    model.load_state_dict(state)
    folder = tmp_path_factory.mktemp("phi3")
    model.save_pretrained(folder)
    return folder


def _logits(base, adapter=None):
    """Of plain PEFT, which must find all that its config asks for, and place all there is."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "`lora_bias=True` was passed")
        options = {"dtype": torch.float64, "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(base, **options)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
            found = model.load_adapter(adapter, "default")
            assert found.missing_keys == found.unexpected_keys == []
        with torch.no_grad():
            return model.double().eval()(INPUT).logits


def _same(one, other, atol=1e-12):
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def _convert(folder, tmp_path, name="out", **asked):
    return tmp_path / name, convert_adapter(folder, tmp_path / name, Conversion(**asked))


def _config(folder):
    return json.loads((folder / "adapter_config.json").read_text())


PATTERNS = {
    "rank_pattern": {"layers.1.self_attn.[qk]_proj": 3, "up_proj": 2},
    "alpha_pattern": {"v_proj": 5, "layers.0.self_attn.k_proj": 7, "down_proj": 3},
}


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
    out, _ = _convert(folder, tmp_path, to_base=str(phi3))
    said = _logits(llama, folder)
    assert (said - _logits(llama)).abs().max() > 0.01
    _same(_logits(phi3, out), said)
    assert _config(out)["base_model_name_or_path"] == str(phi3)
    back, _ = _convert(out, tmp_path, "back", to_base=str(llama))
    _same(_logits(llama, back), said)


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
    out, found = _convert(folder, tmp_path, to_base=str(llama))
    _same(_logits(llama, out), _logits(phi3, folder))
    tensors = load_file(out / "adapter_model.safetensors")
    at = "base_model.model.model.layers.0.self_attn"
    shapes = [list(tensors[f"{at}.{part}_proj.lora_B.weight"].shape) for part in "qkv"]
    r = found.ranks[0]
    assert shapes == [[32, r], [16, r], [16, r]]
    if "layers_to_transform" not in config:
        assert sorted(_config(out)["target_modules"]) == sorted(SEPARATE)
    back, moved = _convert(out, tmp_path, "back", to_base=str(phi3))
    assert moved.moved.fused == moved.moved.fused_at_own_rank > 0
    first, last = (load_file(one / "adapter_model.safetensors") for one in (folder, back))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)


def test_a_fused_rank_is_the_sum_of_the_ranks_and_scalings_stay_bit_equal(llama, phi3, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE, lora_alpha=6)
    out, found = _convert(folder, tmp_path, to_base=str(phi3))
    config = _config(out)
    assert found.ranks == (4, 8, 12)
    for module, r in (("qkv_proj", 12), ("gate_up_proj", 8), ("o_proj", 4)):
        assert config["rank_pattern"].get(module, config["r"]) == r
        assert config["alpha_pattern"].get(module, config["lora_alpha"]) / r == 6 / 4


def test_parts_in_another_order_are_another_model(llama, phi3, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE)
    table = {"qkv_proj": ("q_proj", "v_proj", "k_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    out, _ = _convert(folder, tmp_path, to_base=str(phi3), fused=table)
    assert (_logits(phi3, out) - _logits(llama, folder)).abs().max() > 1e-3


def test_blocks_that_share_columns_are_another_model(llama, phi3, tmp_path, monkeypatch):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE)
    monkeypatch.setattr(fused, "_has_one_a", lambda layers: bool(list(layers)))
    out, _ = _convert(folder, tmp_path, to_base=str(phi3))
    assert (_logits(phi3, out) - _logits(llama, folder)).abs().max() > 1e-3


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
        _convert(folder, tmp_path, to_base=str(phi3))
    assert not (tmp_path / "out").exists()


def test_factors_that_go_with_a_changed_base_are_refused(llama, phi3, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(_config(folder) | {"init_lora_weights": "pissa"}))
    for asked in ({"to_base": str(phi3)}, {"r": 2}, {"others": {folder: 1.0}}):
        with pytest.raises(ArtifactError, match="init_lora_weights = 'pissa', with which"):
            _convert(folder, tmp_path, **asked)
    _convert(folder, tmp_path, dtype="float64")


def test_another_base_is_refused(llama, phi3, tmp_path):
    folder = write_adapter(phi3, tmp_path / "in", target_modules=FUSED)
    other = write_base(tmp_path / "other", num_key_value_heads=1)
    with pytest.raises(ArtifactError, match=r"factors of .* make a weight \[64, 32\]"):
        _convert(folder, tmp_path, to_base=str(other))
    fewer = write_base(tmp_path / "fewer", num_hidden_layers=1)
    with pytest.raises(ArtifactError, match=r"adapts model.layers.1.*, and the base has neither"):
        _convert(folder, tmp_path, to_base=str(fewer))


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, PATTERNS, {"lora_dropout": 0.1}])
def test_a_rank_is_reduced_to_the_best_of_that_rank(llama, tmp_path, config):
    targets = [*SEPARATE, "embed_tokens"]
    folder = write_adapter(llama, tmp_path / "in", target_modules=targets, **config)
    change_tensors(folder, lambda tensors: {k: t.double() for k, t in tensors.items()})
    out, found = _convert(folder, tmp_path, r=2)
    before, after = (PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64), one)
        for one in (folder, out))  # fmt: skip
    for module, loss in found.losses.items():
        old, new = (
            model.get_submodule(f"base_model.model.{module}").get_delta_weight("default")
            for model in (before, after)
        )
        tail = torch.linalg.svdvals(old)[2:].square().sum().sqrt()
        assert loss.distance == pytest.approx(float(tail), rel=1e-9, abs=1e-12)
        assert float((old - new).norm()) == pytest.approx(float(tail), rel=1e-9, abs=1e-12)
        assert loss.relative == pytest.approx(float(tail / old.norm()), rel=1e-9, abs=1e-12)
    assert max(found.ranks) == 2


def test_a_rank_that_was_not_used_is_dropped_without_loss(llama, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE, r=6)

    def cut(tensors):
        tensors = {key: tensor.double() for key, tensor in tensors.items()}
        for key, tensor in tensors.items():
            if "lora_B" in key:
                tensor[:, 3:] = tensor[:, :3]
        return tensors

    change_tensors(folder, cut)
    out, found = _convert(folder, tmp_path, r=3)
    assert all(loss.relative < 1e-14 for loss in found.losses.values())
    _same(_logits(llama, out), _logits(llama, folder))
    with pytest.raises(ArtifactError, match="has rank 6; a rank can be reduced, not raised"):
        _convert(folder, tmp_path, "no", r=6)


def test_an_adapter_that_does_nothing_loses_nothing(llama, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=["q_proj"])
    change_tensors(folder, lambda ts: {k: t * ("lora_A" in k) for k, t in ts.items()})
    _, found = _convert(folder, tmp_path, r=1)
    assert [loss.relative for loss in found.losses.values()] == [0, 0]


# PEFT holds weights and their roots in float32, which these numbers are exact in.
@pytest.mark.parametrize(
    ("how", "weights"),
    [("cat", (1, 1)), ("cat", (0.7, -0.4)), ("linear", (1.5, -3)), ("svd", (0.75, 1.5))],
)
def test_a_combination_is_that_of_peft(llama, tmp_path, how, weights):
    targets = ["q_proj", "down_proj", "embed_tokens"]
    one = write_adapter(llama, tmp_path / "one", target_modules=targets)
    two = write_adapter(llama, tmp_path / "two", target_modules=targets, lora_alpha=3)
    change_tensors(one, lambda tensors: {k: t.double() for k, t in tensors.items()})
    change_tensors(
        two,
        lambda tensors: (
            {k: t.double().flip(-1) if "lora_A" in k else t.double() for k, t in tensors.items()}
        ),
    )
    out, _ = _convert(one, tmp_path, weight=weights[0], others={two: weights[1]}, how=how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64)
        model = PeftModel.from_pretrained(base, one, adapter_name="one")
        model.load_adapter(two, "two")
        model.add_weighted_adapter(["one", "two"], list(weights), "sum", how)
        model.set_adapter("sum")
        with torch.no_grad():
            said = model.double().eval()(INPUT).logits
    _same(_logits(llama, out), said)


def _deltas(base, folder):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, folder)
    found = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    return {name: module.get_delta_weight("default").double() for name, module in found.items()}


@pytest.mark.parametrize("is_rslora", [False, True])
def test_adapters_of_other_modules_and_ranks_are_summed(llama, tmp_path, is_rslora):
    one, two = (
        write_adapter(llama, tmp_path / name, target_modules=targets, r=r, use_rslora=is_rslora)
        for name, targets, r in (
            ("one", ["q_proj", "v_proj"], 4),
            ("two", ["v_proj", "up_proj"], 3),
        )
    )
    for folder in (one, two):
        change_tensors(folder, lambda tensors: {k: t.double() for k, t in tensors.items()})
    out, found = _convert(one, tmp_path, weight=0.7, others={two: -1.3})
    assert found.ranks == (3, 4, 7)
    first, second, whole = (_deltas(llama, folder) for folder in (one, two, out))
    assert whole.keys() == first.keys() | second.keys()
    for name, delta in whole.items():
        _same(delta, 0.7 * first.get(name, 0 * delta) - 1.3 * second.get(name, 0 * delta))
    with pytest.raises(ArtifactError, match=r"ranks \[4, 3\], and a linear combination needs one"):
        _convert(one, tmp_path, "no", others={two: 1.0}, how="linear")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "magnitude of DoRA"),
        ({"lora_bias": True}, "bias of B"),
        ({"modules_to_save": ["lm_head"]}, "no factor of LoRA"),
        ({"trainable_token_indices": [3]}, "no factor of LoRA"),
    ],
)
def test_what_has_no_sum_is_refused(llama, tmp_path, config, said):
    one = write_adapter(llama, tmp_path / "one", target_modules=["q_proj"])
    two = write_adapter(llama, tmp_path / "two", target_modules=["q_proj"], **config)
    with pytest.raises(ArtifactError, match=said):
        _convert(one, tmp_path, others={two: 1.0})
    assert not (tmp_path / "out").exists()


def test_sixteen_bits_keep_what_they_can_and_say_what_they_cannot(llama, tmp_path):
    one = write_adapter(llama, tmp_path / "one", target_modules=["q_proj"])
    change_tensors(one, lambda tensors: {k: t.bfloat16() for k, t in tensors.items()})
    out, _ = _convert(one, tmp_path, "half", weight=0.5, others={one: -2.0})
    found = load_file(out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    with pytest.raises(ArtifactError, match="which bfloat16 cannot hold; keep it with --dtype"):
        _convert(one, tmp_path, "no", others={one: 0.3})
    _convert(one, tmp_path, "rounded", others={one: 0.3}, dtype="bfloat16")
    with pytest.raises(ArtifactError, match="too large for float16"):
        _convert(one, tmp_path, "large", others={one: 1e7}, dtype="float16")


def test_a_dtype_is_written_and_all_else_stays(llama, tmp_path):
    folder = write_adapter(
        llama, tmp_path / "in", target_modules=["q_proj"], use_dora=True, modules_to_save=["norm"]
    )
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    out, _ = _convert(folder, tmp_path, dtype="float64")
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    tensors = load_file(out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float64}
    first, last = _config(folder), _config(out)
    assert last == first | {"target_modules": sorted(first["target_modules"])}
    _same(_logits(llama, out), _logits(llama, folder))


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": SEPARATE, "rank_pattern": {r"model.layers.0.self_attn.q_proj": 2}},
        {"target_modules": r"model\.layers\..*\.(q|up)_proj", "modules_to_save": ["model.norm"]},
        {"target_modules": ["model.layers.1.mlp.up_proj"], "trainable_token_indices":
            {"model.embed_tokens": [3, 5]}},
    ],
)  # fmt: skip
def test_a_prefix_is_renamed_there_and_back(llama, tmp_path, config):
    folder = write_adapter(llama, tmp_path / "in", **config)
    asked = {"prefixes": {"model.": "model.language_model."}, "base_name": "some/base"}
    out, _ = _convert(folder, tmp_path, **asked)
    keys = load_file(out / "adapter_model.safetensors").keys()
    assert all(key.startswith("base_model.model.model.language_model.") for key in keys)
    assert _config(out)["base_model_name_or_path"] == "some/base"
    asked = {"prefixes": {"model.language_model.": "model."}, "to_base": str(llama)}
    back, _ = _convert(out, tmp_path, "back", **asked)
    _same(_logits(llama, back), _logits(llama, folder))


def test_a_prefix_that_fits_nothing_or_two_names_are_refused(llama, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=["q_proj", "v_proj"])
    with pytest.raises(ArtifactError, match=r"--rename transformer\.=model\.: no module"):
        _convert(folder, tmp_path, prefixes={"transformer.": "model."})
    with pytest.raises(ArtifactError, match="two tensors would be called"):
        _convert(folder, tmp_path, prefixes={"model.layers.0.": "model.layers.1."})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "nothing is asked for"),
        ({"dtype": "int8"}, "--dtype int8: is none of"),
        ({"weight": 0.5}, "--weight: needs other adapters"),
        ({"how": "svd"}, "--combine: needs other adapters"),
        ({"fused": {"a": ("b",)}}, "--fused: needs the base"),
        ({"to_base": "/nowhere/at-all"}, "transformers cannot build this model"),
    ],
)
def test_what_makes_no_sense_is_refused(llama, tmp_path, asked, said):
    folder = write_adapter(llama, tmp_path / "in", target_modules=["q_proj"])
    with pytest.raises(ArtifactError, match=said):
        _convert(folder, tmp_path, **asked)


@pytest.mark.world
def test_the_command_says_what_it_did(llama, phi3, tmp_path):
    write_adapter(llama, tmp_path / "one", target_modules=SEPARATE)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    argv = ["convert", "one", "--out", "out", "--add", "two=0.5", "--to-base", str(phi3)]
    done = forked_tplora(*argv, "--rank", "4", "--base", "its/name", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fused into 8 layers of 2 adapters: 0 of parts with one A" in done.stdout
    assert "relative error" in done.stdout
    assert "2 adapters combined: cat" in done.stdout
    assert "adapter: out" in done.stdout
    assert _config(tmp_path / "out")["base_model_name_or_path"] == "its/name"
    twice = forked_tplora(*argv, "--add", "two=1", cwd=tmp_path)
    assert twice.returncode == 2
    assert "is named twice" in twice.stderr


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, vocab_size=50,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mixtral")
    MixtralForCausalLM(config).double().save_pretrained(folder)
    return folder


def test_experts_keep_their_order_in_a_sum_and_lose_what_is_said(mixtral, tmp_path):
    targets = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    one = write_adapter(mixtral, tmp_path / "one", target_modules=["q_proj"], **targets)
    change_tensors(one, lambda tensors: {k: t.double() for k, t in tensors.items()})
    out, found = _convert(one, tmp_path, weight=0.7, others={one: 0.3})
    assert found.ranks == (8,)
    said = _logits(mixtral, one)
    _same(_logits(mixtral, out), said)
    back, found = _convert(out, tmp_path, "back", r=4)
    assert all(loss.relative < 1e-13 for loss in found.losses.values())
    _same(_logits(mixtral, back), said)
    renamed, _ = _convert(one, tmp_path, "renamed", prefixes={"model.": "model.text."})
    again, _ = _convert(renamed, tmp_path, "again", prefixes={"model.text.": "model."})
    _same(_logits(mixtral, again), said)
    fitted, _ = _convert(one, tmp_path, "fitted", to_base=str(mixtral))
    _same(_logits(mixtral, fitted), said)


def test_only_an_adapter_is_replaced(llama, tmp_path):
    folder = write_adapter(llama, tmp_path / "run" / "adapter", target_modules=["q_proj"])
    asked = Conversion(dtype="float16")
    with pytest.raises(ArtifactError, match=r"holds files and no adapter_config\.json"):
        convert_adapter(folder, tmp_path / "run", asked, overwrite=True)
    with pytest.raises(ArtifactError, match="exists already"):
        convert_adapter(folder, folder, asked)
    convert_adapter(folder, folder, asked, overwrite=True)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


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
    out, _ = _convert(folder, tmp_path, to_base=str(phi3))
    assert sorted(_config(out)["target_modules"]) == ["qkv_proj"]
    fitted, _ = _convert(folder, tmp_path, "grown", to_base=str(grown[1]))
    first, last = (load_file(one / "adapter_model.safetensors") for one in (out, fitted))
    assert all(torch.equal(first[key], last[key]) for key in first)


def test_a_base_that_stores_its_weights_transposed_is_nothing_to_the_factors(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 32}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).double().save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    asked = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    folder = write_adapter(base, tmp_path / "in", **asked)
    change_tensors(folder, lambda tensors: {k: t.double() for k, t in tensors.items()})
    twice, _ = _convert(folder, tmp_path, "twice", weight=0.3, others={folder: 0.7})
    out, _ = _convert(twice, tmp_path, r=4, to_base=str(base))
    _same(_logits(base, out), _logits(base, folder))


def test_adapters_of_both_layouts_are_summed_on_either(llama, phi3, tmp_path):
    one = write_adapter(llama, tmp_path / "one", target_modules=SEPARATE)
    two = write_adapter(phi3, tmp_path / "two", target_modules=FUSED, r=3, use_rslora=True)
    for folder in (one, two):
        change_tensors(folder, lambda tensors: {k: t.double() for k, t in tensors.items()})
    on_llama, _ = _convert(one, tmp_path, "llama", others={two: -0.7}, to_base=str(llama))
    on_phi3, found = _convert(one, tmp_path, "phi3", others={two: -0.7}, to_base=str(phi3))
    assert (found.moved.fused, found.moved.split, found.ranks) == (4, 0, (7, 11, 15))
    _same(_logits(llama, on_llama), _logits(phi3, on_phi3))
    first, _ = _convert(one, tmp_path, "first", to_base=str(phi3))
    first, second, whole = (_deltas(phi3, folder) for folder in (first, two, on_phi3))
    for name, delta in whole.items():
        _same(delta, first[name] - 0.7 * second[name])


def test_one_weight_that_is_adapted_twice_is_refused(llama, phi3, tmp_path):
    folder = write_adapter(phi3, tmp_path / "in", target_modules=FUSED)
    at = "base_model.model.model.layers.0.self_attn"
    ends = ("lora_A.weight", "lora_B.weight")
    change_tensors(folder, lambda tensors: tensors | {
        f"{at}.k_proj.{end}": tensors[f"{at}.qkv_proj.{end}"][:16].clone() for end in ends
    })  # fmt: skip
    for base in (llama, phi3):
        with pytest.raises(ArtifactError, match=r"adapts .*qkv_proj and .*k_proj, which are one"):
            _convert(folder, tmp_path, to_base=str(base))


def test_a_text_model_and_one_that_sees_share_an_adapter(llama, tmp_path):
    text = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float64)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4, projection_dim=8,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text.config, image_token_index=49)
    model = LlavaForConditionalGeneration(config).double()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(tmp_path / "llava")
    asked = {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"layers.1.mlp.*": 2}}
    folder = write_adapter(llama, tmp_path / "in", **asked)
    prefixes = {"model.": "model.language_model."}
    out, _ = _convert(folder, tmp_path, prefixes=prefixes, to_base=str(tmp_path / "llava"))
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(model, out)
        found = adapted.load_adapter(out, "default")
        said = adapted.double().eval()(INPUT).logits
    assert found.missing_keys == found.unexpected_keys == []
    _same(said, _logits(llama, folder))
    prefixes = {"model.language_model.": "model."}
    back, _ = _convert(out, tmp_path, "back", prefixes=prefixes, to_base=str(llama))
    assert sorted(_config(back)["target_modules"]) == ["down_proj", "q_proj"]
    _same(_logits(llama, back), said)


def test_what_says_which_base_it_was_follows_the_base(llama, phi3, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE)
    (folder / BASE).write_text(json.dumps(take_fingerprint(str(llama))))
    same, _ = _convert(folder, tmp_path, "same", r=2)
    assert json.loads((same / BASE).read_text()) == take_fingerprint(str(llama))
    fitted, _ = _convert(folder, tmp_path, "fitted", to_base=str(phi3))
    assert json.loads((fitted / BASE).read_text()) == take_fingerprint(str(phi3))
    named, _ = _convert(folder, tmp_path, "named", base_name="another/base")
    assert not (named / BASE).exists()
