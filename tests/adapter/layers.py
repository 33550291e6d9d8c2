"""One layer of each kind, built without a model, and the same in plain torch.

y = x W^T + b + sum over adapters of  scaling * (mask * x / (1 - p)) A^T B^T
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tplora.adapter.dropout import ShardedDropout
from tplora.adapter.embedding import TploraEmbedding
from tplora.adapter.gradients import GradientSync
from tplora.adapter.layers import LINEAR_BY_CUT, shard_dropout
from tplora.collectives.shared_input import SharedInput
from tplora.plan.layer import LayerPlan, plan_weight
from tplora.plan.style import shard_range

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tplora.adapter.factor import Factors
    from tplora.adapter.linear import TploraLinear

KEY = 77
"""What the default generator is seeded with before each forward, here and in the reference."""


@dataclass(frozen=True)
class Case:
    """What one layer is like. Plain values: it travels to the ranks."""

    style: str | None = "colwise"
    out_features: int = 7
    in_features: int = 5
    r: int = 3
    num_tokens: int = 4
    has_bias: bool = True
    p: float = 0.0
    num_adapters: int = 1
    is_disabled: bool = False
    padding_idx: int | None = None
    embed_scale: float | None = None

    @property
    def kind(self):
        return "embedding" if str(self.style).startswith("embedding") else "linear"

    @property
    def adapters(self) -> list[str]:
        return ["default", "second", "third"][: self.num_adapters]

    def __str__(self) -> str:
        return f"{self.style}-{self.out_features}x{self.in_features}"


@dataclass
class Numbers:
    """Full tensors, the same on every rank. For an embedding W is ``[vocab, hidden]``."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: dict[str, torch.Tensor] = field(default_factory=dict)
    b: dict[str, torch.Tensor] = field(default_factory=dict)
    scaling: dict[str, float] = field(default_factory=dict)


def draw(case: Case) -> Numbers:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = randn(case.out_features, case.in_features)
    numbers = Numbers(weight, randn(case.out_features) if case.has_bias else None)
    in_size, out_size = case.in_features, case.out_features
    if case.kind == "embedding":
        in_size, out_size = out_size, in_size
    for k, name in enumerate(case.adapters):
        r = case.r + k  # adapters of different ranks
        numbers.a[name], numbers.b[name] = randn(r, in_size), randn(out_size, r)
        numbers.scaling[name] = (2 + k) / r
    return numbers


def plan_layer(case: Case) -> LayerPlan:
    in_dim = 1 if case.kind == "linear" else 0
    return plan_weight(
        "layer",
        case.kind,
        case.style,
        (case.out_features, case.in_features),
        (in_dim, 1 - in_dim),
        r=case.r,
        tp_size=2,
        has_bias=case.has_bias,
    )


class Layer:
    """A layer on this rank's pieces, with what watches its gradients."""

    key = KEY

    def __init__(self, case: Case, shared_input: SharedInput | None = None) -> None:
        self.case, self.numbers, self.plan = case, draw(case), plan_layer(case)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        group = self.mesh.get_group()
        self.shared_input = shared_input or SharedInput(group)
        self.module = self._build()
        self.sync = GradientSync(group, self.shared_input)
        self.factors: dict[str, Factors] = {}
        for k, name in enumerate(case.adapters):
            plan = plan_layer(replace(case, r=case.r + k))
            shard_dropout(self.module, name, plan)
            self.factors[name] = self.module.make_factors(name, "layer", plan)
            for factor in self.factors[name].values():
                self.sync.add(factor)
        self.module.set_adapter(case.adapters)
        if case.is_disabled:
            self.module.enable_adapters(enabled=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(self.key)  # as the root's forward does, equally on all ranks
        y = self.module(x)
        self.sync.watch_outputs(self.module, (), y)
        return y

    def _build(self) -> TploraLinear | TploraEmbedding:
        case, numbers = self.case, self.numbers
        base = _base(case, numbers, self.plan, self.mesh)
        config = LoraConfig(r=case.r, lora_dropout=case.p, init_lora_weights=False)
        first, *others = case.adapters
        settings = {"config": config, "r": case.r, "lora_alpha": 2}
        if case.kind == "embedding":
            module = TploraEmbedding(base, first, plan=self.plan, mesh=self.mesh, **settings)
        else:
            module = LINEAR_BY_CUT[self.plan.weight.shard_dim](
                base,
                first,
                plan=self.plan,
                mesh=self.mesh,
                shared_input=self.shared_input,
                **settings,
            )
        for k, name in enumerate(others):
            module.update_layer(name, case.r + 1 + k, lora_alpha=3 + k, config=config)
        for name in case.adapters:
            _set_factors(module, name, numbers)
        return module


def _set_factors(module: nn.Module, name: str, numbers: Numbers) -> None:
    a, b = (nn.Parameter(t[name].clone()) for t in (numbers.a, numbers.b))
    if isinstance(module, TploraEmbedding):
        module.lora_embedding_A[name], module.lora_embedding_B[name] = a, b
    else:
        module.lora_A[name].weight, module.lora_B[name].weight = a, b


def _base(case: Case, numbers: Numbers, plan: LayerPlan, mesh: DeviceMesh) -> nn.Module:
    """The frozen base as transformers leaves it: full sizes, weights that are DTensors."""
    with torch.device("meta"):
        if case.kind == "embedding":
            base: nn.Module = nn.Embedding(
                case.out_features, case.in_features, padding_idx=case.padding_idx
            )
        else:
            base = nn.Linear(case.in_features, case.out_features, bias=case.has_bias)
    if case.embed_scale is not None:
        base.embed_scale = torch.tensor(case.embed_scale)
    dim = plan.weight.shard_dim
    base.weight = _frozen(numbers.weight, dim, mesh)
    if case.kind == "linear" and numbers.bias is not None:
        base.bias = _frozen(numbers.bias, 0 if dim == 0 else None, mesh)
    return base


def _frozen(full: torch.Tensor, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    if dim is None:
        return nn.Parameter(full, requires_grad=False)
    start, stop = shard_range(full.shape[dim], mesh.get_local_rank(), mesh.size())
    local = full.narrow(dim, start, stop - start).clone()
    sharded = DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=full.shape, stride=full.stride()
    )
    return nn.Parameter(sharded, requires_grad=False)


def plain_linear(case: Case, numbers: Numbers, x: torch.Tensor) -> torch.Tensor:
    """The truth: plain torch on full tensors. Dropout's masks are those of the full input."""
    torch.manual_seed(KEY)
    y = F.linear(x, numbers.weight, numbers.bias)
    if case.is_disabled:
        return y
    for name in case.adapters:
        dropped = x
        if case.p:
            dropped = ShardedDropout(case.p, in_features=case.in_features, mesh=None)(x)
        y = y + numbers.scaling[name] * (dropped @ numbers.a[name].T @ numbers.b[name].T)
    return y


def plain_embedding(case: Case, numbers: Numbers, tokens: torch.Tensor) -> torch.Tensor:
    scale = 1.0 if case.embed_scale is None else case.embed_scale
    y = scale * F.embedding(tokens, numbers.weight)
    if case.is_disabled:
        return y
    for name in case.adapters:
        rows = F.embedding(tokens, numbers.a[name].T, padding_idx=case.padding_idx)
        y = y + scale * numbers.scaling[name] * (rows @ numbers.b[name].T)
    return y
