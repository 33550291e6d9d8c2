"""A tensor whose numbers are computed when something is done to it that needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DeferredTensor"]

_KNOWN = """size dim ndimension numel nelement stride is_floating_point is_complex get_device
element_size is_contiguous __len__ __hash__ __set__"""
_FACTS = frozenset(_KNOWN.split())
"""What is known without a number."""
_VALUES = [
    getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")
]
"""Of what looks like a fact, what is a tensor."""


class DeferredTensor(torch.Tensor):
    """Has shape, dtype and device, and answers torch's functions without numbers where it can."""

    handlers: ClassVar[dict[str, Callable[..., Any]]] = {}
    """What can be done without the numbers, by the name of torch's function. A handler is given
    torch's function and its arguments; it answers NotImplemented for some that it cannot take."""

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool = False,
    ) -> Self:
        """One without anything to compute it from; ``Tensor._make_wrapper_subclass`` (torch)."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Self = make(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        return made

    def whole(self) -> torch.Tensor:
        """The numbers."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Facts, what has a handler, and all else on the numbers."""
        kwargs, name = kwargs or {}, func.__name__
        if name in _FACTS or (name == "__get__" and func not in _VALUES):
            parent: Any = super()
            return parent.__torch_function__(func, types, args, kwargs)
        handler = cls.handlers.get(name)
        if handler is not None and isinstance(args[0] if args else None, cls):
            found = handler(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*_with_numbers(args), **_with_numbers(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below torch's functions, of which not all can be seen above."""
        return func(*_with_numbers(args), **_with_numbers(kwargs or {}))


def _with_numbers(tree: Any) -> Any:
    return tree_map_only(DeferredTensor, lambda one: one.whole(), tree)
