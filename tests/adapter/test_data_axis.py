"""Means over data ranks of gradients that are there on all ranks, on some, and on none."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tplora.adapter.data_axis import DataAxis

pytestmark = pytest.mark.world


def _factor(grad, shard_dim, *, is_partial=False):
    leaf = torch.zeros(2, 3, requires_grad=True)
    return SimpleNamespace(
        parameter=leaf,
        leaf_grad=grad,
        is_partial=is_partial,
        plan=SimpleNamespace(shard_dim=shard_dim),
        local=lambda: leaf,
    )


def _means(is_overlapped):
    """Whole factors, then cut ones: each rank has one, the first alone, none."""
    rank = dist.get_rank()
    ones = torch.ones(2, 3)
    factors = [
        _factor(grad, shard_dim)
        for shard_dim in (None, 0)
        for grad in (ones * (rank + 1), ones * 4 if rank == 0 else None, None)
    ]
    axis = DataAxis(group=dist.group.WORLD, tp_size=1)
    assert axis.average(factors, is_overlapped=is_overlapped) == 2
    return [None if f.leaf_grad is None else f.leaf_grad[0, 0].item() for f in factors]


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_factor_has_a_mean_where_any_rank_has_a_gradient(world, is_overlapped):
    size = world.size
    wanted = [(size + 1) / 2, 4 / size, None] * 2
    for found in world.run(_means, is_overlapped):
        assert found == pytest.approx(wanted)


def _asked():
    """Whether the device is asked for a number: only by a rank that lacks a gradient."""
    rank, asked = dist.get_rank(), []
    factors = [_factor(torch.ones(2, 3) if rank == 0 else None, None)]
    real = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: asked.append(1) or real(tensor)
    try:
        DataAxis(group=dist.group.WORLD, tp_size=1).average(factors)
    finally:
        torch.Tensor.tolist = real
    return len(asked)


def test_a_rank_with_every_gradient_asks_the_device_for_nothing(world2):
    assert world2.run(_asked) == [0, 1]
