"""Factors' gradients are computed while their input's is summed; bits and collectives stay."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.adapter.models import lora, tokens
from tests.communication import Recorded
from tests.models import world_size
from tests.world import RankError
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.collectives import late_gradients

pytestmark = pytest.mark.world

SETTINGS = {"target_modules": "all-linear", "lora_dropout": 0.3}
CHECKPOINTED = {
    None: None,
    "reentrant": {"use_reentrant": True},
    "keeping": {"keep_reduced_outputs": True},
}


def _load(path, *, overlap, dtype=torch.float64, keywords=None, **settings):
    base = load_base(path, tp_size=world_size(), dtype=dtype)
    model = attach_adapter(base, lora(**settings), seed=11, overlap_communication=overlap).train()
    if keywords:
        model.activation_checkpointing_enable(keywords)
    return model


def _backward(model, num_backwards=1):
    """Gradients after a step of two micro-batches, and what its backward passes said."""
    with Recorded() as said:
        for k in range(2):
            rows = tokens(seed=k)
            loss = model(input_ids=rows, labels=rows).loss
            for rest in reversed(range(num_backwards)):
                loss.backward(retain_graph=bool(rest))
    return {name: f.leaf_grad.clone() for name, f in model.factors().items()}, said.calls


def _same(path, settings, keywords, dtype, num_backwards):
    found, wanted = (
        _backward(
            _load(path, overlap=on, dtype=dtype, keywords=keywords, **settings), num_backwards
        )
        for on in (True, False)
    )
    assert found[1] == wanted[1], "collectives"
    for name, grad in wanted[0].items():
        assert torch.equal(found[0][name], grad), f"grad of {name}"


@pytest.mark.parametrize(
    ("settings", "kind", "dtype", "num_backwards"),
    [
        (SETTINGS, None, torch.float64, 1),
        (SETTINGS, None, torch.bfloat16, 2),
        (SETTINGS, "reentrant", torch.float64, 1),
        (SETTINGS, "keeping", torch.float64, 1),
        ({"target_modules": "all-linear", "lora_bias": True}, None, torch.float64, 1),
        ({"target_modules": ["q_proj", "lm_head", "embed_tokens"]}, None, torch.float64, 1),
    ],
    ids=["plain", "bf16-twice", "reentrant", "keeping", "bias", "some"],
)
def test_gradients_and_collectives_are_those_of_waiting(
    world, checkpoint, settings, kind, dtype, num_backwards
):
    world.run(_same, checkpoint("llama"), settings, CHECKPOINTED[kind], dtype, num_backwards)


class _Work:
    """A work handle that notes when it is waited for."""

    def __init__(self, work, events):
        self._work, self._events = work, events

    def wait(self):
        self._events.append("waited")
        return self._work.wait()


def _events(path):
    """What happens in one backward: sums that are started and waited for, and late gradients."""
    model, events = _load(path, overlap=True, **SETTINGS), []
    reduce, take = dist.all_reduce, late_gradients.Held.take

    def noting(tensor, group=None, async_op=False):
        work = reduce(tensor, group=group, async_op=async_op)
        events.append("started" if async_op else "summed")
        return _Work(work, events) if async_op else work

    def taking(held):
        events.append("late")
        return take(held)

    loss = model(input_ids=tokens(), labels=tokens()).loss
    with (
        mock.patch.object(late_gradients.dist, "all_reduce", noting),
        mock.patch.object(late_gradients.Held, "take", taking),
    ):
        loss.backward()
    return events


def test_a_sum_is_under_way_while_the_factors_gradients_are_computed(world2, checkpoint):
    """Of two layers: A and B of gate and up, then of q, k and v; the first layer reads what is
    frozen, so nothing of it is summed. The head's own sum waits for nothing."""
    for events in world2.run(_events, checkpoint("llama")):
        own = [event for event in events if event != "summed"]
        mlp, attention = ["started", *["late"] * 4, "waited"], ["started", *["late"] * 6, "waited"]
        assert own == [*mlp, *attention, *mlp]


def _too_early(path):
    """The gradient is read before the sum is there: nobody waits."""
    with mock.patch.object(late_gradients._Wait, "backward", lambda ctx, grad: (grad * 0, None)):
        _same(path, SETTINGS, None, torch.float64, 1)


def test_gradients_see_a_sum_that_is_not_waited_for(world2, checkpoint):
    with pytest.raises(RankError, match="grad of"):
        world2.run(_too_early, checkpoint("llama"))
