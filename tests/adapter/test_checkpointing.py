"""A layer that keeps its sums over ranks takes none of them again, and computes the same bits."""

from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.adapter.models import load_tplora, lora, tokens
from tests.communication import Recorded
from tests.models import load
from tests.rehearsal.models import write_model
from tplora.collectives import kept_sums
from tplora.collectives.kept_sums import keep_sums, kept_or_taken
from tplora.errors import PlanError

KEEPING = {"keep_reduced_outputs": True}
ALL = {"target_modules": "all-linear"}


def _step(model):
    """Loss, gradients, and what forward and backward said."""
    rows = tokens()
    with Recorded() as forward:
        loss = model(input_ids=rows, labels=rows).loss
    with Recorded() as backward:
        loss.backward()
    grads = {name: f.leaf_grad.clone() for name, f in model.factors().items()}
    model.zero_grad()
    return loss.detach(), grads, forward.of("all_reduce"), backward.of("all_reduce")


def _repeated(path, settings, kinds, *, is_double=True):
    """How many all-reduces each kind repeats, beside a model that keeps every activation."""
    if is_double:
        model = load_tplora(path, **settings).train()
    else:
        model = load(path, lora(**settings), dtype=torch.float32)
    model.enable_input_require_grads()  # so that the first layer sums its input's gradient, too
    loss, grads, forward, backward = _step(model)
    found = {}
    for kind, keywords in kinds.items():
        model.activation_checkpointing_enable(keywords)
        again = _step(model)
        assert torch.equal(again[0], loss)
        assert all(torch.equal(again[1][name], grad) for name, grad in grads.items())
        assert again[2] == forward, kind
        found[kind] = len(again[3]) - len(backward)
    return found


KINDS = {
    "reentrant": {"use_reentrant": True},
    "stops early": {"use_reentrant": False},
    "keeping": KEEPING,
}


@pytest.mark.world
@pytest.mark.parametrize(
    ("settings", "repeated"),
    [
        # Of two layers: o_proj and down_proj; stopping early, o_proj alone.
        pytest.param(ALL, (4, 2), id="all-linear"),
        # What transformers' styles sum up, with DTensors.
        pytest.param({"target_modules": ["q_proj"]}, (4, 2), id="query"),
        # DoRA sums norms of both.
        pytest.param(ALL | {"use_dora": True}, (8, 6), id="dora"),
    ],
)
def test_a_llama_that_keeps_its_sums_repeats_none(world, checkpoint, settings, repeated):
    path = checkpoint("llama")
    for found in world.run(_repeated, path, settings, KINDS):
        assert (found["reentrant"], found["stops early"], found["keeping"]) == (*repeated, 0)


@pytest.mark.world
def test_a_norm_after_the_sum_and_experts_repeat_none(world2, checkpoint, tmp_path):
    kinds = {name: KINDS[name] for name in ("stops early", "keeping")}
    found = world2.run(_repeated, checkpoint("olmo2"), ALL, kinds)
    assert found == [{"stops early": 4, "keeping": 0}] * 2
    path = write_model("qwen3_moe", tmp_path / "moe")
    for of_rank in world2.run(_repeated_in_single, path, ALL, kinds):
        assert of_rank["stops early"] > of_rank["keeping"] == 0


def _repeated_in_single(path, settings, kinds):
    """Grouped matmuls of experts know no float64."""
    return _repeated(path, settings, kinds, is_double=False)


def _twice(path):
    """A graph that is walked twice, with an evaluation between two forwards."""
    model = load_tplora(path, **ALL).train()
    rows = tokens()
    grads = []
    for keywords in (None, KEEPING):
        if keywords:
            model.activation_checkpointing_enable(keywords)
        loss = model(input_ids=rows, labels=rows).loss
        with torch.no_grad():
            model(input_ids=rows[:1])
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append({name: f.leaf_grad.clone() for name, f in model.factors().items()})
        model.zero_grad()
    assert all(torch.equal(grads[1][name], grad) for name, grad in grads[0].items())


@pytest.mark.world
def test_a_kept_sum_serves_two_walks_of_a_graph(world2, checkpoint):
    world2.run(_twice, checkpoint("llama"))


def _broken(path):
    """The sum before the one that is asked for."""
    with mock.patch.object(kept_sums._Region, "take", _take_another):
        _repeated(path, ALL, {"keeping": KEEPING})


def _take_another(self, take, *, real=kept_sums._Region.take):
    if self.is_computed_again:
        self.sums = [None if one is None else one + 1e-3 for one in self.sums]
    return real(self, take)


@pytest.mark.world
def test_gradients_see_a_sum_that_is_another(world2, checkpoint):
    with pytest.raises(AssertionError, match="_repeated"):
        world2.run(_broken, checkpoint("llama"))


@pytest.mark.world
@pytest.mark.parametrize(
    ("keywords", "words"),
    [(KEEPING | {"use_reentrant": True}, "leave use_reentrant out"),
     ({"selective": True}, "that is not called there")],
)  # fmt: skip
def test_what_would_keep_nothing_is_refused(alone, checkpoint, keywords, words):
    alone.run(_refused, checkpoint("llama"), keywords, words)


def _refused(path, keywords, words):
    model = load_tplora(path)
    with pytest.raises(PlanError, match=words):
        model.activation_checkpointing_enable(keywords)
    model.gradient_checkpointing_enable(KEEPING)  # the old name; one process has no sums to keep
    rows = tokens()
    with Recorded() as said:
        model.train()(input_ids=rows, labels=rows).loss.backward()
    assert not said.calls
    assert all(factor.parameter.grad is not None for factor in model.factors().values())


# The regions by themselves: what is summed here is noted, and nothing is sent.


class _Sums:
    def __init__(self):
        self.num_taken = 0

    def __call__(self, x):
        return _Summed.apply(x, self)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sums):
        def take():
            sums.num_taken += 1
            return x * 2

        return kept_or_taken(take)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def _gradient(layer, x):
    x = x.clone().requires_grad_()
    torch_checkpoint(layer, x, use_reentrant=False, context_fn=keep_sums).sum().backward()
    return x.grad


def _check(layer, sums, *, taken):
    x = torch.arange(1.0, 4.0)
    whole = x.clone().requires_grad_()
    layer(whole).sum().backward()
    sums.num_taken = 0
    torch.testing.assert_close(_gradient(layer, x), whole.grad, rtol=0, atol=0)
    assert sums.num_taken == taken


def test_a_sum_at_the_end_is_not_kept_and_not_asked_for():
    sums = _Sums()
    kept = []
    with mock.patch.object(kept_sums._Region, "end", _noting(kept)):
        _check(lambda x: sums(sums(x).sin().square()), sums, taken=2)
    assert [[one is not None for one in region] for region in kept] == [[True, False]]


def _noting(kept, real=kept_sums._Region.end):
    def end(self):
        real(self)
        kept.append(list(self.sums))

    return end


def test_a_sum_that_the_model_writes_to_is_taken_again():
    sums = _Sums()
    _check(lambda x: sums(x).mul_(3).sin(), sums, taken=2)


def test_a_region_inside_a_region_asks_the_one_around_it():
    sums = _Sums()

    def inner(x):
        return sums(x).sin().square()

    def outer(x):
        x = sums(x).sin()
        return torch_checkpoint(inner, x, use_reentrant=False, context_fn=keep_sums).sin()

    _check(outer, sums, taken=2)


def test_a_region_that_raises_is_left():
    def fails(x):
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        _gradient(fails, torch.ones(2))
    assert not kept_sums.is_keeping_sums()
