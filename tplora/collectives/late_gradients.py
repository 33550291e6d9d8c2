"""Gradients of factors that are computed while the gradient of their input is being summed.

    backward of a column-parallel layer     dx_k = dy_k W_k + (dy_k B_k) A      this rank's part
    started, not waited for                 dx = sum over ranks of dx_k
    meanwhile                               dA = (dy_k B_k)^T x,  dB_k = dy_k^T (x A^T)
    waited for                              dx

Nothing else is left to do meanwhile: what was computed before needs dx. Autograd would compute a
factor's gradient with its product's, before the sum is started. So a product hands its share on,
to a node between the leaf and the product, and a number in its place that nobody reads; which of
the nodes that are ready runs first, autograd decides by their numbers:

    waits: n   <-   late gradients: n + 1   <-   starts the sum: n + 2   <-   layers: n + 3 ...

In any other order the numbers are the same: an edge of the graph says what needs what.

Bits: those of the sum that is waited for at once. Collectives: the same ones, in the same order.

Source: Narayanan et al. 2021, section 3.2, and Megatron-LM's linear layers, which start the sum of
    the input's gradient before they compute their weight's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tplora.upstream import number_of_node, set_number_of_node

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

__all__ = ["Held", "LateGradients", "share_input_late"]


class Held:
    """One product's share of a factor's gradient, on its way to the node that computes it."""

    def __init__(self) -> None:
        self._compute: list[Callable[[], torch.Tensor]] = []

    def put(self, compute: Callable[[], torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
        """What the product returns in the place of the gradient of ``factor``."""
        self._compute.append(compute)
        return factor.new_empty(()).expand_as(factor)

    def take(self) -> torch.Tensor:
        """The gradient."""
        return self._compute.pop()()


class LateGradients:
    """Of the layers that read one tensor: where their factors' gradients are computed.

    Args:
        number: Before it the sum is started, after it waited for.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def hold(self, factor: torch.Tensor) -> tuple[torch.Tensor, Held | None]:
        """The factor as a product takes it, and where that leaves its share of the gradient."""
        if not factor.requires_grad:
            return factor, None
        held = Held()
        view: torch.Tensor = _Late.apply(factor, held)  # type: ignore[no-untyped-call]
        set_number_of_node(view, self._number)
        return view, held


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factor: torch.Tensor, held: Held) -> torch.Tensor:
        ctx.held = held
        return factor.view_as(factor)

    @staticmethod
    def backward(ctx: Any, _nothing: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.held.take(), None


class _Passing(torch.autograd.Function):
    """Does nothing; its number lies between those before and after it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, works: list[Any]) -> torch.Tensor:
        ctx.works = works
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.works.pop().wait()
        return grad, None


class _StartSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, works: list[Any]) -> torch.Tensor:
        ctx.group, ctx.works = group, works
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        work: Any = dist.all_reduce(total, group=ctx.group, async_op=True)
        if torch.is_anomaly_enabled():  # it reads each gradient as it is returned
            work.wait()
        ctx.works.append(work)
        return total, None, None


def share_input_late(x: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, LateGradients]:
    """``replicate_input``, whose sum is under way while late gradients are computed.

    One all-reduce of x's bytes in backward.
    """
    works: list[Any] = []
    waits: torch.Tensor = _Wait.apply(x, works)  # type: ignore[no-untyped-call]
    between: torch.Tensor = _Passing.apply(waits)  # type: ignore[no-untyped-call]
    shared: torch.Tensor = _StartSum.apply(between, group, works)  # type: ignore[no-untyped-call]
    return shared, LateGradients(number_of_node(between))
