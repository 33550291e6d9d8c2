"""Which weights are held to the checkpoint after loading, how much of each, and by which rank.

Of every kind of parameter the one of the first and of the last layer; of a large one its first rows
or columns: those that are not cut, so that every rank's piece is looked at. What a rank reads for
it is at most a tenth of what it holds, unless half a MiB of each weight is more.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from tplora.upstream.loading import Conversions

__all__ = [
    "CODE_DTYPES",
    "PLAIN_DTYPES",
    "compared_parts",
    "divide",
    "part_bytes",
    "sampled_names",
]

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CODE_DTYPES = (torch.uint8, torch.int8)
"""Of quantised weights; see ``verify_quantized``."""
_LARGE_BYTES = 1 << 20
"""Of a larger weight a part is compared; every rank has some of it."""
_SMALL_BYTES = 512 << 10
"""A smaller weight is compared whole, however small the model."""
_TOO_LARGE_BYTES = 512 << 20
"""A larger weight that can only be compared whole is not."""


def sampled_names(model: PreTrainedModel) -> list[str]:
    """Of parameters whose names differ in numbers only, the first and the last.

    What falls out of one weight of the checkpoint is of one layer, so it comes together.
    """
    kinds: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return list(dict.fromkeys(name for same in kinds.values() for name in (same[0], same[-1])))


def part_bytes(held_bytes: int, joined: list[list[str]], num_ranks: int) -> int:
    """What is compared of one weight, so that no rank is given more than a tenth of what it holds.

    A rank is given no more than its part of them all and one of ``joined``, see ``divide``.
    """
    num_weights, num_together = sum(map(len, joined)), max(map(len, joined))
    share = held_bytes * num_ranks // (10 * (num_weights + num_ranks * num_together))
    return min(_LARGE_BYTES, max(_SMALL_BYTES, share))


def compared_parts(
    together: Mapping[str, torch.Tensor], conversions: Conversions, limit: int
) -> dict[str, tuple[int, ...]]:
    """How many of the first rows of each dim are compared, of weights that come together.

    What fuses into one has to be cut short alike. Without those that cannot be compared.
    """
    found = {
        name: parameter
        for name, parameter in together.items()
        if parameter.dtype in (*PLAIN_DTYPES, *CODE_DTYPES) and not conversions.lose(name)
    }
    if not found:
        return {}
    largest = max(found.values(), key=lambda parameter: parameter.nbytes)
    shape, taken = list(largest.shape), dict[int, int]()
    for dim in range(largest.ndim):
        num_bytes = math.prod(shape) * largest.element_size()
        if num_bytes > limit and all(
            dim != _cut_dim(parameter) and conversions.keep_rows_apart(name, dim)
            for name, parameter in found.items()
        ):
            taken[dim] = shape[dim] = max(1, shape[dim] * limit // num_bytes)
    if not taken and largest.nbytes > _TOO_LARGE_BYTES:
        return {}
    return {
        name: tuple(min(taken.get(dim, size), size) for dim, size in enumerate(parameter.shape))
        for name, parameter in found.items()
    }


def divide(
    joined: list[list[str]], parts: Mapping[str, Sequence[int]], num_ranks: int
) -> dict[str, int]:
    """Which rank compares which weight: the largest first, to the one that has least.

    Args:
        joined: Names of weights that fuse into one of the checkpoint, so one rank needs them all.
        parts: By name, the shape of what is compared; some are not.
        num_ranks: That share the work.
    """
    loads, owners = [0] * num_ranks, dict[str, int]()
    sizes = [sum(math.prod(parts.get(name, (0,))) for name in names) for names in joined]
    for index in sorted(range(len(joined)), key=lambda one: -sizes[one]):
        rank = loads.index(min(loads))
        loads[rank] += sizes[index]
        owners |= dict.fromkeys(joined[index], rank)
    return owners


def _cut_dim(parameter: torch.Tensor) -> int | None:
    if not isinstance(parameter, DTensor):
        return None
    dim: int | None = getattr(parameter.placements[-1], "dim", None)
    return None if dim is None else dim % parameter.ndim
