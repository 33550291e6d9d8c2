"""Adapters whose init took something out of W, in the form that fits W as it was loaded.

    W' + s B A  =  W + s (B A - B0 A0)  =  W + s [B  -B0] [A; A0]        W' = W - s B0 A0

So the saved adapter has twice the rank and is plain LoRA: any tool loads it, merges it, or puts it
beside others. A trainer's checkpoint keeps A and B as they are trained, for the optimizer's state
is of those; a probe of B0 A0 beside them tells whether a model that resumes has the same W'.

Source: PEFT's ``subtract_mutated_init`` (peft 0.21), which leaves out DoRA's magnitudes and cannot
do use_rslora with patterns; both are exact here.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from tplora.adapter.initial import FromWholeWeight
from tplora.errors import ArtifactError
from tplora.upstream.peft_keys import adapter_file_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from peft import LoraConfig

    from tplora.adapter.initial import Initial
    from tplora.adapter.model import TploraModel

__all__ = ["PROBES", "check_probes", "for_loaded_base", "write_probes"]

PROBES = "initial.safetensors"
"""Beside the factors of a checkpoint: what the init took out of each W, seen from one vector."""

_PROBE_RTOL = 1e-3
# Two float32 decompositions of one W differ by less; those of another seed or W by about 1.


@contextlib.contextmanager
def for_loaded_base(
    model: TploraModel, factors: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """While open, the model's configs are those of the factors that it gives.

    Args:
        model: The model whose adapters are saved.
        factors: Every full factor by its parameter's name, as trained; on the writer's rank.
    """
    trained = dict(model.peft_config)
    found = dict(factors)
    try:
        for name, config in trained.items():
            if _taken_out(model, name):
                found |= _widened(model, name, factors)
                model.peft_config[name] = _plain_config(config)
        yield found
    finally:
        model.peft_config.update(trained)


def write_probes(model: TploraModel, folder: Path) -> None:
    """Write the probes of every adapter whose init changed W beside its factors; one rank."""
    for name in model.peft_config:
        probes = {
            adapter_file_key(key, name): initial.probe
            for key, initial in _taken_out(model, name).items()
        }
        if probes:
            place = folder if name == "default" else folder / name
            save_file(probes, place / PROBES, metadata={"format": "pt"})


def check_probes(model: TploraModel, folder: Path, adapter_name: str) -> None:
    """Refuse trained factors that belong to another W'. Every rank reads; no communication.

    Raises:
        ArtifactError: Naming the first layer whose init took out something else.
    """
    if not (folder / PROBES).is_file():
        return  # of an init that leaves W, or from another tool
    saved = load_file(folder / PROBES)
    taken = _taken_out(model, adapter_name)
    for name, initial in taken.items():
        key = adapter_file_key(name, adapter_name)
        was = saved.get(key)
        scale = float(initial.probe.norm())
        if was is None or float((was - initial.probe).norm()) > _PROBE_RTOL * scale:
            raise ArtifactError(
                f"{folder / PROBES}: {key}: the adapter was trained on another rest of the base's "
                f"weight than init_lora_weights = "
                f"{model.peft_config[adapter_name].init_lora_weights!r} leaves here; attach with "
                "the seed, and the preprocessing, that the training began with"
            )


def _taken_out(model: TploraModel, adapter_name: str) -> dict[str, Initial]:
    """By the name of A's parameter, what the adapter's init took out of each W."""
    return {
        module.factors[adapter_name]["A"].name: module.initial[adapter_name]
        for module in model.modules()
        if isinstance(module, FromWholeWeight) and adapter_name in module.initial
    }


def _widened(
    model: TploraModel, adapter_name: str, factors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``[A; A0]`` and ``[B  -B0]``; zeros for a layer, such as an embedding, whose W is whole."""
    found = {}
    for module in model.modules():
        if not isinstance(module, FromWholeWeight) or adapter_name not in module.factors:
            continue
        own, initial = module.factors[adapter_name], module.initial.get(adapter_name)
        a, b = factors[own["A"].name], factors[own["B"].name]
        a0, b0 = torch.zeros_like(a), torch.zeros_like(b)
        if initial is not None:
            assert initial.a is not None  # the writer is the first rank of its group
            assert initial.b is not None
            a0, b0 = initial.a.to(a.dtype), initial.b.to(b.dtype)
        found[own["A"].name] = torch.cat([a, a0])
        found[own["B"].name] = torch.cat([b, -b0], dim=1)
    return found


def _plain_config(config: LoraConfig) -> LoraConfig:
    """Twice the rank at the same scaling, drawn as usual: what is loaded overwrites it."""
    plain = copy.copy(config)
    # The scaling is alpha / r, or alpha / sqrt(r).
    factor: int | float = 2**0.5 if config.use_rslora else 2
    plain.init_lora_weights = True
    plain.corda_config = plain.lora_ga_config = None
    plain.r, plain.lora_alpha = 2 * config.r, factor * config.lora_alpha
    plain.rank_pattern = {key: 2 * r for key, r in config.rank_pattern.items()}
    plain.alpha_pattern = {key: factor * alpha for key, alpha in config.alpha_pattern.items()}
    return plain
