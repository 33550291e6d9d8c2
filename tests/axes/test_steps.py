"""Data axes: on every mesh a training is that of one process with the same rows a step."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.axes.running import Mesh, RowsSeen, assert_same, run_on, trainer_on
from tests.models import CUT, InDouble
from tests.train.training import Setup, token_rows
from tplora.train.counting import num_own_rows

pytestmark = pytest.mark.world

ALONE = Mesh()
MESHES = [
    Mesh(tp_size=2),
    Mesh(dp_replicate_size=2),
    Mesh(fsdp_size=2),
    Mesh(tp_size=4),
    Mesh(tp_size=2, dp_replicate_size=2),
    Mesh(tp_size=2, fsdp_size=2),
    Mesh(fsdp_size=2, dp_replicate_size=2),
]
OVER_DATA = [mesh for mesh in MESHES if mesh.data_size > 1]
BOTH = Mesh(tp_size=2, dp_replicate_size=2)
SHARDED = Mesh(tp_size=2, fsdp_size=2)
SETUP = Setup(batch_size=4, eval_batch_size=4, accumulation=2, max_steps=10, has_eval=True)
"""17 rows, 8 a step: the third step of an epoch has one row, of which one data rank has none."""


@pytest.fixture(scope="module")
def alone_with(alone, checkpoint, tmp_path_factory):
    """The result of a setup in one process, computed once."""
    found = {}

    def get(setup, name="llama"):
        if (setup, name) not in found:
            args = (checkpoint(name, **CUT), tmp_path_factory.mktemp("alone"), setup)
            found[setup, name] = alone.run(run_on, ALONE, *args)[0]
        return found[setup, name]

    return get


def _first_numbers(mesh, path, folder):
    """The first loss and gradient norm of eight rows, at once and in micro-batches."""
    found = []
    smallest = max(2, mesh.data_size)
    for batch_size, accumulation in ((8, 1), (smallest, 8 // smallest)):
        setup = Setup(
            learning_rate=0.0, batch_size=batch_size, accumulation=accumulation, max_steps=1
        )
        trainer = trainer_on(mesh, path, folder, setup)
        with InDouble():
            trainer.train()
        found.append([trainer.state.log_history[0][key] for key in ("loss", "grad_norm")])
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_first_loss_and_norm_are_one_number_on_every_mesh(
    world_of, alone, checkpoint, tmp_path, mesh
):
    """Rows are of unequal length: a mean of means would be another number."""
    path = checkpoint("llama", **CUT)
    wanted = alone.run(_first_numbers, ALONE, path, tmp_path)[0]
    assert wanted[0] == pytest.approx(wanted[1], rel=1e-6)
    for found in world_of(mesh.world_size).run(_first_numbers, mesh, path, tmp_path):
        for numbers, others in zip(found, wanted, strict=True):
            assert numbers == pytest.approx(others, rel=1e-6)


CUT_OVER_DATA = [
    pytest.param(replace(mesh, is_cut=True), marks=pytest.mark.slow) for mesh in (SHARDED, BOTH)
]


@pytest.mark.parametrize("mesh", [*OVER_DATA, *CUT_OVER_DATA], ids=str)
def test_ten_steps_are_those_of_one_process(world_of, alone_with, checkpoint, tmp_path, mesh):
    """Losses, norms, token counts, evaluation and factors, over short last steps."""
    wanted = alone_with(SETUP)
    assert {"eval_loss", "eval_mean_token_accuracy", "num_tokens"} <= wanted[0][-2].keys() | set(
        wanted[0][0]
    )
    args = (mesh, checkpoint("llama", **CUT), tmp_path, SETUP)
    for found in world_of(mesh.world_size).run(run_on, *args):
        assert_same(found, wanted)
        assert found[2] == pytest.approx(wanted[2], rel=0.25), "padding differs"


def test_alone_every_number_is_that_of_trls_own_trainer(alone_with):
    """The counting itself changes nothing: a short last batch of an evaluation among them."""
    setup = replace(SETUP, max_steps=3, eval_batch_size=2)
    logs, _, flos = alone_with(setup)  # trl's own head computes in float32: no factors
    assert_same((logs, {}, flos), (*alone_with(replace(setup, trainer="trl"))[:1], {}, flos))


@pytest.mark.parametrize("trainer", ["trl", "transformers"])
@pytest.mark.parametrize("mesh", [BOTH, SHARDED], ids=str)
def test_an_unmodified_trainer_trains_the_same(
    world4, alone_with, checkpoint, tmp_path, trainer, mesh
):
    """Where the rows go round: it would train twice on what fills up a last batch."""
    setup = replace(SETUP, trainer=trainer, num_rows=16, has_eval=False, max_steps=4)
    wanted = alone_with(setup)
    for found in world4.run(run_on, mesh, checkpoint("llama", **CUT), tmp_path, setup):
        assert_same(found, wanted)


def test_masks_differ_between_data_ranks_and_not_within_a_tp_group(
    world_of, alone_with, checkpoint, tmp_path
):
    setup = replace(SETUP, dropout=0.3, max_steps=3, has_eval=False)
    args = (checkpoint("llama", **CUT), tmp_path, setup)
    wanted = world_of(2).run(run_on, Mesh(dp_replicate_size=2), *args)[0]
    for mesh in (BOTH, SHARDED):
        for found in world_of(4).run(run_on, mesh, *args):
            assert_same(found, wanted)
    with pytest.raises(AssertionError, match="step 1"):
        assert_same(wanted, alone_with(setup))


# ---- rows


def _seen(mesh, path, folder, setup):
    trainer = trainer_on(mesh, path, folder, setup)
    seen = RowsSeen().watch(trainer)
    trainer.train()
    return seen.rows


@pytest.mark.parametrize("num_rows", [17, 3], ids=["17 rows", "fewer than go round"])
def test_each_row_is_learned_once_in_an_epoch_and_by_one_data_rank(
    world4, checkpoint, tmp_path, num_rows
):
    steps = -(-num_rows // 8)
    setup = replace(SETUP, num_rows=num_rows, max_steps=steps, has_eval=False)
    found = world4.run(_seen, BOTH, checkpoint("llama", **CUT), tmp_path, setup)
    assert found[0] == found[1], "the ranks of a tp group have the same rows"
    assert found[2] == found[3]
    rows = sorted(tuple(row["input_ids"]) for row in token_rows(num_rows))
    assert sorted([*found[0], *found[2]]) == rows


@pytest.mark.parametrize("num_rows", range(1, 13))
def test_repeats_of_a_last_batch_are_told_from_its_rows(num_rows):
    """As accelerate shares them out: three data ranks, batches of two."""
    own = [num_own_rows(num_rows, 2, data_rank=rank, data_size=3) for rank in range(3)]
    assert sum(own) == num_rows % 6 or own == [2, 2, 2]
    assert own == sorted(own, reverse=True)
    assert dist.is_available()
