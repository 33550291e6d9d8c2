"""`tplora finetune` with method = "dpo": two ranks' run is one process's; the best is saved."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.run.test_finetune import RECIPE, metrics, tplora
from tests.tiny import write_checkpoint
from tests.train.preferences import pairs
from tests.train.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.world

DPO = """method = "dpo"
beta = 0.2
eval_strategy = "steps"
eval_steps = 1
save_strategy = "steps"
save_steps = 1
load_best_model_at_end = true
metric_for_best_model = "rewards/rejected"
greater_is_better = true
"""
"""The best one is an early one: training lowers the other answers' rewards."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a recipe, a base with its tokenizer, and pairs."""
    folder = tmp_path_factory.mktemp("place")
    write_checkpoint("llama_bias", folder / "base", vocab_size=512, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(folder / "base")
    (folder / "recipe.toml").write_text(RECIPE.replace("assistant_only_loss = true\n", "") + DPO)
    twins = [{"prompt": "a", "chosen": " b", "rejected": " b"}]
    for name, rows in (("train", pairs(14) + twins), ("eval", pairs(5, first=20))):
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def cut(place) -> Path:
    done = tplora(place, "finetune", "recipe.toml", "--output", "cut")
    assert done.returncode == 0, done.stderr + done.stdout
    (place / "said.txt").write_text(done.stdout)
    return place / "cut"


def test_the_run_of_two_ranks_is_that_of_one_process(place, cut):
    argv = ["--set", "parallel.tp_size=1", "--output", "whole"]
    done = tplora(place, "finetune", "recipe.toml", *argv)
    assert done.returncode == 0, done.stderr + done.stdout
    there, here = metrics(cut), metrics(place / "whole")
    assert {"rewards/margins", "rewards/accuracies", "loss"} <= there[0].keys()
    assert {"eval_rewards/margins", "eval_rewards/accuracies", "eval_loss"} <= there[1].keys()
    for a, b in zip(there, here, strict=True):
        for name in set(a) - {"tokens_per_s", "peak_bytes"}:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), (name, a, b)
    for name, factor in load_file(cut / "adapter" / "adapter_model.safetensors").items():
        truth = load_file(place / "whole" / "adapter" / "adapter_model.safetensors")[name]
        torch.testing.assert_close(factor, truth, rtol=0, atol=1e-4, msg=name)


def test_what_is_saved_is_the_best_adapter_and_not_the_reference(place, cut):
    said = (place / "said.txt").read_text()
    assert "1 with two equal answers in its first 1024 (row 15)" in said
    assert "of the pairs have the better answer ahead" in said
    assert "in plain PEFT" in said
    values = {r["step"]: r["eval_rewards/rejected"] for r in metrics(cut) if "eval_loss" in r}
    best = max(values, key=values.get)
    assert best < 4
    assert f"the adapter is that of step {best}" in said
    saved = (cut / "adapter" / "adapter_model.safetensors").read_bytes()
    assert saved == (cut / f"checkpoint-{best}" / "adapter_model.safetensors").read_bytes()
    assert not (cut / "adapter" / "ref").exists()
    assert (cut / f"checkpoint-{best}" / "ref").is_dir()
    card = (cut / "adapter" / "README.md").read_text()
    assert "dpo" in card
    assert "the checkpoints of 4 steps" in card


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_best_adapter(place, cut, tmp_path):
    run = tmp_path / "killed"
    shutil.copytree(cut, run)
    for name in ("adapter", "checkpoint-4", "checkpoint-3"):
        shutil.rmtree(run / name)
    done = tplora(place, "finetune", "recipe.toml", "--output", str(run), "--resume")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "checkpoint-2" in done.stdout
    for name in ("adapter/adapter_model.safetensors", "checkpoint-4/optimizer.pt"):
        assert (run / name).read_bytes() == (cut / name).read_bytes(), name
    done = tplora(place, "finetune", "recipe.toml", "--output", str(run), "--resume",
                  "--set", "train.method=kto")  # fmt: skip
    assert done.returncode == 1
    assert 'train.method: was "dpo", is "kto"' in done.stderr


def test_what_cannot_be_compared_with_is_refused_before_anything_loads(place):
    for changes, words in (
        ('lora.init_lora_weights="pissa"', "needs a second adapter, frozen, to compare with, and"),
        ('lora.bias="all"', "the base's biases are trained in place"),
        ('train.report_to="nothing"', 'train.report_to = "nothing": is none of'),
    ):
        done = tplora(place, "check", "recipe.toml", "--set", changes)
        assert done.returncode == 1
        assert words in done.stderr
