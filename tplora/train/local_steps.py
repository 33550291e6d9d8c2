"""Clipping and optimizer steps on this rank's pieces, as plain tensors.

    norm^2 = sum over tp ranks of |gradients of cut factors|^2 + |gradients of replicated ones|^2

Optimizers that step element by element step a piece as its part of the whole. Their parameters are
the DTensors that names, schedulers and checkpoints go by; for the length of a step the leaves that
share their storage are in their places, so that no DTensor operation is dispatched: with hundreds
of small factors dispatch costs more than the arithmetic.

Communication: one all-reduce of a number per step, for the norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tplora.upstream import local_shard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

    from tplora.adapter.factor import Factor

__all__ = ["StepsLocally", "clip_local_gradients", "step_on_pieces"]

_ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def clip_local_gradients(
    factors: Iterable[Factor], max_norm: float, group: ProcessGroup
) -> torch.Tensor:
    """Scale all gradients so that their norm is ``max_norm`` at most; the norm before. Collective.

    Args:
        factors: Those that are trained; their gradients are reduced.
        max_norm: Infinite, to measure only.
        group: The tp group.
    """
    leaves: list[torch.Tensor] = []
    cut: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    for factor in factors:
        if factor.parameter.grad is None:
            continue
        leaf = factor.local()
        grad = leaf.grad = local_shard(factor.parameter.grad)
        leaves.append(leaf)
        (whole if factor.plan.shard_dim is None else cut).append(grad)
    if not leaves:
        return torch.zeros(())
    of_cut, of_whole = (
        nn.utils.get_total_norm(one).square().to(leaves[0].device) for one in (cut, whole)
    )
    dist.all_reduce(of_cut, group=group)
    norm = (of_cut + of_whole).sqrt()
    if max_norm != float("inf"):
        nn.utils.clip_grads_with_norm_(leaves, max_norm, norm)
    return norm


def step_on_pieces(optimizer: torch.optim.Optimizer, factors: Iterable[Factor]) -> None:
    """Have an optimizer step leaves in the place of DTensors, from now on."""
    owners = {id(factor.parameter): factor for factor in factors}
    parameters: list[list[Any]] = []

    def enter(*_: Any) -> None:
        parameters[:] = [group["params"] for group in optimizer.param_groups]
        for group, held in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = [_piece(optimizer, p, owners.get(id(p))) for p in held]

    def leave(*_: Any) -> None:
        for group, held in zip(optimizer.param_groups, parameters, strict=True):
            for piece, p in zip(group["params"], held, strict=True):
                if piece is not p and piece in optimizer.state:
                    optimizer.state[p] = optimizer.state.pop(piece)
            group["params"] = held

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(leave)


def _piece(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, owner: Factor | None
) -> torch.Tensor:
    """The leaf with the parameter's gradient and state."""
    if owner is None:
        return parameter
    leaf = owner.local()
    leaf.grad = None if parameter.grad is None else local_shard(parameter.grad)
    if parameter in optimizer.state:
        held = optimizer.state.pop(parameter)
        optimizer.state[leaf] = {
            key: local_shard(value) if isinstance(value, torch.Tensor) else value
            for key, value in held.items()
        }
    return leaf


class StepsLocally:
    """Put before a ``Trainer`` whose model is a ``TploraModel``."""

    _local_optimizer: torch.optim.Optimizer | None = None

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The trainer's; it steps pieces if it steps element by element."""
        parent: Any = super()
        optimizer: torch.optim.Optimizer = parent.create_optimizer(*args, **kwargs)
        is_elementwise = type(optimizer) in _ELEMENTWISE
        if self._is_cut and is_elementwise and optimizer is not self._local_optimizer:
            self._local_optimizer = optimizer
            step_on_pieces(optimizer, self._trained_factors())
        return optimizer

    @property
    def _is_cut(self: Any) -> bool:
        return self.model.mesh is not None

    def _trained_factors(self: Any) -> list[Factor]:
        every = (f for name in self.model.peft_config for f in self.model.factors(name).values())
        return list({id(f.parameter): f for f in every if f.parameter.requires_grad}.values())

    def _clip_grad_norm(self: Any, model: Any) -> Any:
        """The trainer's, on pieces."""
        if not self._is_cut:
            parent: Any = super()
            return parent._clip_grad_norm(model)
        return self._clip_locally(self.args.max_grad_norm)

    def _get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        """The trainer's, on pieces where nothing was clipped."""
        if self._is_cut and grad_norm is None:
            return self._clip_locally(float("inf"))
        parent: Any = super()
        return parent._get_grad_norm(model, grad_norm=grad_norm)

    def _clip_locally(self: Any, max_norm: float) -> torch.Tensor:
        factors, group = self._trained_factors(), self.model.mesh.get_group()
        return clip_local_gradients(factors, max_norm, group)
