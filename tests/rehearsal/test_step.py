"""A step that is rehearsed without storage takes and says what the real step takes and says."""

import dataclasses
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from transformers import AutoConfig

from tests.axes.running import Mesh
from tests.models import lora as tiny_lora
from tests.models import world_size
from tests.quantized import quantization
from tests.rehearsal.measure import measure, peak_bytes
from tests.rehearsal.models import lora, write_model
from tests.train import preferences
from tests.train.preferences import Preferring
from tests.train.training import Setup, build_trainer
from tplora.errors import PlanError
from tplora.plan.build import build_plan
from tplora.plan.step_cost import Batch
from tplora.rehearsal.step import rehearse

pytestmark = pytest.mark.world

KEPT = Batch(rows=2, length=64, is_checkpointed=False)
CHECKPOINTED = Batch(rows=3, length=160, is_checkpointed=True)
KEEPING = dataclasses.replace(CHECKPOINTED, checkpointing={"keep_reduced_outputs": True})
ACCUMULATED = Batch(rows=4, length=100, is_checkpointed=False, is_accumulated=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, written = tmp_path_factory.mktemp("rehearsed"), {}

    def get(name):
        if name not in written:
            written[name] = write_model(name, folder / name)
        return written[name]

    return get


def _rehearsed(path, batch, tp_size, config=None, **changes):
    config, adapter = config or AutoConfig.from_pretrained(path), lora(**changes)
    plan = build_plan(config, adapter, tp_size=tp_size)
    return rehearse(plan, config, adapter, batch)


def _assert_same(cost, found):
    assert found["resident"] == cost.resident
    assert cost.working == pytest.approx(found["working"], rel=0.1)
    for part in ("forward", "backward", "bucket"):
        assert getattr(cost, part) == found[part], part


CASES = [
    pytest.param(name, batch, id=f"{name}-{kind}", marks=[] if is_fast else pytest.mark.slow)
    for name, batch, kind, is_fast in (
        ("llama", KEPT, "kept", True),
        ("llama", CHECKPOINTED, "checkpointed", False),
        ("llama", ACCUMULATED, "accumulated", False),
        ("qwen3", KEPT, "kept", False),
        ("qwen3", CHECKPOINTED, "checkpointed", False),
        ("llama", KEEPING, "keeping", True),
        ("gemma2", KEEPING, "keeping", False),
        ("gemma2", CHECKPOINTED, "checkpointed", False),
        ("gemma2", ACCUMULATED, "accumulated", True),
    )
]


@pytest.mark.parametrize(("name", "batch"), CASES)
@pytest.mark.parametrize("tp_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rehearsed_step_takes_what_the_allocator_gives_out(world_of, model, name, batch, tp_size):
    cost = _rehearsed(model(name), batch, tp_size)
    found = world_of(tp_size).run(measure, model(name), lora(), batch)
    for of_rank in found:
        assert cost.working == pytest.approx(of_rank["working"], rel=0.1)
    _assert_same(cost, found[0])


PASSES = {
    "joined": Batch(rows=3, length=80, is_checkpointed=True, is_joined=True),
    "pairs": Batch(rows=4, length=64, is_checkpointed=True, reference_passes=1),
    "rated": Batch(rows=3, length=64, is_checkpointed=False, passes_before=1, reference_passes=2),
}


@pytest.mark.parametrize("kind", ["joined", "pairs", pytest.param("rated", marks=pytest.mark.slow)])
def test_joined_rows_and_a_reference_take_what_was_rehearsed(world2, model, kind):
    cost = _rehearsed(model("llama"), PASSES[kind], 2)
    _assert_same(cost, world2.run(measure, model("llama"), lora(), PASSES[kind])[0])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_and_latent_attention_say_what_was_rehearsed(world2, model, name):
    for batch in (KEPT, CHECKPOINTED):
        cost = _rehearsed(model(name), batch, 2)
        _assert_same(cost, world2.run(measure, model(name), lora(), batch)[0])


def test_dropout_takes_what_was_rehearsed(world2, model):
    cost = _rehearsed(model("llama"), KEPT, 2, lora_dropout=0.1)
    _assert_same(cost, world2.run(measure, model("llama"), lora(lora_dropout=0.1), KEPT)[0])


def test_adapted_experts_say_what_was_rehearsed(world2, model):
    path = model("qwen3_moe")
    changes = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    cost = _rehearsed(path, KEPT, 2, **changes)
    _assert_same(cost, world2.run(measure, path, lora(**changes), KEPT)[0])


def test_a_quantised_base_takes_what_was_rehearsed(world2, model):
    path, given = model("llama"), quantization("nf4-double")
    config = AutoConfig.from_pretrained(path)
    plan = build_plan(config, lora(), tp_size=2, quantization=given)
    for batch in (KEPT, CHECKPOINTED):
        cost = rehearse(plan, config, lora(), batch)
        found = world2.run(_measure_quantised, path, batch)[0]
        assert cost.working == pytest.approx(found["working"], rel=0.1)
        assert cost.forward == found["forward"]
        assert cost.backward == found["backward"]


def _measure_quantised(path, batch):
    return measure(path, lora(), batch, quantization_config=quantization("nf4-double"))


def _measure_in_trainer(path, folder):
    rows = [{"input_ids": [3 + (k * n) % 90 for n in range(63 - (k == 3))]} for k in range(8)]
    rows = [row | {"completion_mask": [1] * len(row["input_ids"])} for row in rows]
    setup = Setup(batch_size=4, accumulation=1, max_steps=2)
    return _peak_of_last_step(build_trainer(path, folder, setup, rows=rows))


def _peak_of_last_step(trainer):
    step, peaks = trainer.training_step, []

    def measured(*args):
        results = []
        peaks.append(peak_bytes(lambda: results.append(step(*args))))
        return results[0]

    trainer.training_step = measured
    trainer.train()
    return peaks[-1]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_trainer_takes_what_was_rehearsed(world_of, model, tmp_path, tp_size):
    config, adapter = AutoConfig.from_pretrained(model("llama")), tiny_lora()
    plan = build_plan(config, adapter, tp_size=tp_size, dtype="float64")
    cost = rehearse(plan, config, adapter, Batch(rows=4, length=63, is_checkpointed=False))
    for found in world_of(tp_size).run(_measure_in_trainer, model("llama"), tmp_path):
        assert cost.working == pytest.approx(found, rel=0.1)


def _measure_pairs(path, folder):
    """Of pairs whose answers are all of the sequence but one token, one of them shorter by one."""
    answer = [3 + n % 90 for n in range(62)]
    rows = [
        {"prompt_ids": [5], "chosen_ids": answer[: 62 - (k == 3)], "rejected_ids": answer[::-1]}
        for k in range(8)
    ]
    setup = Preferring(num_rows=8, accumulation=1, max_steps=2)
    with mock.patch.dict(preferences.ROWS, dpo=lambda num_rows: rows):
        trainer = preferences.build(path, folder, setup, Mesh(tp_size=world_size()))
    return _peak_of_last_step(trainer)


def test_the_trainer_of_pairs_takes_what_was_rehearsed(world2, model, tmp_path):
    config, adapter = AutoConfig.from_pretrained(model("llama")), tiny_lora()
    plan = build_plan(config, adapter, tp_size=2, dtype="float64")
    batch = Batch(rows=8, length=63, is_checkpointed=False, reference_passes=1)
    cost = rehearse(plan, config, adapter, batch)
    for found in world2.run(_measure_pairs, model("llama"), tmp_path):
        assert cost.working == pytest.approx(found, rel=0.1)


def test_the_tolerance_sees_a_pass_of_the_reference(world2, model):
    """What is said by it, though what it takes is smaller than backward's most."""
    alone = replace(PASSES["pairs"], reference_passes=0)
    cost = _rehearsed(model("llama"), alone, 2)
    found = world2.run(measure, model("llama"), lora(), PASSES["pairs"])[0]
    assert found["resident"] > cost.resident
    assert found["forward"] != cost.forward


def test_the_tolerance_sees_activations_that_are_kept(world2, model):
    """What is kept of three layers, or of one input each, is more than a tenth apart."""
    kept = Batch(rows=3, length=160, is_checkpointed=False)
    cost = _rehearsed(model("llama"), kept, 2)
    found = world2.run(measure, model("llama"), lora(), CHECKPOINTED)[0]
    with pytest.raises(AssertionError):
        _assert_same(cost, found)


def test_a_rehearsal_leaves_no_group_and_no_hook(model):
    hook = sys.excepthook
    _rehearsed(model("llama"), KEPT, 4)
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_what_a_step_takes_grows_with_its_rows(model):
    one, two, four = (
        _rehearsed(model("llama"), Batch(rows=rows, length=64, is_checkpointed=False), 1)
        for rows in (2, 4, 8)
    )
    assert four.kept - two.kept == pytest.approx(2 * (two.kept - one.kept), rel=0.01)


@pytest.mark.parametrize(
    "keywords", [{"use_reentrant": True}, {"every_n_layers": 2}, {"keep_reduced_outputs": True}]
)
def test_keywords_of_checkpointing_are_rehearsed(world2, model, keywords):
    batch = dataclasses.replace(CHECKPOINTED, checkpointing=keywords)
    cost = _rehearsed(model("llama"), batch, 2)
    _assert_same(cost, world2.run(measure, model("llama"), lora(), batch)[0])


def test_code_that_needs_values_is_refused_by_name(model, monkeypatch):
    path = model("llama")
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.LlamaMLP.forward",
        lambda self, x: x * float(x.tolist()[0][0][0]),
    )
    with pytest.raises(PlanError, match="LlamaForCausalLM: its step cannot be followed without"):
        _rehearsed(path, KEPT, 1)
    assert not dist.is_initialized()


def _refused_in_a_group(path):
    with pytest.raises(PlanError, match="inside a process group"):
        _rehearsed(path, KEPT, 2)
    return dist.is_initialized()


def test_a_rank_of_a_group_is_left_as_it_is(world2, model):
    assert world2.run(_refused_in_a_group, model("llama")) == [True, True]
