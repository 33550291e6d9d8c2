"""What is known of a run before any process starts."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tplora.errors import PlanError
from tplora.recipe.check import read_recipe
from tplora.run.preflight import plan_recipe


def _recipe(folder: Path) -> Path:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
    )
    config.save_pretrained(folder / "base")
    (folder / "base" / "model.safetensors").write_bytes(b"")  # there, but never read
    (folder / "rows.jsonl").write_text(json.dumps({"text": "a row"}) + "\n")
    path = folder / "tiny.toml"
    path.write_text(
        '[model]\npretrained_model_name_or_path = "base"\n[lora]\nr = 2\n'
        'target_modules = "all-linear"\n[data]\ntrain = "rows.jsonl"\n'
    )
    return path


def test_a_recipe_is_planned_without_its_weights(tmp_path):
    recipe = read_recipe(_recipe(tmp_path))
    planned = plan_recipe(recipe, tp_size=2)
    assert planned.tp_size == 2
    assert len(planned.layers) == 7


def test_a_tp_size_that_cannot_be_is_refused_before_anything_starts(tmp_path):
    recipe = read_recipe(_recipe(tmp_path))
    with pytest.raises(PlanError, match=r"tp_size = 4.*key-value heads"):
        plan_recipe(recipe, tp_size=4)
