"""One trained tensor of an adapter on this rank, such as A: a DTensor parameter and a plain leaf.

The parameter has the full logical shape and a placement, so ``clip_grad_norm_``, optimizers,
``state_dict`` and PEFT's files are right without special cases. The leaf is a plain tensor that
shares the parameter's local storage: forward and backward run on it, so no DTensor operation is
dispatched in either. Its gradient becomes the parameter's in ``gradients.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tplora.errors import ShardError
from tplora.upstream import local_shard, placement_of
from tplora.upstream.dtensor import placement_spec, with_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from tplora.plan.layer import LayerPlan
    from tplora.plan.style import FactorPlan

__all__ = [
    "Factor",
    "Factors",
    "delta_like",
    "factors_of",
    "factors_of_linears",
    "placed_like",
    "shard_full",
]


def shard_full(full: torch.Tensor, plan: FactorPlan, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's piece of ``full``, a copy of its own. No communication."""
    dim = plan.shard_dim
    if dim is None:
        return full.detach().clone()
    ranges = plan.shard_ranges(mesh.get_local_rank(), mesh.size())
    pieces = [full.detach().narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(pieces, dim=dim)


def delta_like(weight: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a delta weight, placed as W is, so that W can take it in."""
    return placed_like(weight, local.detach())


def placed_like(weight: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor that is placed as W is. Gradients flow to the piece."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


class Factor:
    """A, B or another trained tensor of one adapter on one layer.

    Args:
        name: The parameter's name in the PEFT model.
        owner: The module or dict that holds the parameter, and the key it holds it under.
        plan: Full shape, cut, and whether the gradient is partial.
        mesh: The tp mesh, or None in one process, where the parameter is its own leaf.
        is_cut: Whether the parameter is this rank's piece already, as what the base holds is.

    Raises:
        ShardError: If the parameter does not have the plan's full shape, or its piece's.
    """

    def __init__(
        self,
        name: str,
        owner: tuple[nn.Module, str],
        plan: FactorPlan,
        mesh: DeviceMesh | None,
        *,
        is_cut: bool = False,
    ) -> None:
        self.name, self.plan, self.mesh = name, plan, mesh
        self._owner, self._key = owner
        self._leaf: torch.Tensor | None = None
        self._specs: dict[tuple[bool, torch.dtype], Any] = {}
        self.stash: torch.Tensor | None = None
        """A gradient that was reduced in an earlier backward of this step."""
        self.is_reduced = False
        self.on_grad: Callable[[torch.Tensor], None] | None = None
        """Called with each gradient that reaches the leaf, before it is accumulated."""
        self.other_names: tuple[str, ...] = ()
        """Under which the same parameter stands as well, where modules are tied."""
        if mesh is not None:
            self._adopt(mesh) if is_cut else self._shard(mesh)

    @property
    def parameter(self) -> nn.Parameter:
        """The registered parameter: a DTensor under tensor parallelism."""
        parameter = self._owner._parameters[self._key]
        assert parameter is not None
        return parameter

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the parameter; modules that are tied have one each."""
        return (self.name, *self.other_names)

    @property
    def is_partial(self) -> bool:
        """Whether this rank's gradient is a part of a sum."""
        return self.plan.is_grad_partial

    def _shard(self, mesh: DeviceMesh) -> None:
        full = self.parameter
        if tuple(full.shape) != self.plan.shape or isinstance(full, DTensor):
            raise ShardError(
                f"{self.name}: has shape {tuple(full.shape)} when attached, the plan says "
                f"{self.plan.shape}; attach to a model that was planned with the same config"
            )
        local = shard_full(full, self.plan, mesh)
        self._owner._parameters[self._key] = nn.Parameter(
            self._wrap_local(local, is_partial=False), requires_grad=full.requires_grad
        )

    def _adopt(self, mesh: DeviceMesh) -> None:
        held = self.parameter
        local, planned = (
            local_shard(held),
            self.plan.shard_shape(mesh.get_local_rank(), mesh.size()),
        )
        if tuple(local.shape) != planned:
            raise ShardError(
                f"{self.name}: this rank holds {tuple(local.shape)}, the plan says {planned}; "
                "attach to a model that was planned with the same config"
            )
        self._owner._parameters[self._key] = nn.Parameter(
            self._wrap_local(local.detach(), is_partial=False), requires_grad=held.requires_grad
        )

    def share_with(self, module: nn.Module, leaf: str, name: str) -> None:
        """Put the parameter on a module that is tied, where it is called ``name``."""
        module._parameters[leaf] = self.parameter
        self.other_names += (name,)

    def _wrap_local(self, local: torch.Tensor, *, is_partial: bool) -> DTensor:
        """``local`` as a DTensor of the full shape: the factor's placement, or a partial sum."""
        assert self.mesh is not None
        placement = (
            Partial() if is_partial else placement_of(self.plan.shard_dim, self.plan.split_factor)
        )
        return DTensor.from_local(
            local,
            self.mesh,
            [placement],
            run_check=False,
            shape=torch.Size(self.plan.shape),
            stride=_contiguous_stride(self.plan.shape),
        )

    def local(self) -> torch.Tensor:
        """The leaf that forward uses, made anew when the parameter's storage was replaced.

        ``model.to(dtype)``, ``p.data = ...`` or a loaded checkpoint can replace it; a stale leaf
        would train values that nobody saves.
        """
        parameter = self.parameter
        if self.mesh is None:
            return parameter
        shard = local_shard(parameter)
        leaf = self._leaf
        if leaf is None or leaf.data_ptr() != shard.data_ptr() or leaf.dtype != shard.dtype:
            leaf = self._leaf = shard.detach()
            self._watch(leaf, requires_grad=parameter.requires_grad)
        elif leaf.requires_grad != parameter.requires_grad:
            self._watch(leaf, requires_grad=parameter.requires_grad)
        return leaf

    def _watch(self, leaf: torch.Tensor, *, requires_grad: bool) -> None:
        leaf.requires_grad_(requires_grad)
        if requires_grad and self.on_grad is not None:
            leaf.register_hook(self.on_grad)  # type: ignore[no-untyped-call]

    @property
    def leaf_grad(self) -> torch.Tensor | None:
        """What has accumulated on the leaf."""
        return None if self._leaf is None else self._leaf.grad

    @leaf_grad.setter
    def leaf_grad(self, grad: torch.Tensor | None) -> None:
        if self._leaf is not None:
            self._leaf.grad = grad

    def publish_grad(self, local: torch.Tensor, *, is_partial: bool) -> None:
        """Make ``local`` the parameter's gradient; it keeps sharing storage with the leaf's."""
        key = is_partial, local.dtype
        if key in self._specs:
            self.parameter.grad = with_spec(local, self._specs[key])
            return
        wrapped = self._wrap_local(local, is_partial=is_partial)
        self._specs[key], self.parameter.grad = placement_spec(wrapped), wrapped

    def full(self) -> torch.Tensor:
        """The full factor. Collective when it is cut: one all-gather of its bytes."""
        return self.full_of(self.parameter)

    def full_of(self, like: torch.Tensor) -> torch.Tensor:
        """A full tensor from this rank's piece, cut as the factor is: an optimizer's state."""
        if self.mesh is None:
            return like.detach()
        placed = self._wrap_local(local_shard(like).detach(), is_partial=False)
        return placed.full_tensor().detach()

    def piece_of(self, full: torch.Tensor) -> torch.Tensor:
        """What ``full_of`` undoes: this rank's piece of a full tensor, placed as the factor is.

        Only the piece goes to the factor's device.
        """
        if self.mesh is None:
            return full.detach().to(self.parameter.device, copy=True)
        piece = shard_full(full, self.plan, self.mesh).to(self.parameter.device)
        return self._wrap_local(piece, is_partial=False)


Factors = dict[str, Factor]
"""What one adapter trains on one layer: "A", "B", and "magnitude" or "bias" where it has them."""


def factors_of(factors: Mapping[str, Factors], adapter_name: str) -> Factors:
    """The factors of an adapter that PEFT has put on a layer.

    Raises:
        ShardError: If PEFT made them behind our back; skipping them would train nothing.
    """
    if adapter_name not in factors:
        raise ShardError(
            f"adapter {adapter_name!r}: was put on the model past tplora and is not cut; add it "
            "with model.add_adapter or model.load_adapter"
        )
    return factors[adapter_name]


def factors_of_linears(layer: Any, adapter_name: str, prefix: str, plan: LayerPlan) -> Factors:
    """A, B and B's bias, which PEFT holds in two linears, ``lora_A`` and ``lora_B``; the vectors.

    A factor has the name of its parameter in PEFT's model.
    """
    places = {
        "A": ("lora_A", "weight", plan.a),
        "B": ("lora_B", "weight", plan.b),
    }
    extras = {
        "bias": ("lora_B", "bias"),
        "magnitude": ("lora_magnitude_vector", "weight"),
        "diagonal": ("lora_diag", ""),
    }
    places |= {extra: (*extras[extra], factor_plan) for extra, factor_plan in plan.extras}
    factors = {}
    for what, (key, leaf, factor_plan) in places.items():
        holder, name = getattr(layer, key), f"{prefix}.{key}.{adapter_name}"
        owner = (holder[adapter_name], leaf) if leaf else (holder, adapter_name)
        factors[what] = Factor(f"{name}.{leaf}".rstrip("."), owner, factor_plan, layer.mesh)
    return factors


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
