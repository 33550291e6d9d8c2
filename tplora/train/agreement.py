"""Cheap proofs, while training, that all ranks still run one run.

Each compares short fingerprints; none moves a batch or a factor. Over data axes they are gathered
over the world, so that all ranks stop when two of them differ.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tplora.errors import TrainError
from tplora.mesh import largest_of_ranks
from tplora.upstream import local_shard, norms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from tplora.adapter.data_axis import DataAxis
    from tplora.adapter.factor import Factor
    from tplora.adapter.model import TploraModel

__all__ = [
    "check_finite",
    "check_gradient_norm",
    "check_rows",
    "check_same_batch",
    "check_same_replicas",
    "fingerprint",
    "gradient_norms",
]

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


def _first_difference(
    prints: torch.Tensor, group: ProcessGroup | None, like: Callable[[int], int] = lambda rank: 0
) -> tuple[int, int] | None:
    """The first row of ``prints`` that differs in the group, and the first rank that differs.

    Every rank is held to the rank that ``like`` names; None is the whole world.
    """
    gathered = [torch.empty_like(prints) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, prints, group=group)
    for rank, other in enumerate(gathered):
        rows = (other != gathered[like(rank)]).any(dim=-1).nonzero()
        if len(rows):
            return int(rows[0]), rank
    return None


def check_same_replicas(model: TploraModel, *, step: int) -> None:
    """Every replicated factor is bit for bit the same on all ranks, a cut one on data ranks.

    Collective. Communication: one all-gather of 16 bytes a replicated factor, over data axes one
    more of 16 bytes a cut one.

    Raises:
        TrainError: On every rank, naming the first factor that differs.
    """
    if model.mesh is None:
        return
    factors = list(model.factors().values())
    tp_size = model.mesh.size()
    whole = [factor for factor in factors if factor.plan.shard_dim is None]
    cut = [factor for factor in factors if factor.plan.shard_dim is not None]
    group = model.mesh.get_group() if model.data is None else None
    _check_same(whole, group, lambda rank: 0, tp_size, step)
    if model.data is not None:
        _check_same(cut, None, lambda rank: rank % tp_size, tp_size, step)


def _check_same(
    factors: list[Factor],
    group: ProcessGroup | None,
    like: Callable[[int], int],
    tp_size: int,
    step: int,
) -> None:
    if not factors:
        return
    prints = torch.stack([fingerprint(local_shard(factor.parameter)) for factor in factors])
    found = _first_difference(prints, group, like)
    if found is not None:
        row, rank = found
        raise TrainError(
            f"step {step}: {factors[row].name} differs between {_place(like(rank), tp_size)} and "
            f"{_place(rank, tp_size)}, where replicas must be equal; training stopped and nothing "
            "was saved"
        )


def _place(rank: int, tp_size: int) -> str:
    """A rank of the world by its place; tp ranks are innermost."""
    data_rank = f" of data rank {rank // tp_size}" if rank >= tp_size else ""
    return f"tp rank {rank % tp_size}{data_rank}"


def check_rows(batch: Mapping[str, object], model: TploraModel, *, step: int) -> None:
    """The ranks of a tp group hold the same batch, and no two data ranks do. Collective.

    Raises:
        TrainError: On every rank, naming what is wrong.
    """
    if model.mesh is None:
        return
    if model.data is None:
        check_same_batch(batch, model.mesh.get_group(), step=step)
        return
    tp_size = model.mesh.size()
    check_same_batch(batch, dist.group.WORLD, step=step, tp_size=tp_size)
    _check_other_rows(batch, model.data, step=step)


def _check_other_rows(batch: Mapping[str, object], data: DataAxis, *, step: int) -> None:
    tokens, labels = batch.get("input_ids"), batch.get("labels", batch.get("completion_mask"))
    if not isinstance(tokens, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return
    positions = batch.get("position_ids")  # of joined rows, each of which begins at 0
    num_rows = int((positions == 0).sum()) if isinstance(positions, torch.Tensor) else len(tokens)
    count = torch.tensor([num_rows], device=tokens.device)
    prints = torch.cat([_shape_and_bits(tokens), _shape_and_bits(labels), count])
    found = data.gather(prints).view(data.size, -1)
    # A dataset may hold a row twice; two batches of several are not alike.
    if num_rows > 1 and bool((found == found[0]).all()):
        raise TrainError(
            f"step {step}: every data rank holds the same batch, and each has to get other rows; "
            'set accelerator_config = {"dispatch_batches": false} for an iterable dataset, and '
            "give every rank the same dataset"
        )


def check_same_batch(
    batch: Mapping[str, object],
    group: ProcessGroup | None,
    *,
    step: int,
    tp_size: int | None = None,
) -> None:
    """All ranks of a tp group hold the same batch. Collective; one all-gather of a few bytes.

    Args:
        batch: This rank's.
        group: The tp group, or the world of several.
        step: For the message.
        tp_size: Ranks of each tp group in ``group``; all of them when left out.

    Raises:
        TrainError: On every rank, naming what differs.
    """
    if group is None:
        return
    size = tp_size or dist.get_world_size(group)

    def first(rank: int) -> int:
        return rank - rank % size

    tensors = {n: v for n, v in sorted(batch.items()) if isinstance(v, torch.Tensor)}
    device = next(iter(tensors.values())).device
    # Columns first, in one print of a fixed size: the next gather needs as many rows on every rank.
    columns = torch.tensor([[zlib.crc32(repr(sorted(tensors)).encode())]], device=device)
    found, names = _first_difference(columns, group, first), [f"columns {list(tensors)}"]
    if found is None:
        prints = [_shape_and_bits(tensor) for tensor in tensors.values()]
        found, names = _first_difference(torch.stack(prints), group, first), list(tensors)
    if found is not None:
        row, rank = found
        raise TrainError(
            f"step {step}: {names[row]!r} of the batch differs between "
            f"{_place(first(rank), size)} and {_place(rank, size)}; ranks of one tensor-parallel "
            "group must get the same rows; build the trainer with "
            "tplora.parallelism_config(model) and order rows alike on every rank"
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


def gradient_norms(model: TploraModel) -> dict[str, torch.Tensor]:
    """Norm of this rank's piece of every gradient, before clipping makes all of them alike."""
    grads = {
        factor.name: local_shard(factor.parameter.grad)
        for factor in model.factors().values()
        if factor.parameter.grad is not None
    }
    return dict(zip(grads, norms_of(list(grads.values())), strict=True))


def check_gradient_norm(
    norm: float, of_factors: Mapping[str, torch.Tensor], model: TploraModel, *, step: int
) -> None:
    """Stop at a gradient norm that is not finite, with the factor and rank it comes from.

    Collective if it is not, and it is the same on every rank.

    Args:
        norm: Of all gradients.
        of_factors: What ``gradient_norms`` gave before they were clipped.
        model: Whose gradients they are.
        step: For the message.

    Raises:
        TrainError: On every rank. A sum over ranks is not finite on all of them, whoever it is
            that brought it in.
    """
    if norm - norm == 0:
        return
    names, is_fine = list(of_factors), [bool(norm.isfinite()) for norm in of_factors.values()]
    first = is_fine.index(False) if False in is_fine else len(names)
    size, tp_size = _world_size(), 1 if model.mesh is None else model.mesh.size()
    own = first * size + (dist.get_rank() if dist.is_initialized() else 0)
    index, rank = divmod(-largest_of_ranks(-own), size)
    what = "the gradient norm"
    if index < len(names):
        is_everywhere = not largest_of_ranks(int(is_fine[index]))
        where = "every rank" if is_everywhere and size > 1 else _place(rank, tp_size)
        what = f"the gradient of {names[index]} is not finite on {where}, so {what}"
    check_finite(norm, what=what, step=step)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
