"""One gradient for all layers that read the same tensor."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from tplora.collectives.late_gradients import share_input_late
from tplora.collectives.operators import replicate_input, share_gathered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tplora.collectives.late_gradients import LateGradients

__all__ = ["SharedInput"]


class SharedInput:
    """``replicate_input``, once for all layers that read the same tensor.

    q, k and v read one tensor, gate and up another; one all-reduce of the summed gradient serves
    them all. A memo of one slot, by the tensor's identity.

    The memo is bypassed when no graph is built: what a custom function returns under ``no_grad``
    says that it requires grad but has no graph, and a later hit would lose its gradient. It misses
    when the tensor was written to (``_version``), since then it is another value. It never keeps
    the tensor alive and is not stored on it (``x -> y -> graph -> x`` would leak). ``clear`` it
    after the root forward and after backward.

    Args:
        group: The tensor-parallel process group, or None in one process.
        is_waited_for_late: Whether factors' gradients are computed while the sum is under way; see
            ``late_gradients.py``.
    """

    def __init__(self, group: ProcessGroup | None, *, is_waited_for_late: bool = False) -> None:
        self._group, self._is_waited_for_late = group, is_waited_for_late
        self.clear()

    def clear(self) -> None:
        """Forget the remembered tensor."""
        self._seen: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._shared: torch.Tensor | None = None
        self._late: LateGradients | None = None
        self._gathered: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None

    def late_gradients(self, x: torch.Tensor) -> LateGradients | None:
        """Where factors that multiply ``x`` leave their gradients, if it is the shared tensor."""
        return self._late if x is self._shared else None

    def note_gathered(self, whole: torch.Tensor, local: torch.Tensor) -> None:
        """``whole`` was gathered from the tokens ``local``: its shared gradient goes there."""
        self._gathered = weakref.ref(whole), whole._version, local

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, whose gradient is summed over the group once."""
        if self._group is None or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        is_seen = self._seen is not None and self._seen() is x and self._version == x._version
        if not is_seen or self._shared is None:
            self._shared, self._late = self._share(x, self._group)
            self._seen, self._version = weakref.ref(x), x._version
        return self._shared

    def _share(
        self, x: torch.Tensor, group: ProcessGroup
    ) -> tuple[torch.Tensor, LateGradients | None]:
        if self._gathered is not None:
            whole, version, local = self._gathered
            if whole() is x and version == x._version:
                return share_gathered(local, x, group), None
        if self._is_waited_for_late:
            return share_input_late(x, group)
        return replicate_input(x, group), None
