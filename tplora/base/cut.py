"""Where a rank's piece of a linear's weight lies, for weights that are no DTensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from tplora.plan.style import shard_range
from tplora.upstream import placement_of
from tplora.upstream.quantization import full_linear_shape

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Cut", "cut_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where the piece of this rank lies in the full weight ``[O, I]``."""

    shape: tuple[int, int]
    """In full."""
    dim: int | None
    mesh: DeviceMesh | None

    @property
    def ranges(self) -> tuple[slice, slice]:
        """Rows and columns of the piece."""
        rows, columns = (slice(0, size) for size in self.shape)
        if self.dim is None or self.mesh is None:
            return rows, columns
        own = shard_range(self.shape[self.dim], self.mesh.get_local_rank(), self.mesh.size())
        return (slice(*own), columns) if self.dim == 0 else (rows, slice(*own))

    @property
    def local_shape(self) -> tuple[int, int]:
        """Of the piece."""
        rows, columns = self.ranges
        return rows.stop - rows.start, columns.stop - columns.start

    def has_whole(self, block_size: int) -> bool:
        """Whether on every rank a row of the piece is whole blocks; the same answer on all."""
        if self.dim is None or self.mesh is None:
            return True
        width, pieces = self.shape[1], self.mesh.size() if self.dim == 1 else 1
        return width % (pieces * block_size) == 0

    def piece_of(self, full: torch.Tensor, *, per: int = 1) -> torch.Tensor:
        """The piece ``[O/P, I / per]`` or ``[O, I/P / per]`` of a full tensor ``[O, I / per]``.

        A copy: a view would keep the full tensor. What is not cut may have rows of any width.
        """
        if self.dim is None or self.mesh is None:
            return full.clone(memory_format=torch.contiguous_format)
        rows, columns = self.ranges
        table = full.reshape(self.shape[0], self.shape[1] // per)
        piece = table[rows, columns.start // per : columns.stop // per]
        return piece.clone(memory_format=torch.contiguous_format)

    def gather(self, piece: torch.Tensor, *, per: int = 1) -> torch.Tensor:
        """What ``piece_of`` undoes. Collective where W is cut: one all-gather."""
        if self.dim is None or self.mesh is None:
            return piece
        columns = self.shape[1] // per
        placed = DTensor.from_local(
            piece,
            self.mesh,
            [placement_of(self.dim)],
            run_check=False,
            shape=torch.Size((self.shape[0], columns)),
            stride=(columns, 1),
        )
        return placed.full_tensor()


def cut_of(module: nn.Module, weight: torch.Tensor) -> Cut:
    """How a linear's weight is cut, from the DTensor that transformers has put in its place."""
    shape = full_linear_shape(module)
    if not isinstance(weight, DTensor):
        return Cut(shape=shape, dim=None, mesh=None)
    dim: int | None = getattr(weight.placements[-1], "dim", None)
    mesh = weight.device_mesh
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    return Cut(shape=shape, dim=None if dim is None else dim % 2, mesh=mesh)
