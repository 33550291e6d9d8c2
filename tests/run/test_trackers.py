"""A recipe's ``train.report_to``: one rank writes, into the run's folder, what it logged."""

import json
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import pytest

from tests.faults.running import write_place
from tests.run.test_finetune import metrics
from tplora.recipe.check import read_recipe
from tplora.run.finetune import run_finetune
from tplora.run.folder import clear_run_folder

pytestmark = pytest.mark.world


class _Writer:
    """What transformers calls of tensorboard, which is not installed here; lines of JSON."""

    def __init__(self, log_dir):
        self._path = Path(log_dir, f"events.out.tfevents.1.host.{os.getpid()}.0")
        self._path.parent.mkdir(parents=True)

    def add_scalar(self, name, value, step):
        with self._path.open("a") as file:
            file.write(json.dumps([step, name, value]) + "\n")

    def add_text(self, name, text, step=None):
        self._path.touch()

    def flush(self):
        pass

    def close(self):
        pass


def _finetune(place, run):
    board = types.ModuleType("tensorboardX")
    board.__spec__, board.SummaryWriter = ModuleSpec("tensorboardX", None), _Writer
    with (
        mock.patch.dict(sys.modules, {"tensorboardX": board}),
        mock.patch("tplora.run.finetune.leave_process_group"),
    ):
        recipe = read_recipe(place / "recipe.toml", ['train.report_to="tensorboard"'])
        run_finetune(recipe, run)


def test_tensorboard_is_told_by_one_rank_and_its_files_are_the_runs(world2, tmp_path):
    run = tmp_path / "run"
    world2.run(_finetune, write_place(tmp_path), run)
    (file,) = run.glob("runs/*/events.out.tfevents.*")
    told = [json.loads(line) for line in file.read_text().splitlines()]
    for ours, theirs in (("loss", "train/loss"), ("eval_loss", "eval/loss")):
        wanted = [(r["step"], r[ours]) for r in metrics(run) if ours in r]
        assert wanted
        assert [(step, value) for step, name, value in told if name == theirs] == wanted
    clear_run_folder(run)
    assert list(run.iterdir()) == []
