"""Rows that are packed are learned as they are alone, whoever holds which piece of the model."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import datasets
import pytest
import torch

from tests.axes.running import Mesh, assert_same, results, trainer_on
from tests.models import CUT, InDouble, lora
from tests.train.training import Setup, token_rows
from tests.zoo.build import build_model, tiny_config
from tplora.errors import TrainError
from tplora.plan.packing import joined_rows_problem
from tplora.train.counting import CountsOnce
from tplora.train.kinds import build_arguments, prepare_rows
from tplora.train.packing import MarksPacks, pack_rows, say_packs

ROWS = Setup(num_rows=12, batch_size=12, accumulation=1, max_steps=10)
"""All rows in each step, so that packed or not it is the same step."""
PACKS = replace(ROWS, batch_size=4, arguments=(("packing", True),))
"""In three packs: of two data ranks one has a pack and a repeat."""
JOINED = replace(ROWS, arguments=(("padding_free", True), ("max_length", None)))
MESHES = [
    Mesh(tp_size=2),
    pytest.param(Mesh(fsdp_size=2), marks=pytest.mark.slow),
    Mesh(dp_replicate_size=2),
]


def _run(mesh, path, folder, setup):
    trainer = trainer_on(mesh, path, folder, setup)
    with InDouble():
        trainer.train()
    return *results(trainer), trainer.state.num_input_tokens_seen


@pytest.fixture(scope="module")
def wanted(alone, checkpoint, tmp_path_factory):
    path = checkpoint("llama", **CUT)
    return alone.run(_run, Mesh(), path, tmp_path_factory.mktemp("alone"), ROWS)[0]


@pytest.mark.world
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("setup", [PACKS, JOINED], ids=["packs", "joined"])
def test_ten_steps_of_joined_rows_are_those_of_rows_alone_in_one_process(
    world2, checkpoint, wanted, tmp_path, setup, mesh
):
    for *found, seen in world2.run(_run, mesh, checkpoint("llama", **CUT), tmp_path, setup):
        assert_same(found, wanted[:3])
        assert seen == wanted[3]


def _forgetting(path, folder, what):
    broken = {
        "positions": mock.patch.object(MarksPacks, "__call__", _without_positions),
        "repeats": mock.patch.object(CountsOnce, "_only", lambda self, own, batch: batch),
    }
    mesh = Mesh(tp_size=2) if what == "positions" else Mesh(dp_replicate_size=2)
    with broken[what]:
        return _run(mesh, path, folder, replace(PACKS, max_steps=2))


def _without_positions(self, examples):
    batch = self.collate(examples)
    count = torch.arange(batch["position_ids"].shape[1])[None]
    return {**batch, "position_ids": count}


@pytest.mark.world
@pytest.mark.parametrize("what", ["positions", "repeats"])
def test_parity_sees_rows_that_read_each_other_and_packs_learned_twice(
    world2, checkpoint, wanted, tmp_path, what
):
    (logs, _, _), broken = wanted[:3], _forgetting
    found = world2.run(broken, checkpoint("llama", **CUT), tmp_path, what)[0]
    assert found[0][0]["loss"] != pytest.approx(logs[0]["loss"], rel=1e-4)


# ---- packs


def _dataset(rows):
    labels = [[-100] * 3 + row["input_ids"][3:] for row in rows]
    tokens = [row["input_ids"] for row in rows]
    return datasets.Dataset.from_dict({"input_ids": tokens, "labels": labels})


def test_each_row_is_in_one_pack_and_whole():
    rows = _dataset(token_rows(2500))
    packs = pack_rows(rows, 64)
    found = Counter()
    for pack in packs:
        assert sum(pack["seq_lengths"]) == len(pack["input_ids"]) == len(pack["labels"]) <= 64
        start = 0
        for length in pack["seq_lengths"]:
            end = start + length
            found[(*pack["input_ids"][start:end], *pack["labels"][start:end])] += 1
            start = end
    assert found == Counter((*row["input_ids"], *row["labels"]) for row in rows)
    assert pack_rows(rows, 64)[:] == packs[:], "the same on every rank"
    assert not packs.cache_files
    assert say_packs(packs, 64).startswith(f"2,500 rows in {len(packs):,} packs of up to 64 tokens")


def test_evaluation_is_packed_as_training_unless_it_says_otherwise(tmp_path):
    rows, common = _dataset(token_rows(6)), {"output_dir": str(tmp_path), "use_cpu": True}
    common |= {"bf16": False, "activation_checkpointing": False}
    packed = build_arguments("sft", {**common, "packing": True, "max_length": 64})
    assert len(prepare_rows("sft", rows, packed, is_eval=True)) < len(rows)
    packed.eval_packing = False
    assert prepare_rows("sft", rows, packed, is_eval=True) is rows
    assert len(prepare_rows("sft", rows, packed)) < len(rows)
    joined = build_arguments("sft", {**common, "padding_free": True})
    assert joined.max_length is None, "or trl refuses rows it does not cut"
    assert prepare_rows("sft", rows, joined) is rows


# ---- models that do not keep rows apart


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("jamba", {}, "jamba: its layers have not been shown to keep joined rows apart"),
        ("gpt_oss", {"attention": "eager"}, "gpt_oss: its layers"),
        ("llama", {"attention": "flash_attention_2"}, "use eager or sdpa"),
        ("llama", {"alora_invocation_tokens": [5]}, "aLoRA looks for where it is invoked once"),
        ("gemma3", {}, "gemma3: has more than a text model"),
        ("llama", {"attention": "sdpa"}, None),
        ("gemma2", {}, None),
    ],
)
def test_a_model_or_an_attention_that_was_not_shown_is_refused_by_name(model_type, changes, words):
    config = tiny_config(model_type) if model_type != "gemma3" else _with_towers()
    attention, tokens = changes.get("attention"), changes.get("alora_invocation_tokens")
    problem = joined_rows_problem(config, lora(alora_invocation_tokens=tokens), attention)
    assert (problem is None) == (words is None)
    assert words is None or words in problem


def _with_towers():
    return mock.Mock(model_type="gemma3", get_text_config=lambda **_: tiny_config("gemma3_text"))


def _refused_in_trainer(path, folder, changes):
    with pytest.raises(TrainError) as caught:
        trainer_on(Mesh(), path, folder, replace(PACKS, arguments=tuple(changes.items())))
    return str(caught.value)


@pytest.mark.world
def test_the_trainer_refuses_what_a_recipe_does(alone, tmp_path, checkpoint):
    build_model("gpt_oss").save_pretrained(tmp_path / "base")
    (said,) = alone.run(_refused_in_trainer, str(tmp_path / "base"), tmp_path, {"packing": True})
    assert said.startswith("packing = true: gpt_oss: its layers")
    wrapped = {"packing": True, "packing_strategy": "wrapped"}
    (said,) = alone.run(_refused_in_trainer, checkpoint("llama", **CUT), tmp_path, wrapped)
    assert "has each row read those before it" in said
