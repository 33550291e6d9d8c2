"""Training under trl's and transformers' trainers: at tp_size 2 and 3 every number is that of 1."""

import json
import math
import re
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from transformers import (
    TrainerCallback,
)

import tplora
from tests.models import CUT, InDouble, load, lora
from tests.tiny import VOCAB
from tests.train.training import TRAINERS, Setup, build_trainer, collate, logged_numbers, token_rows
from tests.world import RankError
from tplora.errors import ArtifactError, TrainError
from tplora.train.parallelism import parallelism_config
from tplora.upstream import local_shard

pytestmark = pytest.mark.world


def _train(path, folder, setup):
    trainer = build_trainer(path, folder, setup)
    with InDouble():
        trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    factors = {name: factor.full().cpu() for name, factor in model.factors().items()}
    return logged_numbers(trainer.state.log_history), factors


def _assert_same(found, wanted, *, but=()):
    """Logged numbers and factors are equal to rounding."""
    (logs, factors), (other_logs, other_factors) = found, wanted
    assert len(logs) == len(other_logs)
    for entry, other in zip(logs, other_logs, strict=True):
        assert entry.keys() == other.keys()
        for key in sorted(entry.keys() - set(but)):
            assert entry[key] == pytest.approx(other[key], rel=1e-6), f"{entry['step']}: {key}"
    for name, factor in factors.items():
        torch.testing.assert_close(
            factor, other_factors[name], rtol=0, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(scope="module")
def trained_alone(alone, checkpoint, tmp_path_factory):
    """The result of a setup in one process, computed once."""
    found = {}

    def get(name, setup):
        if (name, setup) not in found:
            folder = tmp_path_factory.mktemp("alone")
            found[name, setup] = alone.run(_train, checkpoint(name, **CUT), folder, setup)[0]
        return found[name, setup]

    return get


WHOLE = Setup(dropout=0.3, has_eval=True)


def test_sft_logs_the_numbers_of_one_process(world, trained_alone, checkpoint, tmp_path):
    wanted = trained_alone("llama", WHOLE)
    logs = wanted[0]
    assert {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"} <= logs[0].keys()
    assert {"eval_loss", "eval_mean_token_accuracy", "eval_entropy"} <= logs[-2].keys()
    for found in world.run(_train, checkpoint("llama", **CUT), tmp_path, WHOLE):
        _assert_same(found, wanted)


def test_sft_with_adapters_on_head_and_embedding_equals_one_process(
    world2, trained_alone, checkpoint, tmp_path
):
    setup = replace(WHOLE, targets="ends")
    wanted = trained_alone("qwen2_tied", setup)
    for found in world2.run(_train, checkpoint("qwen2_tied", **CUT), tmp_path, setup):
        _assert_same(found, wanted)


# Tokens that occur in several of the rows that token_rows makes.
HEADS = {
    "dora": (("use_dora", True), ("target_modules", ("lm_head", "q_proj"))),
    "activated": (("alora_invocation_tokens", (76,)),),
    "saved": (("modules_to_save", ("lm_head",)),),
    "tokens": (("trainable_token_indices", (3, 76, 98)),),
}


@pytest.mark.parametrize("head", HEADS)
def test_what_changes_the_head_or_its_loss_equals_one_process(
    world2, trained_alone, checkpoint, tmp_path, head
):
    """The tied head of the trained tokens is the fused one as well."""
    name = "qwen2_tied" if head == "tokens" else "llama"
    setup = Setup(dropout=0.3, max_steps=3, changes=HEADS[head])
    wanted = trained_alone(name, setup)
    assert any(entry.get("grad_norm", 0) > 0 for entry in wanted[0])
    for found in world2.run(_train, checkpoint(name, **CUT), tmp_path, setup):
        _assert_same(found, wanted)


@pytest.mark.parametrize("trainer", ["trl", "transformers"])
def test_an_unmodified_trainer_trains_the_same(
    world2, trained_alone, checkpoint, tmp_path, trainer
):
    """Its evaluation may differ: it takes each row once per tp rank, a short last batch twice."""
    setup = Setup(trainer, dropout=0.3, has_eval=True)
    wanted = trained_alone("llama", setup)
    counted = ("eval_loss", "num_tokens", "eval_num_tokens", "eval_entropy")
    for found in world2.run(_train, checkpoint("llama", **CUT), tmp_path, setup):
        _assert_same(found, wanted, but=(*counted, "eval_mean_token_accuracy"))


LOSSES = {
    "dft": Setup(arguments=(("loss_type", "dft"),), has_eval=True),
    "smoothed": Setup(arguments=(("label_smoothing_factor", 0.2),), has_eval=True),
    "transformers-smoothed": Setup("transformers", arguments=(("label_smoothing_factor", 0.2),)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_another_loss_equals_one_process(world2, trained_alone, checkpoint, tmp_path, name):
    setup = replace(LOSSES[name], targets="ends", max_steps=3)
    wanted = trained_alone("llama", setup)
    for found in world2.run(_train, checkpoint("llama", **CUT), tmp_path, setup):
        _assert_same(found, wanted)


def _smooths_as_trl(path, folder):
    """trl's own smoothing runs the model twice; ours is one forward."""
    smoothed = Setup(arguments=(("label_smoothing_factor", 0.2),), max_steps=3)
    ours = _train(path, folder / "ours", smoothed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        theirs = _train(path, folder / "theirs", replace(smoothed, trainer="trl"))
    _assert_same(ours, theirs)
    _, others = _train(path, folder / "none", replace(smoothed, arguments=()))
    assert any((ours[1][name] - other).abs().max() > 1e-5 for name, other in others.items())


def test_label_smoothing_is_trls(world2, checkpoint, tmp_path):
    world2.run(_smooths_as_trl, checkpoint("llama", **CUT), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((("use_liger_kernel", True),), "use_liger_kernel = true: "),
        ((("label_smoothing_factor", 0.1), ("loss_type", "dft")), "label_smoothing_factor = 0.1: "),
    ],
)
def test_a_loss_that_is_not_computed_here_is_refused(alone, checkpoint, tmp_path, options, message):
    path = checkpoint("llama", **CUT)
    with pytest.raises(RankError, match=f"TrainError: {message}"):
        alone.run(_train, path, tmp_path, Setup(arguments=options))


def _accelerate_loop(path):
    """accelerate's own loop, as its documentation writes it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = load(path, lora(dropout=0.3))
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, parallelism_config=parallelism_config(model)
    )
    rows = [collate(token_rows(8)[k : k + 2]) for k in range(0, 8, 2)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = accelerator.prepare(torch.optim.AdamW(trained, lr=1e-2))
    logs = []
    with InDouble():
        for k, batch in enumerate(rows * 2):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                logs.append({"step": k, "loss": float(loss.detach())})
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(trained, 0.05)
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                    logs.append({"step": k, "grad_norm": float(norm)})
                optimizer.step()
                optimizer.zero_grad()
    return logs, {name: factor.full() for name, factor in model.factors().items()}


def test_a_plain_accelerate_loop_trains_the_same(world2, alone, checkpoint):
    path = checkpoint("llama", **CUT)
    wanted = alone.run(_accelerate_loop, path)[0]
    for found in world2.run(_accelerate_loop, path):
        _assert_same(found, wanted)


def _first_losses(path, folder, *, is_head_zero):
    """The first loss of a step of four rows, at once and as four micro-batches."""
    losses = []
    for batch_size, accumulation in ((4, 1), (1, 4)):
        setup = Setup(
            learning_rate=0.0, batch_size=batch_size, accumulation=accumulation, max_steps=1
        )
        trainer = build_trainer(path, folder, setup)
        if is_head_zero:
            local_shard(trainer.model.get_base_model().lm_head.weight).data.zero_()
        with InDouble():
            trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    return losses


def _first_losses_of_zero_head(path, folder):
    return _first_losses(path, folder, is_head_zero=True)


def _first_losses_of_head(path, folder):
    return _first_losses(path, folder, is_head_zero=False)


def test_the_first_loss_is_the_mean_over_tokens_whatever_the_cut(
    world2, alone, checkpoint, tmp_path
):
    """Not times tp_size, not times micro-batches: ln V where the head knows nothing."""
    path = checkpoint("llama", **CUT)
    zero = [w.run(_first_losses_of_zero_head, path, tmp_path) for w in (alone, world2)]
    assert [*zero[0], *zero[1]] == [[pytest.approx(math.log(VOCAB), rel=1e-7)] * 2] * 3
    wanted = alone.run(_first_losses_of_head, path, tmp_path)[0]
    assert wanted[0] == pytest.approx(wanted[1], rel=1e-7)
    assert wanted[0] != pytest.approx(math.log(VOCAB), rel=1e-3)
    for found in world2.run(_first_losses_of_head, path, tmp_path):
        assert found == pytest.approx(wanted, rel=1e-7)


def _save_in_every_way(path, folder, trainer_name):
    trainer = build_trainer(path, folder, Setup(trainer_name, max_steps=1, save_steps=1))
    trainer.train()
    model = trainer.model
    trainer.save_model(str(folder / "trainer"))
    model.save_pretrained(folder / "model")
    tplora.save_adapter(model, folder / "tplora")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_way_of_saving_writes_the_same_adapter(world2, checkpoint, tmp_path, trainer):
    path = checkpoint("llama", **CUT)
    world2.run(_save_in_every_way, path, tmp_path, trainer)
    folders = [tmp_path / name for name in ("tplora", "model", "trainer", "checkpoint-1")]
    wanted = (folders[0] / "adapter_model.safetensors").read_bytes()
    config = json.loads((folders[0] / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    for folder in folders[1:]:
        assert (folder / "adapter_model.safetensors").read_bytes() == wanted
        assert json.loads((folder / "adapter_config.json").read_text()) == config
    tensors = load_file(folders[0] / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].shape == (46, 4)


def _train_on_other_rows(path, folder, rank_with_others):
    seed = 9 if torch.distributed.get_rank() == rank_with_others else 5
    trainer = build_trainer(path, folder, Setup(), rows=token_rows(17, seed=seed))
    with pytest.raises(TrainError) as caught:
        trainer.train()
    assert trainer.state.global_step == 0
    return str(caught.value)


def test_a_rank_with_other_rows_stops_every_rank_before_the_first_step(
    world2, checkpoint, tmp_path
):
    for message in world2.run(_train_on_other_rows, checkpoint("llama", **CUT), tmp_path, 1):
        assert "step 1: 'input_ids' of the batch differs between tp rank 0 and tp rank 1" in message


class _AfterStep(TrainerCallback):
    """Calls ``act(model)`` on rank 1 when an optimizer step is over."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step and torch.distributed.get_rank() == 1:
            self.act(model)


def _factor_of(model, key):
    name = f"base_model.model.model.layers.1.self_attn.q_proj.{key}.default.weight"
    return name, local_shard(model.factors()[name].parameter).data


def _nudge(model):
    _, replica = _factor_of(model, "lora_A")
    replica[2, 3] = torch.nextafter(replica[2, 3], torch.tensor(math.inf, dtype=replica.dtype))


def _train_with_a_nudge(path, folder):
    trainer = build_trainer(
        path, folder, Setup(max_steps=4), callbacks=[_AfterStep(1, _nudge)], check_every_steps=3
    )
    with pytest.raises(TrainError) as caught:
        trainer.train()
    assert trainer.state.global_step == 3
    return str(caught.value)


def test_a_replica_off_by_one_ulp_stops_every_rank_at_the_next_check(world2, checkpoint, tmp_path):
    for message in world2.run(_train_with_a_nudge, checkpoint("llama", **CUT), tmp_path):
        assert "step 3: base_model.model.model.layers.1.self_attn.q_proj.lora_A" in message
        assert "tp rank 1" in message


def _poison(model):
    _, shard = _factor_of(model, "lora_B")
    shard[0, 0] = math.nan


def _train_with_a_nan(path, folder, save_steps):
    setup = Setup(max_steps=4, save_steps=save_steps)
    trainer = build_trainer(path, folder, setup, callbacks=[_AfterStep(2, _poison)])
    with pytest.raises((TrainError, ArtifactError)) as caught:
        trainer.train()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("save_steps", "error", "message"),
    [(1, "ArtifactError", "q_proj.lora_B.*NaN"), (3, "TrainError", "step 3: the loss is nan")],
    ids=["just-before-a-save", "between-saves"],
)
def test_a_nan_on_one_rank_stops_every_rank_and_reaches_no_file(
    world2, checkpoint, tmp_path, save_steps, error, message
):
    found = world2.run(_train_with_a_nan, checkpoint("llama", **CUT), tmp_path, save_steps)
    for name, text in found:
        assert name == error
        assert len(text.splitlines()) == 1
        assert re.search(message, text)
    saved = list(tmp_path.rglob("adapter_model.safetensors"))
    assert len(saved) == (1 if save_steps == 1 else 0)
    for file in saved:
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


def _train_with_a_broken_head(path, folder, setup):
    with mock.patch("tplora.adapter.head.defer.replicate_input", lambda x, _: x):
        return _train(path, folder, setup)


def test_a_head_that_does_not_sum_its_input_gradient_is_seen(
    world2, trained_alone, checkpoint, tmp_path
):
    wanted = trained_alone("llama", WHOLE)
    found = world2.run(_train_with_a_broken_head, checkpoint("llama", **CUT), tmp_path, WHOLE)[0]
    with pytest.raises(AssertionError, match="grad_norm"):
        _assert_same(found, wanted)
