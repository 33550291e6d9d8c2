"""Whole commands against a hub on this machine: runs that end there, adapters that come from it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.artifact.hub import local_hub
from tests.run.test_finetune import RECIPE, chat
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer
from tplora.artifact.verify import has_passed

pytestmark = [pytest.mark.world, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_checkpoint("llama", folder / "base", vocab_size=512, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(folder / "base")
    (folder / "recipe.toml").write_text(RECIPE)
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(chat, range(9))) + "\n")
    return folder


def _tplora(place, hub, *argv):
    env = {
        "PYTHONPATH": str(Path.cwd()),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_secret",
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(place / "home"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tplora", *argv],
        cwd=place,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "hf_secret" not in done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def run(place):
    """A run whose upload fails, with two restarts that it must not take."""
    with local_hub(refuses="/commit/", stores=".safetensors") as hub:
        argv = ["--set", "export.push_to_hub=me/mine", "--set", "train.save_strategy=steps",
                "--set", "train.save_steps=2", "--max-restarts", "2"]  # fmt: skip
        done = _tplora(place, hub, "finetune", "recipe.toml", *argv)
    return place / "runs" / "recipe", done


def test_an_upload_that_fails_leaves_a_complete_run_and_says_how_to_go_on(run, place):
    folder, done = run
    assert done.returncode == 1
    assert "verified" in done.stdout
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("error: the run is complete, and was not uploaded: me/mine: the hub")
    assert "`tplora push runs/recipe/adapter me/mine`: runs/recipe/adapter is whole" in said
    assert done.stdout.count("step 4/4  loss") == 1, "trained once"
    assert has_passed(folder / "adapter")
    with local_hub(stores=".safetensors") as hub:
        done = _tplora(place, hub, "push", "runs/recipe", "me/mine")
    assert done.returncode == 0, done.stderr
    assert (
        hub.files["adapter_model.safetensors"]
        == (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    )
    for name, data in hub.files.items():
        assert str(place).encode() not in data, name


def test_a_hub_that_refuses_stops_the_run_before_it_starts(place):
    with local_hub(refuses="whoami") as hub:
        argv = ["--output", "runs/none", "--set", "export.push_to_hub=me/mine"]
        done = _tplora(place, hub, "finetune", "recipe.toml", *argv)
    assert done.returncode == 1
    assert done.stderr.startswith("error: export.push_to_hub: me/mine: the hub does not take it")
    assert not (place / "runs" / "none").exists()


def test_every_command_takes_an_adapter_from_the_hub(run, place):
    files = {path.name: path.read_bytes() for path in (run[0] / "adapter").iterdir()}
    config = json.loads(files["adapter_config.json"])
    config["base_model_name_or_path"] = "me/base"
    files["adapter_config.json"] = json.dumps(config).encode()
    base = {path.name: path.read_bytes() for path in (place / "base").iterdir()}
    again = RECIPE.replace(
        'pretrained_model_name_or_path = "base"', 'pretrained_model_name_or_path = "me/base"'
    )
    start, end = again.index("[lora]"), again.index("[data]")
    again = again[:start] + '[lora]\nadapter_name_or_path = "me/adapter"\n' + again[end:]
    (place / "again.toml").write_text(again)
    shutil.rmtree(place / "merged", ignore_errors=True)
    with local_hub(holds={"me/adapter": files, "me/base": base}) as hub:
        for argv in (
            ["inspect", "me/adapter", "runs/recipe"],
            ["generate", "me/adapter", "hi", "--max-new-tokens", "3"],
            ["generate", "me/adapter", "hi", "--base", "base", "--max-new-tokens", "3"],
            ["verify", "me/adapter"],
            ["export", "me/adapter", "--merged", "merged"],
            ["verify", "me/adapter", "--base", "base", "--merged", "merged"],
            ["export", "me/adapter", "--for", "vllm", "--out", "served"],
            ["convert", "me/adapter", "--out", "half", "--dtype", "float16"],
            ["finetune", "again.toml", "--set", "parallel.tp_size=1"],
        ):
            done = _tplora(place, hub, *argv)
            assert done.returncode == 0, (argv, done.stderr)
        done = _tplora(place, hub, "inspect", "me/nothing")
    assert done.returncode == 1
    assert "me/nothing: no such folder, and the hub does not give it" in done.stderr
    assert done.stderr.count("\n") == 1
