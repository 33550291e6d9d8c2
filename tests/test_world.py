"""The launcher of every test across processes: a rank that fails fails the test, by its number."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.world import RankError


def _rank_and_sum() -> tuple[int, float]:
    total = torch.ones(())
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def test_answers_come_in_rank_order(world):
    assert world.run(_rank_and_sum) == [(k, float(world.size)) for k in range(world.size)]


def _draw() -> float:
    return torch.rand(()).item()


def test_ranks_are_seeded_differently_and_alike_every_time(world):
    first = world.run(_draw)
    assert len(set(first)) == world.size
    assert world.run(_draw) == first


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("this one")
    dist.barrier()


def test_a_rank_that_raises_is_named_and_the_world_goes_on(world):
    with pytest.raises(RankError, match=r"(?s)rank 1 of \d.*ValueError: this one"):
        world.run(_raise_on, 1)
    assert len(world.run(_rank_and_sum)) == world.size


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_rank_that_dies_is_named(world2):
    with pytest.raises(RankError, match="rank 1 of 2: the process died"):
        world2.run(_die_on, 1)


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_a_rank_that_hangs_is_named(world2):
    with pytest.raises(RankError, match=r"no answer from ranks \[0\] in 4 s"):
        world2.run(_sleep_on, 0, timeout_s=4)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _leave_a_mesh() -> None:
    shape = (1, dist.get_world_size())
    cycle: list[object] = [init_device_mesh("cpu", shape, mesh_dim_names=("one", "all"))]
    cycle.append(cycle)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by Linux's files")
def test_groups_end_with_the_job_that_made_them(world2):
    before = world2.run(_num_threads)
    for _ in range(3):
        world2.run(_leave_a_mesh)
    assert world2.run(_num_threads) == before


def _is_alone() -> bool:
    return not dist.is_initialized() and "RANK" not in os.environ


def test_a_world_of_one_has_no_group(alone):
    assert alone.run(_is_alone) == [True]


# The comparers themselves: a comparer that accepts everything proves nothing.


def _comparer_accepts() -> None:
    full = torch.arange(14, dtype=torch.float64).view(7, 2)
    piece = full.chunk(dist.get_world_size())[dist.get_rank()]
    assert_is_shard(shard=piece, full=full, dim=0, what="rows", is_exact=True)
    assert_is_shard(shard=full + 1e-13, full=full, dim=None, what="all")
    assert_same_on_all_ranks(tensor=full, what="all")


def test_comparers_accept_what_is_right(world):
    world.run(_comparer_accepts)


def _comparer_sees(fault: str) -> None:
    full = torch.arange(12, dtype=torch.float64).view(6, 2)
    size, rank = dist.get_world_size(), dist.get_rank()
    piece = full.chunk(size)[rank]
    if fault == "wrong piece":
        piece = full.chunk(size)[(rank + 1) % size]
    if fault == "wrong shape":
        piece = full
    if fault == "wrong dtype":
        piece = piece.float()
    if fault == "small":
        piece = piece + 1e-11
    if fault == "replica":
        full = full.clone()
        full[0, 0] = -0.0 if rank else 5e-324
        with pytest.raises(AssertionError, match=r"rows: ranks \[1"):
            assert_same_on_all_ranks(tensor=full, what="rows")
        return
    with pytest.raises(AssertionError, match="rows: "):
        assert_is_shard(shard=piece, full=full, dim=0, what="rows")


@pytest.mark.parametrize("fault", ["wrong piece", "wrong shape", "wrong dtype", "small", "replica"])
def test_comparers_see(world, fault):
    world.run(_comparer_sees, fault)
