"""What is trained of the base itself, and LoRA's variants, on tokens: plain PEFT in one process."""

from dataclasses import replace

import pytest
import torch

from tests.adapter.beside import BIASES, MODULES, TOKENS
from tests.models import CUT, Case, batches, compare_run, load, lora, record_run, world_size
from tests.quantized import quantization
from tests.rehearsal.models import write_model
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.errors import PlanError, ShardError

pytestmark = pytest.mark.world

VARIANTS = {
    "dora": ("llama_bias", CUT, Case(changes={"use_dora": True})),
    "lora-bias": ("llama_bias", CUT, Case(changes={"lora_bias": True})),
}
ALL = {**MODULES, **TOKENS, **BIASES, **VARIANTS}


def _record(path, case, file):
    record_run(path, case, file, is_plain=True)


def _compare(path, case, file):
    compare_run(path, case, file)


@pytest.mark.slow
@pytest.mark.parametrize("what", ALL)
def test_what_is_trained_beside_lora_is_that_of_one_process(
    world_of, alone, checkpoint, tmp_path, what
):
    name, changes, case = ALL[what]
    path = checkpoint(name, **changes)
    alone.run(_record, path, case, tmp_path / "alone")
    world_of(3).run(_compare, path, replace(case, is_cut=True), tmp_path / "alone")


def _assert_same_step(model, whole, batch):
    """With whole sequences, whose parity has its own tests."""
    for one in (model, whole):
        one.zero_grad()
        one(**batch).loss.backward()
    for name, factor in whole.factors("second").items():
        found = model.factors("second")[name].parameter.grad.to_local()
        wanted = factor.parameter.grad.to_local()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=name)


def _assert_same_logits(model, whole, ids):
    found, wanted = (one.eval()(input_ids=ids).logits for one in (model, whole))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def _added_and_asked(path):
    model = load(path, lora("query"), is_cut=True)
    whole = load(path, lora("query"))
    with pytest.raises(PlanError, match="whose scattered sums are not kept"):
        model.gradient_checkpointing_enable({"keep_reduced_outputs": True})
    with pytest.raises(PlanError, match="whose scattered sums are not overlapped"):
        attach_adapter(
            load_base(path, tp_size=world_size()),
            lora("query"),
            sequence_parallel=True,
            overlap_communication=True,
        )
    with pytest.raises(PlanError, match="o_proj gives each rank its tokens"):
        model.add_adapter("third", lora("query", modules_to_save=["o_proj"]))
    for one in (model, whole):
        one.add_adapter("second", lora(init_lora_weights=False))
        one.set_adapter("second")
    ids = batches(1)[1]["input_ids"]
    few = ids[:, :2]  # fewer than ranks
    _assert_same_step(model, whole, batches(1)[0])
    _assert_same_step(model, whole, {"input_ids": few, "labels": few})
    for asked in (ids, ids[:, :1]):
        _assert_same_logits(model, whole, asked)
    with torch.no_grad():  # whole sequences on every rank
        _assert_same_logits(model, whole, ids)
        kept = model(input_ids=ids, output_hidden_states=True).hidden_states
        assert {hidden.shape[1] for hidden in kept} == {ids.shape[1]}
        made = [one.generate(input_ids=ids, max_new_tokens=4) for one in (model, whole)]
    assert torch.equal(*made)
    with pytest.raises(ShardError, match="output_hidden_states = True: each rank has some tokens"):
        model(input_ids=ids, output_hidden_states=True)
    layer = model.get_base_model().model.layers[0]
    with pytest.raises(ShardError, match="self_attn: runs outside of its model"):
        layer(torch.ones(1, 2, 24, dtype=torch.float64), position_embeddings=None)


def test_a_second_adapter_evaluation_generation_and_one_token(world_of, checkpoint):
    world_of(3).run(_added_and_asked, checkpoint("llama", **CUT))


def _packed(path):
    """Two rows in one, kept apart by their positions, beside the two rows."""
    model = load(path, lora(init_lora_weights=False), is_cut=True).eval()
    rows = [batches(1)[0]["input_ids"][0, :n] for n in (5, 8)]
    given = {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
    }
    logits = model(**given, use_cache=False).logits[0]
    apart = [model(input_ids=row[None]).logits[0] for row in rows]
    torch.testing.assert_close(logits, torch.cat(apart), rtol=0, atol=1e-12)


def test_packed_rows_stay_apart(world_of, checkpoint):
    world_of(3).run(_packed, checkpoint("llama", **CUT))


def _quantised(path):
    """The same ranks and pieces with whole sequences: their parity has its own tests."""
    found = []
    for is_cut in (True, False):
        base = load_base(
            path,
            tp_size=world_size(),
            dtype=torch.float32,
            quantization_config=quantization("nf4"),
        )
        config = lora("query", init_lora_weights=False)
        model = attach_adapter(base, config, sequence_parallel=is_cut).train()
        loss = model(**batches(1)[0]).loss
        loss.backward()
        grads = {name: f.parameter.grad.to_local() for name, f in model.factors().items()}
        found.append({"loss": loss.detach()} | grads)
    for name, wanted in found[1].items():
        torch.testing.assert_close(found[0][name], wanted, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_a_quantised_base_runs_on_tokens(world_of, tmp_path):
    path = write_model("llama", tmp_path / "base")
    world_of(2).run(_quantised, path)
