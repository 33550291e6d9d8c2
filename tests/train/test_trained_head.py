"""The fused head over a head that is trained itself, and runs that train, stop and resume it."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.models import CUT, load, lora
from tests.tiny import VOCAB
from tests.train import test_head, test_trainer
from tests.train.test_checkpoint import _assert_same, _run
from tests.train.training import Setup
from tests.zoo.build import build_model, tiny_config
from tplora.adapter.head.projection import Projection

pytestmark = pytest.mark.world

HEADS = {
    "trained": ("llama", {"modules_to_save": ["lm_head"]}),
    "trained-tied": ("qwen2_tied", {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    "tokens-tied": ("qwen2_tied", {"trainable_token_indices": [22, 5, 70, 126]}),
    "tokens-apart": (
        "llama",
        {"trainable_token_indices": {"embed_tokens": [22, 6], "lm_head": [22, 5, 126]}},
    ),
}


def _with(changes):
    """What ``tests.train.test_head`` takes for its config."""
    return mock.patch.object(
        test_head,
        "_config",
        lambda case: lora(
            target_modules=case.targets, dropout=case.dropout, init_lora_weights=False, **changes
        ),
    )


def _equals_whole_logits(path, case, changes):
    with _with(changes):
        test_head._equals_whole_logits(path, case)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_trained_equals_whole_logits(world, checkpoint, name):
    model, changes = HEADS[name]
    case = test_head.Case(temperature=0.7)
    world.run(_equals_whole_logits, checkpoint(model, **CUT), case, changes)


def test_a_trained_bias_of_the_head_equals_whole_logits(world2, tmp_path):
    """phi's head has one."""
    config = tiny_config("phi")
    config.vocab_size, config.num_hidden_layers = VOCAB, 1
    build_model("phi", config).to(torch.float64).save_pretrained(tmp_path)
    case = test_head.Case(targets=["q_proj"])
    world2.run(_equals_whole_logits, str(tmp_path), case, {"bias": "all"})


def _largest_logits(path, case, changes):
    with _with(changes):
        return test_head._largest_logits(path, case)


@pytest.mark.parametrize("name", ["trained", "tokens-apart"])
def test_no_rank_ever_holds_more_logits_than_a_chunk(world2, checkpoint, name):
    model, changes = HEADS[name]
    case = test_head.Case(chunk=5)
    path = checkpoint(model, **CUT)
    assert world2.run(_largest_logits, path, case, changes) == [5, 5]


def _frozen_tokens(self, *given):
    """The head's logits, without those of trained rows."""
    return F.linear(given[0], given[1]) + 0 * given[2].sum()


def _breaks(path, case, changes):
    with mock.patch.object(Projection, "__call__", _frozen_tokens):
        _equals_whole_logits(path, case, changes)


def test_parity_sees_a_head_that_forgets_its_tokens(world2, checkpoint):
    model, changes = HEADS["tokens-tied"]
    with pytest.raises(AssertionError, match=r"grad of .*trainable_tokens_delta"):
        world2.run(_breaks, checkpoint(model, **CUT), test_head.Case(), changes)


SETUP = Setup(max_steps=6, save_steps=3, saves_weights_only=False)
RUNS = {
    "head-and-norms": ("llama", {"modules_to_save": ["lm_head", "norm"]}),
    "tokens": ("qwen2_tied", {"trainable_token_indices": [22, 5, 70, 126]}),
}


def _load(changes):
    return lambda path, _: load(path, lora("query", **changes))


def _run_with(path, folder, setup, changes, resumed=None):
    return _run(path, folder, setup, resumed, load=_load(changes))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_one_process_and_resumes_at_another_tp_size(
    world_of, alone, checkpoint, tmp_path, name
):
    model, changes = RUNS[name]
    path = checkpoint(model, **CUT)
    wanted = alone.run(_run_with, path, tmp_path / "one", SETUP, changes)[0]
    whole = world_of(2).run(_run_with, path, tmp_path / "two", SETUP, changes)[0]
    _assert_same(whole, wanted)
    first = tmp_path / "two" / "checkpoint-3"
    resumed = world_of(3).run(_run_with, path, tmp_path / "three", SETUP, changes, first)[0]
    _assert_same(resumed, wanted)


def _unmodified(path, folder, setup, changes):
    with mock.patch("tests.train.training.load", _load(changes)):
        return test_trainer._train(path, folder, setup)


def test_trls_own_trainer_trains_a_head_the_same(world2, alone, checkpoint, tmp_path):
    model, changes = RUNS["head-and-norms"]
    setup = Setup("trl", max_steps=3)
    path = checkpoint(model, **CUT)
    wanted = alone.run(_unmodified, path, tmp_path, replace(setup), changes)[0]
    for found in world2.run(_unmodified, path, tmp_path, setup, changes):
        test_trainer._assert_same(found, wanted, but=("num_tokens",))
