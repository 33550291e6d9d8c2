"""Questions to one device, each with its numbers; of any size, so that a CPU can answer them."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from tplora.adapter.attach import attach_adapter
from tplora.adapter.head.statistics import label_statistics
from tplora.base.load import load_base
from tplora.rehearsal.live_bytes import LiveBytes

LIBRARIES = ("peft", "tplora")


@dataclass(frozen=True)
class Size:
    """Layers of Llama-3-8B's size, and the head of a vocabulary of 152 thousand."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 4
    vocab: int = 1024
    rows: int = 1
    length: int = 2048
    r: int = 16
    head_vocab: int = 152064
    head_tokens: int = 4096
    dtype: torch.dtype = torch.bfloat16
    repeats: int = 7

    def config(self) -> Any:
        return AutoConfig.for_model(
            "llama",
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            tie_word_embeddings=False,
            dtype=self.dtype,
        )


def write_base(size: Size, folder: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(size.config(), dtype=size.dtype).save_pretrained(folder)
    return str(folder)


def build(library: str, path: str, size: Size, device: torch.device, *, is_packed: bool) -> Any:
    options: dict[str, Any] = {"dtype": size.dtype}
    if is_packed:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=size.dtype,
        )
    lora = LoraConfig(
        r=size.r, lora_alpha=2 * size.r, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    if library == "tplora":
        return attach_adapter(load_base(path, tp_size=1, device=device, **options), lora).train()
    base = AutoModelForCausalLM.from_pretrained(path, device_map={"": device}, **options)
    base.requires_grad_(False)
    return get_peft_model(base, lora).train()


def layers(path: str, size: Size, device: torch.device, *, is_packed: bool) -> dict[str, Any]:
    """Forward and backward of the layers with an adapter on each linear, the libraries in turn."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, size.vocab, (size.rows, size.length), generator=draw).to(device)
    steps: dict[str, Callable[[], float]] = {}
    for library in LIBRARIES:
        model = build(library, path, size, device, is_packed=is_packed)
        steps[library] = lambda model=model: _step(model, tokens)
    return _paired(steps, size.repeats, device)


def _step(model: nn.Module, tokens: torch.Tensor) -> float:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    return float(loss.detach())


def loss(size: Size, device: torch.device) -> dict[str, Any]:
    """Log-probabilities of labels and the gradient of the hidden states, whole and in chunks."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(size.head_tokens, size.hidden, generator=draw) * 0.1
    weight = torch.randn(size.head_vocab, size.hidden, generator=draw) * 0.02
    hidden, weight = (one.to(device, size.dtype) for one in (hidden, weight))
    labels = torch.randint(0, size.head_vocab, (size.head_tokens,), generator=draw).to(device)
    hidden.requires_grad_()

    def whole() -> float:
        total = F.cross_entropy(F.linear(hidden, weight).float(), labels)
        total.backward()
        hidden.grad = None
        return float(total.detach())

    def chunked() -> float:
        found = label_statistics(
            (hidden,),
            (weight,),
            labels,
            F.linear,
            vocab_start=0,
            vocab_size=size.head_vocab,
            group=None,
        )
        total = -found.log_probs.mean()
        total.backward()
        hidden.grad = None
        return float(total.detach())

    return _paired({"peft": whole, "tplora": chunked}, size.repeats, device)


def _paired(
    steps: dict[str, Callable[[], float]], num_repeats: int, device: torch.device
) -> dict[str, Any]:
    """Medians and the median ratio of repeats in turn; peak bytes of a step beyond what is held.

    Raises:
        AssertionError: If the first results are not the same.
    """
    results = {name: step() for name, step in steps.items()}
    first, second = results.values()
    assert abs(first - second) <= 2e-2 * abs(first), results
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(num_repeats + 1):
        for name in list(steps) if repeat % 2 else reversed(list(steps)):
            _wait(device)
            start = time.perf_counter()
            steps[name]()
            _wait(device)
            if repeat:
                times[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    return {
        "seconds": {name: statistics.median(found) for name, found in times.items()},
        "ratio": statistics.median(ratios),
        "bytes": {name: peak_bytes(step, device) for name, step in steps.items()},
        "results": results,
    }


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """What a step takes on top of what is held: by CUDA's allocator, or by operators' results."""
    if device.type != "cuda":
        with LiveBytes() as live:
            step()
        return live.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
