"""A stack of experts on this rank's pieces, adapted by tplora, and whole, adapted by plain PEFT.

y = sum over a token's experts of  weight_e * ( silu(gate_e x) * (up_e x) ) down_e
"""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners import lora
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tplora.adapter.factor import shard_full
from tplora.adapter.gradients import GradientSync
from tplora.adapter.parameter import ParamWrapper
from tplora.collectives.operators import reduce_partial, replicate_input
from tplora.collectives.shared_input import SharedInput
from tplora.plan.facts import ParameterFacts
from tplora.plan.parameter import plan_parameter
from tplora.upstream import local_shard, placement_of

PARAMETERS = ("gate_up_proj", "down_proj")
SCALE = 0.4
"""Of weights and factors, so that outputs and gradients are near one, as the tolerance wants."""


@dataclass(frozen=True)
class Case:
    """What one stack is like. Plain values: it travels to the ranks."""

    num_experts: int = 5
    hidden: int = 6
    ffn: int = 33
    is_transposed: bool = False
    r: int = 3
    num_adapters: int = 1
    is_disabled: bool = False
    dtype: torch.dtype = torch.float64
    factor_dtype: torch.dtype = torch.float64

    @property
    def adapters(self) -> list[str]:
        return ["default", "second"][: self.num_adapters]

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """``[E, out, in]``, or ``[E, in, out]``."""
        found = {PARAMETERS[0]: (2 * self.ffn, self.hidden), PARAMETERS[1]: (self.hidden, self.ffn)}
        order = -1 if self.is_transposed else 1
        return {name: (self.num_experts, *two[::order]) for name, two in found.items()}


class Experts(nn.Module):
    """As transformers writes them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.is_transposed = case.is_transposed
        for name, full in _draw_weights(case).items():
            setattr(self, name, nn.Parameter(full, requires_grad=False))

    def _multiply(self, x, weight):
        return x @ weight if self.is_transposed else F.linear(x, weight)

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for k in ids.unique().tolist():
            rows, place = torch.where(ids == k)
            gate, up = self._multiply(x[rows], self.gate_up_proj[k]).chunk(2, dim=-1)
            one = self._multiply(F.silu(gate) * up, self.down_proj[k])
            y = y.index_add(0, rows, one * weights[rows, place, None])
        return y


def _draw_weights(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: (SCALE * torch.randn(shape, generator=generator, dtype=torch.float64)).to(case.dtype)
        for name, shape in case.shapes.items()
    }


def draw_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, expert ids, routing weights and dy. Of several experts, one gets no token."""
    generator = torch.Generator().manual_seed(5)
    num_used = max(1, case.num_experts - 1)
    ids = torch.stack(
        [torch.randperm(num_used, generator=generator)[: min(2, num_used)] for _ in range(9)]
    )
    x, dy = (torch.randn(9, case.hidden, generator=generator).to(case.dtype) for _ in range(2))
    weights = torch.rand(ids.shape, generator=generator).to(case.dtype)
    return x.requires_grad_(), ids, weights.requires_grad_(), dy


def _config(case: Case, k: int) -> dict:
    """Adapters of different ranks and scalings."""
    config = LoraConfig(r=case.r + k, lora_alpha=2 + k, init_lora_weights=False)
    return {"config": config, "r": config.r, "lora_alpha": config.lora_alpha}


def _wrap(case: Case, module: nn.Module, build) -> dict[str, lora.ParamWrapper]:
    """One wrapper in the other, with every adapter's factors drawn; by the parameter's name."""
    wrappers, generator = {}, torch.Generator().manual_seed(7)
    for name in PARAMETERS:
        module = wrappers[name] = build(module, name)
        for k, adapter in enumerate(case.adapters):
            if k:
                module.update_layer(adapter, **_config(case, k))
            for layer in (module.lora_A[adapter], module.lora_B[adapter]):
                full = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
                layer.weight = nn.Parameter((SCALE * full).to(case.factor_dtype))
        module.set_adapter(case.adapters)
        module.enable_adapters(enabled=not case.is_disabled)
    return wrappers


def plain_experts(case: Case) -> dict[str, lora.ParamWrapper]:
    """The truth: plain PEFT on the full weights. The outer wrapper, of down_proj, is the module."""

    def build(module, name):
        return lora.ParamWrapper(module, case.adapters[0], parameter_name=name, **_config(case, 0))

    return _wrap(case, Experts(case), build)


def plan_of(case: Case, name: str, k: int = 0, *, tp_size: int = 2):
    is_gate_up = name == PARAMETERS[0]
    styles = ("packed_colwise", "rowwise")
    if case.is_transposed:
        styles = ("packed_rowwise", "colwise")
    style = styles[0] if is_gate_up else styles[1]
    facts = ParameterFacts(
        name=f"experts.{name}",
        shape=case.shapes[name],
        style=style,
        module_style="moe_tp_experts",
        role="experts",
        is_transposed=case.is_transposed,
    )
    return plan_parameter(facts, case.r + k, tp_size=tp_size)


class CutExperts:
    """The experts on this rank's pieces, with what watches their gradients."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        shared_input = SharedInput(self.mesh.get_group())

        def build(module, name):
            return ParamWrapper(
                module,
                case.adapters[0],
                parameter_name=name,
                plan=plan_of(case, name),
                mesh=self.mesh,
                shared_input=shared_input,
                **_config(case, 0),
            )

        self.wrappers = _wrap(case, self._cut_base(), build)
        self.sync = GradientSync(self.mesh.get_group(), shared_input)
        for name, wrapper in self.wrappers.items():
            for k, adapter in enumerate(case.adapters):
                for factor in wrapper.make_factors(adapter, name, plan_of(case, name, k)).values():
                    self.sync.add(factor)

    def __call__(self, *inputs):
        outer = self.wrappers[PARAMETERS[1]]
        y = outer(*inputs)
        self.sync.watch_outputs(outer, (), y)
        return y

    def piece(self, full: torch.Tensor, plan) -> torch.Tensor:
        return shard_full(full, plan, self.mesh)

    def _cut_base(self) -> Experts:
        """As transformers leaves it: DTensors, and a forward on local pieces between reductions."""
        experts, group = Experts(self.case), self.mesh.get_group()
        for name in PARAMETERS:
            weight, full = plan_of(self.case, name).weight, getattr(experts, name).data
            cut = DTensor.from_local(
                self.piece(full, weight),
                self.mesh,
                [placement_of(weight.shard_dim, weight.split_factor)],
                run_check=False,
                shape=full.shape,
                stride=full.stride(),
            )
            setattr(experts, name, nn.Parameter(cut, requires_grad=False))
        own = experts.forward

        def forward(x, ids, weights):
            with _local_weights(experts):
                y = own(replicate_input(x, group), ids, replicate_input(weights, group))
            return reduce_partial(y, group)

        experts.forward = forward
        return experts


@contextlib.contextmanager
def _local_weights(module):
    held = dict(module._parameters)
    module._parameters.update((name, local_shard(one)) for name, one in held.items())
    try:
        yield
    finally:
        module._parameters.update(held)
