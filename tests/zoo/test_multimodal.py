"""Classes of a text model with towers for images or sound: rows of text train as in one process.

Per class, on a tiny random checkpoint of the whole class: the loss and every gathered gradient over
two batches, one of them padded, against plain PEFT in one process; the saved file, read by plain
PEFT; steps of the trainer. Ranks are seeded differently.

Towers see nothing of a row of text. An adapter on them, as "all-linear" has it, is saved as it was
drawn, like plain PEFT's.
"""

from unittest import mock

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3Config,
    Qwen3VLTextConfig,
)

from tests.models import TARGETS, InDouble, lora
from tests.train.training import Setup, build_trainer, logged_numbers
from tests.world import RankError
from tests.zoo.build import VOCAB
from tests.zoo.multimodal import CLASSES, load_plain, tiny_config, write_checkpoint
from tplora.adapter.attach import attach_adapter
from tplora.adapter.factor import shard_full
from tplora.base import mends
from tplora.base.load import check_shards, load_base
from tplora.collectives.shared_input import SharedInput
from tplora.plan.build import build_plan
from tplora.plan.report import plan_text
from tplora.upstream import auto_class, local_shard

TEXT = r"(model\.|.*language_model\.)layers\.\d+\.(self_attn|mlp|\w+\.shared_expert)\.\w+_proj"
"""The text model's attention and MLP, whatever class it is in; no layer of a tower."""
TARGETS["text"] = {"target_modules": TEXT}

LOADS_THE_TEXT_MODEL_ALONE = ("llama4", "qwen3_5")
OPTIONS = {"dtype": torch.float64, "experts_implementation": "eager"}
# These models compute norms, softmax and rotary angles in float32 whatever their weights are in.
RTOL = 1e-5


def _batches():
    draw = torch.Generator().manual_seed(5)
    for pad in (0, 3):
        ids = torch.randint(3, VOCAB, (3, 11), generator=draw)
        mask = torch.ones_like(ids)
        mask[0, :pad] = 0
        mask[1, 11 - pad :] = 0
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _attached(path, targets, is_cut=False):
    """A tplora model over the ranks and plain PEFT beside it, with the same random factors."""
    config = AutoConfig.from_pretrained(path)
    plan = build_plan(config, lora(targets), tp_size=2, sequence_parallel=is_cut)
    base = load_base(path, tp_size=2, **OPTIONS)
    check_shards(base, plan)
    model = attach_adapter(base, lora(targets), plan=plan).train()
    truth = get_peft_model(load_plain(path, **OPTIONS), lora(targets)).train()
    factors, parameters = model.factors(), dict(truth.named_parameters())
    assert set(factors) == {name for name, p in parameters.items() if p.requires_grad}
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, factor in factors.items():
            parameters[name].normal_(std=0.1, generator=draw)
            shard = shard_full(parameters[name], factor.plan, factor.mesh)
            local_shard(factor.parameter).copy_(shard)
    return model, truth


def _assert_same_step(model, truth, batch):
    """Loss and gradients of one batch are equal; returns the names that had a gradient."""
    losses = []
    for one in (model, truth):
        one.zero_grad()
        losses.append(one(**batch, use_cache=False).loss)
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=RTOL)
    here = {name: factor.parameter.grad for name, factor in model.factors().items()}
    there = {name: p.grad for name, p in truth.named_parameters() if p.grad is not None}
    assert there.keys() == {name for name, grad in here.items() if grad is not None}
    floor = 1e-7 * max(float(grad.norm()) for grad in there.values())
    for name, grad in there.items():
        error = float((here[name].full_tensor() - grad).norm()) / max(float(grad.norm()), floor)
        assert error < RTOL, f"grad of {name}: {error:.2g} off"
    return set(there)


def _parity(path, targets, folder, is_cut=False):
    """How many factors there are, how many had a gradient, and what the model says; files."""
    model, truth = _attached(path, targets, is_cut)
    for batch in _batches():
        trained = _assert_same_step(model, truth, batch)
    model.save_pretrained(f"{folder}/tplora")
    if torch.distributed.get_rank() == 0:
        truth.save_pretrained(f"{folder}/peft")
    return len(model.factors()), len(trained), _logits(model)


def _logits(model):
    with torch.no_grad():
        return [model.eval()(**batch, use_cache=False).logits for batch in _batches()]


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("model_type", [one for one in CLASSES if one not in ("gemma4", "llama4")])
def test_rows_of_text_train_on_tokens_as_in_one_process(world2, tmp_path, model_type):
    path = write_checkpoint(model_type, tmp_path / "base")
    world2.run(_parity, path, "text", tmp_path, True)


def _assert_same_files(path, folder, logits):
    saved, plain = (
        load_file(folder / who / "adapter_model.safetensors") for who in ("tplora", "peft")
    )
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], plain[name]) for name in plain)
    again = PeftModel.from_pretrained(load_plain(path, **OPTIONS), folder / "tplora")
    for found, wanted in zip(_logits(again), logits, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=RTOL * float(wanted.abs().max()))


@pytest.mark.world
@pytest.mark.parametrize("model_type", CLASSES)
def test_rows_of_text_train_the_text_model_as_in_one_process(world2, model_type, tmp_path):
    path = write_checkpoint(model_type, tmp_path / "base")
    found = world2.run(_parity, path, "text", str(tmp_path))
    assert all(num_factors == num_trained > 0 for num_factors, num_trained, _ in found)
    _assert_same_files(path, tmp_path, found[0][-1])


@pytest.mark.world
@pytest.mark.parametrize("model_type", sorted(set(CLASSES) - set(LOADS_THE_TEXT_MODEL_ALONE)))
def test_adapters_on_towers_stay_as_they_are_drawn_and_are_saved(world2, model_type, tmp_path):
    path = write_checkpoint(model_type, tmp_path / "base")
    found = world2.run(_parity, path, "all-linear", str(tmp_path))
    assert all(num_factors > num_trained > 0 for num_factors, num_trained, _ in found)
    _assert_same_files(path, tmp_path, found[0][-1])


def _while_inputs_are_not_summed(path, targets):
    with mock.patch.object(SharedInput, "__call__", lambda _, x: x):
        _parity(path, targets, "")


@pytest.mark.world
def test_parity_sees_a_text_model_whose_input_gradients_are_not_summed(world2, tmp_path):
    path = write_checkpoint("mistral3", tmp_path / "base")
    with pytest.raises(RankError, match=r"grad of .*language_model.*: .* off"):
        world2.run(_while_inputs_are_not_summed, path, "all-linear")


def _train(path, folder, setup):
    trainer = build_trainer(path, folder, setup)
    with InDouble():
        trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    factors = {name: factor.full() for name, factor in model.factors().items()}
    return logged_numbers(trainer.state.log_history), factors


@pytest.mark.world
@pytest.mark.parametrize(
    ("model_type", "targets"), [("qwen2_5_vl", "all-linear"), ("llama4", "text")]
)
def test_the_trainer_logs_the_numbers_of_one_process(world2, alone, model_type, targets, tmp_path):
    path = write_checkpoint(model_type, tmp_path / "base")
    setup = Setup(targets=targets, max_steps=2, dropout=0.3, has_eval=True)
    [(wanted, wanted_factors)] = alone.run(_train, path, tmp_path / "alone", setup)
    for found, factors in world2.run(_train, path, tmp_path / "two", setup):
        assert len(found) == len(wanted)
        for entry, other in zip(found, wanted, strict=True):
            assert entry == pytest.approx(other, rel=1e-9)
        for name, factor in wanted_factors.items():
            torch.testing.assert_close(factors[name], factor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_class_is_loaded_by_what_its_users_load_it_with(model_type):
    found = auto_class(tiny_config(model_type))
    is_causal = model_type in ("gemma3", "gemma4", *LOADS_THE_TEXT_MODEL_ALONE)
    assert found is (AutoModelForCausalLM if is_causal else AutoModelForImageTextToText)


def test_a_plan_says_that_towers_are_whole():
    plan = build_plan(tiny_config("qwen2_5_vl"), lora("all-linear"), tp_size=2)
    assert {layer.weight.shard_dim for layer in plan.layers if ".visual." in layer.name} == {None}
    rows = [line for line in plan_text(plan).splitlines() if "visual.blocks.*.attn" in line]
    assert rows
    assert all("whole" in row for row in rows)


def _without_mend(path):
    with mock.patch.object(mends, "CLASS_MENDS", {}):
        _parity(path, "text", "")


# When this fails, transformers has become right: take the mend out.
@pytest.mark.world
def test_transformers_alone_still_mixes_tensors_in_gemma4(world2, tmp_path):
    path = write_checkpoint("gemma4", tmp_path / "base")
    with pytest.raises(RankError, match=r"mixed torch\.Tensor and DTensor"):
        world2.run(_without_mend, path)


def test_a_qwen3_vl_is_cut_like_a_qwen3():
    assert not [name for name in Qwen3VLTextConfig.base_model_tp_plan if "layers" in name]
    plan = build_plan(tiny_config("qwen3_vl"), lora("text"), tp_size=2)
    styles = {layer.name.partition(".layers.0.")[2]: layer.style for layer in plan.layers}
    styles.pop("")
    wanted = {
        name.removeprefix("layers.*."): s for name, s in Qwen3Config.base_model_tp_plan.items()
    }
    assert styles == {name: style for name, style in wanted.items() if "proj" in name}
