"""Small models whose activations are large beside a tensor's overhead."""

from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

SETTINGS = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 8,
        "head_dim": 8,
    },
}


def write_model(name: str, folder: Path, **changes) -> str:
    settings = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 1021,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        **SETTINGS[name],
        **changes,
    }
    config = AutoConfig.for_model(name, **settings, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def lora(**changes) -> LoraConfig:
    settings = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**settings | changes)
