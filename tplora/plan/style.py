"""The only table: from a style of transformers to the cut of W, and from the cut of W to A and B.

    W cut on           A [r, in]     B [out, r]    gradient of A / B
    out (column)       replicated    cut on out    partial / shard
    in (row)           cut on in     replicated    shard / partial
    vocab (embedding)  cut on vocab  replicated    shard / partial
    nothing            replicated    replicated    full / full

The factor that owns W's cut dimension is cut with it; the other one is replicated, and because it
is fed or read by shards its gradient on one rank is only a part of the sum. The cut follows from W,
not from the name of the style, which only says where W is cut and what surrounds the product.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "STYLES",
    "FactorPlan",
    "Kind",
    "Style",
    "TensorPlan",
    "place_factors",
    "shard_range",
]

Kind = Literal["linear", "embedding"]


def shard_range(size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """The half-open range of a cut dimension that ``tp_rank`` owns.

    DTensor's rule, which is torch.chunk's: pieces of ceil(size / tp_size), the last ones shorter or
    empty.
    """
    piece = -(-size // tp_size)
    start = min(piece * tp_rank, size)
    return start, min(start + piece, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """A full tensor and how it is cut: on one dim, or not at all."""

    shape: tuple[int, ...]
    shard_dim: int | None

    def shard_shape(self, tp_rank: int, tp_size: int) -> tuple[int, ...]:
        """The shape of the piece that ``tp_rank`` holds."""
        if self.shard_dim is None:
            return self.shape
        start, stop = shard_range(self.shape[self.shard_dim], tp_rank, tp_size)
        return (*self.shape[: self.shard_dim], stop - start, *self.shape[self.shard_dim + 1 :])

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    def shard_numel(self, tp_rank: int, tp_size: int) -> int:
        """Elements of the piece that ``tp_rank`` holds."""
        return TensorPlan(shape=self.shard_shape(tp_rank, tp_size), shard_dim=None).numel


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorPlan(TensorPlan):
    """One LoRA factor, A or B."""

    is_grad_partial: bool
    """Whether the gradient on one rank is a part of a sum that still has to be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a style of transformers does to a module that can be adapted."""

    weight_shard_dim: int | None
    """The dim of W that is cut: 0 is out (or vocab), 1 is in; None for a whole W."""
    gathers_output: bool = False
    """Whether the cut output is all-gathered before it leaves the module."""
    splits_input: bool = False
    """Whether the module gets the whole input and takes its own slice."""
    is_replica_grad_partial: bool = False
    """Whether a whole W works on sharded activations, so that its gradients are partial sums."""
    transforms_output: bool = False
    """Whether the style does something of its own to a whole W's output, which the adapter's output
    has to go through as well."""


# Read in transformers 5.24, distributed/tensor_parallel.py. A style that is not here is refused.
STYLES: dict[Kind, dict[str | None, Style]] = {
    "linear": {
        "colwise": Style(weight_shard_dim=0),
        "colwise_gather_output": Style(weight_shard_dim=0, gathers_output=True),
        "colwise_rep": Style(weight_shard_dim=0, gathers_output=True),
        "rowwise": Style(weight_shard_dim=1),
        "rowwise_split_input": Style(weight_shard_dim=1, splits_input=True),
        "rowwise_rep": Style(weight_shard_dim=1, splits_input=True),
        "replicate": Style(weight_shard_dim=None),
        "replicated_with_grad_allreduce": Style(
            weight_shard_dim=None, is_replica_grad_partial=True
        ),
        "mla_kv_a_proj": Style(weight_shard_dim=None, transforms_output=True),
        None: Style(weight_shard_dim=None),
    },
    "embedding": {
        "embedding_rowwise": Style(weight_shard_dim=0),
        "replicate": Style(weight_shard_dim=None),
        None: Style(weight_shard_dim=None),
    },
}


def place_factors(
    kind: Kind, weight: TensorPlan, *, r: int, is_replica_grad_partial: bool
) -> tuple[FactorPlan, FactorPlan]:
    """Placements of A and B from the placement of W.

    Args:
        kind: A linear's W is ``[out, in]``; an embedding's is ``[vocab, hidden]``, where vocab is
            the input.
        weight: The full shape of W and its cut.
        r: The LoRA rank.
        is_replica_grad_partial: For a whole W: whether it works on sharded activations.

    Returns:
        A ``[r, in]`` and B ``[out, r]``.
    """
    in_dim = 1 if kind == "linear" else 0
    out_dim = 1 - in_dim
    is_cut = weight.shard_dim is not None
    owns_a = is_cut and weight.shard_dim == in_dim
    owns_b = is_cut and weight.shard_dim == out_dim
    is_replica_partial = is_cut or is_replica_grad_partial
    return (
        FactorPlan(
            shape=(r, weight.shape[in_dim]),
            shard_dim=1 if owns_a else None,
            is_grad_partial=is_replica_partial and not owns_a,
        ),
        FactorPlan(
            shape=(weight.shape[out_dim], r),
            shard_dim=0 if owns_b else None,
            is_grad_partial=is_replica_partial and not owns_b,
        ),
    )
