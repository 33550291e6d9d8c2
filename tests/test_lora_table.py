"""No field of ``LoraConfig`` is accepted and ignored, and the page says what the tests hold."""

import dataclasses

import pytest
from peft import IA3Config, LoraConfig, PrefixTuningConfig, VeraConfig

from tests.lora_table import PAGE, missing_tests, page_text, proofs
from tests.tiny import tiny_config
from tplora.errors import PlanError
from tplora.plan.build import build_plan
from tplora.recipe.lora_fields import LORA_FIELDS, REFUSED_INITS

FIELDS = [field.name for field in dataclasses.fields(LoraConfig)]
EXACT = [name for name in FIELDS if LORA_FIELDS[name].state == "exact"]
REFUSED = [name for name in FIELDS if LORA_FIELDS[name].state == "refused"]
# A value for each kind of field; peft's own classes would refuse some of them first.
VALUES = {"megatron_core": "other.core", "qalora_group_size": 8, "init_lora_weights": "loftq"}


def test_the_table_has_every_field_of_the_class_and_no_other():
    assert set(FIELDS) == set(LORA_FIELDS)


@pytest.mark.parametrize("name", EXACT)
def test_a_field_that_is_accepted_has_a_parity_test(name):
    assert name in proofs()


def test_the_parity_tests_are_there():
    assert missing_tests() == []


def _problems(name, value):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    setattr(config, name, value)
    with pytest.raises(PlanError) as caught:
        build_plan(tiny_config("llama"), config, tp_size=2)
    return caught.value.problems


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_not_accepted_is_refused_by_name(name):
    (problem,) = _problems(name, VALUES.get(name, ["something"]))
    assert problem.startswith(f"lora.{name} = ")
    assert "; " in problem or ", so " in problem, "what to do instead"


@pytest.mark.parametrize("name", REFUSED_INITS)
def test_an_init_that_is_not_accepted_is_refused_by_name(name):
    (problem,) = _problems("init_lora_weights", name)
    assert problem.startswith(f"lora.init_lora_weights = {name!r}")


@pytest.mark.parametrize("config", [IA3Config(), VeraConfig(), PrefixTuningConfig()])
def test_another_method_is_refused_with_the_nearest_that_is_trained(config):
    with pytest.raises(PlanError, match='only "LORA" is trained'):
        build_plan(tiny_config("llama"), config, tp_size=2)


def test_the_page_is_what_the_tests_say():
    assert PAGE.read_text(encoding="utf-8") == page_text()
