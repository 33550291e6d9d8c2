"""Each operator: forward, backward, what it leaves alone, and how often it communicates."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from tests.communication import Recorded, count_collectives, kind_of
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.world import RankError
from tplora.collectives import operators
from tplora.collectives.operators import (
    gather_last_dim,
    reduce_partial,
    replicate_input,
    split_last_dim,
)
from tplora.collectives.raw import all_gather, all_reduce
from tplora.collectives.shared_input import SharedInput

pytestmark = pytest.mark.world


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _own(full: torch.Tensor) -> torch.Tensor:
    size = -(-full.shape[-1] // dist.get_world_size())
    start = min(size * dist.get_rank(), full.shape[-1])
    return full[..., start : start + size].clone()


# --- raw


def _raw_all_reduce() -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    parts = [_randn(3, 5, seed=k) for k in range(size)]
    for x in (parts[dist.get_rank()], parts[dist.get_rank()].T.contiguous().T):
        before = x.clone()
        total = all_reduce(x, group)
        assert_is_shard(shard=total, full=sum(parts), dim=None, what="sum")
        assert torch.equal(x, before), "the input was written to"
        assert total.data_ptr() != x.data_ptr()


def test_all_reduce_makes_a_new_tensor(world):
    world.run(_raw_all_reduce)


def _raw_all_gather(size: int) -> None:
    full = _randn(2, 3, size)
    own = _own(full)
    before = own.clone()
    found = all_gather(own, size, dist.group.WORLD, dim=-1)
    assert_is_shard(shard=found, full=full, dim=None, what="gathered", is_exact=True)
    assert torch.equal(own, before)
    assert found.is_contiguous()


@pytest.mark.parametrize("size", [1, 2, 6, 7, 127])
def test_all_gather_joins_pieces_that_may_be_shorter_or_empty(world, size):
    world.run(_raw_all_gather, size)


# --- differentiable: forward, gradient, untouched inputs


def _conjugate(name: str, size: int) -> None:
    group, num_ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    full, dy_full = _randn(3, size), _randn(3, size, seed=1)
    parts = [_randn(3, size, seed=10 + k) for k in range(num_ranks)]
    grads = [_randn(3, size, seed=20 + k) for k in range(num_ranks)]
    x, dy, y_wanted, dx_wanted, fn = {
        "replicate_input": (
            full, grads[rank], full, sum(grads), lambda x: replicate_input(x, group)
        ),
        "reduce_partial": (
            parts[rank], dy_full, sum(parts), dy_full, lambda x: reduce_partial(x, group)
        ),
        "gather_last_dim": (
            _own(full), dy_full, full, _own(dy_full), lambda x: gather_last_dim(x, size, group)
        ),
        "split_last_dim": (
            full, _own(dy_full), _own(full), dy_full, lambda x: split_last_dim(x, group)
        ),
    }[name]  # fmt: skip
    x = x.clone().requires_grad_()
    x_before, dy_before = x.detach().clone(), dy.clone()
    y = fn(x)
    y.backward(dy)
    assert_is_shard(shard=y.detach(), full=y_wanted, dim=None, what="y")
    assert_is_shard(shard=x.grad, full=dx_wanted, dim=None, what="dx")
    assert torch.equal(x.detach(), x_before), "forward wrote to its input"
    assert torch.equal(dy, dy_before), "backward wrote to the gradient it was given"


OPERATORS = ["replicate_input", "reduce_partial", "gather_last_dim", "split_last_dim"]


@pytest.mark.parametrize("size", [1, 6, 7])
@pytest.mark.parametrize("name", OPERATORS)
def test_forward_and_backward_are_a_conjugate_pair(world, name, size):
    world.run(_conjugate, name, size)


def _gradient_of_f_of_x_plus_x() -> None:
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    (replicate_input(x, dist.group.WORLD) + x).backward(torch.ones_like(x))
    wanted = torch.full((4,), dist.get_world_size() + 1.0, dtype=torch.float64)
    assert_is_shard(shard=x.grad, full=wanted, dim=None, what="dx", is_exact=True)


def test_the_gradient_of_f_of_x_plus_x_is_one_more_than_the_ranks(world):
    world.run(_gradient_of_f_of_x_plus_x)


def _in_place_backward() -> None:
    """What other libraries do: reduce the gradient where it lies."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(grad, group=ctx.group)
        return grad, None

    right = operators._ReplicateInput.backward
    operators._ReplicateInput.backward = staticmethod(backward)
    try:
        _gradient_of_f_of_x_plus_x()
    finally:
        operators._ReplicateInput.backward = staticmethod(right)


def test_parity_sees_a_reduction_in_place(world):
    with pytest.raises(RankError, match="dx"):
        world.run(_in_place_backward)


def _outputs_may_be_modified_in_place(name: str, num_rows: int) -> None:
    """Models write to what a layer returns; that must not reach its input or break backward."""
    size, group = 6, dist.group.WORLD
    x = _own(_randn(num_rows, size)) if name == "gather_last_dim" else _randn(num_rows, size)
    x.requires_grad_()
    before = x.detach().clone()
    fn = {
        "reduce_partial": lambda: reduce_partial(x, group),
        "gather_last_dim": lambda: gather_last_dim(x, size, group),
        "split_last_dim": lambda: split_last_dim(x, group),
    }[name]
    y = fn()
    y.mul_(2.0)
    y.sum().backward()
    assert torch.equal(x.detach(), before)
    assert_is_shard(shard=x.grad, full=torch.full_like(before, 2.0), dim=None, what="dx")


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", OPERATORS[1:])
def test_outputs_may_be_modified_in_place(world, name, num_rows):
    world.run(_outputs_may_be_modified_in_place, name, num_rows)


# --- communication, as in the table of the module

COMMUNICATION = {
    "replicate_input": ({}, {"all_reduce": 1}),
    "reduce_partial": ({"all_reduce": 1}, {}),
    "gather_last_dim": ({"all_gather": 1}, {}),
    "split_last_dim": ({}, {"all_gather": 1}),
}


def _communication(name: str) -> tuple[dict[str, int], dict[str, int]]:
    group, size = dist.group.WORLD, 12
    x = _own(_randn(3, size)) if name == "gather_last_dim" else _randn(3, size)
    x.requires_grad_()
    args = (x, size, group) if name == "gather_last_dim" else (x, group)
    outputs: list[torch.Tensor] = []
    forward = count_collectives(lambda: outputs.append(getattr(operators, name)(*args)))
    backward = count_collectives(lambda: outputs[0].sum().backward())
    return forward, backward


@pytest.mark.parametrize("name", OPERATORS)
def test_communication_is_that_of_the_table(world, name):
    assert world.run(_communication, name) == [COMMUNICATION[name]] * world.size


def _counted_twice(name: str) -> tuple[dict[str, int], dict[str, int]]:
    group, size = dist.group.WORLD, 12
    x = (_own(_randn(3, size)) if name == "gather_last_dim" else _randn(3, size)).requires_grad_()
    args = (x, size, group) if name == "gather_last_dim" else (x, group)

    def run() -> None:
        getattr(operators, name)(*args).sum().backward()

    with CommDebugMode() as mode:
        run()
    theirs = {kind_of(str(op)): number for op, number in mode.get_comm_counts().items()}
    return count_collectives(run), theirs


@pytest.mark.parametrize("name", OPERATORS)
def test_our_counter_agrees_with_that_of_torch(world2, name):
    ours, theirs = world2.run(_counted_twice, name)[0]
    assert ours == theirs
    assert sum(ours.values()) == 1


def _bytes_sent() -> tuple[list[int], list[int]]:
    x = _randn(3, 12).requires_grad_()
    with Recorded() as sent:
        reduce_partial(x, dist.group.WORLD)
        gather_last_dim(_own(x.detach()), 12, dist.group.WORLD)
    return sent.of("all_reduce"), sent.of("all_gather")


def test_no_more_bytes_travel_than_the_tensor_has(world):
    assert world.run(_bytes_sent)[0] == ([3 * 12 * 8], [3 * 12 * 8 // world.size])


# --- the shared input: x feeds two sharded layers and a replicated one


def _full_block(x: torch.Tensor) -> torch.Tensor:
    w_a, w_b, w_c, w_o = _weights()
    return F.linear(F.linear(x, w_a).sigmoid() * F.linear(x, w_b), w_o) + F.linear(x, w_c).tanh()


def _weights() -> tuple[torch.Tensor, ...]:
    shapes = ((7, 5), (7, 5), (5, 5), (5, 7))
    return tuple(_randn(*shape, seed=30 + k) for k, shape in enumerate(shapes))


def _sharded_block(share: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    w_a, w_b, w_c, w_o = _weights()
    size, rank = dist.get_world_size(), dist.get_rank()
    w_a, w_b, w_o = w_a.chunk(size)[rank], w_b.chunk(size)[rank], w_o.chunk(size, dim=1)[rank]

    def block(x: torch.Tensor) -> torch.Tensor:
        inner = F.linear(share(x), w_a).sigmoid() * F.linear(share(x), w_b)
        return reduce_partial(F.linear(inner, w_o), dist.group.WORLD) + F.linear(x, w_c).tanh()

    return block


Block = Callable[[torch.Tensor], torch.Tensor]


def _plain(block: Block, x: torch.Tensor) -> None:
    block(block(x * 1.0)).sin().sum().backward()


def _checkpoint_not_reentrant(block: Block, x: torch.Tensor) -> None:
    h = checkpoint(block, x * 1.0, use_reentrant=False)
    checkpoint(block, h, use_reentrant=False).sin().sum().backward()


def _checkpoint_reentrant(block: Block, x: torch.Tensor) -> None:
    h = checkpoint(block, x * 1.0, use_reentrant=True)
    checkpoint(block, h, use_reentrant=True).sin().sum().backward()


def _closure(block: Block, x: torch.Tensor, *, use_reentrant: bool) -> None:
    """x reaches the checkpointed function from outside, not as its argument."""
    h = x * 1.0
    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    checkpoint(lambda d: block(h) * d, one, use_reentrant=use_reentrant).sin().sum().backward()


def _closure_not_reentrant(block: Block, x: torch.Tensor) -> None:
    _closure(block, x, use_reentrant=False)


def _closure_reentrant(block: Block, x: torch.Tensor) -> None:
    _closure(block, x, use_reentrant=True)


def _changed_in_place(block: Block, x: torch.Tensor) -> None:
    """The same tensor object is another value after it was written to."""
    h = x * 1.0
    y = block(h)
    h.add_(1.0)
    (y + block(h)).sin().sum().backward()


def _no_grad_first(block: Block, x: torch.Tensor) -> None:
    h = x * 1.0
    with torch.no_grad():
        block(h)
    block(h).sin().sum().backward()


def _two_backwards(block: Block, x: torch.Tensor) -> None:
    h = x * 1.0
    block(h).sin().sum().backward(retain_graph=True)
    block(h).cos().sum().backward()


def _detached_first(block: Block, x: torch.Tensor) -> None:
    block(x.detach())
    block(x * 1.0).sin().sum().backward()


def _same_leaf_in_two_steps(block: Block, x: torch.Tensor) -> None:
    block(x).sin().sum().backward()
    block(x).sin().sum().backward()


def _nested_checkpoints(block: Block, x: torch.Tensor) -> None:
    def outer(z: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, block(z), use_reentrant=False)

    checkpoint(outer, x * 1.0, use_reentrant=False).sin().sum().backward()


CASES = {
    case.__name__.strip("_"): case
    for case in (
        _plain,
        _checkpoint_not_reentrant,
        _checkpoint_reentrant,
        _closure_not_reentrant,
        _closure_reentrant,
        _changed_in_place,
        _no_grad_first,
        _two_backwards,
        _detached_first,
        _same_leaf_in_two_steps,
        _nested_checkpoints,
    )
}


class NaiveMemo(SharedInput):
    """By identity alone: hits under no_grad and after a write."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._seen is None or self._seen() is not x or self._shared is None:
            assert self._group is not None
            self._shared = replicate_input(x, self._group)
            self._seen = weakref.ref(x)
        return self._shared


def _unshared(group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: replicate_input(x, group)


def _memo_case(name: str, memo: Callable[..., Any]) -> None:
    x_full, x = (_randn(4, 5).requires_grad_() for _ in range(2))
    CASES[name](_full_block, x_full)
    CASES[name](_sharded_block(memo(dist.group.WORLD)), x)
    assert_is_shard(shard=x.grad, full=x_full.grad, dim=None, what="dx")
    assert_same_on_all_ranks(tensor=x.grad, what="dx")


@pytest.mark.parametrize("name", CASES)
def test_a_shared_input_has_the_gradient_of_one_process(world, name):
    world.run(_memo_case, name, SharedInput)


@pytest.mark.parametrize("name", ["no_grad_first", "closure_reentrant"])
def test_parity_sees_a_memo_by_identity_alone(world, name):
    with pytest.raises(RankError, match=r"dx|does not require grad"):
        world.run(_memo_case, name, NaiveMemo)


def _identity(_group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x


def test_parity_sees_a_missing_reduction_of_the_input_gradient(world):
    with pytest.raises(RankError, match="dx"):
        world.run(_memo_case, "plain", _identity)


def _num_reductions(name: str, memo: Callable[..., Any]) -> int:
    """All-reduces of backward in ``name``, less those of its forwards."""
    x = _randn(4, 5).requires_grad_()
    block = _sharded_block(memo(dist.group.WORLD))
    return count_collectives(lambda: CASES[name](block, x))["all_reduce"]


@pytest.mark.parametrize("name", ["plain", "two_backwards", "same_leaf_in_two_steps"])
def test_two_consumers_of_one_tensor_share_one_reduction(world, name):
    num_forwards = 2  # one all-reduce each
    assert world.run(_num_reductions, name, SharedInput)[0] == num_forwards + 2
    assert world.run(_num_reductions, name, _unshared)[0] == num_forwards + 4


def _bypasses() -> None:
    memo = SharedInput(dist.group.WORLD)
    x = _randn(4, 5)
    assert memo(x) is x, "no gradient is wanted"
    x.requires_grad_()
    with torch.no_grad():
        assert memo(x) is x, "no graph is built"
    assert SharedInput(None)(x) is x, "one process alone"
    shared = memo(x)
    assert shared is not x
    assert memo(x) is shared
    memo.clear()
    assert memo(x) is not shared
    h = x * 1.0
    first = memo(h)
    h.add_(1.0)
    assert memo(h) is not first, "the tensor was written to"


def test_the_memo_is_bypassed_where_it_could_be_wrong(world2):
    world2.run(_bypasses)


def _lifetime() -> None:
    memo = SharedInput(dist.group.WORLD)
    leaf = _randn(4, 5).requires_grad_()
    h = leaf * 2
    remembered = weakref.ref(h)
    shared = memo(h)
    del h, shared
    memo.clear()
    assert remembered() is None, "clear() left the tensor alive without the garbage collector"
    h = leaf * 2
    remembered = weakref.ref(h)
    memo(h)
    memo(leaf * 3)  # another tensor takes the only slot
    del h
    gc.collect()
    assert remembered() is None, "a tensor outlived its slot"


def test_the_memo_keeps_no_tensor_alive_once_cleared(world2):
    world2.run(_lifetime)


def _address_reuse() -> None:
    """A dead tensor's successor at the same address is not taken for it."""
    memo = SharedInput(dist.group.WORLD)
    leaf = _randn(4, 5).requires_grad_()
    first = memo(leaf * 2)
    value = first.detach().clone()
    memo._seen = weakref.ref(torch.empty(0))  # as if the tensor had died
    assert memo._seen() is None
    second = memo(leaf * 3)
    assert second is not first
    assert_is_shard(shard=second.detach(), full=value * 1.5, dim=None, what="second")


def test_a_dead_tensor_is_not_remembered(world2):
    world2.run(_address_reuse)
