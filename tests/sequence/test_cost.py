"""What a cut sequence saves and what is sent for it: measured, predicted, and by formula."""

from collections import Counter

import pytest
from transformers import AutoConfig

from tests.rehearsal.measure import RealStep, measure
from tests.rehearsal.models import lora, write_model
from tplora.plan.build import build_plan
from tplora.plan.step_cost import Batch, Traffic
from tplora.rehearsal.step import rehearse

pytestmark = pytest.mark.world

HIDDEN, LAYERS, BYTES = 96, 2, 4
CHECKPOINTED = Batch(rows=3, length=160, is_checkpointed=True)
KEPT = Batch(rows=2, length=99, is_checkpointed=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder, written = tmp_path_factory.mktemp("cut"), {}

    def get(name, **changes):
        key = (name, *sorted(changes.items()))
        if key not in written:
            if name == "llama":  # heads that 2, 3 and 4 divide
                changes = {"num_attention_heads": 24, "num_key_value_heads": 12} | changes
                changes |= {"hidden_size": HIDDEN, "head_dim": 8}
            written[key] = write_model(name, folder / f"{len(written)}", **changes)
        return written[key]

    return get


def _rehearsed(path, batch, tp_size, *, is_cut):
    config = AutoConfig.from_pretrained(path)
    plan = build_plan(config, lora(), tp_size=tp_size, sequence_parallel=is_cut)
    return rehearse(plan, config, lora(), batch)


CASES = [
    pytest.param(*case, marks=() if is_fast else pytest.mark.slow)
    for case, is_fast in (
        (("llama", CHECKPOINTED, 3), True),
        (("llama", CHECKPOINTED, 4), False),
        (("llama", KEPT, 4), False),
        (("gemma2", CHECKPOINTED, 4), False),
        (("gemma2", KEPT, 2), False),
        (("qwen3_moe", KEPT, 2), False),
        (("qwen3_moe", CHECKPOINTED, 4), False),
        (("deepseek_v3", CHECKPOINTED, 2), False),
    )
]


@pytest.mark.parametrize(("name", "batch", "tp_size"), CASES)
def test_a_cut_sequence_takes_and_says_what_was_rehearsed_and_keeps_less(
    world_of, path, name, batch, tp_size
):
    cost = _rehearsed(path(name), batch, tp_size, is_cut=True)
    whole = _rehearsed(path(name), batch, tp_size, is_cut=False)
    found = world_of(tp_size).run(measure, path(name), lora(), batch, True)
    for part in ("forward", "backward", "bucket"):
        assert getattr(cost, part) == found[0][part], part
    assert found[0]["resident"] == cost.resident
    if "moe" not in name and "deepseek" not in name:  # whose experts take by what tokens choose
        for of_rank in found:
            assert cost.working == pytest.approx(of_rank["working"], rel=0.1)
    assert cost.kept < whole.kept


def _kept_of_a_layer(write, batch, tp_size, *, is_cut):
    few, many = (
        _rehearsed(write("llama", num_hidden_layers=n), batch, tp_size, is_cut=is_cut).kept
        for n in (2, 4)
    )
    return (many - few) / 2


@pytest.mark.parametrize("tp_size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_of_a_checkpointed_layer_the_tokens_of_a_rank_are_kept(path, tp_size):
    batch = Batch(rows=3, length=60, is_checkpointed=True)
    tokens = batch.rows * batch.length * HIDDEN * BYTES
    assert _kept_of_a_layer(path, batch, tp_size, is_cut=False) == tokens
    assert _kept_of_a_layer(path, batch, tp_size, is_cut=True) == tokens / tp_size


@pytest.mark.slow
def test_of_a_layer_that_keeps_everything_its_norms_keep_the_tokens_of_a_rank(path):
    batch = Batch(rows=3, length=60, is_checkpointed=False)
    row = batch.rows * batch.length * BYTES
    saved = _kept_of_a_layer(path, batch, 3, is_cut=False) - _kept_of_a_layer(
        path, batch, 3, is_cut=True
    )
    # Two norms: what they read, and the root that each token is divided by.
    assert saved == 2 * row * (HIDDEN + 1) * 2 // 3


def _calls(path, batch, is_cut):
    forward, backward, _ = RealStep(path, lora(), batch, is_cut=is_cut).calls()
    return forward, backward


def test_what_a_layer_sends_is_by_formula(world_of, path):
    """Bytes given: N/P of B T H to an all-gather, all of them to a reduce-scatter; T is padded."""
    tp_size, batch, world = 3, Batch(rows=2, length=64, is_checkpointed=False), world_of(3)
    padded = tp_size * -(-batch.length // tp_size)
    whole = batch.rows * padded * HIDDEN * BYTES
    for forward, backward in world.run(_calls, path("llama"), batch, True):
        sent = Counter(forward)
        assert sent["all_gather", whole // tp_size] == 2 * LAYERS + 1  # and the decoder's output
        assert sent["reduce_scatter", whole] == 2 * LAYERS
        sent = Counter(backward)
        assert sent["all_gather", whole // tp_size] == 2 * LAYERS
        assert sent["reduce_scatter", whole] == 2 * LAYERS - 1  # the embedding is frozen
        head = batch.rows * batch.length * HIDDEN * BYTES
        assert Traffic.of(call for call in backward if call[0] == "all_reduce") == (
            Traffic(kind="all_reduce", count=1, num_bytes=head),
        )
    # A ring sends (P - 1) / P of the tensor for each half, twice that for an all-reduce.
    for forward, backward in world.run(_calls, path("llama"), batch, False):
        halves = [kind for kind, size in (*forward, *backward) if kind != "all_reduce"]
        assert halves == ["all_gather"]  # statistics of the head
        assert sum(kind == "all_reduce" for kind, _ in forward) == 2 * LAYERS + 1
        assert sum(kind == "all_reduce" for kind, _ in backward) == 2 * LAYERS - 1 + 1
