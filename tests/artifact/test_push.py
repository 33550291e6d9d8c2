"""Uploads to a hub on this machine, and the cards that go with them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants
from peft import LoraConfig
from safetensors.torch import load

from tests.artifact.hub import local_hub
from tests.artifact.tiny import write_adapter, write_base
from tplora.adapter.card import card_text, is_hub_id, merged_card_text, public_name
from tplora.artifact.push import push_folder
from tplora.errors import ArtifactError
from tplora.recipe.parse import load_recipe
from tplora.run.card import card_details, card_facts, license_of, without_paths, write_merged_card

RECIPE = """
[model]
pretrained_model_name_or_path = "{base}"
[lora]
r = 4
target_modules = ["q_proj"]
[data]
train = "rows.jsonl"
[train]
max_steps = 3
output_note = "x"
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "my-llama")


@pytest.fixture
def adapter(base, tmp_path):
    folder = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    (folder / "optimizer.pt").write_bytes(b"not to be seen")
    (folder / "README.md").write_text(
        card_text(LoraConfig.from_pretrained(folder), {"steps": "3"}, license_name="apache-2.0")
    )
    return folder


@pytest.fixture
def online(monkeypatch):
    """The suite runs with a hub that is off."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def _push(folder, hub, **settings):
    return push_folder(folder, "me/mine", endpoint=hub.url, token="hf_x", **settings)


def test_an_adapter_goes_up_whole_private_and_without_paths(base, adapter, tmp_path, online):
    with local_hub() as hub:
        assert _push(adapter, hub).endswith("/me/mine")
    asked = hub.repos["me/mine"]
    assert asked.get("private") is True or asked.get("visibility") == "private"
    assert set(hub.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert len(hub.messages) == 1, "one commit"
    for name, data in hub.files.items():
        assert str(tmp_path).encode() not in data, name
        assert str(base.parent).encode() not in data, name
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "my-llama"
    assert len(load(hub.files["adapter_model.safetensors"])) == 4
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base), "what is here stays as it is"


def test_public_is_asked_for(adapter, online):
    with local_hub() as hub:
        _push(adapter, hub, private=False)
    asked = hub.repos["me/mine"]
    assert not asked.get("private")
    assert asked.get("visibility") != "private"


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"private": False}, "everybody sees it"), ({"refuses": True}, "the hub does not take it")],
)
def test_a_hub_that_does_not_fit_is_said(adapter, online, settings, said):
    with local_hub(**settings) as hub, pytest.raises(ArtifactError, match=said):
        _push(adapter, hub)
    assert not hub.files


def test_what_is_no_model_or_names_a_path_is_not_sent(adapter, tmp_path, online):
    with local_hub() as hub:
        with pytest.raises(ArtifactError, match="is no repository; write OWNER/NAME"):
            push_folder(adapter, "mine", endpoint=hub.url, token="hf_x")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ArtifactError, match="holds no adapter and no model"):
            _push(tmp_path / "empty", hub)
        card = (adapter / "README.md").read_text()
        (adapter / "README.md").write_text(f"{card}\nfrom {adapter.resolve()}\n")
        with pytest.raises(ArtifactError, match="names a path of this machine"):
            _push(adapter, hub)
        (tmp_path / "secret").write_text("x")
        (adapter / "README.md").unlink()
        (adapter / "README.md").symlink_to(tmp_path / "secret")
        with pytest.raises(ArtifactError, match="is a link out of its folder"):
            _push(adapter, hub)
    assert not hub.files


@pytest.mark.world
def test_the_command_takes_the_endpoint_of_the_environment(adapter, tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path.cwd()), "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
    with local_hub() as hub:
        done = subprocess.run(
            [sys.executable, "-m", "tplora", "push", str(adapter), "me/mine"],
            env=env | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "pushed: " in done.stdout
    assert "adapter_model.safetensors" in hub.files


@pytest.mark.parametrize("text", [card_text, merged_card_text])
@pytest.mark.parametrize("name", ["owner/model-1", "/home/someone/secret/my-llama", None])
def test_a_card_is_one_that_the_hub_reads(text, name):
    config = LoraConfig(base_model_name_or_path=name, target_modules=["q_proj"], r=4)
    made = text(config, {"steps": "3"}, license_name="apache-2.0", details={"Plan": "a plan"})
    card = ModelCard(made)
    assert card.data.license == "apache-2.0"
    assert card.data.tags == ["lora", "tplora"]
    assert card.data.library_name == ("peft" if text is card_text else "transformers")
    assert getattr(card.data, "base_model", None) == (name if name == "owner/model-1" else None)
    assert "someone" not in made
    assert "| steps | 3 |" in made
    assert "## Plan\n\n```\na plan\n```" in made


@pytest.mark.parametrize("name", ["a: b", "x\n---\nevil: 1", "[MIT]", "../x", "MIT License"])
def test_a_licence_that_is_no_word_is_left_out(name):
    made = card_text(LoraConfig(target_modules=["q"]), {}, license_name=name)
    assert getattr(ModelCard(made).data, "license", None) is None


def test_a_runs_card_tells_recipe_plan_rows_and_versions(base, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    text = RECIPE.replace("output_note", "run_name").format(base=base)
    (tmp_path / "recipe.toml").write_text(text.replace('"x"', f'"{tmp_path}/x y"'))
    recipe = load_recipe(tmp_path / "recipe.toml")
    facts = card_facts(recipe, [{"step": 0, "eval_loss": 2.0}, {"step": 3, "eval_loss": 1.5}])
    details = card_details(recipe, f"LlamaForCausalLM of {base}/config.json over tp_size 2")
    said = json.dumps([facts, details])
    assert str(tmp_path) not in said
    assert str(base.parent) not in said
    assert facts["evaluation loss"] == "2.0000 -> 1.5000"
    assert "peft 0.21" in facts["versions"]
    assert 'pretrained_model_name_or_path = "my-llama"' in details["Recipe"]
    assert 'train = "rows.jsonl"' in details["Recipe"]
    assert details["Plan"] == "LlamaForCausalLM of config.json over tp_size 2"
    other = card_facts(recipe, [])["sha256 of the rows"]
    (tmp_path / "rows.jsonl").write_text('{"text": "b"}\n')
    assert card_facts(recipe, [])["sha256 of the rows"] != other


def test_a_merged_model_has_a_card_with_the_bases_licence(base, adapter, tmp_path):
    licensed = tmp_path / "licensed"
    licensed.mkdir()
    (licensed / "README.md").write_text("---\nlicense: mit\n---\n# A base\n")
    assert license_of(str(licensed)) == "mit"
    assert license_of("no/where") is None
    (licensed / "README.md").write_text("---\nlicense: [\n---\n")
    assert license_of(str(licensed)) is None
    (licensed / "README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "out").mkdir()
    write_merged_card(adapter, adapter, str(licensed), tmp_path / "out")
    card = ModelCard((tmp_path / "out" / "README.md").read_text())
    assert card.data.license == "mit"
    assert "# my-llama with a LoRA adapter merged in" in card.content


def test_a_merged_card_tells_of_the_step_that_was_saved(base, adapter, tmp_path):
    """The best one; where no checkpoint says any more which that was, of none."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    text = RECIPE.replace("output_note", "run_name").format(base=base)
    (tmp_path / "recipe.toml").write_text(f"{text}\nload_best_model_at_end = true\n")
    losses = {0: 3.0, 2: 1.0, 4: 2.0}
    records = [json.dumps({"step": step, "eval_loss": loss}) for step, loss in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records) + "\n")
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (2, 4):
        state = json.dumps({"global_step": step, "best_global_step": 2})
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "out").mkdir()
    write_merged_card(tmp_path, adapter, str(base), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| steps | 2 |" in card
    assert "| chosen among | the checkpoints of 4 steps |" in card
    assert "| evaluation loss | 3.0000 -> 1.0000 |" in card
    for step in (2, 4):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    write_merged_card(tmp_path, adapter, str(base), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "evaluation loss" not in card
    assert "| steps |" not in card


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see /home/a/b.txt.", "see b.txt."),
        ("x = '/a/b'", "x = 'b'"),
        ("~/models/x and ./here/y", "x and y"),
        ("0.5/3 of 576/3", "0.5/3 of 576/3"),
        ("W [576/3, 64]", "W [576/3, 64]"),
    ],
)
def test_paths_become_names(text, said):
    assert without_paths(text) == said


def test_names_that_a_hub_knows():
    assert is_hub_id("a/b-1.0")
    assert not any(map(is_hub_id, ["a", "/a/b", "a/b/c", "./a", "../a", "~/a", "a/b c", "a:b/c"]))
    assert public_name("/x/y/z/") == "z"
    assert public_name("C:\\x\\y") == "y"
