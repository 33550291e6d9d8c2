"""Answers where code asks a tensor without storage for its values.

As if every condition held: each token has a label, each expert is reached by every token that
could reach it. A number that is asked for by itself is zero, a yes or no is no: rows are padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AsIfAllHeld"]

_aten = torch.ops.aten


class AsIfAllHeld(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, operators whose result depends on values give the largest there can be.

    Only on the meta device, where they could give nothing at all.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer the operator, or run it."""
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back here with local tensors
        if func in _ANSWERS and args[0].is_meta:
            return _ANSWERS[func](*args)
        if func in _BY_INDEX and args[0].is_meta:
            args = (args[0], _as_numbers(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def _number(x: torch.Tensor) -> bool | int | float:
    if x.dtype == torch.bool:
        return False
    return 0.0 if x.is_floating_point() else 0


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.numel(), x.ndim), dtype=torch.long)


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    whole, _ = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]
    return x.new_empty(whole.numel())


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: Any = None, *_: Any) -> torch.Tensor:
    """Products of groups of rows, in any dtype; torch's own on meta tensors are of bfloat16 only.

    A dim that the groups share out is there once, in two dims on one side; if it is the one that is
    summed over, each group has a product of its own.
    """
    rows, columns = a.shape[-2], b.shape[-1]
    if a.ndim == 2 and b.ndim == 2:
        return a.new_empty((offs.shape[0], rows, columns))
    is_stacked = a.ndim == 3 and b.ndim == 3
    return a.new_empty((a.shape[0], rows, columns) if is_stacked else (rows, columns))


def _as_numbers(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices with each table of yes and no in the form that ``nonzero`` gives it."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.ndim)]
        else:
            found.append(index)
    return found


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _number,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._grouped_mm.default: _grouped_mm,
}
_BY_INDEX = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index_put.default,
}
