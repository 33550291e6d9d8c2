"""Tiny models in 4 and 8 bits, whole in one process and cut over a world.

Widths are whole blocks of 64 on 2, 3 and 4 ranks: 24 heads of 32, and 768 in the MLP.
"""

from pathlib import Path

import bitsandbytes.functional as bnb
import peft as plain_peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.models import SEED, lora, world_size
from tests.tiny import VOCAB, write_checkpoint
from tests.zoo.build import build_model, tiny_config
from tplora.adapter.attach import attach_adapter
from tplora.adapter.loftq import replace_lora_weights_loftq
from tplora.adapter.model import TploraModel
from tplora.base.cut import Cut
from tplora.base.load import load_base
from tplora.base.quantized import cut_of_loaded
from tplora.upstream.quantization import is_quantized_linear

WIDE = {"hidden_size": 192, "intermediate_size": 768, "heads": (24, 12), "head_dim": 32}
METHODS = ("nf4", "fp4", "nf4-double", "int8")


def quantization(method: str, **changes: object) -> BitsAndBytesConfig:
    """``quantization("nf4-double")``, in bitsandbytes' words."""
    if method == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, **changes)
    kind, _, double = method.partition("-")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=bool(double),
        **changes,
    )


def write_wide(name: str, folder: Path) -> Path:
    """A tiny checkpoint whose pieces are whole blocks."""
    if name != "qwen3_moe":
        return write_checkpoint(name, folder, **WIDE)
    config = tiny_config(name)
    config.hidden_size, config.head_dim, config.vocab_size = 192, 32, VOCAB
    config.moe_intermediate_size = 48
    config.num_attention_heads, config.num_key_value_heads = WIDE["heads"]
    build_model(name, config).save_pretrained(folder)
    return folder


def load_whole(path: str, method: str, **changes: object) -> nn.Module:
    """What transformers gives in one process."""
    given = {} if method == "saved" else {"quantization_config": quantization(method, **changes)}
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, device_map={"": "cpu"}, **given
    )


def load_pieces(path: str, method: str, **changes: object) -> nn.Module:
    """This rank's pieces, by tplora."""
    given = {} if method == "saved" else {"quantization_config": quantization(method, **changes)}
    return load_base(path, tp_size=world_size(), dtype=torch.float32, **given)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


OPTIONS = {
    "dora": {"use_dora": True},
    "dora-rs": {"use_dora": True, "use_rslora": True},
    "dora-dropped": {"use_dora": True, "dropout": 0.3},
    "lora-bias": {"lora_bias": True},
    "bias": {"bias": "all"},
    "loftq": {},
    "activated": {"alora_invocation_tokens": [5, 6]},
}
"""Kinds of LoRA that plain PEFT has on quantised layers."""


def lora_on(targets: str) -> LoraConfig:
    """An adapter by a name of ``tests.models.TARGETS`` or ``OPTIONS``, or on attention and more.

    Of a mixture of experts plain PEFT takes "all-linear" for the experts, too.
    """
    if targets in OPTIONS:
        return lora(**OPTIONS[targets])
    if targets == "attention":
        return lora(target_modules=ATTENTION)
    if targets == "experts":
        return lora(target_modules=ATTENTION, target_parameters=EXPERTS)
    if targets == "beside":
        beside = {"modules_to_save": ["lm_head"], "trainable_token_indices": [5, 9]}
        return lora(target_modules=ATTENTION, **beside)
    return lora(targets)


def adapted(path: str, method: str, targets: str) -> TploraModel:
    """tplora's adapter on this rank's pieces."""
    model = attach_adapter(load_pieces(path, method), lora_on(targets), seed=SEED)
    if targets == "loftq":
        replace_lora_weights_loftq(model)
    return model.train()


def plain_adapted(path: str, method: str, targets: str) -> nn.Module:
    """Plain PEFT's on the whole, with factors drawn as tplora promises to draw them."""
    base = load_whole(path, method)
    torch.manual_seed(SEED)
    model = get_peft_model(base, lora_on(targets)).train()
    if targets == "loftq":
        with pytest.MonkeyPatch.context() as patch:
            _with_cuda_on_the_cpu(patch)
            plain_peft.replace_lora_weights_loftq(model, path)
    return model


def _with_cuda_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """PEFT's LoftQ asks for a GPU by name."""

    def to(self, *args, original=torch.Tensor.to, **kwargs):
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return original(self, *args, **kwargs)

    patch.setattr(torch.Tensor, "to", to)


def quantized_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every quantised linear by its name."""
    return {name: m for name, m in model.named_modules() if is_quantized_linear(m)}


def values_of(module: nn.Module) -> torch.Tensor:
    """The weight as it is multiplied by, unpacked and scaled, in float32."""
    weight = module.weight
    if weight.dtype == torch.int8:
        return weight.data * (weight.SCB[:, None] / 127)
    return bnb.dequantize_4bit(weight.data, weight.quant_state).float()


def cut_of(module: nn.Module) -> Cut:
    return cut_of_loaded(module)
