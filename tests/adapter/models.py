"""Adapted tiny models inside a rank, and one process's truth for them."""

from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tplora.adapter.attach import attach_adapter
from tplora.adapter.model import TploraModel
from tplora.base.load import load_base

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"]
SEED = 11


def lora(**settings: Any) -> LoraConfig:
    """A config as a user writes it, with B drawn so that every gradient is there."""
    defaults = {
        "task_type": "CAUSAL_LM",
        "r": 3,
        "lora_alpha": 6,
        "target_modules": TARGETS,
        "init_lora_weights": False,
    }
    return LoraConfig(**(defaults | settings))


def load_tplora(path: str, *, seed: int = SEED, data_rank: int = 0, **settings: Any) -> TploraModel:
    """The adapted model on this rank's pieces; on one process alone, whole."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    base = load_base(path, tp_size=size, dtype=torch.float64)
    model = attach_adapter(
        base,
        lora(**settings),
        seed=seed,
        data_rank=data_rank,
        autocast_adapter_dtype=False,
    )
    return _in_float64(model)


def load_plain(path: str, *, seed: int = SEED, **settings: Any) -> PeftModel:
    """Plain PEFT on the full model, in this process alone."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    torch.manual_seed(seed)
    return _in_float64(get_peft_model(base, lora(**settings), autocast_adapter_dtype=False))


def _in_float64(model: Any) -> Any:
    """PEFT draws embedding factors in float32; the truth is compared in float64."""
    wrong = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float64]
    if wrong:
        model.to(torch.float64)
    return model


def tokens(num_rows: int = 2, num_tokens: int = 7, *, seed: int = 4) -> torch.Tensor:
    """The same rows on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(127, (num_rows, num_tokens), generator=generator)
