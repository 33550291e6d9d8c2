"""`tplora finetune --resume` from the outside: a run that was killed ends as if it had not been."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.run.test_finetune import RECIPE, chat, children_of, metrics, tplora, wait_for
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer
from tplora.train.checkpoint_files import find_last_checkpoint

pytestmark = pytest.mark.world

CLOCK = {"tokens_per_s", "peak_bytes"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a recipe that saves every two of four steps, a base and rows."""
    folder = tmp_path_factory.mktemp("place")
    write_checkpoint("llama", folder / "base", vocab_size=512, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(folder / "base")
    recipe = RECIPE.replace("tp_size = 2", "tp_size = 1")
    (folder / "recipe.toml").write_text(recipe + 'save_strategy = "steps"\nsave_steps = 2\n')
    (folder / "train.jsonl").write_text("\n".join(chat(n) for n in range(14)) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(chat(n) for n in range(20, 25)) + "\n")
    return folder


@pytest.fixture(scope="module")
def whole(place) -> Path:
    """The run's folder when nothing stops it."""
    done = tplora(place, "finetune", "recipe.toml")
    assert done.returncode == 0, done.stderr + done.stdout
    return place / "runs" / "recipe"


@pytest.fixture
def killed(whole, tmp_path) -> Path:
    """What a kill after the third step leaves: half a line, half a checkpoint, no adapter."""
    run = tmp_path / "killed"
    shutil.copytree(whole, run)
    for name in ("adapter", "checkpoint-4"):
        shutil.rmtree(run / name)
    for name in ("loss.png", "probe.safetensors"):
        (run / name).unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:4]) + "\n" + lines[4][:20])
    half = run / ".checkpoint-4.aside-1-00"
    half.mkdir()
    (half / "optimizer.pt").write_bytes(b"half")
    return run


def resume(place: Path, run: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return tplora(place, "finetune", "recipe.toml", "--output", str(run), "--resume", *argv)


def contents(run: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in run.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def without_clock(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in records]


def test_a_resumed_run_ends_as_the_run_that_nothing_stopped(place, whole, killed):
    """Then, being complete, it is left alone; and with another learning rate it is refused."""
    done = resume(place, killed)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"resumed from {killed}/checkpoint-2" in done.stdout
    for name in ("adapter/adapter_model.safetensors", "checkpoint-4/optimizer.pt"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert without_clock(metrics(killed)) == without_clock(metrics(whole))
    log = (killed / "log.txt").read_text()
    assert log.count("step 1/4  loss") == 1, "what was said before stays"
    assert log.count("step 4/4  loss") == 2
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}

    before = contents(killed)
    done = resume(place, killed)
    assert done.returncode == 0, done.stderr
    assert "this run is complete" in done.stdout
    done = resume(place, killed, "--set", "train.learning_rate=0.5", "--set", "lora.r=8")
    assert done.returncode == 1
    assert "train.learning_rate: was 0.01, is 0.5" in done.stderr
    assert "lora.r: was 4, is 8" in done.stderr
    assert contents(killed) == before


def test_a_run_goes_on_at_another_tp_size_and_for_longer(place, whole, killed):
    done = resume(place, killed, "--set", "parallel.tp_size=2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count(f"resumed from {killed}/checkpoint-2") == 1
    for name, factor in load_file(killed / "adapter" / "adapter_model.safetensors").items():
        truth = load_file(whole / "adapter" / "adapter_model.safetensors")[name]
        torch.testing.assert_close(factor, truth, rtol=0, atol=2e-5, msg=name)
    done = resume(place, killed, "--set", "train.max_steps=5")
    assert done.returncode == 0, done.stderr + done.stdout
    assert [record["step"] for record in metrics(killed) if "loss" in record] == [1, 2, 3, 4, 5]
    done = resume(place, killed, "--set", "train.max_steps=3")
    assert done.returncode == 1
    assert "checkpoint-5: has trained 5, past train.max_steps = 3" in done.stderr


def test_a_damaged_last_checkpoint_is_passed_over_and_said(place, killed, tmp_path):
    shutil.copytree(killed / "checkpoint-2", killed / "checkpoint-3")
    (killed / "checkpoint-3" / "optimizer.pt").write_bytes(b"torn")
    done = resume(place, killed)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "checkpoint-3: passed over: optimizer.pt is damaged" in done.stdout
    assert f"resumed from {killed}/checkpoint-2" in done.stdout
    assert (killed / "checkpoint-3" / "optimizer.pt").read_bytes() == b"torn"


def test_without_a_run_or_a_checkpoint_it_says_what_is_missing(place, killed, tmp_path):
    done = resume(place, tmp_path / "none")
    assert done.returncode == 1
    assert f"error: {tmp_path}/none: holds no run to resume; start it without" in done.stderr
    shutil.rmtree(killed / "checkpoint-2")
    done = resume(place, killed)
    assert done.returncode == 1
    assert "has no checkpoint to resume" in done.stderr
    done = resume(place, killed, "--overwrite")
    assert done.returncode == 2
    assert "--resume" in done.stderr


def test_a_rank_killed_at_any_moment_leaves_whole_checkpoints(place):
    argv = ["-m", "tplora", "finetune", "recipe.toml", "--output", "torn", "--set",
            "train.max_steps=100000", "--set", "train.save_steps=1", "--set",
            "train.save_total_limit=3", "--set", "parallel.tp_size=2"]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, *argv],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        wait_for(place / "torn" / "metrics.jsonl", text='"step": 4')
        os.kill(children_of(launcher.pid)[0], signal.SIGKILL)
        launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    found = find_last_checkpoint(place / "torn")
    step = json.loads((found / "trainer_state.json").read_text())["global_step"]
    done = resume(place, place / "torn", "--set", f"train.max_steps={step + 2}")
    assert done.returncode == 0, done.stderr + done.stdout
    steps = [record["step"] for record in metrics(place / "torn") if "loss" in record]
    assert steps == list(range(1, step + 3))
