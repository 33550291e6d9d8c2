"""One Mixture-of-Experts block, adapted by both libraries with the same factors, step by step."""

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from peft import LoraConfig
from peft.tuners import lora
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.adapter.experts import PARAMETERS, Case, CutExperts, draw_inputs, plan_of
from tests.communication import count_collectives
from tplora.adapter.parameter import ParamWrapper
from tplora.collectives.shared_input import SharedInput
from tplora.upstream import local_shard

LIBRARIES = ("frozen", "peft", "tplora")
"""The frozen block alone is what both have to pay."""


@dataclass(frozen=True)
class Size:
    """A block of the order of a small model's; float32."""

    num_experts: int = 32
    hidden: int = 512
    ffn: int = 256
    top_k: int = 4
    num_tokens: int = 256
    r: int = 8

    @property
    def case(self) -> Case:
        return Case(
            num_experts=self.num_experts,
            hidden=self.hidden,
            ffn=self.ffn,
            r=self.r,
            dtype=torch.float32,
            factor_dtype=torch.float32,
        )


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that torch's operators returned and that still live, and their peak.

    What an operator takes and gives back inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_address(leaf) for leaf in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for one in _tensors(result):
            if _address(one) not in given | self._known:
                self._add(one.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return
        self._known.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def build_step(size: Size, implementation: str, library: str) -> Callable[[], list[torch.Tensor]]:
    """A function that runs forward and backward and returns y and every gradient."""
    config = Qwen3MoeConfig(
        hidden_size=size.hidden,
        moe_intermediate_size=size.ffn,
        num_experts=size.num_experts,
        num_experts_per_tok=size.top_k,
        experts_implementation=implementation,
    )
    torch.manual_seed(3)
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter.requires_grad_(False), std=0.05)
    factors = [] if library == "frozen" else _adapt(block, size, library)
    x, dy = (torch.randn(1, size.num_tokens, size.hidden) for _ in range(2))
    x.requires_grad_()

    def step() -> list[torch.Tensor]:
        for leaf in (x, *factors):
            leaf.grad = None
        y = block(x)
        y.backward(dy)
        return [y.detach(), *(leaf.grad for leaf in (x, *factors))]

    return step


def _adapt(block: nn.Module, size: Size, library: str) -> list[nn.Parameter]:
    module, factors = block.experts, []
    lora_config = LoraConfig(r=size.r, lora_alpha=2 * size.r, init_lora_weights=False)
    for name in PARAMETERS:
        settings = {
            "parameter_name": name,
            "config": lora_config,
            "r": size.r,
            "lora_alpha": 2 * size.r,
        }
        if library == "tplora":
            plan = plan_of(size.case, name, tp_size=1)
            extra = {"plan": plan, "mesh": None, "shared_input": SharedInput(None)}
            module = ParamWrapper(module, "default", **extra, **settings)
            module.make_factors("default", name, plan)
        else:
            module = lora.ParamWrapper(module, "default", **settings)
        for layer in (module.lora_A, module.lora_B):
            factors.append(nn.init.normal_(layer["default"].weight, std=0.05))
    block.experts = module
    return factors


def compare(size: Size, implementation: str, *, num_repeats: int) -> list[dict]:
    """A record per library and repeat, in turn within one run; the first two steps are warm-up.

    Raises:
        AssertionError: If the two libraries do not compute the same.
    """
    steps = {name: build_step(size, implementation, name) for name in LIBRARIES}
    for one, other in zip(steps["peft"](), steps["tplora"](), strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-4, "they do not compute the same"
    about = {"implementation": implementation, **asdict(size)}
    records = []
    for repeat in range(num_repeats + 1):
        for name in LIBRARIES if repeat % 2 else reversed(LIBRARIES):
            start = time.perf_counter()
            steps[name]()
            seconds = time.perf_counter() - start
            if repeat:
                records.append(about | {"library": name, "repeat": repeat, "step_s": seconds})
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    return [record | {"peak_bytes": peaks[record["library"]]} for record in records]


def peak_bytes(step: Callable[[], list[torch.Tensor]]) -> int:
    """The most that lived at once beyond weights and factors; gradients of factors count."""
    with LiveBytes() as counted:
        step()
    return counted.peak


def summary(records: list[dict]) -> dict[str, float]:
    """Medians, and the median of the ratios of paired repeats."""
    times = {name: [r["step_s"] for r in records if r["library"] == name] for name in LIBRARIES}
    peaks = {r["library"]: r["peak_bytes"] for r in records}
    ratios = [ours / theirs for theirs, ours in zip(times["peft"], times["tplora"], strict=True)]
    return {
        **{f"{name} ms": 1e3 * statistics.median(values) for name, values in times.items()},
        "tplora / peft": statistics.median(ratios),
        **{f"{name} MiB": peaks[name] / 2**20 for name in LIBRARIES},
        "of peft's": peaks["tplora"] / peaks["peft"],
    }


def on_ranks(case: Case) -> dict[str, int]:
    """Collectives of a step with and without the adapter, and bytes of factors; runs in a rank."""
    found = {}
    for is_disabled in (True, False):
        here = CutExperts(replace(case, is_disabled=is_disabled))
        inputs = draw_inputs(case)
        calls = count_collectives(lambda here=here, inputs=inputs: _step(here, inputs))
        key = "without" if is_disabled else "with"
        found[f"collectives {key}"] = sum(calls.values()) - here.sync.num_buckets
    factors = [f for w in here.wrappers.values() for f in w.factors["default"]]
    return found | {
        "buckets": here.sync.num_buckets,
        "factor bytes": sum(local_shard(f.parameter).nbytes for f in factors),
        "factor bytes whole": sum(4 * f.plan.numel for f in factors),
    }


def _step(here: CutExperts, inputs) -> None:
    here(*inputs[:3]).backward(inputs[3])
