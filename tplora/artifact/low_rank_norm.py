"""Norms and products of delta weights, from their factors alone: no ``[out, in]`` is ever built.

    <B1 A1, B2 A2>  =  sum( (B1^T B2) * (A1 A2^T) )          ||B1 A1 - B2 A2|| = || R [A1; A2] ||

with Q R the decomposition of [B1  -B2]: a difference of two norms would lose its digits there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Delta", "cosine", "distance", "norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """``scaling * B @ A``, of each of E matrices: ``a [E, r, in]``, ``b [E, out, r]``, float64."""

    a: torch.Tensor
    b: torch.Tensor
    """Scaling included."""

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, *, scaling: float, num_matrices: int) -> Delta:
        """From the factors of a file; PEFT stacks those of experts, A by expert and B by rank."""
        a, b = a.double(), scaling * b.double()
        r = a.shape[0] // num_matrices
        return cls(
            a=a.reshape(num_matrices, r, a.shape[1]),
            b=b.reshape(b.shape[0], r, num_matrices).permute(2, 0, 1),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """[E, out, in]."""
        return (self.a.shape[0], self.b.shape[1], self.a.shape[2])


def inner(one: Delta, other: Delta) -> float:
    """The sum over all entries of the product of two delta weights."""
    left = one.b.transpose(1, 2) @ other.b
    right = one.a @ other.a.transpose(1, 2)
    return float((left * right).sum())


def norm(delta: Delta) -> float:
    """Frobenius norm of a delta weight."""
    return _norm(delta.b, delta.a)


def distance(one: Delta, other: Delta) -> float:
    """Frobenius norm of the difference of two delta weights, exact to the last digits."""
    b = torch.cat([one.b, -other.b], dim=2)
    return _norm(b, torch.cat([one.a, other.a], dim=1))


def cosine(one: Delta, other: Delta) -> float:
    """Of the angle between two delta weights; 0 where one of them is zero."""
    lengths = norm(one) * norm(other)
    return inner(one, other) / lengths if lengths else 0.0


def _norm(b: torch.Tensor, a: torch.Tensor) -> float:
    if b.shape[1] > b.shape[2]:  # R of a wide b is as large as b itself
        b = torch.linalg.qr(b, mode="r").R
    return float(torch.linalg.vector_norm(b @ a))
