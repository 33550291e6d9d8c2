"""Runs that train something of the base itself, each to be held to plain PEFT in one process."""

import warnings

import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.models import CUT, Case, batches, compare_run, differences, load, lora, record_run
from tests.parity import assert_same_on_all_ranks

SCALED = CUT | {"model_type": "gemma3_text", "tie_word_embeddings": True, "pad_token_id": 6}
"""A tied embedding that is multiplied by the root of the hidden size; norms of heads; a padding
token, whose row gets no gradient."""


def _case(**changes) -> Case:
    return Case("query", changes={"target_modules": ["q_proj", "down_proj"], **changes})


MODULES = {
    "head": ("llama", CUT, _case(modules_to_save=["lm_head"])),
    "embedding-and-head": ("llama", CUT, _case(modules_to_save=["lm_head", "embed_tokens"])),
    "tied-apart": ("qwen2_tied", CUT, _case(modules_to_save=["embed_tokens", "lm_head"])),
    "tied-together": (
        "qwen2_tied",
        CUT,
        _case(modules_to_save=["lm_head"], ensure_weight_tying=True),
    ),
    "scaled": ("llama", SCALED, _case(modules_to_save=["embed_tokens", "q_norm"])),
    "norms": ("qwen3", CUT, _case(modules_to_save=["norm"])),
    "linears": ("llama_bias", CUT, _case(modules_to_save=["o_proj", "gate_proj"])),
    "fused": ("phi3", CUT, _case(target_modules=["o_proj"], modules_to_save=["qkv_proj"])),
}
TOKENS = {
    "list": ("llama", CUT, _case(trainable_token_indices=[22, 100, 7, 126, 0, 64, 63, 69])),
    "tied": ("qwen2_tied", CUT, _case(trainable_token_indices=[22, 100, 7, 126])),
    "own-rows-on-one-rank": ("qwen2_tied", CUT, _case(trainable_token_indices=[22])),
    "tied-but-other-tokens": (
        "qwen2_tied",
        CUT,
        _case(trainable_token_indices={"embed_tokens": [22, 9], "lm_head": [9, 126]}),
    ),
    "tied-and-both-named": (
        "qwen2_tied",
        CUT,
        _case(
            trainable_token_indices={"embed_tokens": [22, 126], "lm_head": [22, 126]},
            ensure_weight_tying=True,
        ),
    ),
    "head-alone": ("llama", CUT, _case(trainable_token_indices={"lm_head": [3, 100, 64]})),
    "tied-head-alone": ("qwen2_tied", CUT, _case(trainable_token_indices={"lm_head": [5, 100]})),
    "scaled": ("llama", SCALED, _case(trainable_token_indices=[22, 6, 0, 116])),
}
BIASES = {
    "all": ("llama_bias", CUT, _case(bias="all")),
    "lora_only": ("llama_bias", CUT, _case(bias="lora_only", target_modules=["q_proj", "o_proj"])),
    "all-with-head": ("qwen2_tied", CUT, _case(bias="all", modules_to_save=["lm_head"])),
}
RUNS = {
    f"{kind}-{name}": run
    for kind, runs in (("modules", MODULES), ("tokens", TOKENS), ("bias", BIASES))
    for name, run in runs.items()
}
ON_TWO = (
    "modules-head",
    "modules-tied-apart",
    "modules-fused",
    "tokens-own-rows-on-one-rank",
    "tokens-tied-and-both-named",
    "tokens-head-alone",
    "tokens-tied-head-alone",
    "bias-lora_only",
)
"""Runs that three ranks add nothing to."""


def record(path, case, file):
    """By plain PEFT in one process, which warns of what is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record_run(path, case, file, is_plain=True)


def compare(path, case, file):
    """On this world's ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare_run(path, case, file)


def differ(path, case, file, broken):
    """What parity says of one step under ``broken``, which breaks something on purpose."""
    with warnings.catch_warnings(), broken():
        warnings.simplefilter("ignore")
        return differences(path, case, file)


def filled(path, case):
    """The model with everything trained far from where it starts; equal at every tp_size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(path, lora(case.targets, **case.changes))
    generator = torch.Generator().manual_seed(5)
    for factor in model.factors().values():
        full = torch.randn(factor.plan.shape, generator=generator, dtype=torch.float64) / 4
        factor.parameter.data.copy_(factor.piece_of(full))
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(**batches(1)[0]).logits


def save(path, case, folder):
    """Save; the logits with the adapter, and without it."""
    model = filled(path, case)
    model.save_pretrained(folder)
    found = logits(model)
    if dist.is_initialized():
        assert_same_on_all_ranks(tensor=found, what="logits")
    with model.disable_adapter():
        return found.numpy(), logits(model).numpy()


def reload_plain(path, folder, merges):
    """What plain PEFT says, with the adapter, without it, and merged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        plain = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False)
        found = logits(plain).numpy()
        with plain.disable_adapter():
            without = logits(plain).numpy()
        return found, without, logits(plain.merge_and_unload()).numpy() if merges else found


def logits_of(folder):
    """What a merged model says, in plain transformers."""
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)).numpy()
