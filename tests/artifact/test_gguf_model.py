"""A merged model in GGUF, reloaded by transformers, says what the merged folder says."""

import json
import math

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from typer.testing import CliRunner

from tests.artifact.tiny import VOCAB, write_adapter, write_base
from tests.merging import merge_one
from tplora.artifact.gguf_model import check_gguf_model, write_gguf_model
from tplora.artifact.gguf_vocab import _LLAMA3
from tplora.cli import app
from tplora.errors import ArtifactError

IDS = torch.arange(12).view(1, -1) % VOCAB
SIZES = {
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "tie_word_embeddings": False,
}  # fmt: skip
MADE = {
    "llama": lambda folder: write_base(folder),
    "llama tied": lambda folder: write_base(folder, tie_word_embeddings=True),
    "llama of wide heads": lambda folder: write_base(folder, head_dim=12, rms_norm_eps=1e-5),
    "llama in shards": lambda folder: write_base(folder, max_shard_size="12KB"),
    "qwen2": lambda folder: _write(folder, Qwen2Config(**SIZES)),
    "mistral": lambda folder: _write(folder, MistralConfig(**SIZES, sliding_window=None)),
    # transformers' reader takes every Qwen3 for one of heads of 128
    "qwen3": lambda folder: _write(folder, Qwen3Config(**SIZES, head_dim=128)),
}


def _write(folder, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # biases and norms, too
    model.save_pretrained(folder)
    return folder


def _logits(*where, **options):
    model = AutoModelForCausalLM.from_pretrained(*where, dtype=torch.float32, **options)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("kind", MADE)
def test_the_file_says_what_the_merged_folder_says(tmp_path, kind):
    base = MADE[kind](tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "a", target_modules="all-linear")
    merge_one(str(base), adapter, tmp_path / "merged")
    write_gguf_model(tmp_path / "merged", tmp_path / "model.gguf")
    found = _logits(tmp_path, gguf_file="model.gguf")
    assert torch.equal(found, _logits(tmp_path / "merged"))
    assert (found - _logits(base)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_once_and_norms_not_at_all(tmp_path, dtype):
    base = _write(tmp_path / "base", Qwen2Config(**SIZES))
    write_gguf_model(base, tmp_path / "model.gguf", dtype=dtype)
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).state_dict()
    for name, tensor in load_file(base / "model.safetensors").items():
        expected = tensor if tensor.ndim == 1 else tensor.to(dtype).float()
        assert torch.equal(found[name], expected), name


def test_llama_3s_frequencies_are_written_as_llama_cpp_divides_by_them(tmp_path):
    rope = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    base = write_base(tmp_path / "base", head_dim=16, rope_parameters=rope)
    write_gguf_model(base, tmp_path / "model.gguf")
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    expected = []
    for i in range(8):
        wave = 2 * math.pi * 1e4 ** (2 * i / 16)
        smooth = (64 / wave - 1.0) / (4.0 - 1.0)
        smooth = min(max(smooth, 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / 8.0 + smooth))
    np.testing.assert_allclose(tensors["rope_freqs.weight"], expected, rtol=1e-6)
    assert len(set(expected)) > 2
    config = AutoConfig.from_pretrained(base)  # transformers' reader reads no scaling from the file
    assert torch.equal(_logits(tmp_path, gguf_file="model.gguf", config=config), _logits(base))


def _write_tokenizer(folder, splitting):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["one two three", "twelve 1234 twos, it's I'LL go"] * 9, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def _by_regex(regex):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize(
    "splitting",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        _by_regex(_LLAMA3),
        _by_regex(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
    ],
    ids=["gpt-2", "llama-bpe", "qwen2"],
)
def test_the_tokenizer_comes_along(tmp_path, splitting):
    base = write_base(tmp_path / "base", vocab_size=320)
    _write_tokenizer(base, splitting)
    write_gguf_model(base, tmp_path / "model.gguf")
    found = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    own = AutoTokenizer.from_pretrained(base)
    for text in ("one two", "twelve  1234 it's</s>", "I'LL go é 漢"):
        expected = own(text, add_special_tokens=False).input_ids
        assert found(text, add_special_tokens=False).input_ids == expected
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused_and_nothing_is_left(tmp_path):
    base = write_base(tmp_path / "base", vocab_size=320)
    _write_tokenizer(base, _by_regex(r"\p{L}+|\s+"))
    with pytest.raises(ArtifactError, match=r"splits text as .*convert_hf_to_gguf\.py"):
        write_gguf_model(base, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_what_gguf_would_not_say_is_refused_with_every_reason(tmp_path):
    base = write_base(tmp_path / "base")
    config = AutoConfig.from_pretrained(base)
    config.attention_bias, config.hidden_act, config.model_type = True, "gelu", "gemma3"
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4}
    with pytest.raises(ArtifactError) as caught:
        check_gguf_model("x", config)
    for reason in ("gemma3", "yarn", "attention_bias", "gelu"):
        assert reason in str(caught.value)


def test_the_command_merges_into_a_file(tmp_path):
    base = write_base(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "a", target_modules=["q_proj"])
    out = tmp_path / "out" / "model.gguf"
    arguments = ["export", str(adapter), "--base", str(base), "--merged", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    assert [path.name for path in out.parent.iterdir()] == ["model.gguf"]
    merge_one(str(base), adapter, tmp_path / "merged")
    assert torch.equal(_logits(out.parent, gguf_file=out.name), _logits(tmp_path / "merged"))
    again = CliRunner().invoke(app, arguments)
    assert "exists already" in str(again.exception)
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    (base / "config.json").write_text(json.dumps(config))
    refused = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "other.gguf")])
    assert "rotary embedding is scaled" in str(refused.exception)
