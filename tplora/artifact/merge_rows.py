"""Some rows of a merged tensor: read, summed, rounded and checked in one thread and its cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tplora.artifact.tensor_file import Memory, bytes_of, is_finite
from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tplora.artifact.base_tensors import TensorRows
    from tplora.artifact.change import Change
    from tplora.artifact.merge_plan import OutTensor

__all__ = ["Room", "RowsMaker", "applied", "rounded", "sum_dtype"]


@dataclass(slots=True)
class Room:
    """Memory that rows are made in."""

    read: Memory = field(default_factory=Memory)
    work: Memory = field(default_factory=Memory)
    out: Memory = field(default_factory=Memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsMaker:
    """One tensor of the result, of which any rows can be had; several threads may ask."""

    tensor: OutTensor
    base: TensorRows
    num_base_rows: int
    changes: Sequence[Change]

    @property
    def needs_whole(self) -> bool:
        """Whether all rows have to be made at once."""
        return any(change.needs_whole for change in self.changes)

    def make(self, rows: slice, room: Room) -> tuple[memoryview, bool]:
        """The bytes of some rows, which lie in ``room``, and whether the adapters moved them."""
        base = self._base_rows(rows, room.read)
        total = applied(self.changes, base, rows, room.work) if self.changes else base
        found = rounded(total, self.tensor, room.out)
        return bytes_of(found), bool(self.changes) and not torch.equal(found, base)

    def _base_rows(self, rows: slice, memory: Memory) -> torch.Tensor:
        """The base's rows; zeros where the result has more."""
        held = slice(min(rows.start, self.num_base_rows), min(rows.stop, self.num_base_rows))
        base = self.base.rows(held, memory=memory)
        missing = (rows.stop - rows.start) - (held.stop - held.start)
        return torch.cat([base, base.new_zeros(missing, *base.shape[1:])]) if missing else base


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for a float64 weight."""
    return torch.promote_types(dtype, torch.float32)


def applied(
    changes: Sequence[Change], base: torch.Tensor, rows: slice, memory: Memory
) -> torch.Tensor:
    """The changes one after the other, in the dtype that is summed in."""
    work = memory.tensor(sum_dtype(base.dtype), tuple(base.shape)).copy_(base)
    for change in changes:
        work = change.applied_to(work, rows, base)
    return work


def rounded(total: torch.Tensor, tensor: OutTensor, memory: Memory) -> torch.Tensor:
    """``total`` in the dtype of the result, once it is known to be finite there.

    Raises:
        ArtifactError: If it is not.
    """
    assert tensor.place.dtype is not None, "the plan has checked the dtype"
    found = total
    if total.dtype != tensor.place.dtype:
        found = memory.tensor(tensor.place.dtype, tuple(total.shape)).copy_(total)
    if not is_finite(found):
        what = "base plus delta" if tensor.is_changed else "the base"
        raise ArtifactError(
            f"{tensor.name}: {what} is not finite in {tensor.place.dtype}; merge into a wider "
            "dtype with --dtype, or use the adapter unmerged"
        )
    return found.contiguous()
