"""Attaching: the full factors are plain PEFT's, only factors train, and the model stays PEFT's."""

import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModelForCausalLM

from tests.adapter.models import SEED, TARGETS, load_plain, load_tplora, lora, tokens
from tests.communication import count_collectives
from tests.models import InDouble
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.tiny import NAMES
from tests.world import RankError
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.errors import PlanError

pytestmark = pytest.mark.world

INITS = [True, "gaussian", False]


def _init(path: str, init: bool | str, seed_step: int) -> None:
    """Ranks are seeded differently; ``seed_step`` makes them attach with different seeds too."""
    rank = dist.get_rank()
    model = load_tplora(path, seed=SEED + seed_step * rank, init_lora_weights=init)
    plain = dict(load_plain(path, init_lora_weights=init).named_parameters())
    factors = model.factors()
    assert set(factors) == {name for name in plain if "lora_" in name}
    for name, factor in factors.items():
        full = plain[name].detach()
        shard = factor.parameter.detach()
        assert_is_shard(shard=shard, full=full, dim=factor.plan.shard_dim, what=name, is_exact=True)
        if factor.plan.shard_dim is None:
            assert_same_on_all_ranks(tensor=shard, what=name)
        if "embed" not in name:
            assert bool(full.any()) == (init is False or "lora_A" in name), name


@pytest.mark.parametrize("init", INITS, ids=str)
def test_full_factors_are_bit_for_bit_those_of_plain_peft(world, checkpoint, init):
    world.run(_init, checkpoint("llama"), init, 0)


def test_parity_sees_ranks_that_draw_their_own_factors(world2, checkpoint):
    with pytest.raises(RankError, match=r"AssertionError: base_model.*lora_"):
        world2.run(_init, checkpoint("llama"), True, 1)


def _generator_is_left_alone(path: str) -> None:
    base = load_base(path, tp_size=dist.get_world_size(), dtype=torch.float64)
    before = torch.get_rng_state()
    attach_adapter(base, lora(), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_attaching_draws_nothing_from_the_default_generator(world2, checkpoint):
    world2.run(_generator_is_left_alone, checkpoint("llama"))


def _model_equals_plain_peft(path: str, targets: Any) -> None:
    model = load_tplora(path, target_modules=targets)
    plain = load_plain(path, target_modules=targets)
    rows = tokens()
    with InDouble():
        outputs = [one(input_ids=rows, labels=rows) for one in (model, plain)]
    for output in outputs:
        output.loss.backward()
    found, wanted = (output.logits.detach() for output in outputs)
    assert_is_shard(shard=found, full=wanted, dim=None, what="logits", atol=1e-11)
    full = dict(plain.named_parameters())
    for name, factor in model.factors().items():
        grad, dim = factor.parameter.grad, factor.plan.shard_dim
        assert_is_shard(shard=grad, full=full[name].grad, dim=dim, what=name, atol=1e-11)


ALL = ["qkv_proj", "gate_up_proj", *TARGETS, "k_proj", "gate_proj", "lm_head"]
TARGETS_OF = dict.fromkeys(NAMES, ALL[2:]) | {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"],
    "qwen2_tied": "all-linear",
}


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_every_gradient_are_those_of_plain_peft(world, checkpoint, name):
    world.run(_model_equals_plain_peft, checkpoint(name), TARGETS_OF[name])


def _collectives(path: str) -> tuple[dict[str, int], dict[str, int], int]:
    model = load_tplora(path, target_modules="all-linear")
    rows = tokens()
    outputs: list[Any] = []
    forward = count_collectives(lambda: outputs.append(model(input_ids=rows, labels=rows)))
    backward = count_collectives(lambda: outputs[0].loss.backward())
    return forward, backward, model.sync.num_buckets


def test_the_adapter_adds_no_collective_but_one_bucket(world2, checkpoint):
    """2 forward and 2 backward per layer; the embedding's sum and the head's gather; one bucket."""
    counts = [world2.run(_collectives, checkpoint("llama", num_hidden_layers=n)) for n in (2, 3)]
    (two, three) = (ranks[0] for ranks in counts)
    assert three[0]["all_reduce"] - two[0]["all_reduce"] == 2
    assert three[1]["all_reduce"] - two[1]["all_reduce"] == 2
    assert (two[2], three[2]) == (1, 1)
    for rank_counts in counts:
        assert rank_counts[0] == rank_counts[1], "all ranks call the same collectives"


def _only_factors_train(path: str) -> None:
    model = load_tplora(path)
    assert isinstance(model, PeftModelForCausalLM)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(model.factors())
    assert list(model.factors()) == sorted(trained)


def test_only_factors_are_trainable(world2, checkpoint):
    world2.run(_only_factors_train, checkpoint("llama"))


def _disabled(path: str) -> None:
    model = load_tplora(path)
    base = load_base(path, tp_size=dist.get_world_size(), dtype=torch.float64)
    rows = tokens()
    with torch.no_grad(), model.disable_adapter():
        found = model(input_ids=rows).logits
    wanted = base(input_ids=rows).logits.detach()
    assert_is_shard(shard=found, full=wanted, dim=None, what="logits", atol=1e-11)
    assert not torch.allclose(model(input_ids=rows).logits, wanted)


def test_a_disabled_adapter_leaves_the_base(world2, checkpoint):
    world2.run(_disabled, checkpoint("llama"))


def _refused(path: str) -> None:
    base = load_base(path, tp_size=dist.get_world_size(), dtype=torch.float64)
    with pytest.raises(PlanError, match="did you mean q_proj"):
        attach_adapter(base, lora(target_modules=["q_prj"]))
    attach_adapter(base, lora())  # the refusal left the base as it was


def test_a_refused_target_leaves_the_base_as_it_was(world2, checkpoint):
    world2.run(_refused, checkpoint("llama"))


def _second_adapter(path: str) -> None:
    """Cut like the first, of another rank and on other layers, and drawn from a seed of its own."""
    settings = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
    model, plain = load_tplora(path), load_plain(path)
    model.add_adapter("second", lora(**settings))
    torch.manual_seed(SEED + zlib.crc32(b"second"))
    plain.add_adapter("second", lora(**settings))
    for one in (model, plain):
        one.to(torch.float64)  # a second adapter is drawn in float32
        one.set_adapter("second")
    rows = tokens()
    with InDouble():
        outputs = [one(input_ids=rows, labels=rows) for one in (model, plain)]
    for output in outputs:
        output.loss.backward()
    found, wanted = (output.logits.detach() for output in outputs)
    assert_is_shard(shard=found, full=wanted, dim=None, what="logits", atol=1e-11)
    full = dict(plain.named_parameters())
    factors = model.factors("second")
    assert len(factors) == 8
    for name, factor in factors.items():
        grad, dim = factor.parameter.grad, factor.plan.shard_dim
        assert_is_shard(shard=grad, full=full[name].grad, dim=dim, what=name, atol=1e-11)
    assert all(factor.parameter.grad is None for factor in model.factors().values())


def test_a_second_adapter_is_cut_as_well(world2, checkpoint):
    world2.run(_second_adapter, checkpoint("llama"))
