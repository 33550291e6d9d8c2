"""Sums over ranks that activation checkpointing keeps, and so does not take a second time.

    forward      y = sum over ranks of y_k        y is kept, as the region's input is
    recompute    y, from what was kept            no collective

A region is what is computed again at a time: a decoder layer. torch asks ``keep_sums`` for two
contexts, one around the region's forward, one around each time that it is computed again
(``context_fn`` of ``torch.utils.checkpoint``). What is computed again stops at the last tensor that
backward needs: a sum after it, as that of a Llama's down_proj, is not asked for, and is not kept.
So of a Llama one ``[T, H]`` a layer is kept on top, that of o_proj.

torch's own selective checkpointing would keep both sums, takes each operator of a region through
Python, and allows one backward only. Cited for the idea: Korthikanti et al. 2022, section 5.

Exactness: the bits of a kept sum are those of the sum. A sum that the model wrote to afterwards is
not that sum any more: it is not kept, and taken again, by all ranks alike.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tplora.upstream.recomputing import CountsSaved, finished_work, sum_in_place, sum_of_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["KeepsSumsOfOthers", "is_keeping_sums", "keep_sums", "kept_or_taken"]


class _Region:
    """The sums of one forward of a region, in order."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor | None] = []
        self.num_asked = 0
        self.is_computed_again = False
        self._made: list[tuple[int, int]] = []
        """Of each sum, its version and how many tensors had been saved, when it was taken."""
        self._saved = CountsSaved()

    def begin(self) -> None:
        self._saved.__enter__()

    def end(self) -> None:
        """Forget what backward will not ask for, and what is no sum any more."""
        is_counting, num_saved = self._saved.is_counting, self._saved.count
        self._saved.__exit__(None, None, None)
        for k, (total, (version, before)) in enumerate(zip(self.sums, self._made, strict=True)):
            is_last = is_counting and before == num_saved
            if is_last or (total is not None and total._version != version):
                self.sums[k] = None

    def take(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        if not self.is_computed_again:
            total = compute()
            # An alias: the tensor itself gets a graph, which would hold the region it is held by.
            self.sums.append(total.detach())
            self._made.append((total._version, self._saved.count))
            return total
        k, self.num_asked = self.num_asked, self.num_asked + 1
        kept = self.sums[k] if k < len(self.sums) else None
        return compute() if kept is None else kept.detach()


class _OfThread(threading.local):
    """Regions that are open; on a GPU backward, and what it computes again, has its own thread."""

    def __init__(self) -> None:
        self.regions: list[_Region] = []


_OPEN = _OfThread()


class _Forward:
    def __init__(self, region: _Region) -> None:
        self._region = region

    def __enter__(self) -> None:
        self._region.begin()
        _OPEN.regions.append(self._region)

    def __exit__(self, *_: object) -> None:
        _OPEN.regions.pop()
        self._region.end()


class _Again:
    def __init__(self, region: _Region) -> None:
        self._region = region

    def __enter__(self) -> None:
        self._region.is_computed_again, self._region.num_asked = True, 0
        _OPEN.regions.append(self._region)

    def __exit__(self, *_: object) -> None:
        _OPEN.regions.pop()


def keep_sums() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Two contexts over one region: for its forward, and for each time that it is computed again.

    For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keep_sums)``.
    """
    region = _Region()
    return _Forward(region), _Again(region)


def is_keeping_sums() -> bool:
    """Whether this thread is in a region."""
    return bool(_OPEN.regions)


def kept_or_taken(take: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A sum over ranks: the one that was kept, else what ``take`` gives, which may be kept.

    Args:
        take: Takes the sum, a tensor of its own. Collective.
    """
    regions, _OPEN.regions = _OPEN.regions, []
    try:
        for region in regions:  # the innermost last, so that it asks those around it
            take = partial(region.take, take)
        return take()
    finally:
        _OPEN.regions = regions


class KeepsSumsOfOthers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, sums that others' code takes are kept as ours are.

    Every operator passes through Python meanwhile: open it around such code alone.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator; a sum, unless it was kept."""
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back here with local tensors
        run = partial(func, *args, **(kwargs or {}))
        if not is_keeping_sums():
            return run()
        if sum_of_dtensor(func):
            return kept_or_taken(lambda: torch.ops._c10d_functional.wait_tensor(run()))
        if sum_in_place(func) and len(args[0]) == 1:
            return _sum_in_place(args[0][0], run)
        return run()


def _sum_in_place(partial_sum: torch.Tensor, run: Callable[[], Any]) -> Any:
    returned: list[Any] = []

    def take() -> torch.Tensor:
        returned.append(run())
        return partial_sum

    total = kept_or_taken(take)
    if returned:
        return returned[0]
    partial_sum.copy_(total)
    return [partial_sum], finished_work()
