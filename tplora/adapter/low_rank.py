"""A weight plus its low-rank delta, multiplied without ever being built.

    (W + L R) x = W x + L (R x)

While a module's own forward runs, this object stands in place of the parameter W. Whatever the
forward does with W (``F.linear``, a matmul, a grouped matmul over experts, picking one expert) it
does with W, L and R instead, so that the products are of the size of the tokens that reach an
expert, times r, and no ``[E, out, in]`` delta exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tplora.upstream import grouped_mm

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LowRankSum"]

# A grouped matmul wants rows that begin on 16-byte borders, in its backward too.
_ROW_BYTES = 16


class LowRankSum:
    """``W + L @ R`` on the last two dims.

    Shapes, of this rank's pieces:
        W   [..., m, n]
        L   [..., m, r]
        R   [..., r, n]

    Communication: none.

    Raises:
        NotImplementedError: For what a forward does with a weight that is not known to be linear in
            it; better than a number without the adapter.
    """

    def __init__(self, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        self.weight, self.left, self.right = weight, left, right
        self._experts: list[LowRankSum] | None = None

    def __getattr__(self, name: str) -> Any:
        """Facts about W, such as its shape and dtype; nothing that would compute with it."""
        if name in ("shape", "dtype", "device", "ndim", "size", "dim", "stride", "data_ptr"):
            return getattr(self.weight, name)
        raise AttributeError(f"an adapted weight has no {name!r}")

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LowRankSum:
        return LowRankSum(change(self.weight), change(self.left), change(self.right))

    def to(self, *args: Any, **kwargs: Any) -> LowRankSum:
        """Each of the three in another dtype or on another device."""
        return self._each(lambda one: one.to(*args, **kwargs))

    def float(self) -> LowRankSum:
        """Each of the three in float32."""
        return self.to(torch.float32)

    def type(self, dtype: torch.dtype) -> LowRankSum:
        """Each of the three in ``dtype``."""
        return self.to(dtype)

    def type_as(self, other: torch.Tensor) -> LowRankSum:
        """Each of the three in the dtype of ``other``."""
        return self.to(other.dtype)

    def __getitem__(self, index: Any) -> LowRankSum:
        """One expert, or one per entry of ``index``."""
        is_table = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim > 1
        if self.weight.ndim < 3 or is_table or isinstance(index, (tuple, bool)):
            raise _cannot(f"be indexed by {index!r}")
        if isinstance(index, int) or (isinstance(index, torch.Tensor) and index.ndim == 0):
            return self._expert(int(index))
        return self._each(lambda one: one[index])

    def _expert(self, k: int) -> LowRankSum:
        """One of all, taken apart at once: the gradients of ``left[k]`` would each be of all."""
        if self._experts is None:
            stacks = (self.weight, self.left, self.right)
            parts = zip(*(stack.unbind() for stack in stacks), strict=True)
            self._experts = [LowRankSum(*part) for part in parts]
        return self._experts[k]

    def __len__(self) -> int:
        return len(self.weight)

    def transpose(self, dim0: int, dim1: int) -> LowRankSum:
        """``(W + L R)^T = W^T + R^T L^T``, of the last two dims only."""
        ndim = self.weight.ndim
        if {dim0 % ndim, dim1 % ndim} != {ndim - 2, ndim - 1}:
            raise _cannot(f"be transposed by {dim0}, {dim1}")
        return LowRankSum(self.weight.mT, self.right.mT, self.left.mT)

    def t(self) -> LowRankSum:
        """``transpose`` of a matrix."""
        return self.transpose(0, 1)

    @property
    def T(self) -> LowRankSum:  # noqa: N802
        """``transpose`` of a matrix."""
        return self.transpose(0, 1)

    @property
    def mT(self) -> LowRankSum:  # noqa: N802
        """``transpose`` of the last two dims."""
        return self.transpose(-2, -1)

    def view(self, *shape: int) -> LowRankSum:
        """A matrix as a stack of equal groups of its rows, ``[groups, m / groups, n]``."""
        groups, rows = shape[0], self.weight.shape[0]
        if self.weight.ndim != 2 or len(shape) != 3 or shape[2] != self.weight.shape[1]:
            raise _cannot(f"be viewed as {shape}")
        left = self.left.view(groups, rows // groups, -1)
        return LowRankSum(self.weight.view(*shape), left, self.right.expand(groups, -1, -1))

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        """``(W + L R) x``."""
        return self.weight @ x + self.left @ (self.right @ x)

    def __rmatmul__(self, x: torch.Tensor) -> torch.Tensor:
        """``x (W + L R)``."""
        return x @ self.weight + (x @ self.left) @ self.right

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What torch's own functions do when one of their arguments is an adapted weight."""
        name = getattr(func, "__name__", str(func)).strip("_")
        known = _FUNCTIONS.get(name)
        if known is None:
            raise _unknown(name)
        return known(func, *args, **(kwargs or {}))


def _unknown(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"the model's code applies {name} to an adapted weight, which is not known to be "
        "linear; leave that parameter out of lora.target_parameters"
    )


def _cannot(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"an adapted weight cannot {what}; leave that parameter out of lora.target_parameters"
    )


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise _unknown(name)

    return refuse


# What Python looks up on the class, and in part gives every object: W == 0 has no answer.
_BINARY = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "eq", "ne")
for _name in (*_BINARY, "neg", "abs", "bool", "setitem"):
    setattr(LowRankSum, f"__{_name}__", _refused(_name))


def _check_unset(name: str, settings: dict[str, Any]) -> None:
    """What would act on W, L and R each for itself."""
    given = [key for key, value in settings.items() if value]
    if given:
        raise _unknown(f"{name} with {given[0]}")


def _linear(func: Any, input: torch.Tensor, weight: LowRankSum, bias: Any = None) -> torch.Tensor:
    w = weight
    return F.linear(input, w.weight, bias) + F.linear(F.linear(input, w.right), w.left)


def _matmul(func: Any, a: Any, b: Any) -> Any:
    if isinstance(b, LowRankSum):
        return func(a, b.weight) + func(func(a, b.left), b.right)
    return func(a.weight, b) + func(a.left, func(a.right, b))


def _rmatmul(func: Any, b: Any, a: Any) -> Any:
    return _matmul(torch.matmul, a, b)


def _embedding(
    func: Any, tokens: torch.Tensor, w: LowRankSum, padding_idx: int | None = None, **kw: Any
) -> Any:
    """The padding token's row is looked up, and gives neither L nor R a gradient."""
    kw.pop("norm_type", None)
    _check_unset("embedding", kw)
    delta = func(tokens, w.left) @ w.right
    if padding_idx is not None:
        is_padding = (tokens == padding_idx % len(w)).unsqueeze(-1)
        delta = torch.where(is_padding, delta.detach(), delta)
    return func(tokens, w.weight, padding_idx) + delta


def _grouped_mm(
    func: Any, x: torch.Tensor, w: LowRankSum, offs: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Each product by transformers' own choice of kernel: L and R may not suit the one of W."""
    _check_unset("grouped_mm", {key: value is not None for key, value in kwargs.items()})
    left, right = w.left, w.right
    missing = -left.shape[-1] % (_ROW_BYTES // left.element_size())
    if missing:
        left, right = F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))
    return grouped_mm(x, w.weight, offs) + grouped_mm(grouped_mm(x, left, offs), right, offs)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": _matmul,
    "bmm": _matmul,
    "mm": _matmul,
    "rmatmul": _rmatmul,
    "embedding": _embedding,
    "grouped_mm": _grouped_mm,
    "grouped_mm_fallback": _grouped_mm,
}
