"""A step of our trainer: no DTensor operation, no wait for the device, and the numbers of both."""

import traceback
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from tests.communication import Recorded
from tests.models import CUT, InDouble, batches, load, lora
from tests.train.test_trainer import _assert_same, _train
from tests.train.training import Setup, build_trainer
from tplora.train.local_steps import clip_local_gradients, step_on_pieces
from tplora.train.pending import PendingNumber, settled

pytestmark = pytest.mark.world


class _Watch(TorchDispatchMode):
    """DTensor operations, and numbers read from tensors by who asked for them."""

    def __init__(self):
        super().__init__()
        self.on_dtensors, self.read_by = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            self.on_dtensors[str(func)] += 1
            return NotImplemented
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            frames = [f.filename for f in traceback.extract_stack() if "/torch/" not in f.filename]
            self.read_by[_library(frames[-2])] += 1
        return func(*args, **(kwargs or {}))


def _library(file):
    names = ("tplora/adapter", "tplora/train", "transformers", "trl", "accelerate")
    return next((name for name in names if f"/{name}/" in file), file)


class _WatchSteps(TrainerCallback):
    """Watches from the second step's start to the end of the one before the last."""

    def __init__(self, watch, last):
        self.watch, self.last = watch, last

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.watch.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.last:
            self.watch.__exit__(None, None, None)


def _watched(path, folder, setup):
    watch = _Watch()
    callback = _WatchSteps(watch, setup.max_steps - 1)
    build_trainer(path, folder, setup, callbacks=[callback]).train()
    return dict(watch.on_dtensors), dict(watch.read_by)


SETUP = Setup(max_steps=4, logging_steps=4, arguments=(("optim", "adamw_torch_fused"),))


def test_steps_of_our_trainer_work_on_plain_tensors_and_wait_for_nothing(
    world2, checkpoint, tmp_path
):
    for on_dtensors, read_by in world2.run(
        _watched, checkpoint("llama", **CUT), tmp_path, SETUP, timeout_s=60
    ):
        assert not on_dtensors
        assert not [who for who in read_by if who.startswith(("tplora", "trl"))], read_by


def test_the_watch_sees_both_in_an_unmodified_trainer(world2, checkpoint, tmp_path):
    setup = replace(SETUP, trainer="trl")
    for on_dtensors, read_by in world2.run(
        _watched, checkpoint("llama", **CUT), tmp_path, setup, timeout_s=60
    ):
        assert sum(on_dtensors.values()) > 10
        assert read_by["trl"] > 4


# --- the same numbers


def _gradients(path):
    model = load(path, lora("all-linear", init_lora_weights=False))
    with InDouble():
        model(**batches(1)[0]).loss.backward()
    return model, list(model.factors().values())


def _clips_alike(path, max_norm):
    model, factors = _gradients(path)
    _, others = _gradients(path)
    with Recorded() as sent:
        norm = clip_local_gradients(factors, max_norm, model.mesh.get_group())
    parameters = [factor.parameter for factor in others]
    wanted = nn.utils.clip_grad_norm_(parameters, max_norm).full_tensor()
    torch.testing.assert_close(norm, wanted, rtol=1e-14, atol=0)
    for factor, other in zip(factors, others, strict=True):
        one, two = (f.parameter.grad.to_local() for f in (factor, other))
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-15)
    return sent.calls, float(norm)


def test_clipping_is_torchs_and_sends_one_number(world, checkpoint):
    path = checkpoint("llama", **CUT)
    for max_norm in (0.05, 1e9, float("inf")):
        found = world.run(_clips_alike, path, max_norm)
        assert len({norm for _, norm in found}) == 1
        assert all(calls == [("all_reduce", 8)] for calls, _ in found)


def _steps_alike(path, name, settings):
    _, factors = _gradients(path)
    _, others = _gradients(path)
    make = getattr(torch.optim, name)
    ours, theirs = (
        make([factor.parameter for factor in some], lr=1e-2, weight_decay=0.1, **settings)
        for some in (factors, others)
    )
    step_on_pieces(ours, factors)
    for k in range(4):
        if k == 2:  # a state of DTensors, as a resumed run has it
            state = theirs.state_dict()
            state["state"] = {
                k: {key: value.clone() for key, value in held.items()}
                for k, held in state["state"].items()
            }
            ours.load_state_dict(state)
        for optimizer in (ours, theirs):
            optimizer.step()
    assert [id(p) for p in ours.param_groups[0]["params"]] == [id(f.parameter) for f in factors]
    assert ours.state.keys() == {f.parameter for f in factors}
    for factor, other in zip(factors, others, strict=True):
        assert torch.equal(factor.parameter.to_local(), other.parameter.to_local()), factor.name


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("AdamW", {}),
        ("AdamW", {"fused": True}),
        ("AdamW", {"foreach": True}),
        ("SGD", {"momentum": 0.9}),
    ],
)
def test_a_step_on_pieces_is_the_step_on_dtensors(world2, checkpoint, name, settings):
    world2.run(_steps_alike, checkpoint("llama", **CUT), name, settings)


def _trains_as_trl(path, folder):
    setup = Setup(max_steps=3, dropout=0.2)
    ours = _train(path, folder / "ours", setup)
    theirs = _train(path, folder / "theirs", replace(setup, trainer="trl"))
    _assert_same(ours, theirs)


def test_our_trainer_logs_and_learns_what_trls_does(world2, checkpoint, tmp_path):
    world2.run(_trains_as_trl, checkpoint("llama", **CUT), tmp_path)


# --- pending numbers


def test_pending_numbers_compute_as_numbers_do():
    three, zero = (PendingNumber(torch.tensor([k])).sum() for k in (3, 0))
    found = [
        (three / PendingNumber(torch.tensor(2))).item(),
        (three / zero).item(),
        0 + three // 2,
        three.mean(),
        4.5,
        sum([three, three]) / 2,
    ]
    assert settled(found) == [1.5, 0.0, 1.0, 3.0, 4.5, 3.0]
    assert float(three) == 3
    assert int(three) == 3
    assert zero > 0
