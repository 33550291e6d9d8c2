"""Sizes that do not divide: heads by 3 and 8, features and vocabularies of odd sizes, new rows."""

import pytest
from transformers import AutoModelForCausalLM

from tests.zoo.build import build_model, tiny_config
from tests.zoo.parity import deviations
from tests.zoo.table import is_within
from tplora.errors import PlanError
from tplora.plan.architectures import proven_architectures
from tplora.plan.build import build_plan
from tplora.plan.lora import build_lora_config

PRECISION = {row.model_type: row.precision for row in proven_architectures()}


def _odd_config(model_type: str, vocab: int, **changes):
    config = tiny_config(model_type)
    for name, value in {"vocab_size": vocab, **changes}.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return config


THREE = {"num_attention_heads": 6, "num_key_value_heads": 3}
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 8}
FFN = {"intermediate_size": 129}
CASES = {
    (2, "gemma3_text"): (259, FFN),  # tied
    (2, "mixtral"): (127, {"intermediate_size": 33}),
    (3, "llama"): (127, THREE | FFN | {"hidden_size": 96}),  # it wants whole heads
    (3, "qwen2"): (259, THREE | FFN | {"tie_word_embeddings": True}),
    (3, "qwen3_moe"): (259, THREE | FFN | {"moe_intermediate_size": 33, "num_experts": 5}),
    (3, "deepseek_v3"): (127, {"num_attention_heads": 6, "num_key_value_heads": 6}),
    (8, "llama"): (127, EIGHT | FFN),
    (8, "qwen3_moe"): (131, EIGHT | {"moe_intermediate_size": 33}),
}


def _mark(tp_size, model_type):
    return pytest.mark.slow if (tp_size, model_type) == (8, "qwen3_moe") else ()


@pytest.mark.world
@pytest.mark.parametrize(
    ("tp_size", "model_type"),
    [pytest.param(*case, marks=_mark(*case)) for case in CASES],
)
def test_odd_shapes_are_one_process(world_of, tp_size, model_type, tmp_path):
    vocab, changes = CASES[tp_size, model_type]
    build_model(model_type, _odd_config(model_type, vocab, **changes)).save_pretrained(tmp_path)
    for worst in world_of(tp_size).run(deviations, str(tmp_path), tp_size, vocab):
        assert is_within(worst, PRECISION[model_type]), worst


@pytest.mark.world
def test_rows_for_new_tokens_are_cut_and_trained(world2, tmp_path):
    build_model("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(261, mean_resizing=False)
    model.save_pretrained(tmp_path / "more")
    for worst in world2.run(deviations, str(tmp_path / "more"), 2, 261):
        assert is_within(worst, "float64"), worst


@pytest.mark.parametrize(
    ("tp_size", "heads", "works"),
    [(4, (8, 2), "1, 2"), (3, (8, 2), "1, 2"), (8, (8, 4), "1, 2, 4"), (2, (4, 1), "1")],
)
def test_fewer_key_value_heads_than_ranks_are_refused_with_sizes_that_work(tp_size, heads, works):
    changes = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    config = _odd_config("qwen3_moe", 256, **changes)
    lora = build_lora_config({"target_modules": "all-linear", "experts": True}, config)
    with pytest.raises(PlanError, match=f"use one of {works}$"):
        build_plan(config, lora, tp_size=tp_size)
