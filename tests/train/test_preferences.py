"""DPO and KTO: on every mesh a training is trl's own over plain PEFT in one process."""

from dataclasses import replace
from unittest import mock

import pytest

from tests.axes.running import Mesh, assert_same
from tests.models import InDouble
from tests.train.preferences import (
    ALONE,
    SIZES,
    Preferring,
    build,
    run_on,
    run_plain,
)
from tplora.errors import TrainError
from tplora.train.answer_counting import CountsAnswersOnce

pytestmark = pytest.mark.world

DPO = Preferring(has_eval=True)
KTO = Preferring(method="kto", num_rows=12)
CLOCK = ("num_input_tokens_seen",)
MESHES = [
    Mesh(tp_size=2),
    pytest.param(Mesh(tp_size=3), marks=pytest.mark.slow),
    Mesh(fsdp_size=2),
    Mesh(tp_size=2, dp_replicate_size=2),
]


@pytest.fixture(scope="module")
def plain(alone, checkpoint, tmp_path_factory):
    """What trl's own trainer finds for a setup in one process, computed once."""
    found = {}

    def get(setup, **how):
        key = (setup, *how.items())
        if key not in found:
            folder = tmp_path_factory.mktemp("plain")
            path = checkpoint("llama", **SIZES)
            found[key] = alone.run(_run_plain, path, folder, setup, how)[0]
        return found[key]

    return get


def _run_plain(path, folder, setup, how):
    return run_plain(path, folder, setup, **how)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ten_steps_of_dpo_are_those_of_trl_and_plain_peft(
    world_of, plain, checkpoint, tmp_path, mesh
):
    """Losses, rewards, norms, evaluations, tokens and factors, over short last batches."""
    wanted = plain(DPO)
    assert {"rewards/margins", "rewards/accuracies", "logps/chosen"} <= wanted[0][0].keys()
    path = checkpoint("llama", **SIZES)
    for found in world_of(mesh.world_size).run(run_on, mesh, path, tmp_path, DPO):
        assert_same(found, wanted, but=CLOCK)
        assert found[2] == wanted[2] * mesh.tp_size, "transformers counts the ranks of a tp group"


def test_one_row_for_two_data_ranks_is_learned_once(world_of, plain, checkpoint, tmp_path):
    """The second batch of an epoch has one pair: a data rank has none of its own."""
    setup = replace(DPO, num_rows=5, accumulation=1, max_steps=4)
    wanted = plain(setup)
    path = checkpoint("llama", **SIZES)
    mesh = Mesh(dp_replicate_size=2)
    for found in world_of(2).run(run_on, mesh, path, tmp_path, setup):
        assert_same(found, wanted, but=CLOCK)
        assert found[2] == wanted[2]


def _run_counting_repeats(mesh, path, folder, setup):
    with mock.patch.object(CountsAnswersOnce, "_ignore_repeats", lambda self, batch, *_: batch):
        return run_on(mesh, path, folder, setup)


def test_parity_sees_pairs_that_are_learned_twice(world_of, plain, checkpoint, tmp_path):
    setup = replace(DPO, num_rows=5, accumulation=1, max_steps=4)
    args = (Mesh(dp_replicate_size=2), checkpoint("llama", **SIZES), tmp_path, setup)
    found = world_of(2).run(_run_counting_repeats, *args)[0]
    with pytest.raises(AssertionError, match="step 2"):
        assert_same(found, plain(setup), but=CLOCK)


OTHERS = {
    "weighed": (("loss_type", ("apo_zero", "sft")), ("loss_weights", (1.0, 0.3))),
    "divergent": (("f_divergence_type", "js_divergence"), ("ld_alpha", 0.5)),
    "wpo": (("use_weighting", True), ("loss_type", ("ipo",)), ("beta", 0.3)),
    "dropping": (("disable_dropout", False),),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_of_dpo_equal_one_process(world_of, plain, checkpoint, tmp_path, name):
    setup = replace(DPO, max_steps=3, has_eval=False, changes=OTHERS[name])
    path = checkpoint("llama", **SIZES)
    if name == "dropping":
        setup = replace(setup, dropout=0.3)
        wanted = world_of(1).run(run_on, ALONE, path, tmp_path, setup)[0]
    else:
        wanted = plain(setup)
    for found in world_of(2).run(run_on, Mesh(tp_size=2), path, tmp_path, setup):
        assert_same(found, wanted, but=CLOCK)


def test_dropout_is_disabled_as_trl_does_it(world_of, plain, checkpoint, tmp_path):
    setup = replace(DPO, max_steps=2, has_eval=False, dropout=0.5)
    path = checkpoint("llama", **SIZES)
    for found in world_of(2).run(run_on, Mesh(tp_size=2), path, tmp_path, setup):
        assert_same(found, plain(setup), but=CLOCK)


@pytest.mark.slow
def test_trls_own_head_gives_the_same_numbers_to_float32(alone, plain, checkpoint, tmp_path):
    """Without Adam, which makes large steps of what rounding leaves of a gradient that is zero.

    A reward is 0.1 of the difference of two sums near 300, of which float32 keeps 3e-5.
    """
    setup = replace(DPO, has_eval=False, changes=(("optim", "sgd"),))
    path = checkpoint("llama", **SIZES)
    ours = alone.run(run_on, ALONE, path, tmp_path, setup)[0]
    logs = plain(setup, is_double=False)[0]
    assert len(ours[0]) == len(logs)
    for entry, other in zip(ours[0], logs, strict=True):
        for key in other.keys() - {"train_loss"}:
            assert entry[key] == pytest.approx(other[key], rel=2e-5, abs=1e-5), key


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_rated_answers_train_as_trl_and_plain_peft(
    world_of, plain, checkpoint, tmp_path, loss_type
):
    setup = replace(KTO, changes=(("loss_type", loss_type),))
    wanted = plain(setup)
    assert {"rewards/chosen", "kl", "loss"} <= set().union(*wanted[0])
    path = checkpoint("llama", **SIZES)
    for found in world_of(2).run(run_on, Mesh(tp_size=2), path, tmp_path, setup):
        assert_same(found, wanted, but=CLOCK)


def test_rated_answers_without_a_divergence_train_over_data_axes(
    world_of, plain, checkpoint, tmp_path
):
    """12 rows, then 11: a last batch of three."""
    setup = replace(KTO, num_rows=11, changes=(("loss_type", "apo_zero_unpaired"),))
    path = checkpoint("llama", **SIZES)
    for found in world_of(2).run(run_on, Mesh(fsdp_size=2), path, tmp_path, setup):
        assert_same(found, plain(setup), but=CLOCK)


def _refused(path, folder):
    mesh = Mesh(dp_replicate_size=2)
    for setup in (KTO, replace(DPO, changes=(("loss_type", ("aot",)),))):
        with pytest.raises(TrainError, match="whole batch, of which each data rank sees a part"):
            build(path, folder, setup, mesh)


def test_a_loss_of_a_whole_batch_is_refused_over_data_axes(world_of, checkpoint, tmp_path):
    world_of(2).run(_refused, checkpoint("llama", **SIZES), tmp_path)


@pytest.mark.parametrize(
    "mesh", [Mesh(tp_size=2), pytest.param(Mesh(fsdp_size=2), marks=pytest.mark.slow)], ids=str
)
def test_three_and_three_steps_are_six_bit_for_bit(world_of, checkpoint, tmp_path, mesh):
    setup = replace(DPO, max_steps=6, save_steps=3)
    world, path = world_of(2), checkpoint("llama", **SIZES)
    wanted = world.run(run_on, mesh, path, tmp_path / "whole", setup)
    resumed = tmp_path / "whole" / "checkpoint-3"
    assert (resumed / "ref" / "adapter_model.safetensors").is_file()
    found = world.run(run_on, mesh, path, tmp_path / "resumed", setup, resumed)
    for mine, other in zip(found, wanted, strict=True):
        assert_same(mine, other, is_exact=True)


def _first_rewards(path, folder):
    """At its first step an adapter is its own reference, whatever it is."""
    trainer = build(path, folder, replace(DPO, max_steps=1, has_eval=False), Mesh(tp_size=2))
    model = trainer.model
    with InDouble():
        trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["rewards/chosen"] == entry["rewards/margins"] == 0
    for name, factor in model.factors("ref").items():
        assert not factor.parameter.requires_grad, name
    lora_b = model.factors("ref")["base_model.model.model.layers.0.mlp.up_proj.lora_B.ref.weight"]
    assert bool((lora_b.full() != 0).any()), "the reference is the adapter, not the base"


def test_the_reference_is_the_adapter_that_training_starts_from(world_of, checkpoint, tmp_path):
    world_of(2).run(_first_rewards, checkpoint("llama", **SIZES), tmp_path)
