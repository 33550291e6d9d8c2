"""Models whose adapters are initialised from W: attached in float32, then held in float64.

PEFT computes these inits in float32 and refuses a float64 base. So what the init gives is compared
as it is, bit for bit, and what is trained from there in float64.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model
from peft.tuners.lora.config import CordaConfig, KasaConfig, LoraGAConfig
from peft.tuners.lora.loraga import preprocess_loraga
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import AutoModelForCausalLM

from tests.models import SEED, Case, batches, lora, world_size
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

    from tplora.adapter.model import TploraModel

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# "random" draws; a rank that drew otherwise would be seen.
GRADIENT = {
    "target_modules": LINEAR,  # peft's preprocessing does not know "all-linear"
    "init_lora_weights": "lora_ga",
    "lora_ga_config": LoraGAConfig(direction="random"),
}


def _init(name: str, targets: str = "all-linear", **changes: Any) -> Case:
    return Case(targets, changes={"init_lora_weights": name, **changes})


CASES: dict[str, Case] = {
    "pissa": _init("pissa", "patterns"),
    "pissa-ends": _init("pissa", "ends"),
    "pissa_niter": _init("pissa_niter_2", lora_dropout=0.0),
    "olora": _init("olora"),
    "corda": _init("corda", corda_config=CordaConfig(corda_method="kpm")),
    "lora_ga": Case(changes=GRADIENT),
    "orthogonal": _init("orthogonal", "ends"),
    "mica": _init("mica", "ends"),
    "kasa": Case("patterns", changes={"kasa_config": KasaConfig()}),
}
INITS_ALONE = {
    "lora_ga-by-weight": Case(
        changes=GRADIENT | {"lora_ga_config": LoraGAConfig(scale="weight_svd")}
    ),
}
"""Held to one process at the start alone: the run from there is another case's."""
CHANGES_BASE = [name for name in CASES if name not in ("orthogonal", "mica")]


def _in_float32(path: str, config: LoraConfig, *, is_cut: bool) -> Any:
    """The base, with what PEFT's preprocessing leaves on it, read from a file that one made."""
    if is_cut:
        base: Any = load_base(path, tp_size=world_size(), dtype=torch.float32)
    else:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    cache = f"{path}.{config.init_lora_weights}/found.pt"
    if config.init_lora_weights == "corda":
        _leave_eigens(base, torch.load(cache))
    if config.init_lora_weights == "lora_ga":
        preprocess_loraga(base, config, lambda: None, cache_file=cache)
    return base


def _leave_eigens(base: Any, found: dict[str, tuple[torch.Tensor, ...]]) -> None:
    """What ``preprocess_corda`` leaves; peft's own module for it needs a package of its own."""
    for name, (u, s, v) in found.items():
        base.get_submodule(name).eigens = SimpleNamespace(U_WC=u, S_WC=s, V_WC=v)


def preprocess(path: str) -> None:
    """Make the files that the preprocessed inits read; in one process, as PEFT does."""
    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = lora(**GRADIENT)
    preprocess_loraga(base, config, train_step(base), cache_file=f"{path}.lora_ga/found.pt")
    found = {}
    for k, (name, module) in enumerate(_linears(base)):
        weight, r = module.weight.detach(), lora().r
        generator = torch.Generator().manual_seed(k)
        inputs = torch.randn(512, weight.shape[1], generator=generator)
        covariance = inputs.T @ inputs / 512
        u, s, vh = torch.linalg.svd(weight @ covariance, full_matrices=False)
        v = (vh @ torch.linalg.inv(covariance)).T
        found[name] = tuple(one.clone() for one in (u[:, -r:], s[-r:], v[:, -r:]))
    Path(f"{path}.corda").mkdir(exist_ok=True)
    torch.save(found, f"{path}.corda/found.pt")


def _linears(base: Any) -> list[tuple[str, nn.Linear]]:
    named = base.named_modules()
    return [(name, one) for name, one in named if isinstance(one, nn.Linear) and "head" not in name]


def train_step(base: Any) -> Any:
    """What ``preprocess_loraga`` runs: one forward and backward of the base."""
    return lambda: base(**batches(9)[0]).loss.backward()


def attach(
    path: str, config: LoraConfig, *, dtype: torch.dtype = torch.float64, is_cut: bool = False
) -> TploraModel:
    """A tplora model over this rank's world; ``is_cut`` as in ``Case``."""
    base = _in_float32(path, config, is_cut=True)
    settings = {"autocast_adapter_dtype": False, "sequence_parallel": is_cut}
    model = attach_adapter(base, config, seed=SEED, **settings)
    return model.to(dtype).train()


def attach_plain(path: str, config: LoraConfig, *, dtype: torch.dtype = torch.float64) -> PeftModel:
    """Plain PEFT in this process alone."""
    base = _in_float32(path, config, is_cut=False)
    torch.manual_seed(SEED)
    return get_peft_model(base, config, autocast_adapter_dtype=False).to(dtype).train()


def put_full(parameter: nn.Parameter, full: torch.Tensor) -> None:
    """Give a parameter, cut or whole, the values of a full tensor."""
    full = full.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        whole = DTensor.from_local(full, parameter.device_mesh, [Replicate()], run_check=False)
        parameter.to_local().copy_(whole.redistribute(placements=parameter.placements).to_local())
    else:
        parameter.copy_(full)
