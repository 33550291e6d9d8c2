"""What an adapter makes of one parameter, some rows at a time, in PEFT's own order of operations.

Floating point does not add up the same in another order, so the order is PEFT's wherever a base is
in the dtype that is summed in: there ``B @ A`` is one product, as in PEFT, and the merged weight is
PEFT's bit for bit. A narrower base is summed in float32 and rounded once, and its product is made
for the rows in hand alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AddedVector", "ByPeft", "Change", "Dora", "LowRank", "Replaced", "ReplacedRows"]


class Change(Protocol):
    """What some rows (entries of dim 0) of a parameter become, in the dtype that is summed in."""

    needs_whole: bool
    """Whether it has to be given all rows at once."""

    def prepare(self) -> None:
        """Make what all rows need."""
        ...

    def applied_to(self, work: torch.Tensor, rows: slice, base: torch.Tensor) -> torch.Tensor:
        """The new rows; ``work`` may be written over, ``base`` is what the file holds there."""
        ...


class LowRank:
    """``W + scaling * B @ A``: of a linear, of an embedding transposed, of each expert of a stack.

    Args:
        a: ``[r, in]``; of a stack ``[E r, in]``, row ``e r + k`` is row k of expert e.
        b: ``[out, r]``; of a stack ``[out, r E]``, column ``k E + e`` is column k of expert e.
        scaling: alpha over r, and the weight of the adapter.
        num_experts: Of a stack of three dims; 0 for a single matrix.
        is_transposed: Whether W is ``[in, out]``, alone or for each expert.
        in_one_product: Make the whole delta at once, as PEFT does.
    """

    needs_whole = False

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        *,
        num_experts: int = 0,
        is_transposed: bool = False,
        in_one_product: bool,
    ) -> None:
        self._a, self._b, self._scaling = a, b, scaling
        self._is_transposed, self._in_one_product = is_transposed, in_one_product
        if num_experts:
            self._a = a.reshape(num_experts, -1, a.shape[-1])
            self._b = b.reshape(b.shape[0], -1, num_experts)
        self._delta: torch.Tensor | None = None

    def prepare(self) -> None:
        """The product, where it is made at once."""
        if self._in_one_product:
            self.delta()

    def delta(self) -> torch.Tensor:
        """All of ``scaling * B @ A``, made once."""
        if self._delta is None:
            if self._a.ndim == 3:
                form = "e i o" if self._is_transposed else "e o i"
                product = torch.einsum(f"o r e, e r i -> {form}", self._b, self._a)
            else:
                product = self._b @ self._a
                product = product.T if self._is_transposed else product
            self._delta = product.mul_(self._scaling)
        return self._delta

    def rows_of_delta(self, rows: slice) -> torch.Tensor:
        """Some rows of it."""
        if self._in_one_product:
            return self.delta()[rows]
        left, right = self._factors(rows)
        return (left @ right).mul_(self._scaling)

    def applied_to(self, work: torch.Tensor, rows: slice, base: torch.Tensor) -> torch.Tensor:
        """The sum."""
        if self._in_one_product:
            return work.add_(self.delta()[rows])
        left, right = self._factors(rows)
        add = work.baddbmm_ if work.ndim == 3 else work.addmm_
        return add(left, right, alpha=self._scaling)

    def _factors(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Left ``[rows, r]`` and right ``[r, columns]``, or a pair for each expert of the rows."""
        if self._a.ndim == 2:
            return (self._a.T[rows], self._b.T) if self._is_transposed else (self._b[rows], self._a)
        a, b = self._a[rows], self._b[:, :, rows].permute(2, 0, 1)
        return (a.transpose(1, 2), b.transpose(1, 2)) if self._is_transposed else (b, a)


class Dora:
    """``m / n (W + delta)`` for each output feature, n the norm of base plus delta in its row.

    Source: DoRA, arXiv 2402.09353; PEFT takes the norm over the base that nothing is merged into.
    """

    needs_whole = False

    def __init__(self, low_rank: LowRank, magnitude: torch.Tensor) -> None:
        self._low_rank, self._magnitude = low_rank, magnitude

    def prepare(self) -> None:
        """The delta's product."""
        self._low_rank.prepare()

    def applied_to(self, work: torch.Tensor, rows: slice, base: torch.Tensor) -> torch.Tensor:
        """Each row brought to its magnitude."""
        delta = self._low_rank.rows_of_delta(rows)
        norm = torch.linalg.norm(base + delta, dim=1)
        return work.add_(delta).mul_((self._magnitude[rows] / norm).view(-1, 1))


class AddedVector:
    """``bias + scaling * the bias of B``."""

    needs_whole = False

    def __init__(self, vector: torch.Tensor, scaling: float) -> None:
        self._vector = vector * scaling

    def prepare(self) -> None:
        """Nothing to make."""

    def applied_to(self, work: torch.Tensor, rows: slice, base: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return work.add_(self._vector[rows])


class Replaced:
    """A tensor that was trained as a whole takes the place of the base's."""

    needs_whole = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def prepare(self) -> None:
        """Nothing to make."""

    def applied_to(self, work: torch.Tensor, rows: slice, base: torch.Tensor) -> torch.Tensor:
        """The adapter's rows."""
        return work.copy_(self._tensor[rows])


class ReplacedRows:
    """Rows of single tokens that were trained take the place of the base's."""

    needs_whole = False

    def __init__(self, indices: Sequence[int], trained: torch.Tensor) -> None:
        self._indices, self._trained = tuple(indices), trained

    def prepare(self) -> None:
        """Nothing to make."""

    def applied_to(self, work: torch.Tensor, rows: slice, base: torch.Tensor) -> torch.Tensor:
        """The base's rows, but for those that were trained."""
        for place, token in enumerate(self._indices):
            if rows.start <= token < rows.stop:
                work[token - rows.start] = self._trained[place]
        return work


class ByPeft:
    """Whatever PEFT's own ``merge`` of the layer makes of the whole weight: KaSA, BD-LoRA, others.

    Args:
        layer: PEFT's layer, whose weight is on the meta device.
        adapters: Which to merge, in order.
    """

    needs_whole = True

    def __init__(self, layer: Any, adapters: Sequence[str]) -> None:
        self._layer, self._adapters = layer, list(adapters)

    def prepare(self) -> None:
        """Nothing to make."""

    def applied_to(self, work: torch.Tensor, rows: slice, base: torch.Tensor) -> torch.Tensor:
        """The merged weight; the layer is left as it was."""
        owner = self._layer.get_base_layer()
        name = getattr(self._layer, "parameter_name", "weight")
        before, bias = owner._parameters[name], owner._parameters.get("bias")
        for parameter in self._layer.parameters():
            if not parameter.is_meta and parameter.is_floating_point():
                parameter.data = parameter.data.to(work.dtype)
        owner._parameters[name] = torch.nn.Parameter(work, requires_grad=False)
        if bias is not None:  # a bias of B is added elsewhere
            zero = torch.zeros(bias.shape, dtype=work.dtype)
            owner._parameters["bias"] = torch.nn.Parameter(zero, requires_grad=False)
        try:
            with torch.no_grad():
                self._layer.merge(adapter_names=self._adapters)
            merged: torch.Tensor = owner._parameters[name].data
        finally:
            owner._parameters[name] = before
            if bias is not None:
                owner._parameters["bias"] = bias
            self._layer.merged_adapters.clear()
        return merged
