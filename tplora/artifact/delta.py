"""The delta weight of one module, a few rows at a time, added to a weight and checked on disk."""

from dataclasses import dataclass
from typing import BinaryIO

import torch

from tplora.artifact.adapter_dir import AdapterFiles, FactorPair
from tplora.artifact.tensor_file import Place, read_rows, row_chunks, write_rows
from tplora.errors import ArtifactError

__all__ = ["Delta", "MergedTensor", "add_delta", "check_added", "copy_tensor", "sum_dtype"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTensor:
    """One changed weight, as read back from the disk."""

    name: str
    max_abs_weight: float
    """Largest entry of the base's weight."""
    max_abs_change: float
    """Largest difference between the merged weight on disk and the base's."""
    max_abs_error: float
    """Largest difference between the merged weight on disk and the exact sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """``scaling * left @ right``: B and A of a linear, A and B transposed of an embedding."""

    left: torch.Tensor
    """[rows of the weight, r]"""
    right: torch.Tensor
    """[r, columns of the weight]"""
    scaling: float

    @classmethod
    def read(cls, adapter: AdapterFiles, pair: FactorPair, dtype: torch.dtype) -> "Delta":
        """Read both factors, in the dtype that is summed in."""
        a, b = adapter.tensor(pair.a).to(dtype), adapter.tensor(pair.b).to(dtype)
        left, right = (a.T, b.T) if pair.is_embedding else (b, a)
        return cls(left=left, right=right, scaling=pair.scaling)

    def added_to(self, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        """``weight`` plus these rows of the delta, in the factors' dtype."""
        return weight.to(self.left.dtype) + (self.left[rows] @ self.right) * self.scaling


def sum_dtype(place: Place) -> torch.dtype:
    """float32, or float64 for a float64 weight."""
    assert place.dtype is not None, "the caller has checked the dtype"
    return torch.promote_types(place.dtype, torch.float32)


def copy_tensor(source: BinaryIO, base: Place, target: BinaryIO, merged: Place) -> None:
    """Copy a tensor from one file to its place in another."""
    for rows in row_chunks(base):
        write_rows(target, merged, rows, read_rows(source, base, rows))


def add_delta(
    delta: Delta, name: str, source: BinaryIO, base: Place, target: BinaryIO, merged: Place
) -> None:
    """Write the base's tensor plus delta, rounded to the base's dtype, to its place in the target.

    Raises:
        ArtifactError: If the sum is not finite in the base's dtype.
    """
    for rows in row_chunks(base):
        weight = read_rows(source, base, rows)
        total = delta.added_to(weight, rows).to(weight.dtype)
        if not torch.isfinite(total).all():
            raise ArtifactError(
                f"{name}: base plus delta is not finite in {weight.dtype}; "
                "merge into a base of a wider dtype, or use the adapter unmerged"
            )
        write_rows(target, merged, rows, total)


def check_added(
    delta: Delta, name: str, source: BinaryIO, base: Place, target: BinaryIO, merged: Place
) -> MergedTensor:
    """Read base and result from the disk and compare the result with the sum, entry by entry.

    Raises:
        ArtifactError: If an entry is further from the sum than its dtype rounds.
    """
    largest = {"weight": 0.0, "change": 0.0, "error": 0.0}
    for rows in row_chunks(base):
        weight = read_rows(source, base, rows)
        written = read_rows(target, merged, rows)
        exact = delta.added_to(weight, rows)
        error = (written.to(exact.dtype) - exact).abs()
        limits = torch.finfo(weight.dtype)
        if not (error <= limits.eps * exact.abs() + limits.tiny).all():  # NaN fails too
            raise ArtifactError(
                f"{name}: what is on disk is {error.max():g} from base plus delta, more than "
                f"{weight.dtype} rounds; the disk or the copy is at fault, merge again"
            )
        change = (written.to(exact.dtype) - weight.to(exact.dtype)).abs()
        for key, values in (("weight", weight.abs()), ("change", change), ("error", error)):
            largest[key] = max(largest[key], float(values.max()))
    return MergedTensor(
        name=name,
        max_abs_weight=largest["weight"],
        max_abs_change=largest["change"],
        max_abs_error=largest["error"],
    )
