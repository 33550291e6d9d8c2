"""Adapters without a run are held to tplora's own layers, and names are told from hub ids."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.artifact.tiny import change_tensors, write_adapter, write_base
from tests.merging import merge_one
from tests.train.tiny_tokenizer import tiny_tokenizer
from tplora.errors import ArtifactError
from tplora.run.verify import check_run
from tplora.saved.hub import is_on_hub

# peft 0.21.2 asks transformers 5.24 for a property by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_base(folder / "base", vocab_size=512)
    tiny_tokenizer().save_pretrained(folder / "base")
    write_adapter(folder / "base", folder / "adapter", target_modules=["q_proj", "down_proj"])
    return folder


def test_an_adapter_from_elsewhere_is_held_to_tploras_own_layers(place):
    done = check_run(place / "adapter")
    assert done.report.passed
    assert done.report.is_telling
    assert not done.has_run
    record = json.loads(done.record.read_text())
    assert record["compared"] == "adapter in plain PEFT, with the adapter in tplora's layers"


def test_so_is_a_model_merged_from_it_and_a_wrong_one_fails(place, tmp_path):
    merge_one(str(place / "base"), place / "adapter", tmp_path / "merged")
    assert check_run(place / "adapter", merged=tmp_path / "merged").report.passed
    changed = shutil.copytree(place / "adapter", tmp_path / "changed")
    change_tensors(changed, lambda t: {k: -v if "lora_B" in k else v for k, v in t.items()})
    assert not check_run(changed, merged=tmp_path / "merged").report.passed


def test_a_base_that_is_elsewhere_is_named(place, tmp_path):
    moved = shutil.copytree(place / "adapter", tmp_path / "moved")
    config = json.loads((moved / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = None
    (moved / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="names no base; name its folder or hub id with --base"):
        check_run(moved)
    assert check_run(moved, base=str(place / "base")).report.passed


def test_names_of_another_class_of_the_model_are_said_with_the_command(place, tmp_path):
    other = shutil.copytree(place / "adapter", tmp_path / "other")
    path = other / "adapter_model.safetensors"
    old, new = "base_model.model.model.", "base_model.model.model.language_model."
    save_file({k.replace(old, new): v for k, v in load_file(path).items()}, path)
    with pytest.raises(ArtifactError, match=r"convert .* --rename model.language_model.=model. "):
        check_run(other)


def test_what_is_nowhere_here_may_be_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert is_on_hub("owner/name")
    assert not any(map(is_on_hub, ["runs/nmae", "./owner/name", "/a/b", "~/x", "a/b/c", "name"]))
