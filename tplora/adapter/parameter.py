"""A parameter that is adapted inside its module's own forward: expert stacks, routers and others.

# E experts   I in_features   O out_features   R LoRA rank r   P tp_size
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners import lora
from torch import nn
from torch.distributed.tensor import DTensor

from tplora.adapter.factor import Factors, delta_like, factors_of, factors_of_linears
from tplora.adapter.low_rank import LowRankSum
from tplora.adapter.merging import MergesLocally
from tplora.collectives.operators import gather_last_dim
from tplora.upstream import local_shard, own_forward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from tplora.collectives.shared_input import SharedInput
    from tplora.plan.layer import LayerPlan

__all__ = ["ParamWrapper"]


class ParamWrapper(MergesLocally, lora.ParamWrapper):  # type: ignore[misc]
    """A module one of whose parameters, W, is adapted: ``W + delta weight`` while it runs.

        W_e + scaling * B_e A_e        for experts [E, O, I], and for a single matrix [O, I]
        W_e + scaling * A_e^T B_e^T    for experts [E, I, O]

    PEFT's format packs experts two ways: row ``e R + k`` of A is row k of A_e, and column
    ``k E + e`` of B is column k of B_e. Several parameters of a module nest one wrapper in another.
    The name of this class is PEFT's, which tells wrappers that nest by it.

    The module's forward, and what transformers put around it, stay: the delta takes part where W
    does, on this rank's piece of W, so its output is in the same state.

    Shapes, per rank, where W is cut on O (and with O and I swapped where it is cut on I):
        W   [E, O/P, I]   sharded    frozen
        A   [E R, I]      replicated
        B   [O/P, R E]    sharded

    Communication: the module's own; the adapter adds none. A head that gathers its output: forward,
        one all-gather; backward, one all-reduce of its input.

    Args:
        base_layer: The module, or the wrapper of another of its parameters.
        adapter_name: The first adapter.
        plan: How W is cut.
        mesh: The tp mesh, or None in one process.
        shared_input: ``replicate_input`` for layers that read one tensor.
        kwargs: What PEFT passes to its own wrapper.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        *,
        plan: LayerPlan,
        mesh: DeviceMesh | None,
        shared_input: SharedInput,
        **kwargs: Any,
    ) -> None:
        super().__init__(base_layer, adapter_name, **kwargs)
        self.plan, self.mesh, self.shared_input = plan, mesh, shared_input
        self.factors: dict[str, Factors] = {}

    def make_factors(self, adapter_name: str, prefix: str, plan: LayerPlan) -> Factors:
        """Cut A and B, which PEFT has just drawn in full, to this rank's pieces."""
        self.factors[adapter_name] = factors_of_linears(self, adapter_name, prefix, plan)
        return self.factors[adapter_name]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with W and its delta in W's place."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not active:
            return self.base_layer(x, *args, **kwargs)
        with self._adapted_weight(active):
            if isinstance(self.base_layer, lora.ParamWrapper) or not self._is_cut_linear:
                return self.base_layer(x, *args, **kwargs)
            return self._cut_linear(x, *args, **kwargs)

    @property
    def _is_cut_linear(self) -> bool:
        """Whether the style around a linear would hand DTensors to a forward that has our W."""
        return self.plan.weight.shard_dim is not None and len(self.plan.weight.shape) == 2

    def _cut_linear(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A subclass of ``nn.Linear``, cut on out, whose forward does more than multiply."""
        assert self.mesh is not None
        base = self.get_base_layer()
        with _local_parameters(base):
            y = own_forward(base)(self.shared_input(x), *args, **kwargs)
        if self.plan.gathers_output:
            return gather_last_dim(y, self.plan.weight.shape[0], self.mesh.get_group())
        return y

    @contextlib.contextmanager
    def _adapted_weight(self, adapter_names: list[str]) -> Iterator[None]:
        """While open, the module finds W and its delta under W's name."""
        parameters: dict[str, Any] = self.get_base_layer()._parameters
        original = parameters[self.parameter_name]
        parameters[self.parameter_name] = self._low_rank(local_shard(original), adapter_names)
        try:
            yield
        finally:
            parameters[self.parameter_name] = original

    def _low_rank(self, weight: torch.Tensor, adapter_names: list[str]) -> LowRankSum:
        """Every active adapter's delta as one product, its ranks side by side."""
        pairs = [self._left_right(name, weight.dtype) for name in adapter_names]
        lefts, rights = zip(*pairs, strict=True)
        return LowRankSum(weight, torch.cat(lefts, dim=-1), torch.cat(rights, dim=-2))

    def _left_right(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """L and R of one adapter's delta, ``[E, rows of W, R]`` and ``[E, R, columns of W]``."""
        factors = factors_of(self.factors, name)
        a, b = factors["A"].local(), factors["B"].local()
        if self._param_ndim == 3:
            num_experts, r = self.num_experts, a.shape[0] // self.num_experts
            a = a.reshape(num_experts, r, a.shape[1])  # sizes in full: a piece may be empty
            b = b.reshape(b.shape[0], r, num_experts).permute(2, 0, 1)
        is_in_first = self._param_ndim == 3 and not self._did_swap_in_out_features
        left, right = (a.mT, b.mT) if is_in_first else (b, a)
        left, right = left.to(dtype), (right * self.scaling[name]).to(dtype)
        return left.contiguous(), right.contiguous()

    def merge_target(self) -> torch.Tensor:
        """The parameter that takes the delta in."""
        parameter: torch.Tensor = self.get_param()
        return parameter

    def get_delta_weight(self, adapter_name: str, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """The delta weight in W's placement, for merging. No communication."""
        parameter = self.get_param()
        compute_dtype = torch.promote_types(parameter.dtype, torch.float32)
        left, right = self._left_right(adapter_name, compute_dtype)
        return delta_like(parameter, (left @ right).to(parameter.dtype))


@contextlib.contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """While open, a module's own parameters are this rank's pieces."""
    originals: dict[str, Any] = dict(module._parameters)
    for name, parameter in originals.items():
        if isinstance(parameter, DTensor):
            vars(module)["_parameters"][name] = local_shard(parameter)
    try:
        yield
    finally:
        module._parameters.update(originals)
