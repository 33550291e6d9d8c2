"""A run goes on over other axes: the same rows a step, shared out to other ranks."""

from dataclasses import replace

import pytest

from tests.axes.running import Mesh, assert_same, run_on, trainer_on
from tests.models import CUT
from tests.train.training import Setup
from tplora.errors import TrainError

pytestmark = pytest.mark.world

BOTH = Mesh(tp_size=2, dp_replicate_size=2)
SHARDED = Mesh(tp_size=2, fsdp_size=2)
SETUP = Setup(batch_size=4, max_steps=6, save_steps=3, saves_weights_only=False)
"""Three steps are an epoch: checkpoint-3 lies between two."""


@pytest.fixture(scope="module")
def run_at(world_of, checkpoint, tmp_path_factory):
    """``run_at(mesh)``: the run that nothing stopped, and its folder; computed once."""
    found = {}

    def get(mesh, setup=SETUP):
        if (mesh, setup) not in found:
            folder = tmp_path_factory.mktemp(str(mesh))
            world = world_of(mesh.world_size)
            results = world.run(run_on, mesh, checkpoint("llama", **CUT), folder, setup)
            found[mesh, setup] = results[0], folder
        return found[mesh, setup]

    return get


@pytest.mark.parametrize("mesh", [BOTH, SHARDED], ids=str)
def test_resumed_on_the_same_mesh_every_bit_is_the_same(
    world_of, run_at, checkpoint, tmp_path, mesh
):
    setup = replace(SETUP, dropout=0.2, num_rows=29)
    wanted, folder = run_at(mesh, setup)
    args = (checkpoint("llama", **CUT), tmp_path, setup, folder / "checkpoint-3")
    for found in world_of(4).run(run_on, mesh, *args):
        assert_same(found, wanted, is_exact=True)
    for file in ("optimizer.pt", "adapter_model.safetensors"):
        again = (tmp_path / "checkpoint-6" / file).read_bytes()
        assert again == (folder / "checkpoint-6" / file).read_bytes(), file


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Mesh(tp_size=2), BOTH),
        (BOTH, Mesh(tp_size=2)),
        (Mesh(tp_size=2), SHARDED),
        (SHARDED, Mesh()),
    ],
    ids=str,
)
def test_resumed_over_other_axes_the_run_is_the_same(
    world_of, run_at, checkpoint, tmp_path, saved, resumed
):
    wanted, folder = run_at(saved)
    args = (checkpoint("llama", **CUT), tmp_path, SETUP, folder / "checkpoint-3")
    for found in world_of(resumed.world_size).run(run_on, resumed, *args):
        assert_same(found, wanted)


def _refused(mesh, path, folder, setup, resumed):
    trainer = trainer_on(mesh, path, folder, setup)
    with pytest.raises(TrainError) as caught:
        trainer.train(resume_from_checkpoint=str(resumed))
    return str(caught.value)


def test_steps_of_other_rows_are_refused_with_both_numbers(world_of, run_at, checkpoint, tmp_path):
    """Copies were added and the batch of each rank kept."""
    _, folder = run_at(Mesh(tp_size=2))
    setup = replace(SETUP, batch_size=8)
    args = (checkpoint("llama", **CUT), tmp_path, setup, folder / "checkpoint-3")
    for message in world_of(4).run(_refused, BOTH, *args):
        assert "checkpoint-3: its steps have 8 rows, this run's have 16" in message
