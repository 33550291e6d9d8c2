"""Private names of torch and transformers that activation checkpointing is followed by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["CountsSaved", "finished_work", "has_forward_of_style", "sum_in_place", "sum_of_dtensor"]


class CountsSaved:
    """While open, counts the tensors that autograd saves under the hooks that were there before.

    ``torch._C._autograd._top_saved_tensors_default_hooks`` (torch 2.11 to 2.14): hooks of Python
    take the place of those before them, so these hand on to them.
    """

    def __init__(self) -> None:
        self.count = 0
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> CountsSaved:
        """Put ours on top; where there are no hooks, nothing is counted."""
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None:
            pack, unpack = top
            self._hooks = saved_tensors_hooks(self._counting(pack), unpack)
            self._hooks.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        """Take ours off."""
        if self._hooks is not None:
            self._hooks.__exit__(*raised)
            self._hooks = None

    @property
    def is_counting(self) -> bool:
        """Whether there were hooks to stand in for."""
        return self._hooks is not None

    def _counting(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def counting(tensor: torch.Tensor) -> Any:
            self.count += 1
            return pack(tensor)

        return counting


def sum_of_dtensor(func: Any) -> bool:
    """Whether an operator is the all-reduce that DTensors are redistributed by (torch 2.11)."""
    return func is torch.ops._c10d_functional.all_reduce.default


def sum_in_place(func: Any) -> bool:
    """Whether an operator is what ``torch.distributed.all_reduce`` calls (torch 2.11 to 2.14)."""
    return func is torch.ops.c10d.allreduce_.default


def finished_work() -> Any:
    """What a collective that is over returns; ``FakeWork`` (torch 2.11 to 2.14)."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def has_forward_of_style(module: nn.Module) -> bool:
    """Whether transformers has put a style of tensor parallelism around a module's forward.

    ``install_forward`` sets ``module.forward`` on the instance (transformers 5.24,
    distributed/tensor_parallel.py).
    """
    forward = vars(module).get("forward")
    return getattr(forward, "__module__", "") == "transformers.distributed.tensor_parallel"
