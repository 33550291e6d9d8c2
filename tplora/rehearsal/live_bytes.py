"""Bytes of the tensors that live at once while a piece of code runs, and the most there were."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, follows each storage that torch's operators return, on any device.

    On the meta device a storage has a size and no bytes, so that a step can be followed that would
    not fit. Storages that were there before are not counted, nor is what an operator takes and
    gives back inside itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes that live now."""
        self.peak = 0
        """The most that lived at once."""
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and follow what it returned that is new."""
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back here with local tensors
        result = func(*args, **(kwargs or {}))
        fresh = [one for one in _storages(result) if one._cdata not in self._known]
        if fresh:
            given = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in fresh:
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._follow(storage)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        if not size:
            return
        self._known.add(storage._cdata)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, storage._cdata, size)

    def _drop(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
    ]
