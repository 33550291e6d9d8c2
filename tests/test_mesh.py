"""What ranks tell each other beside their work."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.world import RankError
from tplora.mesh import largest_of_ranks, tell_all

pytestmark = pytest.mark.world


def _wait_for_the_first(tell):
    """All of the world's own collectives are given half a second."""
    impatient = dist.new_group(timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 0:
        time.sleep(2)
    return tell(impatient)


def _patiently(_group):
    return tell_all(f"rank {dist.get_rank()} is done")


def _impatiently(group):
    told = [dist.get_rank()]
    dist.broadcast_object_list(told, src=0, group=group)


def test_ranks_wait_for_the_first_beyond_the_timeout_of_collectives(world2):
    assert world2.run(_wait_for_the_first, _patiently) == ["rank 0 is done"] * 2
    with pytest.raises(RankError, match=r"imed out|Timeout|timeout"):
        world2.run(_wait_for_the_first, _impatiently)


def _largest():
    return largest_of_ranks(dist.get_rank()), largest_of_ranks(-dist.get_rank())


def test_every_rank_hears_the_largest_number(world):
    assert world.run(_largest) == [(world.size - 1, 0)] * world.size


def _alone():
    return tell_all("x"), largest_of_ranks(3)


def test_one_process_hears_itself(alone):
    assert alone.run(_alone) == [("x", 3)]
