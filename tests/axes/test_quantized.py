"""A quantised base over data axes: each copy holds packed pieces; FSDP cannot share them out."""

from unittest import mock

import pytest
import torch

from tests.axes.running import Mesh, per_rank, results
from tests.models import SEED, lora
from tests.quantized import quantization, write_wide
from tests.train.training import Setup, build_trainer
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.errors import ShardError

pytestmark = pytest.mark.world

BOTH = Mesh(tp_size=2, dp_replicate_size=2)
SETUP = Setup(batch_size=4, accumulation=1, max_steps=2, learning_rate=1e-3, num_rows=8)


def _load(mesh, path):
    base = load_base(
        path,
        tp_size=mesh.tp_size,
        fsdp_size=mesh.fsdp_size,
        dp_replicate_size=mesh.dp_replicate_size,
        dtype=torch.float32,
        quantization_config=quantization("nf4"),
    )
    return attach_adapter(base, lora("all-linear"), seed=SEED).train()


def _train(mesh, path, folder):
    load = "tests.train.training.load"
    with mock.patch(load, side_effect=lambda *_: _load(mesh, path)):
        trainer = build_trainer(path, folder, per_rank(SETUP, mesh))
    trainer.train()
    return results(trainer)


def test_copies_of_a_quantised_base_train_as_one_process(world4, alone, tmp_path):
    path = str(write_wide("llama", tmp_path / "wide"))
    logs, factors, _ = alone.run(_train, Mesh(), path, tmp_path)[0]
    for found_logs, found, _ in world4.run(_train, BOTH, path, tmp_path):
        for entry, other in zip(found_logs[:2], logs[:2], strict=True):
            for key in ("loss", "grad_norm"):
                assert entry[key] == pytest.approx(other[key], rel=1e-4), key
        for name, factor in found.items():
            torch.testing.assert_close(factor, factors[name], rtol=0, atol=1e-4, msg=name)


def _refused(path):
    with pytest.raises(ShardError, match=r"parallel\.fsdp_size: llama is quantised"):
        _load(Mesh(tp_size=2, fsdp_size=2), path)


def test_a_quantised_base_is_not_sharded_over_data_ranks(world4, tmp_path):
    world4.run(_refused, str(write_wide("llama", tmp_path / "wide")))
