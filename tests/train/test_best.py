"""The best checkpoint at the end and stopping early: alike on every rank, mesh and resumed run."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback

from tests.axes.running import Mesh, assert_same, results, trainer_on
from tests.models import CUT, InDouble
from tests.train.training import Setup
from tplora.errors import ArtifactError, TrainError

pytestmark = pytest.mark.world

BEST = Setup(
    batch_size=4,
    eval_batch_size=4,
    max_steps=6,
    has_eval=True,
    save_steps=1,
    saves_weights_only=False,
    arguments=(
        ("eval_steps", 1),
        ("load_best_model_at_end", True),
        ("metric_for_best_model", "loss"),
        ("greater_is_better", False),
        ("lr_scheduler_type", "constant"),
        ("restore_callback_states_from_checkpoint", True),
        ("save_total_limit", 3),
    ),
)
"""A few random rows are learned by heart: on others the loss rises after the first steps."""
MESHES = [
    Mesh(tp_size=2),
    pytest.param(Mesh(tp_size=3), marks=pytest.mark.slow),
    Mesh(fsdp_size=2),
    pytest.param(Mesh(tp_size=2, dp_replicate_size=2), marks=pytest.mark.slow),
]


def _run(mesh, path, folder, setup, resumed=None, patience=None):
    """Results, the best step, the last one, and the factors of the best checkpoint's own file."""
    callbacks = [] if patience is None else [EarlyStoppingCallback(patience)]
    trainer = trainer_on(mesh, path, folder, setup, callbacks=callbacks)
    with InDouble():
        trainer.train(resume_from_checkpoint=resumed and str(resumed))
    return results(trainer), trainer.best_step, trainer.state.global_step


@pytest.fixture(scope="module")
def alone_best(alone, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return alone.run(_run, Mesh(), checkpoint("llama", **CUT), folder, BEST)[0]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_best_factors_are_there_at_the_end_on_every_mesh(
    world_of, alone_best, checkpoint, tmp_path, mesh
):
    wanted, best, last = alone_best
    assert best < last == 6, "a run whose last checkpoint is not the best one"
    path = checkpoint("llama", **CUT)
    found = world_of(mesh.world_size).run(_run, mesh, path, tmp_path, BEST)
    for results_here, best_here, last_here in found:
        assert (best_here, last_here) == (best, last)
        assert_same(results_here, wanted)
    kept = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", "checkpoint-5", "checkpoint-6"}
    shorter = replace(BEST, max_steps=best)
    trained = world_of(1).run(_run, Mesh(), path, tmp_path / "short", shorter)[0][0]
    for name, factor in found[0][0][1].items():
        assert (factor - trained[1][name]).abs().max() <= 1e-12, f"{name}: of another step"


@pytest.mark.parametrize("mesh", [Mesh(tp_size=2), Mesh(fsdp_size=2)], ids=str)
def test_a_resumed_run_still_knows_the_best_one(world_of, checkpoint, tmp_path, mesh):
    """The run's folder has been moved; then the best checkpoint is gone."""
    world, path = world_of(2), checkpoint("llama", **CUT)
    wanted = world.run(_run, mesh, path, tmp_path / "whole", BEST)
    best = wanted[0][1]
    moved = tmp_path / "moved"
    moved.mkdir()
    for step in {best, 5}:
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", moved / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "whole")
    found = world.run(_run, mesh, path, moved, BEST, moved / "checkpoint-5")
    for (mine, *steps), (other, *other_steps) in zip(found, wanted, strict=True):
        assert steps == other_steps
        assert_same(mine, other, is_exact=True)
    shutil.rmtree(moved / f"checkpoint-{best}")
    world.run(_resume_without_best, mesh, path, moved)


def _resume_without_best(mesh, path, folder):
    with pytest.raises(ArtifactError, match=r"checkpoint-\d: is the best checkpoint so far, and"):
        _run(mesh, path, folder, BEST, folder / "checkpoint-5")


@pytest.mark.parametrize(
    "mesh", [Mesh(tp_size=2), pytest.param(Mesh(fsdp_size=2), marks=pytest.mark.slow)], ids=str
)
def test_every_rank_stops_early_at_the_same_step_resumed_or_not(
    world_of, checkpoint, tmp_path, mesh
):
    world, path = world_of(2), checkpoint("llama", **CUT)
    setup = replace(BEST, arguments=(*BEST.arguments, ("save_total_limit", None)))
    whole = tmp_path / "whole"
    wanted = world.run(_run, mesh, path, whole, setup, None, 2)
    (stopped,) = {step for _, _, step in wanted}
    assert 2 < stopped < 6
    before, at = (whole / f"checkpoint-{step}" for step in (stopped - 1, stopped))
    for resumed in (before, at):
        found = world.run(_run, mesh, path, whole, setup, resumed, 2)
        for (mine, *steps), (other, *other_steps) in zip(found, wanted, strict=True):
            assert steps == other_steps
            assert_same(mine, other, is_exact=True)


def _run_with_other_numbers(path, folder):
    """A rank whose loss comes out otherwise, as rounding on another device may make it."""
    trainer = trainer_on(Mesh(tp_size=2), path, folder, BEST, callbacks=[EarlyStoppingCallback(1)])
    before = trainer.prediction_step

    def off(*args, **kwargs):
        loss, *rest = before(*args, **kwargs)
        return (loss + dist.get_rank() * torch.rand(()), *rest)

    trainer.prediction_step = off
    trainer.train()
    return trainer.state.global_step, trainer.best_step


def test_the_first_rank_decides_for_all(world_of, checkpoint, tmp_path):
    found = world_of(2).run(_run_with_other_numbers, checkpoint("llama", **CUT), tmp_path)
    assert found[0] == found[1]


def _refused(path, folder):
    setup = replace(
        BEST, max_steps=2, arguments=(*BEST.arguments, ("eval_steps", 3), ("save_steps", 3))
    )
    trainer = trainer_on(Mesh(tp_size=2), path, folder, setup)
    with pytest.raises(TrainError, match="first evaluation is at step 3, the run ends at step 2"):
        trainer.train()


def test_a_run_that_ends_before_it_is_judged_is_refused(world_of, checkpoint, tmp_path):
    world_of(2).run(_refused, checkpoint("llama", **CUT), tmp_path)
