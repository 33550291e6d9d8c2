"""The changes of a parameter in the dtype that it is summed in, with one product or by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.artifact.merge_rows import sum_dtype

if TYPE_CHECKING:
    import torch

    from tplora.artifact.change import Change
    from tplora.artifact.checkpoint import Checkpoint
    from tplora.artifact.merge_plan import MergePlan

__all__ = ["ChangeReader"]


class ChangeReader:
    """Reads what a plan names.

    Args:
        checkpoint: The base.
        plan: Of the merge.
        max_bytes: Of a parameter whose product may be made at once.
    """

    def __init__(self, checkpoint: Checkpoint, plan: MergePlan, max_bytes: int) -> None:
        self._checkpoint, self._plan, self._max_bytes = checkpoint, plan, max_bytes

    def read(self, parameter: str) -> list[Change]:
        """They have yet to be prepared."""
        dtype = self.dtype_of(self._plan.names_of(parameter)[0])
        one = self._in_one_product(parameter)
        return self._plan.changes[parameter].read(dtype, in_one_product=one)

    def prepared_bytes(self, parameter: str) -> int:
        """What they take from then on, at most."""
        return self._size(parameter) if self._in_one_product(parameter) else 0

    def dtype_of(self, name: str) -> torch.dtype:
        """That a tensor of the base is summed in."""
        dtype = self._checkpoint.tensors[name][1].dtype
        assert dtype is not None, "the plan has checked the dtype"
        return sum_dtype(dtype)

    def _in_one_product(self, parameter: str) -> bool:
        """Where PEFT's bits can be had: the base is summed in its own dtype, and memory allows."""
        names = self._plan.names_of(parameter)
        is_own = all(
            self._checkpoint.tensors[name][1].dtype == self.dtype_of(names[0]) for name in names
        )
        return is_own and self._size(parameter) <= self._max_bytes

    def _size(self, parameter: str) -> int:
        places = [self._checkpoint.tensors[name][1] for name in self._plan.names_of(parameter)]
        return sum(place.end - place.begin for place in places)
