"""What is cut by tokens: forward and backward of each operator, over 2 and 3 ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.communication import count_collectives
from tests.parity import assert_is_shard
from tplora.collectives.operators import (
    gather_tokens,
    scatter_partial,
    share_gathered,
    split_tokens,
)
from tplora.collectives.shared_input import SharedInput
from tplora.plan.style import shard_range

pytestmark = pytest.mark.world
OPERATORS = ("gather_tokens", "split_tokens", "scatter_partial", "share_gathered")


def _randn(length, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, 3, dtype=torch.float64, generator=draw)


def _own(full):
    start, stop = shard_range(full.shape[1], dist.get_rank(), dist.get_world_size())
    return full[:, start:stop].clone()


def _conjugate(name, length):
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    full, dy_full = _randn(length), _randn(length, seed=1)
    parts = [_randn(length, seed=10 + k) for k in range(ranks)]
    x, dy, y_wanted, dx_wanted, fn = {
        "gather_tokens": (
            _own(full), dy_full, full, _own(dy_full), lambda x: gather_tokens(x, length, group)
        ),
        "split_tokens": (
            full, _own(dy_full), _own(full), dy_full, lambda x: split_tokens(x, group)
        ),
        "scatter_partial": (
            parts[rank], _own(dy_full), _own(sum(parts)), dy_full,
            lambda x: scatter_partial(x, group),
        ),
        "share_gathered": (
            _own(full), parts[rank], full, _own(sum(parts)),
            lambda x: share_gathered(x, full, group),
        ),
    }[name]  # fmt: skip
    x = x.requires_grad_()
    x_before, dy_before = x.detach().clone(), dy.clone()
    outputs = []
    forward = count_collectives(lambda: outputs.append(fn(x)))
    backward = count_collectives(lambda: outputs[0].backward(dy))
    assert_is_shard(shard=outputs[0].detach(), full=y_wanted, dim=None, what="y")
    assert_is_shard(shard=x.grad, full=dx_wanted, dim=None, what="dx")
    assert torch.equal(x.detach(), x_before), "forward wrote to its input"
    assert torch.equal(dy, dy_before), "backward wrote to the gradient it was given"
    return forward, backward


COMMUNICATION = {
    "gather_tokens": ({"all_gather": 1}, {}),
    "split_tokens": ({}, {"all_gather": 1}),
    "scatter_partial": ({"reduce_scatter": 1}, {"all_gather": 1}),
    "share_gathered": ({}, {"reduce_scatter": 1}),
}


@pytest.mark.parametrize("length", [1, 6, 7])
@pytest.mark.parametrize("name", OPERATORS)
def test_forward_and_backward_are_a_conjugate_pair_and_say_what_the_table_says(world, name, length):
    assert world.run(_conjugate, name, length) == [COMMUNICATION[name]] * world.size


def _shared():
    """Two layers of shards and a replicated one read what was gathered."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    weights, shared = _randn(2 * ranks + 1, seed=2)[0], SharedInput(group)
    local = _own(_randn(5)).requires_grad_()
    whole = gather_tokens(local, 5, group)
    shared.note_gathered(whole, local)
    own = [shared(whole) * weights[2 * rank + k] for k in range(2)]
    loss = sum(one.pow(2).sum() for one in own) + (whole * weights[-1]).pow(2).sum()
    count = count_collectives(loss.backward)
    return local.grad, count


def _a_shared_gather_has_the_gradient_of_one_process():
    ranks = dist.get_world_size()
    full, weights = _randn(5).requires_grad_(), _randn(2 * ranks + 1, seed=2)[0]
    sharded = sum((full * row).pow(2).sum() for row in weights[:-1])
    (sharded + (full * weights[-1]).pow(2).sum()).backward()
    found, count = _shared()
    assert_is_shard(shard=found, full=full.grad, dim=1, what="dx")
    assert count == {"reduce_scatter": 1}


def test_gathered_tokens_have_the_gradient_of_one_process_in_one_reduce_scatter(world):
    world.run(_a_shared_gather_has_the_gradient_of_one_process)
