"""The GGUF adapter, read back as llama.cpp reads it, changes its weights as PEFT changes PEFT's."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.artifact.tiny import VOCAB, load_adapted, write_adapter, write_base
from tplora.artifact.adapter_dir import read_adapter
from tplora.artifact.consumer_form import write_for

IDS = torch.arange(12).view(1, -1) % VOCAB
ALL = {"target_modules": "all-linear"}
PATTERNS = {
    "rank_pattern": {"q_proj": 2, "layers.1.mlp.*": 7},
    "alpha_pattern": {"up_proj": 11, "k_proj": 3},
}
KINDS = {
    "plain": ALL,
    "rslora": ALL | {"use_rslora": True},
    "patterns": ALL | PATTERNS,
    "rslora with patterns": ALL | PATTERNS | {"use_rslora": True},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "ends of other ranks": {
        "target_modules": ["embed_tokens", "lm_head", "k_proj"],
        "rank_pattern": {"embed_tokens": 2, "lm_head": 9},
        "use_rslora": True,
    },
}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _write_qwen2(folder):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {"llama": write_base(folder / "llama"), "qwen2": _write_qwen2(folder / "qwen2")}


def _read(path):
    """Alpha, and every tensor as float64 numbers, in numpy's order of dimensions."""
    reader = gguf.GGUFReader(path)
    values = {
        name: field.parts[field.data[0]].tobytes().decode()
        if field.types[0] == gguf.GGUFValueType.STRING
        else field.parts[field.data[0]][0]
        for name, field in reader.fields.items()
    }
    tensors = {
        t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
    }
    return values, tensors


def _hf_name(name):
    if name in ("token_embd", "output"):
        return {"token_embd": "model.embed_tokens", "output": "lm_head"}[name]
    _, layer, kind = name.split(".")
    module = next(hf for hf, own in NAMES.items() if own == kind)
    return f"model.layers.{layer}.{module}"


def _turned(weight, heads):
    """Row by row, from llama.cpp's rotary embedding, which turns the neighbours 2 i and 2 i + 1."""
    size = weight.shape[0] // heads
    half = size // 2
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(half):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + half + i]
    return out


def _in_gguf(name, weight, family):
    heads = {"attn_q": 4, "attn_k": 2}.get(name.rpartition(".")[2])
    return weight if heads is None or family != "llama" else _turned(weight, heads)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_base_in_gguf_with_the_adapter_is_the_merged_model_in_gguf(
    bases, tmp_path, family, kind
):
    adapter = write_adapter(bases[family], tmp_path / "a", **KINDS[kind])
    config = AutoConfig.from_pretrained(bases[family])
    write_for(read_adapter(adapter), "llama.cpp", config, tmp_path / "out")
    values, tensors = _read(tmp_path / "out" / "adapter.gguf")
    assert values["general.type"] == "adapter"
    assert values["general.architecture"] == family
    assert values["adapter.type"] == "lora"
    base = AutoModelForCausalLM.from_pretrained(bases[family]).double().state_dict()
    merged = load_adapted(bases[family], adapter).double().merge_and_unload().state_dict()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    weights = {name.rpartition(".")[0] for name in tensors}
    assert {f"{_hf_name(name.removesuffix('.weight'))}.weight" for name in weights} == changed
    for weight in sorted(weights):
        name = weight.removesuffix(".weight")
        a, b = tensors[f"{weight}.lora_a"], tensors[f"{weight}.lora_b"]
        delta = float(values["adapter.lora.alpha"]) / b.shape[1]  # as llama.cpp scales it
        delta = delta * (a @ b.T if name == "token_embd" else b @ a)
        before, after = (
            _in_gguf(name, state[f"{_hf_name(name)}.weight"].numpy(), family)
            for state in (base, merged)
        )
        np.testing.assert_allclose(before + delta, after, rtol=0, atol=2e-6)
        assert np.abs(delta).max() > 0.01


@pytest.mark.parametrize("kind", ["plain", "rslora"])
def test_factors_are_the_adapters_own_where_one_alpha_scales_them_all(bases, tmp_path, kind):
    adapter = read_adapter(write_adapter(bases["qwen2"], tmp_path / "a", **KINDS[kind]))
    config = AutoConfig.from_pretrained(bases["qwen2"])
    write_for(adapter, "llama.cpp", config, tmp_path / "out")
    _, tensors = _read(tmp_path / "out" / "adapter.gguf")
    assert len(tensors) == 2 * len(adapter.pairs)
    for name, found in tensors.items():
        weight, _, factor = name.rpartition(".")
        module = _hf_name(weight.removesuffix(".weight"))
        pair = next(pair for pair in adapter.pairs if pair.module == module)
        key = pair.a if factor == "lora_a" else pair.b
        assert np.array_equal(found, adapter.tensor(key).double().numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_once(bases, tmp_path, dtype):
    adapter = read_adapter(write_adapter(bases["qwen2"], tmp_path / "a", **ALL))
    config = AutoConfig.from_pretrained(bases["qwen2"])
    write_for(adapter, "llama.cpp", config, tmp_path / "out", dtype=dtype)
    _, tensors = _read(tmp_path / "out" / "adapter.gguf")
    pair = next(pair for pair in adapter.pairs if pair.module.endswith("0.mlp.up_proj"))
    expected = adapter.tensor(pair.b).to(dtype).double().numpy()
    assert np.array_equal(tensors["blk.0.ffn_up.weight.lora_b"], expected)


def test_rows_left_in_transformers_order_would_be_another_model(bases, tmp_path):
    adapter = write_adapter(bases["llama"], tmp_path / "a", target_modules=["q_proj"])
    config = AutoConfig.from_pretrained(bases["llama"])
    write_for(read_adapter(adapter), "llama.cpp", config, tmp_path / "out")
    _, tensors = _read(tmp_path / "out" / "adapter.gguf")
    own = read_adapter(adapter)
    pair = next(pair for pair in own.pairs if ".0." in pair.module)
    rows = own.tensor(pair.b).double().numpy()
    assert not np.array_equal(tensors["blk.0.attn_q.weight.lora_b"], rows)
    assert np.array_equal(tensors["blk.0.attn_q.weight.lora_b"], _turned(rows, 4))
