"""Adapters that other tools saved, read into a model that is cut."""

import pickle
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.adapter.models import load_plain, lora, tokens
from tests.merging import merge_one
from tplora.adapter.attach import attach_adapter
from tplora.adapter.load import load_factors
from tplora.base.load import load_base
from tplora.base.resize import resize_tokens
from tplora.errors import ArtifactError

pytestmark = pytest.mark.world
ENDS = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """Plain PEFT's folder, with the copies of embedding and head it adds, and what it says."""
    folder = tmp_path_factory.mktemp("saved")
    model = load_plain(checkpoint("llama"), target_modules=ENDS)
    with torch.no_grad():
        logits = model(tokens()).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says that it adds the copies
        model.save_pretrained(folder)
    assert any("base_layer" in name for name in load_file(folder / WEIGHTS))
    return folder, logits.numpy()


def _attached(path, folder):
    base = load_base(path, tp_size=torch.distributed.get_world_size(), dtype=torch.float64)
    model = attach_adapter(base, LoraConfig.from_pretrained(folder), autocast_adapter_dtype=False)
    return model.to(torch.float64)


def _logits(path, folder):
    model = _attached(path, folder)
    load_factors(model, folder)
    with torch.no_grad():
        return model.eval()(tokens()).logits.numpy()


def _as_bin(folder: Path, target: Path) -> Path:
    target.mkdir()
    (target / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    torch.save(load_file(folder / WEIGHTS), target / "adapter_model.bin")
    return target


def test_an_adapter_of_plain_peft_says_the_same_on_cut_factors(world, checkpoint, saved):
    folder, wanted = saved
    for logits in world.run(_logits, checkpoint("llama"), folder):
        assert abs(logits - wanted).max() < 1e-6


def test_an_older_bin_file_is_read_the_same_way(world2, checkpoint, saved, tmp_path):
    folder, wanted = saved
    for logits in world2.run(_logits, checkpoint("llama"), _as_bin(folder, tmp_path / "old")):
        assert abs(logits - wanted).max() < 1e-6


class _Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _refused(path, folder):
    model = _attached(path, folder)
    with pytest.raises(ArtifactError) as caught:
        load_factors(model, folder)
    return str(caught.value)


def test_a_pickle_that_would_run_something_is_refused(world2, checkpoint, saved, tmp_path):
    folder, victim = _as_bin(saved[0], tmp_path / "old"), tmp_path / "touched"
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"weight": _Hostile(victim)}))
    for said in world2.run(_refused, checkpoint("llama"), folder):
        assert "holds more than tensors, or is damaged" in said
    assert not victim.exists()


def _copy_of(folder, target, change):
    target.mkdir()
    (target / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    save_file(change(load_file(folder / WEIGHTS)), target / WEIGHTS)
    return target


def _other_base(tensors):
    name = "base_model.model.lm_head.base_layer.weight"
    return tensors | {name: tensors[name] + 1}


def _resized(tensors):
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    return tensors | {name: torch.cat([tensors[name], tensors[name][:2]])}


def _one_less(tensors):
    return {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}


def _save_resized(path, folder, **settings):
    """Plain PEFT's adapter of a base with two more tokens; what it says with them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says that it adds the copies
        base = _more_tokens(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64))
        model = get_peft_model(base, lora(target_modules=["q_proj"], **settings))
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.data.add_(torch.randn_like(parameter) / 8)
        model.save_pretrained(folder)
        with torch.no_grad():
            return model.eval()(tokens()).logits.numpy()


def _more_tokens(base):
    torch.manual_seed(3)
    base.resize_token_embeddings(base.get_input_embeddings().weight.shape[0] + 2)
    return base


WHOLE_ENDS = {"modules_to_save": ["embed_tokens", "lm_head"]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "was saved with a vocabulary of 129 tokens, the base has 127; write base and adapter"),
        ({"trainable_token_indices": [1]}, "the base has 127; load the base that it was trained"),
        (WHOLE_ENDS, "before attaching, resize the base with tplora.base.resize.resize_tokens"),
    ],
)
def test_a_vocabulary_that_was_resized_is_said(world2, checkpoint, tmp_path, settings, words):
    _save_resized(checkpoint("llama"), tmp_path, **settings)
    for said in world2.run(_refused, checkpoint("llama"), tmp_path):
        assert words in said


def _logits_resized(path, folder):
    base = load_base(path, tp_size=torch.distributed.get_world_size(), dtype=torch.float64)
    resize_tokens(base, 129, seed=0)
    model = attach_adapter(base, LoraConfig.from_pretrained(folder), autocast_adapter_dtype=False)
    load_factors(model.to(torch.float64), folder)
    with torch.no_grad():
        return model.eval()(tokens()).logits.numpy()


def test_whole_ends_of_a_resized_vocabulary_are_read_once(world2, checkpoint, tmp_path):
    """PEFT saves them three times over; what it was asked to is in the file once each."""
    wanted = _save_resized(checkpoint("llama"), tmp_path, **WHOLE_ENDS)
    assert any("original_module" in name for name in load_file(tmp_path / WEIGHTS))
    for logits in world2.run(_logits_resized, checkpoint("llama"), tmp_path):
        assert abs(logits - wanted).max() < 1e-6


@pytest.mark.parametrize("settings", [{}, WHOLE_ENDS, {"modules_to_save": ["lm_head"]}])
def test_a_resized_adapter_is_merged_as_by_peft(checkpoint, tmp_path, settings):
    path = checkpoint("llama")
    _save_resized(path, tmp_path / "adapter", **settings)
    base = _more_tokens(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64))
    wanted = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    merge_one(path, tmp_path / "adapter", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    for name, tensor in merged.state_dict().items():
        assert float((tensor - wanted[name]).abs().max()) < 1e-6, name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_base, "its values are not the base's"),
        (_resized, "was saved with a vocabulary of 129 tokens, the base has 127; load the base"),
        (_one_less, "are in the file or in the model but not in both"),
    ],
)
def test_what_does_not_fit_the_base_is_refused(world2, checkpoint, saved, tmp_path, change, words):
    folder = _copy_of(saved[0], tmp_path / "changed", change)
    for said in world2.run(_refused, checkpoint("llama"), folder):
        assert words in said
