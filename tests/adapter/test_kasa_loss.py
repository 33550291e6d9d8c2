"""What KaSA adds to the loss, on factors that are cut: its value and every gradient."""

from unittest import mock

import pytest
import torch

from tests.adapter.initial import CASES, attach, attach_plain, put_full
from tests.models import CUT, InDouble, batches, lora
from tests.parity import assert_is_shard
from tests.world import RankError
from tplora.adapter.variants import singular

pytestmark = pytest.mark.world


def _with_kasa_loss(path):
    """PEFT leaves it to the user to add it."""
    case = CASES["kasa"]
    models = [one(path, lora(case.targets, **case.changes)) for one in (attach, attach_plain)]
    losses = []
    for model in models:
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if "lora_B" in name:  # B begins with zeros, and d without a gradient
                    full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                    put_full(parameter, full / 4)
        with InDouble():
            losses.append(model(**batches(1)[0]).loss + 100 * model._get_kasa_loss())
        losses[-1].backward()
    assert_is_shard(shard=losses[0].detach(), full=losses[1].detach(), dim=None, what="loss")
    plain = dict(models[1].named_parameters())
    for name, factor in models[0].factors().items():
        grad, dim = factor.parameter.grad, factor.plan.shard_dim
        assert_is_shard(shard=grad, full=plain[name].grad, dim=dim, what=name)


def test_it_is_that_of_one_process(world, checkpoint):
    world.run(_with_kasa_loss, checkpoint("llama", **CUT))


def _counted_by_every_rank(factor):
    return factor.local()


def _broken(path):
    with mock.patch.object(singular, "_whole_on_every_rank", _counted_by_every_rank):
        _with_kasa_loss(path)


def test_parity_sees_gradients_that_every_rank_counts(world2, checkpoint):
    with pytest.raises(RankError, match=r"AssertionError: base_model.* is off by"):
        world2.run(_broken, checkpoint("llama", **CUT))
