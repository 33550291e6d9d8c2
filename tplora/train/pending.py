"""Numbers of a step that stay on the device until they are logged.

To read one is to wait for the device. trl reads several of each micro-batch, for its log alone;
what it is given here does not answer before somebody needs a number.
"""

from __future__ import annotations

from typing import Any, Self

import torch

__all__ = ["PendingNumber", "settled"]


class PendingNumber:
    """A scalar on its device, as far as trl's metrics compute with it.

    Args:
        tensor: What was gathered; summed when it is asked to be.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()

    def sum(self) -> PendingNumber:
        """The sum of what was gathered."""
        return PendingNumber(self.tensor.sum())

    def mean(self) -> PendingNumber:
        """The mean of what was gathered."""
        return PendingNumber(self.tensor.float().mean())

    def item(self) -> Self:
        """Itself: it is asked for its number too early."""
        return self

    def __gt__(self, _other: object) -> bool:
        """True: nobody waits to learn whether a count is zero; ``/`` says 0 then."""
        return True

    def __truediv__(self, other: Any) -> PendingNumber:
        """The quotient, 0 where the divisor is; trl says so of a batch without labels."""
        divisor = other.tensor if isinstance(other, PendingNumber) else torch.as_tensor(other)
        divisor = divisor.to(self.tensor.device)
        found = self.tensor / divisor
        return PendingNumber(torch.where(divisor == 0, torch.zeros_like(found), found))

    def __floordiv__(self, other: int) -> PendingNumber:
        return PendingNumber(self.tensor // other)

    def __add__(self, other: Any) -> PendingNumber:
        term = other.tensor if isinstance(other, PendingNumber) else other
        return PendingNumber(self.tensor + term)

    __radd__ = __add__

    def __float__(self) -> float:
        return float(self.tensor)

    def __int__(self) -> int:
        return int(self.tensor)


def settled(numbers: list[Any]) -> list[Any]:
    """The same with every pending one read; the device is waited for once."""
    pending = [one.tensor.double() for one in numbers if isinstance(one, PendingNumber)]
    read = iter(torch.stack(pending).tolist() if pending else [])
    return [next(read) if isinstance(one, PendingNumber) else one for one in numbers]
