"""Partial gradients: summed once per optimizer step in one bucket, however backward is called."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import GradientState

from tests.adapter.models import load_plain, load_tplora, tokens
from tests.communication import Recorded
from tests.models import InDouble, in_double
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.world import RankError
from tplora.adapter import gradients
from tplora.adapter.gradients import GradientSync

pytestmark = pytest.mark.world


@contextlib.contextmanager
def _synced(is_last: bool) -> Iterator[None]:
    """As accelerate does around a backward that is, or is not, the last of a step."""
    state = GradientState()
    before = state.sync_gradients
    state._set_sync_gradients(is_last)
    try:
        yield
    finally:
        state._set_sync_gradients(before)


def _loss(model: Any, k: int = 0) -> torch.Tensor:
    rows = tokens(seed=20 + k)
    with InDouble():
        return model(input_ids=rows, labels=rows).loss


def _assert_grads(model: Any, plain: Any, *, when: str) -> None:
    """Every factor's gradient is this rank's piece of plain PEFT's; replicas are equal bits."""
    wanted = dict(plain.named_parameters())
    for name, factor in model.factors().items():
        what = f"{when}: grad of {name}"
        grad, full = factor.parameter.grad, wanted[name].grad
        if full is None:
            assert grad is None, f"{what} should be missing"
            continue
        assert_is_shard(shard=grad, full=full, dim=factor.plan.shard_dim, what=what, atol=1e-11)
        assert grad.placements == factor.parameter.placements, what
        if factor.plan.shard_dim is None:
            assert_same_on_all_ranks(tensor=grad, what=what)


def _accumulate(path: str, num_micro: int) -> None:
    model, plain = load_tplora(path), load_plain(path)
    for step, set_to_none in enumerate((True, False, False, True, False)):
        for k in range(num_micro):
            with _synced(k == num_micro - 1):
                (_loss(model, k) / num_micro).backward()
            (_loss(plain, k) / num_micro).backward()
        _assert_grads(model, plain, when=f"step {step}")
        assert model.sync.num_buckets == step + 1, "one bucket per optimizer step"
        model.zero_grad(set_to_none=set_to_none)
        plain.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("num_micro", [1, 2, 4])
def test_accumulated_gradients_are_those_of_one_process(world, checkpoint, num_micro):
    """Whether the optimizer zeroes gradients or drops them, in any order."""
    world.run(_accumulate, checkpoint("llama"), num_micro)


def _several_synced(path: str) -> None:
    """Without accelerate every backward is the last: each sums only what it added."""
    model, plain = load_tplora(path), load_plain(path)
    for k in range(3):
        _loss(model, k).backward()
        _loss(plain, k).backward()
        _assert_grads(model, plain, when=f"backward {k}")
    assert model.sync.num_buckets == 3


def test_several_synced_backwards_add_up(world, checkpoint):
    world.run(_several_synced, checkpoint("llama"))


def _mixed_syncs(path: str, pattern: str) -> None:
    model, plain = load_tplora(path), load_plain(path)
    for k, letter in enumerate(pattern):
        with _synced(letter == "s"):
            _loss(model, k).backward()
        _loss(plain, k).backward()
    _assert_grads(model, plain, when=pattern)


@pytest.mark.parametrize("pattern", ["sus", "uss", "suus", "ussus"])
def test_synced_and_unsynced_backwards_in_any_order_add_up(world2, checkpoint, pattern):
    world2.run(_mixed_syncs, checkpoint("llama"), pattern)


def _clip_between(path: str) -> None:
    """Clipping writes to the gradients in place, and a later backward adds to the clipped ones."""
    model, plain = load_tplora(path), load_plain(path)
    for k in range(2):
        norms = []
        for one in (model, plain):
            _loss(one, k).backward()
            trained = [p for p in one.parameters() if p.requires_grad]
            norms.append(torch.nn.utils.clip_grad_norm_(trained, 0.1))
        found = norms[0].full_tensor()
        assert_is_shard(shard=found, full=norms[1], dim=None, what="norm", atol=1e-11)
        _assert_grads(model, plain, when=f"clip {k}")


def test_the_norm_counts_a_replica_once_and_clipping_stays(world, checkpoint):
    world.run(_clip_between, checkpoint("llama"))


def _other_loss(path: str) -> None:
    """The loss uses what a hook saw inside the model, and the output not at all."""
    grads = []
    for model in (load_tplora(path), load_plain(path)):
        seen: list[torch.Tensor] = []
        layer = model.get_base_model().model.layers[0]
        hook = layer.register_forward_hook(
            lambda _module, _args, out, seen=seen: seen.append(
                out if isinstance(out, torch.Tensor) else out[0]
            )
        )
        model(input_ids=tokens())
        hook.remove()
        seen[0].square().mean().backward()
        grads.append(model)
    _assert_grads(*grads, when="hidden loss")
    assert grads[0].sync.num_buckets == 1


def test_a_loss_from_inside_the_model_is_reduced_as_well(world, checkpoint):
    world.run(_other_loss, checkpoint("llama"))


def _checkpointed(path: str, use_reentrant: bool, num_micro: int) -> None:
    model, plain = load_tplora(path), load_plain(path)
    model.enable_input_require_grads()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for part in (
        part for layer in model.get_base_model().model.layers for part in layer.children()
    ):
        part.forward = in_double(part.forward)
    model.train()
    for k in range(num_micro):
        with _synced(k == num_micro - 1):
            _loss(model, k).backward()
        _loss(plain, k).backward()
    _assert_grads(model, plain, when="checkpointed")
    assert model.sync.num_buckets == 1, "reentrant backwards are nested, the bucket is not"


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_checkpointing_changes_no_gradient(world, checkpoint, use_reentrant, num_micro):
    world.run(_checkpointed, checkpoint("llama"), use_reentrant, num_micro)


def _retain_graph(path: str) -> None:
    model, plain = load_tplora(path), load_plain(path)
    for one in (model, plain):
        loss = _loss(one)
        loss.backward(retain_graph=True)
        loss.backward()
    _assert_grads(model, plain, when="twice")


def test_a_graph_may_be_walked_twice(world, checkpoint):
    world.run(_retain_graph, checkpoint("llama"))


def _frozen_factor(path: str) -> None:
    """One replicated factor frozen before the first forward, one after it; then back."""
    model, plain = load_tplora(path), load_plain(path)
    names = [name for name, f in model.factors().items() if f.is_partial][:2]

    def set_trainable(name: str, *, is_trained: bool) -> None:
        model.factors()[name].parameter.requires_grad_(is_trained)
        dict(plain.named_parameters())[name].requires_grad_(is_trained)

    def step(when: str) -> None:
        model.zero_grad()
        plain.zero_grad()
        _loss(model).backward()
        _loss(plain).backward()
        _assert_grads(model, plain, when=when)

    set_trainable(names[0], is_trained=False)
    step("one frozen")
    set_trainable(names[1], is_trained=False)
    step("two frozen")
    set_trainable(names[0], is_trained=True)
    step("one trained again")


def test_a_frozen_factor_has_no_gradient_and_the_others_are_right(world, checkpoint):
    world.run(_frozen_factor, checkpoint("llama"))


def _raising(path: str) -> None:
    """A backward that runs out of memory is often caught and tried again with a smaller batch."""
    model, plain = load_tplora(path), load_plain(path)

    def fail(_grad: torch.Tensor) -> None:
        raise MemoryError("out of memory")

    hidden = (
        model.get_base_model()
        .model.layers[0]
        .register_forward_hook(
            lambda _module, _args, out: (
                (out if isinstance(out, torch.Tensor) else out[0]).register_hook(fail) and None
            )
        )
    )
    with pytest.raises(MemoryError):
        _loss(model).backward()
    hidden.remove()
    model.zero_grad()
    _loss(model).backward()
    _loss(plain).backward()
    _assert_grads(model, plain, when="after a failure")


def test_a_backward_that_raised_does_not_stop_the_next(world2, checkpoint):
    world2.run(_raising, checkpoint("llama"))


def _bucket_bytes(path: str) -> tuple[list[int], int]:
    model = load_tplora(path)
    loss = _loss(model)
    with Recorded() as forward_free, mock.patch.object(GradientSync, "_reduce", _nothing):
        loss.backward(retain_graph=True)
    model.zero_grad()
    with Recorded() as sent:
        loss.backward()
    own = list(sent.of("all_reduce"))
    for num_bytes in forward_free.of("all_reduce"):
        own.remove(num_bytes)
    partial = sum(f.parameter.to_local().nbytes for f in model.factors().values() if f.is_partial)
    return own, partial


def _nothing(_self: GradientSync, _factors: Any) -> None:
    """No bucket."""


def test_one_bucket_carries_the_bytes_of_the_partial_factors_and_no_more(world, checkpoint):
    for own, partial in world.run(_bucket_bytes, checkpoint("llama")):
        assert own == [partial]


def _unsynced_is_silent(path: str) -> int:
    """Before the last micro-batch only the layers' own collectives run: no bucket."""
    model = load_tplora(path)
    with _synced(False):
        _loss(model).backward()
    placements = {f.parameter.grad.placements[0].is_partial() for f in model.factors().values()}
    assert placements == {True, False}, "a gradient that is not summed yet says that it is partial"
    return model.sync.num_buckets


def test_accumulation_sums_nothing_before_the_last_backward(world, checkpoint):
    assert set(world.run(_unsynced_is_silent, checkpoint("llama"))) == {0}


# --- broken on purpose


def _while_broken(path: str, name: str) -> None:
    breaks = {
        "no bucket": mock.patch.object(GradientSync, "_reduce", _nothing),
        "reduced twice": mock.patch.object(gradients, "_begin"),
    }
    with breaks[name]:
        _several_synced(path)


@pytest.mark.parametrize(
    ("name", "when"), [("no bucket", "backward 0"), ("reduced twice", "backward 1")]
)
def test_parity_sees(world2, checkpoint, name, when):
    with pytest.raises(RankError, match=f"AssertionError: {when}: grad of"):
        world2.run(_while_broken, checkpoint("llama"), name)
