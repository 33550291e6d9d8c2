"""What a merge makes of one tensor, a few rows at a time; written, and checked on disk."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, Protocol

import torch

from tplora.artifact.adapter_dir import AdapterFiles, FactorPair
from tplora.artifact.tensor_file import Place, read_rows, row_chunks, write_rows
from tplora.errors import ArtifactError

__all__ = [
    "AddedBias",
    "Change",
    "Delta",
    "MergedTensor",
    "Replaced",
    "ReplacedRows",
    "apply_change",
    "check_applied",
    "copy_tensor",
    "sum_dtype",
]


class Change(Protocol):
    """What some rows of a tensor become; every number in the dtype that is summed in."""

    def applied_to(self, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        """``rows`` of the result, from those of the base."""
        ...

    def prepared(self, chunks: Iterable[tuple[slice, torch.Tensor]]) -> "Change":
        """The change, once it has seen all rows of the base if it needs to."""
        ...


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
    """LoRA: ``W + scaling * left @ right``; DoRA: each output feature brought to its magnitude.

    left and right are B and A of a linear, A and B transposed of an embedding.
    """

    left: torch.Tensor
    """[rows of the weight, r]"""
    right: torch.Tensor
    """[r, columns of the weight]"""
    scaling: float
    is_embedding: bool = False
    magnitude: torch.Tensor | None = None
    """DoRA's, one number for each output feature."""
    norms: torch.Tensor | None = None
    """Of an embedding's columns, over all rows; a linear's rows have theirs at hand."""

    @classmethod
    def read(cls, adapter: AdapterFiles, pair: FactorPair, dtype: torch.dtype) -> "Delta":
        """Read the factors, in the dtype that is summed in."""
        a, b = adapter.tensor(pair.a).to(dtype), adapter.tensor(pair.b).to(dtype)
        left, right = (a.T, b.T) if pair.is_embedding else (b, a)
        magnitude = None if pair.magnitude is None else adapter.tensor(pair.magnitude).to(dtype)
        return cls(
            left=left,
            right=right,
            scaling=pair.scaling,
            is_embedding=pair.is_embedding,
            magnitude=magnitude,
        )

    def prepared(self, chunks: Iterable[tuple[slice, torch.Tensor]]) -> "Delta":
        """With the norms of an embedding's columns, where DoRA needs them."""
        if self.magnitude is None or not self.is_embedding:
            return self
        squares = sum(self._sum(weight, rows).square().sum(dim=0) for rows, weight in chunks)
        assert isinstance(squares, torch.Tensor)
        return replace(self, norms=squares.sqrt())

    def applied_to(self, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        """``m / n (W + scaling * left @ right)``, or without ``m / n`` if there is no magnitude."""
        total = self._sum(weight, rows)
        if self.magnitude is None:
            return total
        if self.is_embedding:
            assert self.norms is not None, "prepared has been called"
            return total * (self.magnitude / self.norms)
        scale = self.magnitude[rows] / total.square().sum(dim=1).sqrt()
        return total * scale[:, None]

    def _sum(self, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        return weight.to(self.left.dtype) + (self.left[rows] @ self.right) * self.scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedBias:
    """``bias + scaling * the bias of B``."""

    vector: torch.Tensor

    @classmethod
    def read(cls, adapter: AdapterFiles, pair: FactorPair, dtype: torch.dtype) -> "AddedBias":
        """Read the vector, in the dtype that is summed in."""
        assert pair.bias is not None
        return cls(vector=adapter.tensor(pair.bias).to(dtype) * pair.scaling)

    def prepared(self, chunks: Iterable[tuple[slice, torch.Tensor]]) -> "AddedBias":
        """Nothing to see."""
        return self

    def applied_to(self, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        """The sum."""
        return weight.to(self.vector.dtype) + self.vector[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A tensor that was trained as a whole takes the place of the base's."""

    tensor: torch.Tensor

    @classmethod
    def read(cls, adapter: AdapterFiles, key: str, dtype: torch.dtype) -> "Replaced":
        """Read the tensor."""
        return cls(tensor=adapter.tensor(key).to(dtype))

    def prepared(self, chunks: Iterable[tuple[slice, torch.Tensor]]) -> "Replaced":
        """Nothing to see."""
        return self

    def applied_to(self, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        """The adapter's rows."""
        return self.tensor[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedRows:
    """Rows of single tokens that were trained take the place of the base's."""

    indices: tuple[int, ...]
    trained: torch.Tensor

    @classmethod
    def read(
        cls, adapter: AdapterFiles, key: str, indices: tuple[int, ...], dtype: torch.dtype
    ) -> "ReplacedRows":
        """Read the rows."""
        return cls(indices=indices, trained=adapter.tensor(key).to(dtype))

    def prepared(self, chunks: Iterable[tuple[slice, torch.Tensor]]) -> "ReplacedRows":
        """Nothing to see."""
        return self

    def applied_to(self, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        """The base's rows, but for those that were trained."""
        total = weight.to(self.trained.dtype, copy=True)
        for place, token in enumerate(self.indices):
            if rows.start <= token < rows.stop:
                total[token - rows.start] = self.trained[place]
        return total


def sum_dtype(place: Place) -> torch.dtype:
    """float32, or float64 for a float64 weight."""
    assert place.dtype is not None, "the caller has checked the dtype"
    return torch.promote_types(place.dtype, torch.float32)


def copy_tensor(source: BinaryIO, base: Place, target: BinaryIO, merged: Place) -> None:
    """Copy a tensor from one file to its place in another."""
    for rows in row_chunks(base):
        write_rows(target, merged, rows, read_rows(source, base, rows))


def _chunks(source: BinaryIO, base: Place, merged: Place) -> Iterator[tuple[slice, torch.Tensor]]:
    """The base's rows; zeros where the result has more."""
    for rows in row_chunks(merged):
        held = slice(min(rows.start, base.shape[0]), min(rows.stop, base.shape[0]))
        weight = read_rows(source, base, held)
        missing = (rows.stop - rows.start) - (held.stop - held.start)
        if missing:
            weight = torch.cat([weight, weight.new_zeros(missing, *base.shape[1:])])
        yield rows, weight


def apply_change(
    change: Change, name: str, source: BinaryIO, base: Place, target: BinaryIO, merged: Place
) -> None:
    """Write what the base's tensor becomes, rounded to its dtype, to its place in the target.

    Raises:
        ArtifactError: If it is not finite in the base's dtype.
    """
    change = change.prepared(_chunks(source, base, merged))
    for rows, weight in _chunks(source, base, merged):
        total = change.applied_to(weight, rows).to(weight.dtype)
        if not torch.isfinite(total).all():
            raise ArtifactError(
                f"{name}: base plus delta is not finite in {weight.dtype}; "
                "merge into a base of a wider dtype, or use the adapter unmerged"
            )
        write_rows(target, merged, rows, total)


def check_applied(
    change: Change, name: str, source: BinaryIO, base: Place, target: BinaryIO, merged: Place
) -> MergedTensor:
    """Read base and result from the disk and compare the result with the sum, entry by entry.

    Raises:
        ArtifactError: If an entry is further from the sum than its dtype rounds.
    """
    change = change.prepared(_chunks(source, base, merged))
    largest = {"weight": 0.0, "change": 0.0, "error": 0.0}
    for rows, weight in _chunks(source, base, merged):
        written = read_rows(target, merged, rows)
        exact = change.applied_to(weight, rows)
        error = (written.to(exact.dtype) - exact).abs()
        limits = torch.finfo(weight.dtype)
        if not (error <= limits.eps * exact.abs() + limits.tiny).all():  # NaN fails too
            raise ArtifactError(
                f"{name}: what is on disk is {error.max():g} from base plus delta, more than "
                f"{weight.dtype} rounds; the disk or the copy is at fault, merge again"
            )
        moved = (written.to(exact.dtype) - weight.to(exact.dtype)).abs()
        for key, values in (("weight", weight.abs()), ("change", moved), ("error", error)):
            largest[key] = max(largest[key], float(values.max()))
    return MergedTensor(
        name=name,
        max_abs_weight=largest["weight"],
        max_abs_change=largest["change"],
        max_abs_error=largest["error"],
    )
