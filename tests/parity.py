"""The only comparers of tests across processes; each names the tensor in its failure.

Both run inside a rank. A full tensor is the truth, computed in plain torch by every rank alone;
what is compared with it is this rank's piece.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

ATOL = 1e-12
"""In float64 reduction order is invisible at this tolerance, and a missing all-reduce is not."""


def assert_is_shard(
    *,
    shard: torch.Tensor | None,
    full: torch.Tensor | None,
    dim: int | None,
    what: str,
    atol: float = ATOL,
    is_exact: bool = False,
) -> None:
    """``shard`` is this rank's piece of ``full`` along ``dim``, or all of it when dim is None.

    Args:
        shard: A plain tensor, or a DTensor, whose local piece is compared.
        full: The whole tensor.
        dim: The dim that is cut, by torch.chunk's rule.
        what: The tensor's name in the failure.
        atol: Largest difference allowed.
        is_exact: Ask for equal bits: right where no sum over ranks is involved.
    """
    assert shard is not None, f"{what}: missing on rank {_rank()}"
    assert full is not None, f"{what}: the reference has none"
    found = shard.to_local() if isinstance(shard, DTensor) else shard
    wanted = full if dim is None else _piece(full, dim)
    assert found.shape == wanted.shape, (
        f"{what}: rank {_rank()} has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    )
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, not {wanted.dtype}"
    worst = float((found - wanted).abs().max()) if found.numel() else 0.0
    is_right = torch.equal(found, wanted) if is_exact else worst <= atol
    assert is_right, f"{what}: rank {_rank()} is off by {worst:.3e} (allowed {atol:g})"


def assert_same_on_all_ranks(*, tensor: torch.Tensor | None, what: str) -> None:
    """``tensor`` is bit for bit the same on every rank. Collective; fails on every rank."""
    assert tensor is not None, f"{what}: missing on rank {_rank()}"
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    copies = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, local.detach().contiguous())
    different = [k for k, copy in enumerate(copies) if not torch.equal(copy, copies[0])]
    assert not different, f"{what}: ranks {different} differ from rank 0"


def _piece(full: torch.Tensor, dim: int) -> torch.Tensor:
    pieces = full.chunk(dist.get_world_size(), dim=dim)
    if _rank() < len(pieces):
        return pieces[_rank()]
    return full.narrow(dim, 0, 0)  # chunk makes no empty pieces


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
