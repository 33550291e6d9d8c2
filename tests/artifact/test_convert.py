"""Adapters under other names and dtypes, and what `tplora convert` says and refuses."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    CLIPVisionConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tests.artifact.converting import (
    INPUT,
    SEPARATE,
    check_same,
    convert,
    logits,
    read_config,
    write_phi3,
)
from tests.artifact.tiny import change_tensors, write_adapter, write_base
from tests.command import forked_tplora
from tplora.artifact.convert.conversion import Conversion, convert_adapter
from tplora.base.fingerprint import BASE, take_fingerprint
from tplora.errors import ArtifactError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("llama"), dtype=torch.float64)


@pytest.fixture(scope="module")
def phi3(llama, tmp_path_factory):
    return write_phi3(llama, tmp_path_factory.mktemp("phi3"))


def test_a_dtype_is_written_and_all_else_stays(llama, tmp_path):
    folder = write_adapter(
        llama, tmp_path / "in", target_modules=["q_proj"], use_dora=True, modules_to_save=["norm"]
    )
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    out, _ = convert(folder, tmp_path, dtype="float64")
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    tensors = load_file(out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float64}
    first, last = read_config(folder), read_config(out)
    assert last == first | {"target_modules": sorted(first["target_modules"])}
    check_same(logits(llama, out), logits(llama, folder))


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
    out, _ = convert(folder, tmp_path, **asked)
    keys = load_file(out / "adapter_model.safetensors").keys()
    assert all(key.startswith("base_model.model.model.language_model.") for key in keys)
    assert read_config(out)["base_model_name_or_path"] == "some/base"
    asked = {"prefixes": {"model.language_model.": "model."}, "to_base": str(llama)}
    back, _ = convert(out, tmp_path, "back", **asked)
    check_same(logits(llama, back), logits(llama, folder))


def test_a_prefix_that_fits_nothing_or_two_names_are_refused(llama, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=["q_proj", "v_proj"])
    with pytest.raises(ArtifactError, match=r"--rename transformer\.=model\.: no module"):
        convert(folder, tmp_path, prefixes={"transformer.": "model."})
    with pytest.raises(ArtifactError, match="two tensors would be called"):
        convert(folder, tmp_path, prefixes={"model.layers.0.": "model.layers.1."})


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
        convert(folder, tmp_path, **asked)


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
    assert read_config(tmp_path / "out")["base_model_name_or_path"] == "its/name"
    twice = forked_tplora(*argv, "--add", "two=1", cwd=tmp_path)
    assert twice.returncode == 2
    assert "is named twice" in twice.stderr


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
    out, _ = convert(folder, tmp_path, prefixes=prefixes, to_base=str(tmp_path / "llava"))
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(model, out)
        found = adapted.load_adapter(out, "default")
        said = adapted.double().eval()(INPUT).logits
    assert found.missing_keys == found.unexpected_keys == []
    check_same(said, logits(llama, folder))
    prefixes = {"model.language_model.": "model."}
    back, _ = convert(out, tmp_path, "back", prefixes=prefixes, to_base=str(llama))
    assert sorted(read_config(back)["target_modules"]) == ["down_proj", "q_proj"]
    check_same(logits(llama, back), said)


def test_what_says_which_base_it_was_follows_the_base(llama, phi3, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE)
    (folder / BASE).write_text(json.dumps(take_fingerprint(str(llama))))
    same, _ = convert(folder, tmp_path, "same", r=2)
    assert json.loads((same / BASE).read_text()) == take_fingerprint(str(llama))
    fitted, _ = convert(folder, tmp_path, "fitted", to_base=str(phi3))
    assert json.loads((fitted / BASE).read_text()) == take_fingerprint(str(phi3))
    named, _ = convert(folder, tmp_path, "named", base_name="another/base")
    assert not (named / BASE).exists()


def test_each_tensor_keeps_its_own_dtype(llama, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=["q_proj"], use_dora=True)
    change_tensors(
        folder, lambda ts: {k: t.bfloat16() if "lora_B" in k else t for k, t in ts.items()}
    )
    out, _ = convert(folder, tmp_path, prefixes={"model.": "model."}, base_name="its/name")
    first, last = (load_file(one / "adapter_model.safetensors") for one in (folder, out))
    assert {key: t.dtype for key, t in last.items()} == {key: t.dtype for key, t in first.items()}
    assert all(torch.equal(first[key], last[key]) for key in first)
