"""Tiny random checkpoints whose sizes differ pairwise, so that a mixed-up dim cannot fit.

12 heads and 6 key-value heads divide by 2 and 3; ask for ``heads=(8, 4)`` to divide by 4. A
vocabulary of 127 divides by nothing.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
)

VOCAB = 127
_COMMON = {
    "hidden_size": 24,
    "intermediate_size": 46,
    "num_hidden_layers": 2,
    "head_dim": 10,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3"},
    "phi3": {"model_type": "phi3"},
    "olmo2": {"model_type": "olmo2"},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
}
NAMES = tuple(_CHANGES)
_HEADS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "model_type": "gemma2",
        "final_logit_softcapping": 1.5,
        "query_pre_attn_scalar": 10,
    },
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "granite": {"model_type": "granite", "logits_scaling": 4.0},
    "bamba": {
        "model_type": "bamba",
        "attn_layer_indices": [0, 1],
        "mamba_n_heads": 4,
        "z_loss_coefficient": 0.3,
    },
}
"""Models that do something to their logits, or add to their loss."""

_OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 96,
        "rotary_pct": 0.5,
        "hidden_dropout": 0.2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 18,
        "norm_topk_prob": True,
    },
}
"""Dropout between the layers, and attention beside the MLP; experts."""


def tiny_config(name: str, *, heads: tuple[int, int] = (12, 6), **changes: Any) -> PretrainedConfig:
    """The config of tiny model ``name``; ``heads`` are attention heads and key-value heads."""
    settings: dict[str, Any] = _COMMON | (_CHANGES | _HEADS | _OTHERS)[name]
    settings |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], **changes}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def write_checkpoint(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a float64 model with weights far from their starting values; return its folder.

    Ones and zeros would hide a norm that is skipped and a bias that is added twice.
    """
    config = tiny_config(name, **changes)
    config.dtype = torch.float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    is_norm = parameter_name.endswith("norm.weight")
                    parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.2)
                else:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.to(torch.float64).save_pretrained(folder)
    return folder
