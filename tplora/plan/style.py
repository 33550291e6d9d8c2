"""The only table: from a style of transformers to the cut of W, and from the cut of W to A and B.

    W cut on           A [r, in]     B [out, r]    gradient of A / B
    out (column)       replicated    cut on out    partial / shard
    in (row)           cut on in     replicated    shard / partial
    vocab (embedding)  cut on vocab  replicated    shard / partial
    nothing            replicated    replicated    full / full

The factor that owns W's cut dimension is cut with it, in as many chunks as W is; the other one is
replicated, and because it is fed or read by shards its gradient on one rank is only a part of the
sum. The cut follows from W, not from the name of the style, which only says where W is cut and what
surrounds the product. Stacked expert weights ``[E, out, in]`` follow the same table.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "AROUND_EXPERTS",
    "STYLES",
    "Extra",
    "FactorPlan",
    "Kind",
    "Style",
    "TensorPlan",
    "place_extra",
    "place_factors",
    "shard_range",
    "shard_ranges",
]

Kind = Literal["linear", "embedding", "parameter"]
Extra = Literal["magnitude", "bias", "diagonal"]
"""What some kinds of LoRA train beside A and B: DoRA's magnitude, a bias of B, KaSA's diagonal."""


def shard_range(size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """The half-open range of a cut dimension that ``tp_rank`` owns.

    DTensor's rule, which is torch.chunk's: pieces of ceil(size / tp_size), the last ones shorter or
    empty.
    """
    piece = -(-size // tp_size)
    start = min(piece * tp_rank, size)
    return start, min(start + piece, size)


def shard_ranges(
    size: int, tp_rank: int, tp_size: int, split_factor: int = 1
) -> tuple[tuple[int, int], ...]:
    """What ``tp_rank`` owns of a dimension that holds ``split_factor`` fused weights in a row.

    Each of the chunks, such as gate and up of gate_up_proj, is cut by ``shard_range`` on its own;
    this is ``_StridedShard`` of DTensor.
    """
    chunk = -(-size // split_factor)
    ranges = []
    for first in range(0, size, chunk):
        start, stop = shard_range(min(chunk, size - first), tp_rank, tp_size)
        ranges.append((first + start, first + stop))
    return tuple(ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """A full tensor and how it is cut: on one dim, or not at all."""

    shape: tuple[int, ...]
    shard_dim: int | None
    split_factor: int = 1
    """How many fused weights lie along the cut dim, each of them cut on its own."""

    def shard_ranges(self, tp_rank: int, tp_size: int) -> tuple[tuple[int, int], ...]:
        """What ``tp_rank`` holds of the cut dim; the tensor has to be cut."""
        assert self.shard_dim is not None
        return shard_ranges(self.shape[self.shard_dim], tp_rank, tp_size, self.split_factor)

    def shard_shape(self, tp_rank: int, tp_size: int) -> tuple[int, ...]:
        """The shape of the piece that ``tp_rank`` holds."""
        if self.shard_dim is None:
            return self.shape
        held = sum(stop - start for start, stop in self.shard_ranges(tp_rank, tp_size))
        return (*self.shape[: self.shard_dim], held, *self.shape[self.shard_dim + 1 :])

    def transposed(self) -> "TensorPlan":
        """A matrix with its dims exchanged."""
        return TensorPlan(
            shape=self.shape[::-1],
            shard_dim=None if self.shard_dim is None else 1 - self.shard_dim,
            split_factor=self.split_factor,
        )

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
    is_trained: bool = True
    """Whether it has a gradient at all: MiCA's B keeps its first values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a style of transformers does to a module that can be adapted."""

    weight_shard_dim: int | None
    """The dim of W that is cut: 0 is out (or vocab), 1 is in; None for a whole W. A stack of expert
    weights has its expert dim before these two."""
    split_factor: int = 1
    """How many fused weights lie along the cut dim."""
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
        "embedding_colwise": Style(weight_shard_dim=1, gathers_output=True),
        "replicate": Style(weight_shard_dim=None),
        None: Style(weight_shard_dim=None),
    },
    "parameter": {
        "colwise": Style(weight_shard_dim=0),
        "colwise_gather_output": Style(weight_shard_dim=0, gathers_output=True),
        "colwise_rep": Style(weight_shard_dim=0, gathers_output=True),
        "packed_colwise": Style(weight_shard_dim=0, split_factor=2),
        "rowwise": Style(weight_shard_dim=1),
        "packed_rowwise": Style(weight_shard_dim=1, split_factor=2),
        "replicate": Style(weight_shard_dim=None),
        None: Style(weight_shard_dim=None),
    },
}

AROUND_EXPERTS = frozenset(["all_reduce", "local_params", "moe_identity_expert", "moe_tp_experts"])
"""Styles of modules that compute with their own cut parameters; those say where they are cut."""


def place_factors(
    weight: TensorPlan,
    *,
    in_dim: int,
    out_dim: int,
    r: int,
    is_replica_grad_partial: bool,
) -> tuple[FactorPlan, FactorPlan]:
    """Placements of A and B from the placement of W.

    Args:
        weight: The full shape of W and its cut. A stack of E matrices has three dims.
        in_dim: The dim of W that A shares: 1 of a linear's ``[out, in]``, 0 of an embedding's
            ``[vocab, hidden]``.
        out_dim: The dim of W that B shares.
        r: The LoRA rank.
        is_replica_grad_partial: For a whole W: whether it works on sharded activations.

    Returns:
        A ``[E * r, in]`` and B ``[out, r * E]``, where E is 1 for a single matrix.
    """
    num_columns = r * (weight.shape[0] if len(weight.shape) == 3 else 1)
    is_cut = weight.shard_dim is not None
    owns_a = is_cut and weight.shard_dim == in_dim
    owns_b = is_cut and weight.shard_dim == out_dim
    is_replica_partial = is_cut or is_replica_grad_partial
    return (
        FactorPlan(
            shape=(num_columns, weight.shape[in_dim]),
            shard_dim=1 if owns_a else None,
            split_factor=weight.split_factor if owns_a else 1,
            is_grad_partial=is_replica_partial and not owns_a,
        ),
        FactorPlan(
            shape=(weight.shape[out_dim], num_columns),
            shard_dim=0 if owns_b else None,
            split_factor=weight.split_factor if owns_b else 1,
            is_grad_partial=is_replica_partial and not owns_b,
        ),
    )


def place_extra(extra: Extra, weight: TensorPlan, b: FactorPlan) -> FactorPlan:
    """The placement of a vector beside A and B, from those of W and B.

    One over W's output features is cut with B. Where W is cut on its input it is whole, and its
    gradient is partial if it multiplies a partial sum (a magnitude), full if it is added once the
    sum is taken (a bias). One over the rank (a diagonal between A and B) is whole, and every rank
    of a cut W sees a part of what it multiplies or feeds.

    Args:
        extra: What the vector is.
        weight: W and its cut.
        b: B, which has W's output features as rows.
    """
    is_cut = weight.shard_dim is not None
    if extra == "diagonal":
        return FactorPlan(
            shape=(b.shape[1],), shard_dim=None, is_grad_partial=is_cut or b.is_grad_partial
        )
    is_added_after_sum = extra == "bias" and is_cut
    return FactorPlan(
        shape=(b.shape[0],),
        shard_dim=b.shard_dim,
        split_factor=b.split_factor,
        is_grad_partial=b.is_grad_partial and not is_added_after_sum,
    )
