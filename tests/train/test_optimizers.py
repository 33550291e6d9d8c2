"""LoRA+ and LoRA-FA over cut factors: the steps of one process."""

import datasets
import pytest
import torch
from peft.optimizers import create_lorafa_optimizer as create_plain_lorafa

from tests.models import CUT, InDouble, batches, load, load_plain, lora
from tests.train.training import Setup, build_trainer, logged_numbers
from tplora.train.optimizers import create_lorafa_optimizer

pytestmark = pytest.mark.world

SETUP = Setup(targets="ends", dropout=0.3, max_steps=4)


def _train_loraplus(path, folder):
    datasets.disable_progress_bars()
    trainer = build_trainer(path, folder, SETUP, loraplus_lr_ratio=8.0, loraplus_lr_embedding=3e-3)
    with InDouble():
        trainer.train()
    rates = {group["initial_lr"] for group in trainer.optimizer.param_groups if group["params"]}
    factors = {name: factor.full().cpu() for name, factor in trainer.model.factors().items()}
    return logged_numbers(trainer.state.log_history), factors, len(rates)


def test_loraplus_trains_as_in_one_process(world, alone, checkpoint, tmp_path):
    path = checkpoint("llama", **CUT)
    logs, factors, num_rates = alone.run(_train_loraplus, path, tmp_path / "alone")[0]
    assert num_rates == 3
    for found_logs, found, _ in world.run(_train_loraplus, path, tmp_path / "here"):
        for entry, wanted in zip(found_logs, logs, strict=True):
            assert entry == pytest.approx(wanted, rel=1e-6)
        for name, factor in found.items():
            torch.testing.assert_close(factor, factors[name], rtol=0, atol=1e-7, msg=name)


def _train_lorafa(path, create, is_plain):
    config = lora("all-linear", init_lora_weights=False)
    model = load_plain(path, config) if is_plain else load(path, config)
    optimizer = create(model, r=4, lora_alpha=8, lr=1e-2, weight_decay=0.1)
    for step in range(1, 5):
        optimizer.zero_grad()
        with InDouble():
            loss = model(**batches(step)[0]).loss
        loss.backward()
        optimizer.step()
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
        if "lora_" in name
    }


def _plain(model, **settings):
    return create_plain_lorafa(model=model, **settings)


def test_lorafa_steps_as_plain_peft(world, alone, checkpoint):
    """PEFT corrects B's gradient in bfloat16, so one rounding of it is 4e-3 of a step."""
    path = checkpoint("llama", **CUT)
    wanted = alone.run(_train_lorafa, path, _plain, True)[0]
    for found in world.run(_train_lorafa, path, create_lorafa_optimizer, False):
        assert found.keys() == wanted.keys()
        for name, factor in found.items():
            atol = 0 if "lora_A" in name else 4e-4  # four steps of 1e-2
            torch.testing.assert_close(factor, wanted[name], rtol=0, atol=atol, msg=name)
