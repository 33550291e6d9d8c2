"""Which base belongs to a finished run."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.quantized import quantization
from tplora.adapter.base_record import BASE_RECORD
from tplora.errors import ArtifactError, SourceError
from tplora.run.base import find_base
from tplora.run.merging import base_to_merge_into


def _base(folder: Path) -> Path:
    LlamaConfig(dtype="bfloat16").save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def _adapter(run: Path, base: str | None) -> Path:
    LoraConfig(base_model_name_or_path=base).save_pretrained(str(run / "adapter"))
    return run / "adapter"


def _recipe(run: Path, base: Path, dtype: str) -> None:
    (run / "recipe.toml").write_text(
        f'[model]\npretrained_model_name_or_path = {json.dumps(str(base))}\ndtype = "{dtype}"\n'
        '[lora]\nr = 2\n[data]\ntrain = "x.jsonl"\n'
    )


def test_the_recipe_of_a_run_names_its_base_whatever_the_adapter_says(tmp_path):
    base = _base(tmp_path / "base")
    adapter = _adapter(tmp_path, "owner/published-elsewhere")
    _recipe(tmp_path, base, "float32")
    found = find_base(tmp_path, adapter)
    assert (found.path, found.revision, found.dtype) == (str(base), None, torch.float32)


def test_a_dtype_left_to_the_base_is_the_bases(tmp_path):
    base = _base(tmp_path / "base")
    adapter = _adapter(tmp_path, None)
    _recipe(tmp_path, base, "auto")
    assert find_base(tmp_path, adapter).dtype == torch.bfloat16


def test_a_bare_adapter_names_its_base_itself(tmp_path):
    base = _base(tmp_path / "base")
    adapter = _adapter(tmp_path, str(base))
    assert find_base(adapter, adapter).path == str(base)


def _record(adapter: Path, **values: object) -> None:
    (adapter / BASE_RECORD).write_text(json.dumps(values))


def test_a_bare_adapter_says_how_its_base_was_held(tmp_path):
    base = _base(tmp_path / "base")
    adapter = _adapter(tmp_path, str(base))
    assert find_base(adapter, adapter).quantization is None
    given = quantization("nf4-double", bnb_4bit_compute_dtype="bfloat16")
    _record(adapter, dtype="float32", held_in="nf4", quantization_config=given.to_dict())
    found = find_base(adapter, adapter)
    assert found.dtype == torch.float32
    assert found.quantization.to_dict() == given.to_dict()
    _record(adapter, dtype="float16", held_in="float16", quantization_config=None)
    assert find_base(adapter, adapter).quantization is None
    assert find_base(adapter, adapter).dtype == torch.float16


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dtype": "float32", "held_in": "nf4"},
        {"dtype": "float32", "held_in": "nf4", "quantization_config": [4]},
        {"dtype": "float32", "held_in": "nf4", "quantization_config": {"load_in_4bit": "x"}},
        {"dtype": "nonsense", "held_in": "nf4", "quantization_config": None},
    ],
    ids=str,
)
def test_a_damaged_record_is_an_error_of_ours(tmp_path, values):
    base = _base(tmp_path / "base")
    adapter = _adapter(tmp_path, str(base))
    _record(adapter, **values)
    with pytest.raises(ArtifactError, match="does not say how the base was loaded"):
        find_base(adapter, adapter)
    (adapter / BASE_RECORD).write_text('{"dtype": ')
    with pytest.raises(ArtifactError, match="is not JSON"):
        find_base(adapter, adapter)


def test_a_base_that_is_gone_or_not_named_is_an_error_of_ours(tmp_path):
    with pytest.raises(ArtifactError, match="names no base"):
        find_base(tmp_path, _adapter(tmp_path, None))
    gone = _adapter(tmp_path, str(tmp_path / "gone"))
    with pytest.raises(SourceError):
        find_base(tmp_path, gone)


def test_a_base_that_was_not_quantised_has_one_form(tmp_path):
    base = _base(tmp_path / "base")
    save_file({"w": torch.zeros(1)}, base / "model.safetensors")
    adapter = _adapter(tmp_path, str(base))
    found = find_base(adapter, adapter)
    for into in ("dequantized", "original"):
        with (
            pytest.raises(ArtifactError, match="was not trained on a quantised base"),
            base_to_merge_into(found, into=into),
        ):
            pass
    with base_to_merge_into(found) as source:
        assert (source.tensors.checkpoint.folder, source.note) == (base, "")
