"""Private names of torch: local pieces, strided placements, the end of a backward pass."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "copying_shards",
    "local_shard",
    "norms_of",
    "number_of_node",
    "placement_of",
    "placement_spec",
    "queue_after_backward",
    "set_number_of_node",
    "split_factor_of",
    "with_spec",
]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a DTensor, outside autograd; a plain tensor is its own piece.

    ``DTensor._local_tensor`` (torch 2.11 to 2.14): ``to_local()`` would add a node to the graph and
    costs ten times as much, once per factor and forward.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, in one kernel for many of them; nothing waits for the device.

    ``torch._foreach_norm`` (torch 2.11 to 2.14), as torch's own clipping has it.
    """
    return list(torch._foreach_norm(tensors)) if tensors else []


def placement_spec(tensor: DTensor) -> Any:
    """Shape, dtype and placement of a DTensor, for ``with_spec``; it holds no numbers."""
    return tensor._spec


def with_spec(local: torch.Tensor, spec: Any) -> DTensor:
    """``local`` as this rank's piece of a tensor of another's shape and placement.

    ``DTensor.__new__`` and ``DTensor._spec`` (torch 2.11 to 2.14): ``from_local`` is an operation
    of autograd and costs ten times as much, once per factor and step.
    """
    make: Any = DTensor
    made: DTensor = make(local, spec, requires_grad=False)
    return made


def placement_of(shard_dim: int | None, split_factor: int = 1) -> Placement:
    """DTensor's word for a cut: on a dim that holds ``split_factor`` fused weights, or none.

    ``_StridedShard`` (torch 2.11 to 2.14).
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    if shard_dim is None:
        return Replicate()
    if split_factor == 1:
        return Shard(shard_dim)
    return _StridedShard(shard_dim, split_factor=split_factor)


def split_factor_of(placement: Placement) -> int:
    """How many fused weights a cut dim holds; what ``placement_of`` was given.

    ``_StridedShard.split_factor`` (torch 2.11 to 2.14).
    """
    return int(getattr(placement, "split_factor", 1))


def number_of_node(tensor: torch.Tensor) -> int:
    """By which autograd orders nodes that are ready: those of the highest number run first.

    ``Node._sequence_nr`` (torch 2.11 to 2.14).
    """
    node: Any = tensor.grad_fn
    return int(node._sequence_nr())


def set_number_of_node(tensor: torch.Tensor, number: int) -> None:
    """Give the node that made ``tensor`` another number; ``Node._set_sequence_nr``."""
    node: Any = tensor.grad_fn
    node._set_sequence_nr(number)


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` once, when the backward pass that is running now has finished.

    ``Variable._execution_engine.queue_callback`` (torch 2.11 to 2.14), as FSDP2 and DDP use it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@contextlib.contextmanager
def copying_shards() -> Iterator[None]:
    """While open, ``copy.deepcopy`` of a DTensor parameter copies this rank's piece.

    ``Tensor.__deepcopy__`` (torch 2.11 to 2.14) would copy the storage of the wrapper, which has
    none.
    """

    def copy_shard(tensor: DTensor, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = copied
        return copied

    cls: Any = DTensor
    cls.__deepcopy__ = copy_shard
    try:
        yield
    finally:
        del cls.__deepcopy__
