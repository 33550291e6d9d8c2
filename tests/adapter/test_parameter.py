"""Stacks of experts, cut and adapted by parameter, against plain PEFT on the full weights."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.adapter.experts import Case, CutExperts, draw_inputs, plain_experts
from tests.communication import count_collectives
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.world import RankError
from tplora.adapter import factor
from tplora.adapter.factor import shard_full
from tplora.adapter.gradients import GradientSync
from tplora.adapter.parameter import ParamWrapper
from tplora.upstream import local_shard

pytestmark = pytest.mark.world


def _outer(wrappers):
    return wrappers["down_proj"]


def _gradients(wrappers, adapter):
    """``(parameter, A or B)`` and its owner."""
    for name, wrapper in wrappers.items():
        for key, layers in (("A", wrapper.lora_A), ("B", wrapper.lora_B)):
            yield name, key, layers[adapter].weight


def _experts_equal_plain_peft(case: Case) -> None:
    here, there = CutExperts(case), plain_experts(case)
    wanted_inputs, inputs = draw_inputs(case), draw_inputs(case)
    y_full, y = _outer(there)(*wanted_inputs[:3]), here(*inputs[:3])
    assert_is_shard(shard=y.detach(), full=y_full.detach(), dim=None, what="y")
    y_full.backward(wanted_inputs[3])
    y.backward(inputs[3])
    for k, what in ((0, "dx"), (2, "d of the routing weights")):
        assert_is_shard(shard=inputs[k].grad, full=wanted_inputs[k].grad, dim=None, what=what)
    for adapter in case.adapters:
        _assert_gradients(here, there, adapter)


def _assert_gradients(here: CutExperts, there, adapter: str) -> None:
    for name, key, parameter in _gradients(there, adapter):
        factor_ = here.wrappers[name].factors[adapter][key]
        grad, what = factor_.parameter.grad, f"grad of {key} of {name} of {adapter}"
        if here.case.is_disabled:
            assert grad is None
            assert parameter.grad is None
            continue
        piece = shard_full(parameter.grad, factor_.plan, here.mesh)
        assert_is_shard(shard=grad, full=piece, dim=None, what=what)
        if factor_.plan.shard_dim is None:
            assert_same_on_all_ranks(tensor=grad, what=what)


CHANGES = [
    {},
    {"is_transposed": True},
    {"ffn": 32},
    {"ffn": 32, "is_transposed": True},
    {"num_experts": 1},
    {"r": 1},
    {"num_adapters": 2},
    {"num_adapters": 2, "is_transposed": True},
    {"is_disabled": True},
]


@pytest.mark.parametrize(
    "change", CHANGES, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()) or "plain"
)
def test_experts_equal_plain_peft(world, change):
    """33 features of each expert do not divide by 2, nor 32 by 3; there are 5 experts."""
    world.run(_experts_equal_plain_peft, Case(**change))


def _merge_equals_plain_peft(case: Case) -> None:
    here, there, inputs = CutExperts(case), plain_experts(case), draw_inputs(case)
    base = _outer(here.wrappers).get_base_layer()
    before = {name: local_shard(w).clone() for name, w in base.named_parameters()}
    live = _outer(here.wrappers)(*inputs[:3])
    for wrappers in (here.wrappers, there):
        for wrapper in wrappers.values():
            wrapper.merge()
    for name, wrapper in here.wrappers.items():
        full = there[name].get_param().detach()
        piece = here.piece(full, wrapper.plan.weight)
        merged = local_shard(wrapper.get_param()).detach()
        assert_is_shard(shard=merged, full=piece, dim=None, what=f"merged {name}")
    merged_y = _outer(here.wrappers)(*inputs[:3])
    assert not torch.equal(merged_y, live), "the merged forward is the same code on other weights"
    assert_is_shard(shard=merged_y.detach(), full=live.detach(), dim=None, what="y", atol=1e-10)
    for name, wrapper in here.wrappers.items():
        wrapper.unmerge()
        back = local_shard(wrapper.get_param()).detach()
        assert_is_shard(shard=back, full=before[name], dim=None, what=f"unmerged {name}")


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_merge_is_plain_pefts_and_can_be_undone(world, is_transposed):
    """Outputs sum up to 66 products of merged weights, each rounded: 1e-10."""
    world.run(_merge_equals_plain_peft, Case(is_transposed=is_transposed, num_adapters=2))


def _errors_in_bfloat16(case: Case) -> list[tuple[str, float, float]]:
    """How far ours and plain PEFT in bfloat16 are from plain PEFT in float64, in norm."""
    half = replace(case, dtype=torch.bfloat16, factor_dtype=torch.float32)
    here, rounded, exact = CutExperts(half), plain_experts(half), plain_experts(case)
    for name, wrapper in exact.items():  # the same numbers: those that bfloat16 can hold
        wrapper.get_param().data = rounded[name].get_param().data.double()
    found = []
    for module in (here, _outer(rounded), _outer(exact)):
        inputs = [t.detach() for t in draw_inputs(half)]
        if module is _outer(exact):
            inputs = [t.double() if t.is_floating_point() else t for t in inputs]
        y = module(inputs[0].requires_grad_(), *inputs[1:3])
        y.backward(inputs[3])
        found.append({"y": y.detach(), "dx": inputs[0].grad})
    for name, key, parameter in _gradients(exact, "default"):
        factor_ = here.wrappers[name].factors["default"][key]
        plain = {n + k: p for n, k, p in _gradients(rounded, "default")}[name + key]
        for where, grad in zip(
            found, (local_shard(factor_.parameter.grad), plain.grad, parameter.grad), strict=True
        ):
            where[f"{key} of {name}"] = grad
        for where in found[1:]:
            where[f"{key} of {name}"] = here.piece(where[f"{key} of {name}"], factor_.plan)
    truth = found[2]
    return [
        (what, *(float((one[what] - wanted).norm() / wanted.norm()) for one in found[:2]))
        for what, wanted in truth.items()
    ]


def test_in_bfloat16_it_is_at_most_twice_as_far_off_as_plain_peft(world2):
    """Of 288 outputs, not of 54: of few, one that happens to cancel decides."""
    for errors in world2.run(_errors_in_bfloat16, Case(hidden=32, ffn=32)):
        for what, ours, plain in errors:
            assert ours <= 2 * plain, f"{what}: {ours:.2e}, plain PEFT {plain:.2e}"


def _communication(case: Case):
    here, inputs = CutExperts(case), draw_inputs(case)
    outputs = []
    forward = count_collectives(lambda: outputs.append(here(*inputs[:3])))
    backward = count_collectives(lambda: outputs[0].backward(inputs[3]))
    return forward, backward, here.sync.num_buckets


def test_the_adapter_adds_no_collective_but_the_bucket(world2):
    disabled = world2.run(_communication, Case(is_disabled=True))[0]
    assert disabled == ({"all_reduce": 1}, {"all_reduce": 2}, 0)
    assert world2.run(_communication, Case())[0] == ({"all_reduce": 1}, {"all_reduce": 3}, 1)


def _while_contiguous() -> None:
    """B of gate_up in one piece per rank: all of gate on the first, all of up on the second."""

    def cut(full, plan, mesh):
        return shard_full(full, replace(plan, split_factor=1), mesh)

    with mock.patch.object(factor, "shard_full", cut):
        _experts_equal_plain_peft(Case(ffn=32))


def _while_unreduced() -> None:
    with mock.patch.object(GradientSync, "_reduce"):
        _experts_equal_plain_peft(Case())


def _while_unscaled() -> None:
    of_pair = ParamWrapper._left_right

    def forget(self, name, dtype):
        with mock.patch.dict(self.scaling, {"second": 1.0}):
            return of_pair(self, name, dtype)

    with mock.patch.object(ParamWrapper, "_left_right", forget):
        _experts_equal_plain_peft(Case(num_adapters=2))


def _while_ordered_alike() -> None:
    """B's columns by expert, as A's rows are."""

    def left_right(self, name, dtype):
        a, b = (one.local() for one in self.factors[name].values())
        left = b.reshape(b.shape[0], self.num_experts, -1).permute(1, 0, 2)
        return left, a.reshape(self.num_experts, -1, a.shape[1]) * self.scaling[name]

    with mock.patch.object(ParamWrapper, "_left_right", left_right):
        _experts_equal_plain_peft(Case())


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (_while_contiguous, "y"),
        (_while_unreduced, "grad of A of gate_up_proj"),
        (_while_unscaled, "y"),
        (_while_ordered_alike, "y"),
    ],
    ids=["a_contiguous_b", "an_unreduced_a", "a_forgotten_scaling", "one_order_for_a_and_b"],
)
def test_parity_sees(world2, broken, what):
    with pytest.raises(RankError, match=f"AssertionError: {what}.* is off by"):
        world2.run(broken)
