"""Each kind of linear layer on 2 and 3 ranks against plain torch: values, gradients, traffic."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.adapter import layers
from tests.adapter.layers import Case, Layer, plain_linear
from tests.communication import count_collectives
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.world import RankError
from tplora.adapter import linear
from tplora.adapter.gradients import GradientSync
from tplora.collectives import shared_input
from tplora.collectives.operators import reduce_partial
from tplora.collectives.shared_input import SharedInput
from tplora.plan import style as plan_style
from tplora.plan.style import shard_range

pytestmark = pytest.mark.world

STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "replicate",
    "replicated_with_grad_allreduce",
    None,
)


def _cuts(case: Case) -> tuple[int | None, int | None]:
    """Dims of x and y that are cut outside the layer."""
    return {
        "colwise": (None, -1),
        "rowwise": (-1, None),
        "replicated_with_grad_allreduce": (0, 0),  # heads are cut, features are whole
    }.get(case.style or "", (None, None))


def _piece(full: torch.Tensor, dim: int | None) -> torch.Tensor:
    if dim is None:
        return full.clone()
    start, stop = shard_range(full.shape[dim], dist.get_rank(), dist.get_world_size())
    return full.narrow(dim, start, stop - start).clone()


def _layer_equals_plain_torch(case: Case) -> None:
    layer = Layer(case)
    numbers, (x_dim, y_dim) = layer.numbers, _cuts(case)
    generator = torch.Generator().manual_seed(5)
    x_full = torch.randn(case.num_tokens, case.in_features, generator=generator).double()
    dy_full = torch.randn(case.num_tokens, case.out_features, generator=generator).double()

    x_full.requires_grad_()
    for tensor in (*numbers.a.values(), *numbers.b.values()):
        tensor.requires_grad_()
    y_full = plain_linear(case, numbers, x_full)
    y_full.backward(dy_full)

    x = _piece(x_full.detach(), x_dim).requires_grad_()
    y = layer(x)
    y.backward(_piece(dy_full, y_dim))

    assert_is_shard(shard=y.detach(), full=y_full.detach(), dim=y_dim, what="y")
    assert_is_shard(shard=x.grad, full=x_full.grad, dim=x_dim, what="dx")
    for name in case.adapters:
        for key, factor_, full in zip(
            "AB", layer.factors[name].values(), (numbers.a[name], numbers.b[name]), strict=True
        ):
            _assert_grad(factor_, full, f"grad of {key} of {name}", is_none=case.is_disabled)


def _assert_grad(factor_: Any, full: torch.Tensor, what: str, *, is_none: bool) -> None:
    grad = factor_.parameter.grad
    if is_none:
        assert grad is None, f"{what}: a disabled adapter has a gradient"
        assert full.grad is None
        return
    assert_is_shard(shard=grad, full=full.grad, dim=factor_.plan.shard_dim, what=what)
    assert grad.placements == factor_.parameter.placements, f"{what}: {grad.placements}"
    if factor_.plan.shard_dim is None:
        assert_same_on_all_ranks(tensor=grad, what=what)


@pytest.mark.parametrize("style", STYLES)
def test_a_layer_equals_plain_torch(world, style):
    world.run(_layer_equals_plain_torch, Case(style))


@pytest.mark.parametrize(
    "change",
    [
        {"r": 1},
        {"num_tokens": 1},
        {"r": 1, "num_tokens": 1},
        {"has_bias": False},
        {"out_features": 12, "in_features": 18},
        {"out_features": 7, "in_features": 127},
        {"out_features": 127, "in_features": 7},
        {"p": 0.5},
        {"num_adapters": 2},
        {"num_adapters": 3, "p": 0.5},
        {"is_disabled": True},
    ],
    ids=lambda change: "-".join(f"{key}={value}" for key, value in change.items()),
)
def test_odd_layers_equal_plain_torch(world, change):
    for style in STYLES:
        if style != "replicated_with_grad_allreduce" or "p" not in change:
            world.run(_layer_equals_plain_torch, replace(Case(style), **change))


# --- communication, as in the docstrings

COMMUNICATION = {  # forward, backward without the gradient bucket
    "colwise": ({}, {"all_reduce": 1}),
    "colwise_gather_output": ({"all_gather": 1}, {"all_reduce": 1}),
    "rowwise": ({"all_reduce": 1}, {}),
    "rowwise_split_input": ({"all_reduce": 1}, {"all_gather": 1}),
    "replicate": ({}, {}),
    "replicated_with_grad_allreduce": ({}, {}),
    None: ({}, {}),
}
HAS_BUCKET = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")


def _communication(style: str | None, num_adapters: int) -> tuple[Any, Any, int]:
    case = Case(style, num_adapters=num_adapters, out_features=12, in_features=18)
    layer = Layer(case)
    x = _piece(torch.ones(4, 18, dtype=torch.float64), _cuts(case)[0]).requires_grad_()
    outputs: list[torch.Tensor] = []
    forward = count_collectives(lambda: outputs.append(layer(x)))
    backward = count_collectives(lambda: outputs[0].sum().backward())
    num_buckets = layer.sync.num_buckets
    if num_buckets:
        backward["all_reduce"] -= num_buckets
    return forward, {kind: count for kind, count in backward.items() if count}, num_buckets


@pytest.mark.parametrize("num_adapters", [1, 2])
@pytest.mark.parametrize("style", STYLES)
def test_communication_is_that_of_the_docstring(world, style, num_adapters):
    """A second adapter adds none, since both join the base before its collective."""
    num_buckets = int(style in HAS_BUCKET or style == "replicated_with_grad_allreduce")
    wanted = (*COMMUNICATION[style], num_buckets)
    assert world.run(_communication, style, num_adapters) == [wanted] * world.size


def _three_readers_of_one_tensor() -> dict[str, int]:
    shared = SharedInput(dist.group.WORLD)
    layers = [Layer(Case("colwise", out_features=size), shared) for size in (7, 8, 9)]
    x = torch.ones(4, 5, dtype=torch.float64, requires_grad=True)
    ys = [layer.module(x) for layer in layers]  # the root's hook clears the memo, not a layer's
    return count_collectives(lambda: torch.cat(ys, dim=-1).sum().backward())


def test_layers_that_read_one_tensor_share_one_reduction(world):
    num_layers = 3  # each has a bucket of its own here, where no root watches them together
    assert world.run(_three_readers_of_one_tensor)[0] == {"all_reduce": 1 + num_layers}


def _outputs_are_fresh(style: str | None) -> None:
    """Models write to what a layer returns."""
    case = Case(style, out_features=12, in_features=18)
    layer = Layer(case)
    x = _piece(torch.ones(4, 18, dtype=torch.float64), _cuts(case)[0]).requires_grad_()
    before = x.detach().clone()
    with torch.no_grad():
        wanted = layer(x) * 2
    y = layer(x)
    y.mul_(2.0)
    y.sum().backward()
    assert_is_shard(shard=y.detach(), full=wanted, dim=None, what="y")
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("style", STYLES)
def test_outputs_may_be_modified_in_place(world, style):
    world.run(_outputs_are_fresh, style)


def _print(style: str) -> str:
    return repr(Layer(Case(style, out_features=12, in_features=18)).module)


@pytest.mark.parametrize(
    ("style", "cut"), [("colwise", "W cut on out"), ("rowwise", "W cut on in")]
)
def test_print_tells_the_full_sizes_and_the_cut(world2, style, cut):
    assert f"in=18, out=12, {cut} / 2" in world2.run(_print, style)[0]


# --- each invariant broken on purpose, and seen


def _no_bucket(_self: GradientSync, _factors: Any) -> None:
    """Partial gradients stay partial."""


def _no_input_reduction(x: torch.Tensor, _group: Any) -> torch.Tensor:
    return x


def _row_joined_after_the_reduction(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = self.base_shards()
    return self.add_delta(reduce_partial(F.linear(x, weight), self.group), x) + bias


def _row_bias_on_every_rank(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = self.base_shards()
    return reduce_partial(self.add_delta(F.linear(x, weight, bias), x), self.group)


def _shards_in_reverse(size: int, tp_rank: int, tp_size: int, _: int) -> list[tuple[int, int]]:
    return [shard_range(size, tp_size - 1 - tp_rank, tp_size)]


BREAKS: dict[str, tuple[Any, str, Any]] = {
    "no bucket": (GradientSync, "_reduce", _no_bucket),
    "no input reduction": (shared_input, "replicate_input", _no_input_reduction),
    "joined after": (linear.RowParallelLoraLinear, "forward", _row_joined_after_the_reduction),
    "bias everywhere": (linear.RowParallelLoraLinear, "forward", _row_bias_on_every_rank),
    "wrong slice": (plan_style, "shard_ranges", _shards_in_reverse),
}


@contextlib.contextmanager
def _broken(name: str) -> Iterator[None]:
    owner, attribute, replacement = BREAKS[name]
    with mock.patch.object(owner, attribute, replacement):
        yield


def _parity_while_broken(case: Case, name: str) -> None:
    with _broken(name):
        _layer_equals_plain_torch(case)


@pytest.mark.parametrize(
    ("style", "name", "seen"),
    [
        ("colwise", "no bucket", "grad of A"),
        ("colwise_gather_output", "no bucket", "grad of A"),
        ("rowwise", "no bucket", "grad of B"),
        ("rowwise_split_input", "no bucket", "grad of B"),
        ("replicated_with_grad_allreduce", "no bucket", "grad of A"),
        ("colwise", "no input reduction", "dx"),
        ("colwise_gather_output", "no input reduction", "dx"),
        ("rowwise", "joined after", "y"),
        ("rowwise", "bias everywhere", "y"),
        ("colwise", "wrong slice", "y"),
        ("rowwise", "wrong slice", "y"),
    ],
)
def test_parity_sees(world2, style, name, seen):
    case = Case(style, out_features=12, in_features=18)
    world2.run(_layer_equals_plain_torch, case)  # right when not broken
    with pytest.raises(RankError, match=f"AssertionError: {seen}"):
        world2.run(_parity_while_broken, case, name)


def _parity_with_stock_dropout(case: Case) -> None:
    """PEFT's nn.Dropout stays where it was and draws from each rank's own generator."""
    with (
        mock.patch.object(layers, "shard_dropout"),
        mock.patch.object(Layer, "key", 1000 + dist.get_rank()),
    ):
        _layer_equals_plain_torch(case)


@pytest.mark.parametrize("style", ["colwise", "rowwise", None])
def test_parity_sees_stock_dropout_on_ranks_seeded_differently(world2, style):
    with pytest.raises(RankError, match="AssertionError: y"):
        world2.run(_parity_with_stock_dropout, Case(style, p=0.5))
