"""An optimizer's state as one process holds it: every tensor whole, in the trainer's own form.

    rank's pieces --gather, one tensor at a time--> optimizer.pt --cut, no communication--> pieces

The optimizers that a recipe may ask for step element by element, so a piece of the state is the
state of a piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tplora.adapter.factor import Factor

__all__ = ["check_finite_state", "cut_optimizer_state", "gather_optimizer_state"]


def gather_optimizer_state(
    optimizer: Any, factors: Iterable[Factor], *, is_writer: bool
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with full tensors, on the CPU of the writer; empty elsewhere.

    Collective: every rank calls it. One all-gather of its bytes for each tensor that is cut.
    """
    held, owners = optimizer.state_dict(), _owners(optimizer, factors)
    state: dict[int, dict[str, Any]] = {}
    for index, values in sorted(held["state"].items()):
        whole = {key: _whole(value, owners[index]) for key, value in values.items()}
        if is_writer:
            state[index] = {key: _to_cpu(value) for key, value in whole.items()}
    return {"state": state, "param_groups": held["param_groups"]} if is_writer else {}


def cut_optimizer_state(
    saved: Mapping[str, Any], optimizer: Any, factors: Iterable[Factor], *, where: str
) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes on this rank, from full tensors. No communication.

    Raises:
        ArtifactError: If it is the state of another optimizer, or of other factors.
    """
    _check_groups(saved["param_groups"], optimizer.param_groups, where)
    owners = _owners(optimizer, factors)
    state = {
        index: {key: _piece(value, owners[index], where) for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    return {"state": state, "param_groups": saved["param_groups"]}


def check_finite_state(state: Mapping[str, Any], factors: Iterable[Factor], optimizer: Any) -> None:
    """Nothing that is not a number reaches a file.

    Raises:
        ArtifactError: Naming the factor.
    """
    owners = _owners(optimizer, factors)
    for index, values in state["state"].items():
        for key, value in values.items():
            if torch.is_tensor(value) and not bool(torch.isfinite(value).all()):
                raise ArtifactError(
                    f"the optimizer's {key} of {owners[index].name} holds NaN or infinity; nothing "
                    "was written; go back to the last checkpoint and lower train.learning_rate"
                )


def _owners(optimizer: Any, factors: Iterable[Factor]) -> list[Factor]:
    """The factor of every parameter, in the order in which a state counts them."""
    by_parameter = {id(factor.parameter): factor for factor in factors}
    return [by_parameter[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _is_cut(value: object) -> bool:
    """A count of steps is a tensor as well, and every rank has it."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _whole(value: Any, owner: Factor) -> Any:
    return owner.full_of(value) if _is_cut(value) else value


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    return value


def _piece(value: Any, owner: Factor, where: str) -> Any:
    if not _is_cut(value):
        return value
    if tuple(value.shape) != owner.plan.shape:
        raise ArtifactError(
            f"{where}: the state of {owner.name} has shape {tuple(value.shape)}, the factor has "
            f"{owner.plan.shape}; resume with the adapter that was trained"
        )
    return owner.piece_of(value)


def _check_groups(saved: Any, own: Any, where: str) -> None:
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, own)]
    if sizes[0] != sizes[1]:
        raise ArtifactError(
            f"{where}: is of {sum(sizes[0])} parameters, this adapter has {sum(sizes[1])}; resume "
            "with the adapter that was trained"
        )
    for mark in ("betas", "momentum"):
        if (mark in saved[0]) != (mark in own[0]):
            raise ArtifactError(
                f"{where}: is of another optimizer ({mark} on one side alone); resume with the "
                "same train.optim"
            )
