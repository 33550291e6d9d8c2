"""What consumers take is written for them with the same product, and the rest is refused."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tests.artifact.tiny import VOCAB, change_tensors, load_adapted, write_adapter, write_base
from tplora.artifact.adapter_dir import read_adapter
from tplora.artifact.consumer_check import check_fit
from tplora.artifact.consumer_form import write_for
from tplora.artifact.consumers import CONSUMERS, PARTS
from tplora.cli import app
from tplora.errors import ArtifactError
from tplora.saved.config import read_saved_config

IDS = torch.arange(12).view(1, -1) % VOCAB
ALL = {"target_modules": "all-linear"}
PATTERNS = ALL | {
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.*": 7},
    "alpha_pattern": {"up_proj": 11},
}
KINDS = {
    "plain": ALL,
    "q and v": {"target_modules": r".*\.(q_proj|v_proj)"},
    "rslora": ALL | {"use_rslora": True},
    "patterns": PATTERNS,
    "rslora with patterns": PATTERNS | {"use_rslora": True},
    "a pattern for names": {"target_modules": r".*\.(q_proj|down_proj)"},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "ends of other ranks": {
        "target_modules": ["embed_tokens", "lm_head", "o_proj"],
        "rank_pattern": {"embed_tokens": 2, "lm_head": 9},
        "use_rslora": True,
    },
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "lm_head"]},
    "no bias": {"target_modules": ["q_proj"], "bias": "all"},  # the base has none
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    "dora": ALL | {"use_dora": True},
    "lora_bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "rank 1024": {"target_modules": ["q_proj"], "r": 1024},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "pissa": {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
}
# Which of them each consumer takes; the rest has to be refused.
PLAIN = {
    "q and v",
    "plain",
    "no bias",
    "rslora",
    "patterns",
    "rslora with patterns",
    "a pattern for names",
}
ENDS = {"ends", "ends of other ranks"}
TAKEN = {
    "peft": {*KINDS},
    "transformers": {*KINDS} - {"dora", "pissa"},
    "vllm": PLAIN | ENDS | {"one layer"},
    "sglang": PLAIN - {"no bias", "a pattern for names"} | ENDS | {"q and v"},
    "tgi": PLAIN | {"rank 1024"},
    "llama.cpp": PLAIN | ENDS | {"one layer", "rank 1024"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        kind: write_adapter(base, folder / kind.replace(" ", "-"), **config)
        for kind, config in KINDS.items()
        if kind != "pissa"
    } | {"pissa": _says_pissa(write_adapter(base, folder / "pissa", target_modules=["q_proj"]))}


def _says_pissa(folder):
    config = read_saved_config(folder)
    config.init_lora_weights = "pissa"
    config.save_pretrained(str(folder))
    return folder


def _logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_every_part_is_ruled_on_by_every_consumer_that_is_not_peft():
    for name, consumer in CONSUMERS.items():
        assert set(consumer.rules) <= set(PARTS)
        if name not in ("peft", "transformers"):
            assert set(consumer.rules) == set(PARTS), name


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_consumer_does_not_take_is_refused_with_the_reason(
    base, adapters, tmp_path, consumer, kind
):
    adapter = read_adapter(adapters[kind])
    config = AutoConfig.from_pretrained(base)
    out = tmp_path / "out"
    if kind in TAKEN[consumer]:
        write_for(adapter, consumer, config, out)
        assert out.is_dir()
        return
    with pytest.raises(ArtifactError, match=r" does not take it: .*; (merge it instead|it cannot)"):
        write_for(adapter, consumer, config, out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("consumer", ["peft", "vllm", "sglang", "tgi"])
@pytest.mark.parametrize("kind", sorted(PLAIN | ENDS))
def test_what_is_written_says_in_peft_what_the_adapter_said(
    base, adapters, tmp_path, consumer, kind
):
    if kind not in TAKEN[consumer]:
        return
    out = tmp_path / "out"
    write_for(read_adapter(adapters[kind]), consumer, AutoConfig.from_pretrained(base), out)
    found = _logits(load_adapted(base, out).double())
    expected = _logits(load_adapted(base, adapters[kind]).double())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)  # B is rounded to float32 once


@pytest.mark.parametrize("consumer", ["vllm", "sglang", "tgi"])
def test_one_rank_and_one_alpha_describe_every_pair(base, adapters, tmp_path, consumer):
    kind, out = "rslora with patterns", tmp_path / "out"
    write_for(read_adapter(adapters[kind]), consumer, AutoConfig.from_pretrained(base), out)
    config = read_saved_config(out)
    found = (config.rank_pattern, config.alpha_pattern, config.use_rslora)
    assert found == ({}, {}, False)
    tensors = load_file(out / "adapter_model.safetensors")
    assert {t.shape[0] for key, t in tensors.items() if ".lora_A." in key} == {config.r}
    assert {t.shape[1] for key, t in tensors.items() if ".lora_B." in key} == {config.r}


@pytest.mark.parametrize("kind", sorted(TAKEN["transformers"]))
def test_transformers_load_adapter_says_what_peft_says(base, adapters, tmp_path, kind):
    out = tmp_path / "out"
    write_for(read_adapter(adapters[kind]), "transformers", AutoConfig.from_pretrained(base), out)
    model = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.load_adapter(str(out))
    assert torch.equal(_logits(model), _logits(load_adapted(base, adapters[kind])))


def test_transformers_load_adapter_still_loses_magnitudes(base, adapters):
    model = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.load_adapter(str(adapters["dora"]))
    difference = _logits(model) - _logits(load_adapted(base, adapters["dora"]))
    assert difference.abs().max() > 1e-3, "take the rule out"


def test_every_reason_is_said_and_the_command_that_merges(base, tmp_path):
    config = ALL | {"use_dora": True, "modules_to_save": ["input_layernorm"], "r": 520}
    write_adapter(base, tmp_path / "a", **config)
    done = CliRunner().invoke(
        app,
        ["export", f"{tmp_path}/a", "--base", str(base), "--for", "vllm", "--out", f"{tmp_path}/o"],
    )
    said = str(done.exception)
    assert isinstance(done.exception, ArtifactError)
    for reason in ("use_dora", "modules_to_save", "rank is 520"):
        assert reason in said
    assert f"merge it instead: tplora export {tmp_path}/a --base {base} --merged" in said


def test_the_command_writes_and_says_how_to_serve(base, adapters, tmp_path):
    out = tmp_path / "out"
    arguments = ["export", str(adapters["patterns"]), "--base", str(base)]
    done = CliRunner().invoke(app, [*arguments, "--for", "vllm", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "--max-lora-rank 8" in done.output.replace("\n", " ")
    assert PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--for", "vllm"], ["--out", "o"], ["--merged", "m", "--for", "vllm", "--out", "o"],
     ["--for", "vllm", "--out", "o", "--weight", "2"]],
)  # fmt: skip
def test_neither_and_both_are_mistakes(arguments):
    assert CliRunner().invoke(app, ["export", "run", *arguments]).exit_code == 2


def test_a_bias_in_the_bases_place_is_refused_by_servers(tmp_path):
    base = write_base(tmp_path / "base", attention_bias=True)
    adapter = write_adapter(base, tmp_path / "a", target_modules=["q_proj"], bias="all")
    facts = AutoConfig.from_pretrained(base)
    for name in ("vllm", "sglang", "tgi", "llama.cpp"):
        fit = check_fit(read_adapter(adapter), name, facts)
        assert any("biases in the base's place" in reason for reason in fit.reasons)


def test_tokens_that_the_base_has_not_are_refused(base, adapters):
    facts = AutoConfig.from_pretrained(base)
    facts.vocab_size = VOCAB + 8
    fit = check_fit(read_adapter(adapters["ends"]), "vllm", facts)
    assert any("an adapter cannot add tokens" in reason for reason in fit.reasons)


@pytest.mark.parametrize("consumer", ["vllm", "sglang", "llama.cpp"])
def test_a_copy_that_is_not_the_bases_own_is_not_left_out(base, tmp_path, consumer):
    folder = write_adapter(base, tmp_path / "a", target_modules=["embed_tokens", "lm_head"])
    config = AutoConfig.from_pretrained(base)
    adapter = read_adapter(folder)
    assert adapter.saved_bases
    write_for(adapter, consumer, config, tmp_path / "same", base_folder=base)

    def change(tensors):
        key = next(key for key in tensors if key.endswith("lm_head.base_layer.weight"))
        return tensors | {key: tensors[key] + 1e-3}

    change_tensors(folder, change)
    with pytest.raises(ArtifactError, match=r"lm_head.base_layer.weight is not the base's own"):
        write_for(read_adapter(folder), consumer, config, tmp_path / "other", base_folder=base)
    assert not (tmp_path / "other").exists()


def test_llama_cpp_takes_no_end_of_a_tied_base_and_no_unknown_model(base, adapters):
    adapter = read_adapter(adapters["ends"])
    facts = AutoConfig.from_pretrained(base).to_dict()
    tied = SimpleNamespace(**facts | {"tie_word_embeddings": True})
    assert sum("tied" in one for one in check_fit(adapter, "llama.cpp", tied).reasons) == 2
    other = SimpleNamespace(**facts | {"model_type": "gemma3_text"})
    assert any("gemma3_text" in one for one in check_fit(adapter, "llama.cpp", other).reasons)


def test_halves_are_widened_where_their_scaling_rounds(base, adapters, tmp_path):
    folder = write_adapter(base, tmp_path / "half", **PATTERNS)
    path = folder / "adapter_model.safetensors"
    save_file({key: t.bfloat16() for key, t in load_file(path).items()}, path)
    write_for(read_adapter(folder), "vllm", AutoConfig.from_pretrained(base), tmp_path / "out")
    found = _logits(load_adapted(base, tmp_path / "out").double())
    expected = _logits(load_adapted(base, folder).double())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    write_for(
        read_adapter(folder), "vllm", AutoConfig.from_pretrained(base), tmp_path / "float16",
        dtype=torch.float16,
    )  # fmt: skip
    written = load_file(tmp_path / "float16" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float16}
