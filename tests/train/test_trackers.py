"""Trackers of transformers get the numbers of one process, from one rank only."""

import sys
import types
from importlib.machinery import ModuleSpec
from unittest import mock

import pytest
from transformers.integrations import TensorBoardCallback, WandbCallback

from tests.axes.running import Mesh, trainer_on
from tests.models import CUT, InDouble
from tests.train.training import Setup
from tplora.errors import TrainError

pytestmark = pytest.mark.world

SETUP = Setup(batch_size=4, eval_batch_size=4, max_steps=3, has_eval=True)
CLOCK = ("runtime", "per_second", "flos")


class _Writer:
    """What the callback calls of tensorboard's SummaryWriter."""

    def __init__(self, log_dir=None):
        self.scalars, self.texts, self.is_closed = [], [], False

    def add_scalar(self, name, value, step):
        self.scalars.append((step, name, value))

    def add_text(self, name, text, step=None):
        self.texts.append(name)

    def flush(self):
        pass

    def close(self):
        self.is_closed = True


def _modules():
    """Stand-ins for what is not installed, or would ask the network."""
    board, wandb = types.ModuleType("tensorboardX"), mock.MagicMock()
    board.__spec__, board.SummaryWriter = ModuleSpec("tensorboardX", None), _Writer
    wandb.__spec__, wandb.run = ModuleSpec("wandb", None), None
    wandb.init.side_effect = lambda **_: setattr(wandb, "run", mock.MagicMock())
    errors = mock.MagicMock(ConfigError=RuntimeError)
    names = ("wandb.sdk", "wandb.sdk.lib", "wandb.sdk.lib.config_util")
    return {"tensorboardX": board, "wandb": wandb, **dict.fromkeys(names, errors)}


def _train(mesh, path, folder, setup):
    """What both trackers of this rank were given."""
    modules = _modules()
    with mock.patch.dict(sys.modules, modules):
        writer = _Writer()
        callbacks = [TensorBoardCallback(writer), WandbCallback()]
        trainer = trainer_on(mesh, path, folder, setup, callbacks=callbacks)
        with InDouble():
            trainer.train()
    logged = [call.args[0] for call in modules["wandb"].log.call_args_list]
    return writer.scalars, writer.texts, logged, modules["wandb"].init.call_count


def _same(found, wanted):
    assert [(step, name) for step, name, _ in found] == [(step, name) for step, name, _ in wanted]
    for (step, name, value), (_, _, other) in zip(found, wanted, strict=True):
        if not any(word in name for word in CLOCK):
            assert value == pytest.approx(other, rel=1e-6), f"{step}: {name}"


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(tp_size=2),
        Mesh(dp_replicate_size=2),
        pytest.param(Mesh(tp_size=2, fsdp_size=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_rank_tells_the_trackers_the_numbers_of_one_process(
    world_of, alone, checkpoint, tmp_path, mesh
):
    path = checkpoint("llama", **CUT)
    wanted = alone.run(_train, Mesh(), path, tmp_path / "alone", SETUP)[0]
    names = {name for _, name, _ in wanted[0]}
    assert {"train/loss", "train/grad_norm", "eval/loss"} <= names
    first, *others = world_of(mesh.world_size).run(_train, mesh, path, tmp_path, SETUP)
    _same(first[0], wanted[0])
    assert first[1] == wanted[1]
    assert [one.keys() for one in first[2]] == [one.keys() for one in wanted[2]]
    assert first[3] == 1
    for scalars, texts, logged, inits in others:
        assert scalars == texts == logged == []
        assert inits == 0


def _uploads(path, folder):
    with (
        mock.patch.dict(sys.modules, _modules()),
        mock.patch.dict("os.environ", WANDB_LOG_MODEL="end"),
        pytest.raises(TrainError, match="WANDB_LOG_MODEL: would save the model on the first rank"),
    ):
        trainer_on(Mesh(tp_size=2), path, folder, SETUP, callbacks=[WandbCallback()])


def test_a_tracker_that_saves_on_one_rank_is_refused(world_of, checkpoint, tmp_path):
    world_of(2).run(_uploads, checkpoint("llama", **CUT), tmp_path)
