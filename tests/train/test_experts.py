"""A mixture of experts under the trainer: adapters on experts and routers, the router's loss."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import AutoConfig

from tests.models import InDouble
from tests.tiny import VOCAB
from tests.train.training import Setup, build_trainer, logged_numbers
from tests.zoo.build import build_model, tiny_config
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.plan.lora import expert_parameters

pytestmark = pytest.mark.world

SETUP = Setup(max_steps=3, batch_size=2, accumulation=2, learning_rate=1e-3, num_rows=12)


def _load(path, _lora):
    config = AutoConfig.from_pretrained(path)
    lora = LoraConfig(
        r=4,
        target_modules="all-linear",
        target_parameters=[*expert_parameters(config), "mlp.gate.weight"],
    )
    tp_size = dist.get_world_size() if dist.is_initialized() else 1
    base = load_base(path, tp_size=tp_size, dtype=torch.float64, experts_implementation="eager")
    return attach_adapter(base, lora)


def _train(path, folder):
    with mock.patch("tests.train.training.load", _load):
        trainer = build_trainer(path, folder, SETUP)
    with InDouble():
        trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    factors = {name: factor.full().cpu() for name, factor in model.factors().items()}
    return logged_numbers(trainer.state.log_history), factors


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe"])
def test_experts_and_router_loss_train_as_in_one_process(world2, alone, model_type, tmp_path):
    config = tiny_config(model_type)
    config.vocab_size = VOCAB
    build_model(model_type, config).save_pretrained(tmp_path / "base")
    path = str(tmp_path / "base")
    logs, factors = alone.run(_train, path, str(tmp_path / "alone"))[0]
    assert "aux_loss" in logs[0]
    for found, cut in world2.run(_train, path, str(tmp_path / "cut")):
        for entry, wanted in zip(found, logs, strict=True):
            assert entry == pytest.approx(wanted, rel=1e-6)
        for name, factor in factors.items():
            assert float((cut[name] - factor).abs().max()) <= 1e-7, name
