"""Trainers of trl that no recipe names, unmodified: ten steps are those of one process.

A reward model's score head is trained whole; ORPO reads the logits of both answers.
"""

import warnings

import datasets
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PrinterCallback
from trl import RewardConfig, RewardTrainer
from trl.import_utils import TRLExperimentalWarning

from tests.axes.running import Mesh
from tests.models import SEED, InDouble, load, lora
from tests.tiny import tiny_config
from tests.train.preferences import SIZES, pairs
from tests.train.tiny_tokenizer import tiny_tokenizer
from tests.train.training import logged_numbers
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.train.parallelism import parallelism_config

pytestmark = pytest.mark.world

ALONE = Mesh()
MESHES = [Mesh(tp_size=2), pytest.param(Mesh(dp_replicate_size=2), marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """A tiny llama with a score head of one number."""
    folder = tmp_path_factory.mktemp("scorer")
    config = tiny_config("llama", **SIZES, num_labels=1, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config).to(torch.float64)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


def _arguments(folder, mesh, model):
    return {
        "output_dir": str(folder),
        "max_steps": 10,
        "per_device_train_batch_size": 4 // mesh.data_size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "max_grad_norm": 0.05,
        "parallelism_config": parallelism_config(model),
    }


def _trained(trainer):
    trainer.remove_callback(PrinterCallback)
    with InDouble():
        trainer.train()
    factors = {name: factor.full().cpu() for name, factor in trainer.model.factors().items()}
    return logged_numbers(trainer.state.log_history), factors


def _reward(path, folder, mesh):
    datasets.disable_progress_bars()
    base = load_base(
        path,
        tp_size=mesh.tp_size,
        dp_replicate_size=mesh.dp_replicate_size,
        model_class=AutoModelForSequenceClassification,
        dtype=torch.float64,
    )
    config = lora("all-linear", init_lora_weights=False, task_type="SEQ_CLS")
    model = attach_adapter(base, config, seed=SEED).train()
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**_arguments(folder, mesh, model)),
        train_dataset=datasets.Dataset.from_list(pairs(16)),
        processing_class=tiny_tokenizer(),
    )
    return _trained(trainer)


def _orpo(path, folder, mesh):
    datasets.disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TRLExperimentalWarning)
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: PLC0415  (it warns)
    model = load(path, lora("all-linear", init_lora_weights=False))
    trainer = ORPOTrainer(
        model=model,
        args=ORPOConfig(**_arguments(folder, mesh, model), max_length=64),
        train_dataset=datasets.Dataset.from_list(pairs(16)),
        processing_class=tiny_tokenizer(),
    )
    return _trained(trainer)


def _assert_same(found, wanted):
    (found_logs, found_factors), (logs, factors) = found, wanted
    assert [entry["step"] for entry in found_logs] == [entry["step"] for entry in logs]
    for entry, other in zip(found_logs, logs, strict=True):
        for key in other.keys() - {"num_tokens", "train_loss"}:
            assert entry[key] == pytest.approx(other[key], rel=1e-6, abs=1e-9), key
    for name, factor in found_factors.items():
        torch.testing.assert_close(factor, factors[name], rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_reward_model_trains_as_in_one_process(world2, alone, scorer, tmp_path, mesh):
    wanted = alone.run(_reward, scorer, tmp_path / "alone", ALONE)[0]
    assert {"accuracy", "margin", "loss", "grad_norm"} <= wanted[0][0].keys()
    assert any("score" in name for name in wanted[1])
    for found in world2.run(_reward, scorer, tmp_path / "here", mesh):
        _assert_same(found, wanted)


def test_orpo_trains_as_in_one_process(world2, alone, checkpoint, tmp_path):
    path = checkpoint("llama", **SIZES)
    wanted = alone.run(_orpo, path, tmp_path / "alone", ALONE)[0]
    assert {"rewards/margins", "nll_loss", "log_odds_ratio"} <= wanted[0][0].keys()
    for found in world2.run(_orpo, path, tmp_path / "here", Mesh(tp_size=2)):
        _assert_same(found, wanted)
