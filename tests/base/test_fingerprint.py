"""An adapter beside a base of the same shapes that it was not trained on."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests.artifact.tiny import write_base
from tplora.adapter.attach import attach_adapter
from tplora.adapter.load import load_factors
from tplora.adapter.save import save_adapter
from tplora.base.fingerprint import BASE, check_same_base, take_fingerprint
from tplora.errors import ArtifactError
from tplora.run.base import find_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model = attach_adapter(model, LoraConfig(r=2, target_modules=["q_proj"]))
    save_adapter(model, tmp_path / "adapter")
    return tmp_path / "adapter"


def _rewritten(base, folder, change=lambda model: None, **settings):
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder, **settings)
    return folder


def _tuned(model):
    model.model.layers[1].mlp.up_proj.weight.mul_(1 + 1e-6)


def _half(model):
    model.to(torch.bfloat16)


def _shorter_rope(model):
    model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 5e5}


def _grown(model):
    model.resize_token_embeddings(60)


def test_what_is_saved_says_nothing_of_this_machine(adapter, tmp_path):
    assert str(tmp_path) not in (adapter / BASE).read_text()
    assert "base0" not in (adapter / BASE).read_text()


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda model: None, {}),
        (lambda model: None, {"max_shard_size": "20KB"}),
        (_half, {}),
        (_grown, {}),
    ],
    ids=["again", "in shards", "in bfloat16", "with more tokens"],
)
def test_a_base_that_holds_the_same_numbers_is_the_same(base, adapter, tmp_path, change, settings):
    check_same_base(adapter, str(_rewritten(base, tmp_path / "other", change, **settings)))


@pytest.mark.parametrize(
    ("change", "said"),
    [(_tuned, "such as model.layers.1.mlp.up_proj.weight"), (_shorter_rope, "other settings")],
)
def test_another_base_is_refused_by_every_way_in(base, adapter, tmp_path, change, said):
    other = _rewritten(base, tmp_path / "other", change)
    with pytest.raises(ArtifactError, match=said):
        check_same_base(adapter, str(other))
    model = attach_adapter(
        AutoModelForCausalLM.from_pretrained(other), LoraConfig.from_pretrained(adapter)
    )
    with pytest.raises(ArtifactError, match=rf"another base than .*{said}.*or remove .*{BASE}"):
        load_factors(model, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    named = config | {"base_model_name_or_path": str(other)}
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    with pytest.raises(ArtifactError, match=said):
        find_base(adapter, adapter)
    (adapter / BASE).unlink()
    load_factors(model, adapter)
    assert find_base(adapter, adapter).path == str(other)


def test_a_base_that_is_gone_is_not_compared(base, adapter, tmp_path):
    check_same_base(adapter, str(tmp_path / "nowhere"))
    shutil.copytree(base, tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    assert take_fingerprint(str(tmp_path / "weightless")) is None
    assert take_fingerprint("") is None


@pytest.mark.parametrize("text", ["{}", '{"tensors": 3}', "[]", '{"tensors": {"a": {}}}'])
def test_a_file_that_is_no_fingerprint_is_refused(base, adapter, text):
    if text.endswith("{}}}"):
        name = next(iter(json.loads((adapter / BASE).read_text())["tensors"]))
        text = text.replace('"a"', f'"{name}"')
    (adapter / BASE).write_text(text)
    with pytest.raises(ArtifactError, match="is no fingerprint of a base"):
        check_same_base(adapter, str(base))
