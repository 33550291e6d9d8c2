"""Ways to train that save memory or time, or measure: over tp and data the run is that of one.

Metrics of an evaluation, both ways to checkpoint activations, autocast, compiled
layers.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from tests.axes.running import Mesh, assert_same, results, trainer_on
from tests.models import CUT, InDouble, batches, load, lora
from tests.train.training import Setup, build_trainer
from tplora.adapter.gradients import GradientSync

pytestmark = pytest.mark.world

SETUP = Setup(batch_size=4, eval_batch_size=4, max_steps=3)
MESHES = [Mesh(tp_size=2), pytest.param(Mesh(dp_replicate_size=2), marks=pytest.mark.slow)]


def _metrics(found):
    """Of each token of each row once: how often the likeliest is the label, and how many rows."""
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    labels, kept = found.label_ids[:, 1:], found.label_ids[:, 1:] != -100
    right = (logits.argmax(-1)[:, :-1] == labels)[kept]
    return {"right": right.mean(), "rows": len(labels), "size": np.abs(logits[:, :-1][kept]).mean()}


WAYS = {
    "metrics": replace(SETUP, has_eval=True),
    "reentrant": replace(SETUP, arguments=(("gradient_checkpointing", True),)),
}


def _run(mesh, path, folder, way):
    setup, more = WAYS[way], {}
    if way == "metrics":
        more = {"compute_metrics": _metrics}
    if way == "reentrant":
        how = ("gradient_checkpointing_kwargs", {"use_reentrant": True})
        setup = replace(setup, arguments=(*setup.arguments, how))
    trainer = trainer_on(mesh, path, folder, setup, **more)
    with InDouble():
        trainer.train()
    return results(trainer)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_training_is_that_of_one_process(world2, alone, checkpoint, tmp_path, way, mesh):
    path = checkpoint("llama", **CUT)
    wanted = alone.run(_run, Mesh(), path, tmp_path / "alone", way)[0]
    assert way != "metrics" or {"eval_right", "eval_rows", "eval_size"} <= set().union(*wanted[0])
    for found in world2.run(_run, mesh, path, tmp_path, way):
        assert_same(found, wanted)


def _gradients(path, is_autocast, is_broken=False):
    """Gradients of every factor, in float32, of a float32 base."""
    if is_broken:
        with mock.patch.object(GradientSync, "_reduce"):
            return _gradients(path, is_autocast)
    config = lora(init_lora_weights=False)  # or A has no gradient
    model, batch = load(path, config, dtype=torch.float32), batches(1)[0]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = model(**batch).loss
    loss.backward()
    grads = {}
    for name, factor in model.factors().items():
        grad = factor.parameter.grad
        grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return grads


def _error(found, truth):
    return float(np.median([(found[n] - truth[n]).norm() / truth[n].norm() for n in truth]))


def test_autocast_rounds_no_worse_than_twice_one_process(world2, alone, checkpoint):
    """To the bound of a bfloat16 base: twice the error that one process makes."""
    path = checkpoint("llama", **CUT)
    truth = alone.run(_gradients, path, False)[0]
    own = _error(alone.run(_gradients, path, True)[0], truth)
    assert 1e-4 < own < 0.1
    for found in world2.run(_gradients, path, True):
        assert _error(found, truth) <= 2 * own
    for found in world2.run(_gradients, path, True, True):
        assert _error(found, truth) > 2 * own, "a gradient that is not summed is seen"


def _ten_steps(path, folder, is_autocast, dtype=torch.float32):
    """Losses and factors of the recipes' trainer; what is compared after it has no autocast."""
    ten = {"max_steps": 10, "learning_rate": 1e-3, "changes": (("init_lora_weights", False),)}
    setup = replace(SETUP, **ten, arguments=(("bf16", is_autocast),))
    with mock.patch("tests.train.training.load", partial(load, dtype=dtype)):
        trainer = build_trainer(path, folder, setup)
    trainer.train()
    history, factors, _ = results(trainer)
    model, probe = trainer.model, batches(1)[0]["input_ids"]
    with torch.no_grad():
        under = model(input_ids=probe).logits.float()
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        outside = model(input_ids=probe).logits.float()
    assert torch.equal(under, outside) != is_autocast
    return torch.tensor([e["loss"] for e in history if "loss" in e]), factors


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_ten_steps_under_autocast_are_as_near_to_float32_as_those_of_one_process(
    world2, alone, checkpoint, tmp_path, dtype
):
    """What it rounds depends on tp_size in the last bit of bfloat16, and on nothing else."""
    path = checkpoint("llama", **CUT)
    losses, factors = alone.run(_ten_steps, path, tmp_path, False)[0]
    own_losses, own_factors = alone.run(_ten_steps, path, tmp_path, True, dtype)[0]
    own, own_loss = _error(own_factors, factors), float((own_losses - losses).norm())
    assert 1e-5 < own < 1e-2
    found = world2.run(_ten_steps, path, tmp_path, True, dtype)
    for there, their_factors in found:
        assert _error(their_factors, factors) <= 2 * own
        assert float((there - losses).norm()) <= 2 * own_loss
    for name, factor in found[0][1].items():
        assert torch.equal(factor, found[1][1][name]), "and ranks do not drift apart"


def _compiled(path):
    """How far the gradients of compiled layers are from the others'."""
    config = lora(init_lora_weights=False)  # or A has no gradient
    model, batch = load(path, config, dtype=torch.float32), batches(1)[0]
    found = []
    for is_compiled in (False, True):
        if is_compiled:
            for layer in model.get_base_model().model.layers:
                layer.compile(backend="aot_eager")
        model.zero_grad()
        model(**batch).loss.backward()
        found.append({n: f.parameter.grad.full_tensor() for n, f in model.factors().items()})
    return max(float((found[1][n] - found[0][n]).abs().max()) for n in found[0])


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradients(world2, checkpoint):
    for difference in world2.run(_compiled, checkpoint("llama", **CUT), timeout_s=120):
        assert difference < 1e-6
