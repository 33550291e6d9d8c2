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
from tests.recipe.writing import write_recipe
from tplora.adapter.card import card_text, is_hub_id, merged_card_text, public_name
from tplora.artifact.push import check_hub, push_folder
from tplora.errors import ArtifactError, HubError
from tplora.recipe.parse import load_recipe
from tplora.run.card import card_details, card_facts, license_of, without_paths, write_merged_card
from tplora.run.preflight import check_upload

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
    monkeypatch.setattr(
        constants, "HF_HUB_DISABLE_XET", True
    )  # a protocol that no test here speaks


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


@pytest.mark.parametrize("part", ["create", "/store/", "/commit/"])
def test_an_upload_that_fails_says_how_to_go_on_and_no_token(adapter, online, part):
    before = {path: path.read_bytes() for path in adapter.iterdir()}
    with (
        local_hub(refuses=part, stores=".safetensors") as hub,
        pytest.raises(HubError, match=f"then `tplora push {adapter} me/mine`: .* is whole") as said,
    ):
        _push(adapter, hub)
    assert not hub.files
    assert "Bearer hf_x" in hub.tokens
    assert "hf_x" not in str(said.value)
    assert before == {path: path.read_bytes() for path in adapter.iterdir()}


def test_a_hub_is_asked_before_the_run_what_it_will_say_after_it(online):
    def ask(hub, **settings):
        check_hub("me/mine", token="hf_x", **({"endpoint": hub.url} | settings))

    with local_hub() as hub:
        ask(hub)
        assert not hub.repos
        with pytest.raises(HubError, match="me/mine: the hub does not take it"):
            ask(hub, endpoint="http://127.0.0.1:9")
    with local_hub(private=True) as hub:
        ask(hub)
    with local_hub(private=False) as hub:
        ask(hub, private=False)
        with pytest.raises(HubError, match="everybody sees it"):
            ask(hub)
    with local_hub(refuses="whoami") as hub, pytest.raises(HubError, match="hf auth login"):
        ask(hub)


def test_a_hub_that_is_switched_off_stops_a_run_before_it_starts(tmp_path):
    recipe = write_recipe(tmp_path)
    recipe.write_text(f'{recipe.read_text()}[export]\npush_to_hub = "me/mine"\n')
    with pytest.raises(
        HubError, match=r"^export.push_to_hub: me/mine: the hub .*; or leave it out"
    ):
        check_upload(load_recipe(recipe))


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"private": False}, "everybody sees it"), ({"refuses": ""}, "the hub does not take it")],
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
    """A large file goes beside the commit, and is in it."""
    env = os.environ | {"PYTHONPATH": str(Path.cwd()), "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
    env |= {"HF_HUB_DISABLE_XET": "1"}
    with local_hub(stores=".safetensors") as hub:
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
    (stored,) = hub.stored.values()
    assert stored == (adapter / "adapter_model.safetensors").read_bytes()
    assert hub.files["adapter_model.safetensors"] == stored
    assert len(hub.messages) == 1, "one commit"


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
    write_merged_card(adapter, {adapter: 1.0}, str(licensed), tmp_path / "out")
    card = ModelCard((tmp_path / "out" / "README.md").read_text())
    assert card.data.license == "mit"
    assert "# my-llama with a LoRA adapter merged in" in card.content


def test_a_merged_models_card_tells_what_went_in_and_no_other_models_loss(base, tmp_path):
    run, out = tmp_path / "runs" / "first", tmp_path / "out"
    (run / "adapter").mkdir(parents=True)
    out.mkdir()
    (run / "recipe.toml").write_text(RECIPE.replace('output_note = "x"', "").format(base=base))
    config = LoraConfig(target_modules=["q_proj"], base_model_name_or_path=str(base))
    config.save_pretrained(run / "adapter")
    records = [json.dumps({"step": step, "eval_loss": 2.0 - step}) for step in (0, 1)]
    (run / "metrics.jsonl").write_text("\n".join(records) + "\n")

    def card(others, **settings):
        write_merged_card(run, {run / "adapter": 1.0} | others, str(base), out, **settings)
        return (out / "README.md").read_text()

    alone = card({}, note="it holds the base as it was; more", dtype="float16")
    assert "| evaluation loss | 2.0000 -> 1.0000 |" in alone
    assert "| weights | it holds the base as it was |" in alone
    assert "| written in | float16 |" in alone
    both = card({tmp_path / "second": 0.5})
    assert "| merged in | 1 x `first`, 0.5 x `second` |" in both
    assert "evaluation loss" not in both


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
    write_merged_card(tmp_path, {adapter: 1.0}, str(base), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| steps | 2 |" in card
    assert "| chosen among | the checkpoints of 4 steps |" in card
    assert "| evaluation loss | 3.0000 -> 1.0000 |" in card
    for step in (2, 4):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    write_merged_card(tmp_path, {adapter: 1.0}, str(base), tmp_path / "out")
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
