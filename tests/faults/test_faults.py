"""What ends a run leaves nothing half, and the run that goes on from there ends as if unharmed."""

import pytest

from tests.faults.conftest import REPEATS
from tests.faults.running import assert_ended_like, assert_nothing_is_half, export, finetune
from tests.world import RankError, World
from tplora.run.start import Start

pytestmark = pytest.mark.world

GO_ON = Start(or_begin=True)


def goes_on(world, place, run, whole):
    """Started again by the same command, the run ends like one that nothing stopped."""
    assert_nothing_is_half(run)
    assert world.run(finetune, place, run, (), GO_ON) == ["", ""]
    assert_nothing_is_half(run)
    assert_ended_like(run, whole)


SAVING = "tplora.train.checkpoint_saving"
FINAL = "tplora.run.finetune"
TRAINER = "tplora.train.trainer.TploraSFTTrainer"
KILLS = {
    "before-a-checkpoint": ("killed at", 1, 2),
    "in-a-step": ("killed at", 1, 4),
    "the-writer-in-a-step": ("killed at", 0, 6),
    "half-a-file": ("killed in", 0, "torch.save", 4, True),
    "before-a-checkpoint-is-renamed": ("killed in", 0, "tplora.files._rename_folder", 2),
    "before-old-ones-go": ("killed in", 0, f"{SAVING}.remove_old_checkpoints", 3),
    "in-a-gather": ("killed in", 1, f"{SAVING}.gather_factors", 2),
    "before-an-epoch-is-evaluated": ("killed in", 1, f"{TRAINER}.evaluate", 2),
    "in-the-last-gather": ("killed in", 1, f"{FINAL}.gather_factors"),
    "before-the-adapter-is-written": ("killed in", 0, f"{FINAL}.write_adapter"),
    "before-the-adapter-is-renamed": ("killed in", 0, "tplora.files._rename_folder", 4),
    "before-it-is-verified": ("killed in", 0, "tplora.run.finish.verify_adapter"),
}
FAST = ("half-a-file", "before-the-adapter-is-renamed")


@pytest.mark.parametrize(
    "kill", [pytest.param(k, marks=[] if k in FAST else pytest.mark.slow) for k in KILLS]
)
def test_a_rank_is_killed(world2, place, whole, tmp_path, kill):
    with pytest.raises(RankError, match=f"rank {KILLS[kill][1]} of 2: the process died"):
        world2.run(finetune, place, tmp_path / "run", KILLS[kill])
    goes_on(world2, place, tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(max(20, REPEATS)))
def test_a_rank_is_killed_at_a_random_moment(world2, place, whole, tmp_path, seed):
    """Up to the end of a run, which then has to go on from wherever it was."""
    fault = ("killed after", seed % 2, seed, 2.5)
    try:
        world2.run(finetune, place, tmp_path / "run", fault)
    except RankError as error:
        assert f"rank {seed % 2} of 2: the process died" in str(error)  # noqa: PT017  or it lived
    goes_on(world2, place, tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("rank", "step"),
    [(1, 3), (1, 4), *(pytest.param(rank, 3, marks=pytest.mark.slow) for rank in (0, "all"))],
)
def test_a_rank_that_is_asked_to_end_ends_all_at_its_step(
    world2, place, whole, tmp_path, rank, step
):
    """With a checkpoint of step 3, which has none otherwise; of step 4 once it is evaluated."""
    run = tmp_path / "run"
    for error in world2.run(finetune, place, run, ("asked to end", rank, step)):
        assert error == (
            f"PreemptedError: stopped by SIGTERM after step {step}/6; checkpoint-{step} is saved; "
            "go on with --resume"
        )
    saved = {path.name for path in run.glob("checkpoint-*")}
    assert saved == {"checkpoint-2", f"checkpoint-{step}"}
    goes_on(world2, place, run, whole)


@pytest.mark.slow
def test_asked_to_end_a_run_that_saves_nothing_saves_all_of_its_step(world2, place, tmp_path):
    """Its arguments say weights only, and those never."""
    run, fault = tmp_path / "run", ("asked to end", 1, 2)
    errors = world2.run(finetune, place, run, fault, None, "unsaved.toml")
    assert "after step 2/6; checkpoint-2 is saved" in errors[0]
    assert_nothing_is_half(run)
    assert (run / "checkpoint-2" / "optimizer.pt").is_file()


@pytest.mark.parametrize(
    ("which", "where"),
    [
        ("q_proj.lora_B", "tp rank 1"),
        pytest.param("q_proj.lora_A", "every rank", marks=pytest.mark.slow),
    ],
)
def test_a_gradient_that_is_not_finite_is_named_with_its_rank(
    world2, place, whole, tmp_path, which, where
):
    """A sum of all ranks' parts has it everywhere."""
    run = tmp_path / "run"
    for error in world2.run(finetune, place, run, ("poisoned", 1, 4, which)):
        assert error.startswith("TrainError: step 4: the gradient of base_model.model.")
        assert f"{which}.default.weight is not finite on {where}, so the gradient norm is" in error
    assert not (run / "adapter").exists()
    goes_on(world2, place, run, whole)


def test_a_rank_that_is_fed_otherwise_stops_all_and_is_named(world2, place, whole, tmp_path):
    run = tmp_path / "run"
    for error in world2.run(finetune, place, run, ("fed otherwise", 1, 4)):
        assert error.startswith("TrainError: step 4: 'input_ids' of the batch differs between tp r")
        assert "tp rank 0 and tp rank 1" in error
    goes_on(world2, place, run, whole)


def test_a_full_disk_stops_every_rank_and_is_named(world2, place, whole, tmp_path):
    run = tmp_path / "run"
    errors = world2.run(finetune, place, run, ("disk full", 0, "torch.save", 4))
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"ArtifactError: {run}/checkpoint-4: the disk is full")
    goes_on(world2, place, run, whole)


@pytest.mark.slow
def test_a_file_that_the_kernel_cuts_short_stops_every_rank_and_is_named(place, whole, tmp_path):
    """In a world of its own: one meets in a file, which grows with all that it ran before."""
    run = tmp_path / "run"
    with World(2) as fresh:
        errors = fresh.run(finetune, place, run, ("small files", 0, 20_000))
        assert errors[0] == errors[1]
        assert errors[0].startswith(f"ArtifactError: {run}/checkpoint-2: ")
        goes_on(fresh, place, run, whole)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (("killed in", "tplora.files._settle_folder"), "the process died"),
        (("small files", 20_000), "ArtifactError"),
    ],
    ids=["killed", "full"],
)
def test_an_export_that_ends_early_leaves_nothing_to_be_taken_for_a_model(
    alone, place, whole, tmp_path, fault, says
):
    adapter, merged = whole / "adapter", tmp_path / "merged"
    with pytest.raises(RankError, match=says):
        alone.run(export, place, adapter, merged, fault)
    assert not merged.exists()
    alone.run(export, place, adapter, merged)
    assert (merged / "model.safetensors").is_file()


SLOW = ("slow disk", "all", 7.0, 3.0)


@pytest.mark.slow
def test_a_disk_slower_than_a_collective_may_be_ends_nothing(world2, place, whole, tmp_path):
    run = tmp_path / "run"
    assert world2.run(finetune, place, run, SLOW) == ["", ""]
    assert_ended_like(run, whole)


@pytest.mark.slow
def test_with_the_collectives_own_patience_it_would(world2, place, tmp_path):
    with pytest.raises((RankError, AssertionError)):
        assert world2.run(finetune, place, tmp_path / "run", (*SLOW, False)) == ["", ""]
