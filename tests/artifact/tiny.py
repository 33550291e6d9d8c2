"""Tiny random bases and trained-looking PEFT adapters on disk."""

import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB = 50


def write_base(folder, *, dtype=torch.float32, max_shard_size="5GB", **config):
    """Save a two-layer Llama of pairwise different sizes."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**(sizes | config))).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def write_adapter(base, folder, **config):
    """Save a PEFT adapter on ``base`` whose B is not zero."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice on tied weights, which is what is tested
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6} | config)),
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(torch.rand_like(parameter) + 0.5)
                elif parameter.requires_grad:
                    parameter.normal_(std=0.2)
        model.save_pretrained(folder)
    return folder


def load_adapted(base, adapter, *, dtype=torch.float32):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        return PeftModel.from_pretrained(model, adapter)


def change_tensors(folder, change):
    """Rewrite an adapter's tensors as ``change`` makes them."""
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
