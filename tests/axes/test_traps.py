"""What goes wrong over data axes, broken on purpose or asked for: seen, or refused by name."""

from dataclasses import replace
from unittest import mock

import datasets
import pytest
import torch.distributed as dist
from accelerate.state import GradientState
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from tests.adapter.models import tokens
from tests.axes.running import (
    Mesh,
    RowsSeen,
    assert_same,
    load_on,
    results,
    run_on,
    trainer_on,
)
from tests.communication import Recorded
from tests.models import CUT, InDouble, lora
from tests.tiny import VOCAB
from tests.train.training import Setup, build_trainer, token_rows
from tests.zoo.build import build_model, tiny_config
from tplora.adapter.data_axis import DataAxis
from tplora.errors import LaunchError, PlanError, ShardError, TrainError
from tplora.plan.axes import Axes
from tplora.plan.axes_cost import bucket_bytes
from tplora.plan.lora import expert_parameters
from tplora.train.agreement import check_rows
from tplora.train.counting import _check_arguments

pytestmark = pytest.mark.world

BOTH = Mesh(tp_size=2, dp_replicate_size=2)
SHARDED = Mesh(tp_size=2, fsdp_size=2)
SETUP = Setup(batch_size=4, max_steps=3)


def _sum_over_tp_only(self, factors, **_):
    """Each data rank steps by its own rows."""
    for factor in factors:
        if factor.is_partial and factor.leaf_grad is not None:
            dist.all_reduce(factor.leaf_grad, group=factor.mesh.get_group())
    return 1


def _never_averaged(mesh, path, folder):
    with mock.patch.object(DataAxis, "average", _sum_over_tp_only):
        trainer = trainer_on(mesh, path, folder, SETUP, check_every_steps=1)
        with pytest.raises(TrainError) as caught:
            trainer.train()
    return trainer.state.global_step, str(caught.value)


@pytest.mark.parametrize("mesh", [BOTH, SHARDED], ids=str)
def test_gradients_that_are_not_averaged_stop_every_rank_at_the_next_check(
    world4, checkpoint, tmp_path, mesh
):
    for step, message in world4.run(_never_averaged, mesh, checkpoint("llama", **CUT), tmp_path):
        assert step == 1
        assert "differs between tp rank 0 and tp rank 0 of data rank 1" in message


def _broken_cut_factors(path, folder):
    divisor = DataAxis._divisor

    def summed(self, factor):
        return divisor(self, factor) if factor.plan.shard_dim is None else 1

    with mock.patch.object(DataAxis, "_divisor", summed):
        return run_on(BOTH, path, folder, SETUP)


def test_parity_sees_cut_factors_that_are_summed(world4, alone, checkpoint, tmp_path):
    """Equal on all data ranks, so no check of replicas says it."""
    path = checkpoint("llama", **CUT)
    wanted = alone.run(run_on, Mesh(), path, tmp_path, SETUP)[0]
    found = world4.run(_broken_cut_factors, path, tmp_path)[0]
    with pytest.raises(AssertionError, match="step 1: grad_norm"):
        assert_same(found, wanted)


def _other_rows_on_one_rank(path, folder):
    seed = 9 if dist.get_rank() == 3 else 5
    trainer = trainer_on(BOTH, path, folder, SETUP, rows=token_rows(17, seed=seed))
    with pytest.raises(TrainError) as caught:
        trainer.train()
    assert trainer.state.global_step == 0
    return str(caught.value)


def test_a_rank_of_one_tp_group_with_other_rows_stops_the_world(world4, checkpoint, tmp_path):
    for message in world4.run(_other_rows_on_one_rank, checkpoint("llama", **CUT), tmp_path):
        assert message.startswith("step 1: 'input_ids' of the batch differs between tp rank 0 of")
        assert "tp rank 0 of data rank 1 and tp rank 1 of data rank 1" in message


def _same_rows_everywhere(path):
    model = load_on(BOTH, path, lora())
    batch = {"input_ids": tokens(), "labels": tokens()}
    with pytest.raises(TrainError, match="step 1: every data rank holds the same batch"):
        check_rows(batch, model, step=1)
    batch["input_ids"] = batch["input_ids"] + model.data.rank
    check_rows(batch, model, step=1)


def test_data_ranks_with_one_batch_are_seen(world4, checkpoint):
    world4.run(_same_rows_everywhere, checkpoint("llama", **CUT))


def _streamed(mesh, path, folder):
    rows = datasets.IterableDataset.from_generator(lambda: iter(token_rows(16)))
    with mock.patch("datasets.Dataset.from_list", return_value=rows):
        trainer = trainer_on(mesh, path, folder, replace(SETUP, max_steps=2))
    seen = RowsSeen().watch(trainer)
    trainer.train()
    return seen.rows


def test_an_iterable_dataset_is_shared_out_as_well(world4, checkpoint, tmp_path):
    found = world4.run(_streamed, BOTH, checkpoint("llama", **CUT), tmp_path)
    assert found[0] == found[1]
    assert found[2] == found[3]
    rows = sorted(tuple(row["input_ids"]) for row in token_rows(16))
    assert sorted([*found[0], *found[2]]) == rows


class _Args:
    """What the check reads."""

    def __init__(self, *, dispatch_batches=None, **settings):
        self.accelerator_config = mock.Mock(dispatch_batches=dispatch_batches)
        self.train_sampling_strategy = "random"
        self.__dict__.update(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dispatch_batches": True}, "dispatch_batches = true"),
        ({"train_sampling_strategy": "batch_rebalance"}, "different rows"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(settings, message):
    with pytest.raises(TrainError, match=message):
        _check_arguments(_Args(**settings))
    fine = _Args()
    _check_arguments(fine)
    assert fine.accelerator_config.dispatch_batches is False


def _trained_are_dtensors(mesh, path):
    """Trainer averages what is trained and no DTensor over all ranks, tp ranks among them."""
    asked = {} if mesh.fsdp_size > 1 else {"modules_to_save": ["norm"], "use_dora": True}
    model = load_on(mesh, path, lora(**asked))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert not [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)]


@pytest.mark.parametrize("mesh", [BOTH, SHARDED], ids=str)
def test_nothing_trained_is_left_to_the_trainer_to_average(world4, checkpoint, mesh):
    world4.run(_trained_are_dtensors, mesh, checkpoint("llama", **CUT))


# ---- cost


def _bucket(mesh, path):
    model = load_on(mesh, path, lora())
    state = GradientState()
    state._set_sync_gradients(False)
    rows = tokens()
    model(input_ids=rows, labels=rows).loss.backward()
    state._set_sync_gradients(True)
    with Recorded() as sent:
        num_buckets = model.data.average(model.factors().values())
    data = {"fsdp_size": mesh.fsdp_size, "dp_replicate_size": mesh.dp_replicate_size}
    axes = Axes(tp_size=mesh.tp_size, **data)
    rank = dist.get_rank() % mesh.tp_size
    planned = bucket_bytes(model.plan, axes, rank, bytes_per_element=8)
    return num_buckets, sorted(sent.of("all_reduce")), sorted(planned.values())


@pytest.mark.parametrize("mesh", [BOTH, SHARDED], ids=str)
def test_two_buckets_carry_the_bytes_that_the_plan_says(world4, checkpoint, mesh):
    for num_buckets, sent, planned in world4.run(_bucket, mesh, checkpoint("llama", **CUT)):
        assert num_buckets == len(sent) == 2
        assert sent == planned


# ---- what a sharded base cannot have


def _refused_on_sharded_base(path):
    asked = {
        "init_lora_weights = 'olora'": {"init_lora_weights": "olora"},
        "use_dora": {"use_dora": True},
        "model.norm: to train it": {"modules_to_save": ["norm"]},
        "model.embed_tokens: an adapter": {"target_modules": ["embed_tokens", "q_proj"]},
    }
    for message, changes in asked.items():
        with pytest.raises(PlanError, match=message):
            load_on(SHARDED, path, lora(**changes))
    model = load_on(SHARDED, path, lora())
    with pytest.raises(ShardError, match="merge: the base is sharded over data ranks"):
        model.merge_adapter()


def test_what_reads_weights_between_forwards_is_refused_on_a_sharded_base(world4, checkpoint):
    world4.run(_refused_on_sharded_base, checkpoint("llama", **CUT))


def test_an_adapter_on_the_head_of_a_sharded_base_trains_as_alone(
    world4, alone, checkpoint, tmp_path
):
    setup = replace(SETUP, changes=(("target_modules", ("lm_head", "o_proj")),))
    path = checkpoint("llama", **CUT)
    wanted = alone.run(run_on, Mesh(), path, tmp_path, setup)[0]
    for found in world4.run(run_on, SHARDED, path, tmp_path, setup):
        assert_same(found, wanted)


def _wrong_world(path):
    with pytest.raises(LaunchError, match="dp_replicate_size 3 x tp_size 2 needs 6 processes, 4 w"):
        load_on(Mesh(tp_size=2, dp_replicate_size=3), path, lora())


def test_a_world_that_is_not_the_product_is_one_clear_error(world4, checkpoint):
    world4.run(_wrong_world, checkpoint("llama", **CUT))


# ---- experts


def _load_experts(mesh, path):
    config = AutoConfig.from_pretrained(path)
    targets = [*expert_parameters(config), "mlp.gate.weight"]
    lora_config = LoraConfig(r=4, target_modules="all-linear", target_parameters=targets)
    return load_on(mesh, path, lora_config, experts_implementation="eager")


def _train_experts(mesh, path, folder, setup):
    load = "tests.train.training.load"
    with mock.patch(load, side_effect=lambda *_: _load_experts(mesh, path)):
        trainer = build_trainer(path, folder, setup)
    with InDouble():
        trainer.train()
    return results(trainer)


def test_experts_train_as_alone_with_the_same_micro_batches(world4, alone, tmp_path):
    """Of which the router's own loss is a mean."""
    config = tiny_config("qwen3_moe")
    config.vocab_size = VOCAB
    build_model("qwen3_moe", config).save_pretrained(tmp_path / "base")
    setup = replace(SETUP, batch_size=2, accumulation=4, num_rows=16, learning_rate=1e-3)
    args = (str(tmp_path / "base"), tmp_path / "out")
    wanted = alone.run(_train_experts, Mesh(), *args, setup)[0]
    assert wanted[0][0]["aux_loss"] > 0
    of_micro_batches = ("entropy", "mean_token_accuracy")
    for mesh in (BOTH, SHARDED):
        shared = replace(setup, accumulation=2)
        for found in world4.run(_train_experts, mesh, *args, shared):
            assert_same(found, wanted, but=of_micro_batches)
