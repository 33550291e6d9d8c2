"""Trainings over data axes: a model on a mesh of this rank's world, and what one process finds."""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

from tests.models import SEED, InDouble
from tests.train.training import build_trainer, logged_numbers
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base


@dataclass(frozen=True)
class Mesh:
    """The size of every axis. Plain values: it travels to the ranks."""

    tp_size: int = 1
    fsdp_size: int = 1
    dp_replicate_size: int = 1
    is_cut: bool = False
    """Whether the ranks of a tp group share out the tokens between attention and MLP."""

    @property
    def data_size(self):
        return self.fsdp_size * self.dp_replicate_size

    @property
    def world_size(self):
        return self.tp_size * self.data_size

    def __str__(self):
        names = {"dp": self.dp_replicate_size, "fsdp": self.fsdp_size, "tp": self.tp_size}
        sizes = "x".join(f"{name}{size}" for name, size in names.items() if size > 1) or "alone"
        return sizes + "-cut" * self.is_cut


def load_on(mesh, path, config, **from_pretrained):
    base = load_base(
        path,
        tp_size=mesh.tp_size,
        fsdp_size=mesh.fsdp_size,
        dp_replicate_size=mesh.dp_replicate_size,
        dtype=torch.float64,
        **from_pretrained,
    )
    return attach_adapter(base, config, seed=SEED, sequence_parallel=mesh.is_cut).train()


def trainer_on(mesh, path, folder, setup, **kwargs):
    """The trainer of ``setup`` on a mesh; its batch sizes are of all data ranks together."""
    setup = per_rank(setup, mesh)
    with mock.patch("tests.train.training.load", lambda *args: load_on(mesh, *args)):
        return build_trainer(path, folder, setup, **kwargs)


def per_rank(setup, mesh):
    return replace(
        setup,
        batch_size=setup.batch_size // mesh.data_size,
        eval_batch_size=setup.eval_batch_size // mesh.data_size,
    )


def run_on(mesh, path, folder, setup, resumed=None):
    """Logged numbers and full factors of a training."""
    trainer = trainer_on(mesh, path, folder, setup)
    with InDouble():
        trainer.train(resume_from_checkpoint=resumed and str(resumed))
    return results(trainer)


def results(trainer):
    model = trainer.model
    factors = {name: factor.full().cpu() for name, factor in model.factors().items()}
    return logged_numbers(trainer.state.log_history), factors, float(trainer.state.total_flos)


def assert_same(found, wanted, *, but=(), is_exact=False):
    """Logged numbers, which are float32 in part, and factors, which are float64."""
    (logs, factors, _), (other_logs, other_factors, _) = found, wanted
    assert [entry["step"] for entry in logs] == [entry["step"] for entry in other_logs]
    for entry, other in zip(logs, other_logs, strict=True):
        for key in sorted(other.keys() - {"train_loss", *but}):
            near = other[key] if is_exact else pytest.approx(other[key], rel=1e-6)
            assert entry[key] == near, f"step {entry['step']}: {key}"
    assert factors.keys() == other_factors.keys()
    for name, factor in factors.items():
        worst = float((factor - other_factors[name]).abs().max())
        assert worst <= (0 if is_exact else 1e-12), f"{name}: off by {worst:.3e}"


class RowsSeen(TrainerCallback):
    """What a rank has learned from: the rows of every micro-batch that have a label."""

    def __init__(self):
        self.rows = []

    def watch(self, trainer):
        before = trainer.compute_loss

        def compute_loss(model, inputs, *args, **kwargs):
            if model.training:
                for tokens, mask, labels in zip(
                    inputs["input_ids"], inputs["attention_mask"], inputs["labels"], strict=True
                ):
                    if bool((labels != -100).any()):
                        self.rows.append(tuple(tokens[mask.bool()].tolist()))
            return before(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss
        return self
