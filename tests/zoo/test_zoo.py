"""Every causal architecture that carries a TP plan is exact, and its published row is true."""

import copy
from functools import partial

import pytest
from peft import LoraConfig
from transformers import AutoConfig

from tests.zoo import table
from tests.zoo.build import architectures, build_model, tiny_config
from tests.zoo.packing import stays_apart
from tests.zoo.parity import deviations
from tplora.errors import PlanError
from tplora.plan.architectures import proven_architectures, proven_classes
from tplora.plan.build import build_plan
from tplora.plan.lora import build_lora_config
from tplora.plan.packing import PROVEN_ATTENTION

ALL = architectures()
ROWS = {row.model_type: row for row in proven_architectures()}


JOINED = ("gemma3_text", "gpt_oss", "jamba", "qwen3_moe")
"""A window, a mask without positions, a state, experts; the others only in the slow tests."""


def _mark(model_type):
    return () if model_type in JOINED else pytest.mark.slow


def _assert_exact(found, precision: str) -> None:
    for worst in found:
        assert table.is_within(worst, precision), {k: v for k, v in worst.items() if v[0] > 1e-9}


@pytest.mark.world
@pytest.mark.parametrize("model_type", ALL)
def test_two_ranks_are_one_process(world2, model_type, tmp_path):
    build_model(model_type).save_pretrained(tmp_path)
    row = ROWS[model_type]
    packs = row.packs and model_type in JOINED
    found = world2.run(partial(deviations, packs=packs), str(tmp_path), 2)
    _assert_exact(found, row.precision)
    config = AutoConfig.from_pretrained(tmp_path)
    assert table.describe(model_type, config, row.precision, packs=row.packs) == row


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize("model_type", [m for m in ALL if ROWS[m].packs and m not in JOINED])
def test_joined_rows_on_two_ranks_are_those_of_one_process(world2, model_type, tmp_path):
    build_model(model_type).save_pretrained(tmp_path)
    found = world2.run(partial(deviations, packs=True), str(tmp_path), 2)
    _assert_exact(found, ROWS[model_type].precision)


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=_mark(name)) for name in ALL])
def test_joined_rows_stay_apart_where_the_table_says_so(model_type):
    """In one process, gradients and both attentions; a state that runs on is refused.

    glm_moe_dsa stays apart here, but over ranks its indexer breaks ties as the sequence's length
    has it.
    """
    kinds = [stays_apart(model_type, attention) for attention in PROVEN_ATTENTION]
    is_apart = all(kind is not False for kind in kinds) and model_type != "glm_moe_dsa"
    assert is_apart == ROWS[model_type].packs


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ALL)
def test_layers_that_an_adapter_leaves_out_are_exact(world2, model_type, tmp_path):
    build_model(model_type).save_pretrained(tmp_path)
    found = world2.run(partial(deviations, every=2), str(tmp_path), 2)
    _assert_exact(found, ROWS[model_type].precision)


def _often(model_type):
    marks = () if model_type in table.OFTEN_AT_FOUR else pytest.mark.slow
    return pytest.param(model_type, marks=marks)


@pytest.mark.world
@pytest.mark.parametrize("model_type", [_often(name) for name in table.AT_FOUR])
def test_four_ranks_are_one_process(world4, model_type, tmp_path):
    build_model(model_type, tiny_config(model_type, wide=True)).save_pretrained(tmp_path)
    _assert_exact(world4.run(deviations, str(tmp_path), 4), ROWS[model_type].precision)


@pytest.mark.parametrize("model_type", ALL)
def test_all_linear_and_experts_make_a_plan_or_name_what_to_exclude(model_type):
    config = tiny_config(model_type)
    row = ROWS[model_type]
    asked = {"target_modules": "all-linear", "experts": row.experts is not None, "r": 4}
    if row.not_adapted:
        with pytest.raises(PlanError, match=r"add it to lora\.exclude_modules"):
            build_plan(config, build_lora_config(asked, config), tp_size=2)
        asked["exclude_modules"] = list(row.not_adapted)
    plan = build_plan(config, build_lora_config(asked, config), tp_size=2)
    stacks = {p.name for p in plan.facts.with_role("experts")}
    assert stacks <= {layer.name for layer in plan.layers}


def test_every_architecture_has_a_row_and_no_row_is_made_up():
    assert sorted(ROWS) == ALL
    assert len(ALL) == 116


def test_the_page_and_the_rows_are_one():
    rows, classes = proven_architectures(), proven_classes()
    assert table.ROWS.read_text(encoding="utf-8") == table.rows_text(rows, classes)
    assert table.PAGE.read_text(encoding="utf-8") == table.page_text(rows, classes)


def test_an_architecture_without_a_row_is_refused_by_name():
    config = copy.deepcopy(tiny_config("llama"))
    config.model_type = "llama_of_tomorrow"
    with pytest.raises(PlanError, match="llama_of_tomorrow has not been proven exact when cut"):
        build_plan(config, LoraConfig(target_modules=["q_proj"]), tp_size=2)
