"""Cheap proofs, while training, that the ranks of a tp group still run one run.

Each compares a short fingerprint over the group; none moves a batch or a factor.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tplora.errors import TrainError
from tplora.upstream import local_shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from tplora.adapter.model import TploraModel

__all__ = ["check_finite", "check_same_batch", "check_same_replicas", "fingerprint"]

_PRIME = 2_147_483_647  # 2^31 - 1: sums of products of two residues stay exact in int64


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two integers that change when any bit or any place of ``tensor`` does. int64 ``[2]``.

    A sum of the bits, and a sum weighted by position, both exact and so equal on every device.
    """
    bits = _bits(tensor)
    places = torch.arange(1, bits.numel() + 1, device=bits.device) % _PRIME
    return torch.stack([bits.sum() % _PRIME, (bits % _PRIME * places % _PRIME).sum() % _PRIME])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous().reshape(-1)
    if tensor.dtype == torch.bool:
        return tensor.to(torch.int64)
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(by_size[tensor.element_size()]).to(torch.int64)


def _first_difference(prints: torch.Tensor, group: ProcessGroup) -> tuple[int, int] | None:
    """The first row of ``prints`` that differs in the group, and the first rank that differs."""
    gathered = [torch.empty_like(prints) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, prints, group=group)
    for rank, other in enumerate(gathered):
        rows = (other != gathered[0]).any(dim=-1).nonzero()
        if len(rows):
            return int(rows[0]), rank
    return None


def check_same_replicas(model: TploraModel, *, step: int) -> None:
    """Every replicated factor is bit for bit the same on all ranks of the tp group.

    Collective. Communication: one all-gather of 16 bytes a replicated factor.

    Raises:
        TrainError: On every rank, naming the first factor that differs.
    """
    if model.mesh is None:
        return
    factors = [f for f in model.factors().values() if f.plan.shard_dim is None]
    if not factors:
        return
    prints = torch.stack([fingerprint(local_shard(factor.parameter)) for factor in factors])
    found = _first_difference(prints, model.mesh.get_group())
    if found is not None:
        row, tp_rank = found
        raise TrainError(
            f"step {step}: {factors[row].name} differs between tp rank 0 and tp rank {tp_rank}, "
            "where replicas must be equal; training stopped and nothing was saved"
        )


def check_same_batch(batch: Mapping[str, object], group: ProcessGroup | None, *, step: int) -> None:
    """All ranks of the tp group hold the same batch. Collective; one all-gather of a few bytes.

    Raises:
        TrainError: On every rank, naming what differs.
    """
    if group is None:
        return
    tensors = {n: v for n, v in sorted(batch.items()) if isinstance(v, torch.Tensor)}
    device = next(iter(tensors.values())).device
    # Columns first, in one print of a fixed size: the next gather needs as many rows on every rank.
    columns = torch.tensor([[zlib.crc32(repr(sorted(tensors)).encode())]], device=device)
    found, names = _first_difference(columns, group), [f"columns {list(tensors)}"]
    if found is None:
        prints = [_shape_and_bits(tensor) for tensor in tensors.values()]
        found, names = _first_difference(torch.stack(prints), group), list(tensors)
    if found is not None:
        row, tp_rank = found
        raise TrainError(
            f"step {step}: {names[row]!r} of the batch differs between tp rank 0 and tp rank "
            f"{tp_rank}; ranks of one tensor-parallel group must get the same rows; build the "
            "trainer with tplora.parallelism_config(model) and order rows alike on every rank"
        )


def _shape_and_bits(value: torch.Tensor) -> torch.Tensor:
    shape = torch.tensor([*value.shape, value.numel()], device=value.device)
    return torch.cat([fingerprint(value), fingerprint(shape)])


def check_finite(value: float, *, what: str, step: int) -> None:
    """Stop at the first number that is not finite.

    Raises:
        TrainError: Naming what it is and the step.
    """
    if value != value or value in (float("inf"), float("-inf")):
        raise TrainError(
            f"step {step}: {what} is {value}; training stopped before it was saved; lower "
            "train.learning_rate, set train.max_grad_norm, or look at the rows of this step"
        )
