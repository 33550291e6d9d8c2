"""What tests of conversions share: one model in two layouts, and what plain PEFT says."""

import json
import warnings

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from tplora.artifact.convert.conversion import Conversion, convert_adapter

SEPARATE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
INPUT = torch.arange(2, 26).reshape(2, 12)

PATTERNS = {
    "rank_pattern": {"layers.1.self_attn.[qk]_proj": 3, "up_proj": 2},
    "alpha_pattern": {"v_proj": 5, "layers.0.self_attn.k_proj": 7, "down_proj": 3},
}


def write_phi3(llama, folder):
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
    model.save_pretrained(folder)
    return folder


def write_mixtral(folder):
    """Two layers of three experts."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, vocab_size=50,
    )  # fmt: skip
    MixtralForCausalLM(config).double().save_pretrained(folder)
    return folder


def logits(base, adapter=None):
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


def check_same(one, other, atol=1e-12):
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def convert(folder, tmp_path, name="out", **asked):
    return tmp_path / name, convert_adapter(folder, tmp_path / name, Conversion(**asked))


def read_config(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def delta_weights(base, folder):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, folder)
    found = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    return {name: module.get_delta_weight("default").double() for name, module in found.items()}
