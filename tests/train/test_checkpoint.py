"""A run that is stopped and resumed, at any tp_size, is the run that was never stopped."""

import errno
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from tests.models import CUT, InDouble, load_plain
from tests.tiny import VOCAB
from tests.train import test_experts
from tests.train.training import Setup, build_trainer, logged_numbers
from tests.zoo.build import build_model, tiny_config
from tplora.errors import ArtifactError, TrainError
from tplora.train.checkpoint import ResumesAtAnySize
from tplora.train.checkpoint_files import check_checkpoint, find_last_checkpoint
from tplora.train.optimizer_state import gather_optimizer_state

pytestmark = pytest.mark.world

SETUP = Setup(dropout=0.2, max_steps=6, save_steps=1, saves_weights_only=False)
"""Five steps are an epoch: checkpoint-3 lies in the first, checkpoint-5 between the two."""


def _run(path, folder, setup, resumed=None, *, load=None):
    """Logged numbers and full factors of a run, from the start or from a checkpoint."""
    how = mock.patch("tests.train.training.load", load) if load else mock.MagicMock()
    with how:
        trainer = build_trainer(path, folder, setup)
    with InDouble():
        trainer.train(resume_from_checkpoint=resumed and str(resumed))
    model = trainer.accelerator.unwrap_model(trainer.model)
    if load is load_plain:
        factors = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    else:
        factors = {name: factor.full().cpu() for name, factor in model.factors().items()}
    return logged_numbers(trainer.state.log_history), factors


def _assert_same(found, wanted, *, is_exact=False, but=()):
    (logs, factors), (other_logs, other_factors) = found, wanted
    assert [entry["step"] for entry in logs] == [entry["step"] for entry in other_logs]
    for entry, other in zip(logs, other_logs, strict=True):
        for key in sorted(other.keys() - {"train_loss", *but}):  # of the steps since the resume
            near = other[key] if is_exact else pytest.approx(other[key], rel=1e-6)
            assert entry[key] == near, f"step {entry['step']}: {key}"
    assert factors.keys() == other_factors.keys()
    for name, factor in factors.items():
        worst = float((factor - other_factors[name]).abs().max())
        assert worst <= (0 if is_exact else 1e-7), f"{name}: off by {worst:.3e}"


@pytest.fixture(scope="module")
def run_at(world_of, checkpoint, tmp_path_factory):
    """``run_at(size)``: the uninterrupted run at that tp_size, and its folder; computed once."""
    found = {}

    def get(size, setup=SETUP):
        if (size, setup) not in found:
            folder = tmp_path_factory.mktemp(f"tp{size}")
            results = world_of(size).run(_run, checkpoint("llama", **CUT), folder, setup)
            found[size, setup] = (results[0], folder)
        return found[size, setup]

    return get


@pytest.mark.parametrize("step", [3, 5], ids=["within-an-epoch", "between-epochs"])
def test_resumed_at_the_same_tp_size_every_bit_is_the_same(
    world_of, run_at, checkpoint, tmp_path, step
):
    wanted, folder = run_at(2)
    resumed = folder / f"checkpoint-{step}"
    for found in world_of(2).run(_run, checkpoint("llama", **CUT), tmp_path, SETUP, resumed):
        _assert_same(found, wanted, is_exact=True)
    for file in ("optimizer.pt", "adapter_model.safetensors", "rng_state.pth"):
        again = (tmp_path / "checkpoint-6" / file).read_bytes()
        assert again == (folder / "checkpoint-6" / file).read_bytes(), file


@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (2, 3), (2, 4), (1, 2)])
def test_resumed_at_another_tp_size_the_run_is_the_same(
    world_of, run_at, checkpoint, tmp_path, saved, resumed
):
    wanted, folder = run_at(saved)
    args = (checkpoint("llama", **CUT), tmp_path, SETUP, folder / "checkpoint-3")
    for found in world_of(resumed).run(_run, *args):
        _assert_same(found, wanted)


def test_the_optimizer_is_saved_as_one_process_has_it(run_at):
    alone, cut = (
        torch.load(run_at(size)[1] / "checkpoint-3" / "optimizer.pt", weights_only=True)
        for size in (1, 2)
    )
    assert alone["param_groups"] == cut["param_groups"]
    assert alone["state"].keys() == cut["state"].keys()
    for index, values in alone["state"].items():
        assert values.keys() == cut["state"][index].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in values.items():
            torch.testing.assert_close(cut["state"][index][key], value, rtol=1e-6, atol=1e-9)


PLAIN = replace(SETUP, dropout=0.0)
COUNTED = ("num_tokens", "num_input_tokens_seen")
"""A plain trainer starts counting anew, and tp ranks are counted as they are there."""


def _run_plain(path, folder, setup, resumed=None):
    """trl's trainer over plain PEFT."""
    return _run(path, folder, replace(setup, trainer="trl"), resumed, load=load_plain)


@pytest.mark.parametrize("targets", ["all-linear", "patterns"])
def test_a_plain_trainer_resumes_our_checkpoint(world_of, alone, checkpoint, tmp_path, targets):
    path, setup = checkpoint("llama", **CUT), replace(PLAIN, targets=targets, save_steps=3)
    wanted = world_of(2).run(_run, path, tmp_path / "ours", setup)[0]
    resumed = tmp_path / "ours" / "checkpoint-3"
    found = world_of(1).run(_run_plain, path, tmp_path / "plain", setup, resumed)[0]
    _assert_same(found, wanted, but=COUNTED)


def test_our_trainer_resumes_a_plain_ones_checkpoint(world_of, checkpoint, tmp_path):
    path = checkpoint("llama", **CUT)
    wanted = world_of(1).run(_run_plain, path, tmp_path / "plain", PLAIN)[0]
    resumed = tmp_path / "plain" / "checkpoint-3"
    for found in world_of(2).run(_run, path, tmp_path / "ours", PLAIN, resumed):
        _assert_same(found, wanted, but=COUNTED)


def test_adapters_on_head_and_embedding_resume(world_of, checkpoint, tmp_path):
    path, setup = checkpoint("qwen2_tied", **CUT), replace(SETUP, targets="ends", save_steps=3)
    wanted = world_of(2).run(_run, path, tmp_path / "whole", setup)[0]
    resumed = tmp_path / "whole" / "checkpoint-3"
    _assert_same(world_of(1).run(_run, path, tmp_path / "alone", setup, resumed)[0], wanted)


EXPERTS = replace(test_experts.SETUP, max_steps=4, save_steps=2, saves_weights_only=False)


def test_strided_factors_of_experts_resume(world_of, tmp_path):
    config = tiny_config("qwen3_moe")
    config.vocab_size = VOCAB
    build_model("qwen3_moe", config).save_pretrained(tmp_path / "base")
    path, resumed = str(tmp_path / "base"), tmp_path / "whole" / "checkpoint-2"
    wanted = world_of(2).run(_run_experts, path, tmp_path / "whole")[0]
    for size in (2, 1):
        for found in world_of(size).run(_run_experts, path, tmp_path / f"tp{size}", resumed):
            _assert_same(found, wanted, is_exact=size == 2)


def _run_experts(path, folder, resumed=None):
    return _run(path, folder, EXPERTS, resumed, load=test_experts._load)


def test_a_checkpoint_of_the_last_step_adds_no_step(world_of, run_at, checkpoint, tmp_path):
    wanted, folder = run_at(2)
    resumed = folder / "checkpoint-6"
    for found in world_of(2).run(_run, checkpoint("llama", **CUT), tmp_path, SETUP, resumed):
        _assert_same((found[0][:6], found[1]), (wanted[0][:6], wanted[1]), is_exact=True)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_logged_mean_is_of_the_steps_on_both_sides_of_the_resume(
    world_of, run_at, checkpoint, tmp_path
):
    setup = replace(SETUP, logging_steps=2, save_steps=3)
    wanted, folder = run_at(2, setup)
    args = (checkpoint("llama", **CUT), tmp_path, setup, folder / "checkpoint-3")
    _assert_same(world_of(2).run(_run, *args)[0], wanted, is_exact=True)


def test_what_the_arguments_say_of_saving_holds_over_what_the_checkpoint_says(
    world_of, run_at, checkpoint, tmp_path
):
    setup = replace(SETUP, save_steps=2)
    resumed = run_at(1)[1] / "checkpoint-3"
    world_of(1).run(_run, checkpoint("llama", **CUT), tmp_path, setup, resumed)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}


def test_what_is_not_done_with_checkpoints_is_refused_by_name():
    with pytest.raises(TrainError, match=r"train\.push_to_hub = true"):
        ResumesAtAnySize(args=SimpleNamespace(push_to_hub=True))


# ---- what is broken


def _forget_optimizer(saved, optimizer, _factors, **_):
    return optimizer.state_dict()


def _run_forgetting(path, folder, resumed, what):
    take_progress = ResumesAtAnySize._take_progress

    def forget_forwards(self, folder):
        take_progress(self, folder)
        self.model.forward_seed.num_forwards = 0

    breaks = {
        "optimizer": mock.patch("tplora.train.checkpoint.cut_optimizer_state", _forget_optimizer),
        "forwards": mock.patch.object(ResumesAtAnySize, "_take_progress", forget_forwards),
    }
    with breaks[what]:
        return _run(path, folder, SETUP, resumed)


@pytest.mark.parametrize(
    ("what", "seen"), [("optimizer", "step 5: .*"), ("forwards", "step 4: .*")]
)
def test_a_resume_that_forgets_is_seen(world_of, run_at, checkpoint, tmp_path, what, seen):
    wanted, folder = run_at(2)
    args = (checkpoint("llama", **CUT), tmp_path, folder / "checkpoint-3", what)
    found = world_of(2).run(_run_forgetting, *args)[0]
    with pytest.raises(AssertionError, match=seen):
        _assert_same(found, wanted)


def _run_with_a_full_disk(path, folder):
    trainer = build_trainer(path, folder, replace(SETUP, save_steps=2))
    if dist.get_rank() == 0:
        full = OSError(errno.ENOSPC, "No space left on device")
        trainer._save_scaler = mock.Mock(side_effect=full)
    with pytest.raises(ArtifactError) as caught:
        trainer.train()
    return trainer.state.global_step, str(caught.value)


def _train_slowly_writing(path, folder):
    """Two steps to a checkpoint; the first is not finished before the next step is."""
    trainer = build_trainer(path, folder, SLOW)
    save, seen = torch.save, []

    def saved_later(value, file):
        if file.name == "optimizer.pt" and not seen:
            seen.append(_wait(lambda: trainer.state.global_step > 2))
            seen.append(file.parent.parent.joinpath("checkpoint-2").exists())
        save(value, file)

    with mock.patch("torch.save", saved_later), InDouble():
        trainer.train()
    return seen, {path.name for path in folder.glob("checkpoint-*")}


def _wait(condition, timeout_s=30):
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


SLOW = replace(SETUP, save_steps=2)


def test_a_checkpoint_is_written_while_training_goes_on(world_of, run_at, checkpoint, tmp_path):
    """And holds what it held when it was begun, to the bit; none of it can be seen before."""
    folder = run_at(2, SLOW)[1]
    found = world_of(2).run(_train_slowly_writing, checkpoint("llama", **CUT), tmp_path)
    assert found[0][0] == [True, False]
    assert found[0][1] == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    for file in ("optimizer.pt", "adapter_model.safetensors", "rng_state.pth", "scheduler.pt"):
        written = (tmp_path / "checkpoint-2" / file).read_bytes()
        assert written == (folder / "checkpoint-2" / file).read_bytes(), file
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert [entry["step"] for entry in state["log_history"]] == [1, 2]


class _Reads(TrainerCallback):
    """Of a tracker that uploads checkpoints."""

    def on_save(self, args, state, control, **kwargs):
        check_checkpoint(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _train_watched(path, folder):
    trainer = build_trainer(path, folder, SLOW, callbacks=[_Reads()])
    trainer.train()


def test_a_callback_that_hears_of_a_checkpoint_finds_it(world_of, checkpoint, tmp_path):
    world_of(2).run(_train_watched, checkpoint("llama", **CUT), tmp_path)


def test_a_writer_that_fails_in_the_middle_leaves_no_folder_and_stops_every_rank(
    world_of, checkpoint, tmp_path
):
    found = world_of(2).run(_run_with_a_full_disk, checkpoint("llama", **CUT), tmp_path)
    assert found[0] == found[1]
    assert found[0][0] in (2, 3, 4), "at the next logged step, at the next checkpoint at the latest"
    assert (
        found[0][1] == f"{tmp_path}/checkpoint-2: the disk is full; make room or name another place"
    )
    assert not list(tmp_path.iterdir())


def _poison_and_train(path, folder):
    trainer = build_trainer(path, folder, replace(SETUP, save_steps=2))
    gather = "tplora.train.checkpoint_saving.gather_optimizer_state"

    def poisoned(optimizer, *args, **kwargs):
        state = gather_optimizer_state(optimizer, *args, **kwargs)
        if state:
            state["state"][3]["exp_avg"][0, 0] = float("nan")
        return state

    with mock.patch(gather, poisoned), pytest.raises(ArtifactError) as caught:
        trainer.train()
    return str(caught.value)


def test_an_optimizer_state_that_is_not_finite_reaches_no_file(world_of, checkpoint, tmp_path):
    for message in world_of(2).run(_poison_and_train, checkpoint("llama", **CUT), tmp_path):
        assert "the optimizer's exp_avg of base_model.model" in message
        assert len(message.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def _cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path):
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


class _RunsCode:
    def __reduce__(self):
        return Path.touch, (Path("was-run"),)


def _write(text):
    return lambda path: path.write_text(text)


def _write_code(path):
    torch.save(_RunsCode(), path)


DAMAGES = {
    "missing": ("scheduler.pt", Path.unlink, "has no scheduler.pt"),
    "no-json": ("trainer_state.json", _write(""), "trainer_state.json is damaged"),
    "no-step": ("trainer_state.json", _write("{}"), "global_step is None"),
    "cut-factors": ("adapter_model.safetensors", _cut_off, "adapter_model.safetensors is damaged"),
    "cut-optimizer": ("optimizer.pt", _cut_off, "optimizer.pt is damaged"),
    "flipped-bit": ("optimizer.pt", _flip, "optimizer.pt is damaged"),
    "code": ("rng_state.pth", _write_code, "rng_state.pth is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over(run_at, tmp_path, damage):
    name, act, says = DAMAGES[damage]
    for step in (2, 3):
        shutil.copytree(run_at(2)[1] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    act(tmp_path / "checkpoint-3" / name)
    said = []
    assert find_last_checkpoint(tmp_path, say=said.append) == tmp_path / "checkpoint-2"
    (line,) = said
    assert line.startswith(f"{tmp_path}/checkpoint-3: passed over: ")
    assert says in line
    assert (tmp_path / "checkpoint-3").is_dir()
    with pytest.raises(ArtifactError, match=f"checkpoint-3: cannot be resumed: .*{says}"):
        check_checkpoint(tmp_path / "checkpoint-3")
    assert not Path("was-run").exists()


def _refused(path, folder, setup, resumed):
    trainer = build_trainer(path, folder, setup)
    with pytest.raises((ArtifactError, TrainError)) as caught:
        trainer.train(resume_from_checkpoint=str(resumed))
    assert trainer.state.global_step in (0, 3)
    return str(caught.value)


def _other_alpha(folder):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 9}))


def _other_shape(folder):
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    state["state"][4]["exp_avg"] = state["state"][4]["exp_avg"].T.contiguous()
    torch.save(state, folder / "optimizer.pt")


def _no_file(folder):
    (folder / "optimizer.pt").unlink()


@pytest.mark.parametrize(
    ("act", "changes", "says"),
    [
        (_other_alpha, {}, "lora_alpha was 9, this adapter's is 8"),
        (_other_shape, {}, "optimizer.pt: the state of base_model.* has shape"),
        (_no_file, {}, "has no optimizer.pt; was it saved with save_only_model?"),
        (lambda _: None, {"targets": "ends"}, "in the file or in the model but not in both"),
        (lambda _: None, {"max_steps": 2}, "is of step 3, past the end of this run, step 2"),
    ],
    ids=["alpha", "shape", "missing", "targets", "past-the-end"],
)
def test_a_checkpoint_of_another_run_is_refused_on_every_rank(
    world_of, run_at, checkpoint, tmp_path, act, changes, says
):
    resumed = tmp_path / "checkpoint-3"
    shutil.copytree(run_at(2)[1] / "checkpoint-3", resumed)
    act(resumed)
    setup = replace(SETUP, **changes)
    found = world_of(2).run(_refused, checkpoint("llama", **CUT), tmp_path, setup, resumed)
    for message in found:
        assert len(message.splitlines()) == 1
        assert re.search(says, message)
