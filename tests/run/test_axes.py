"""`tplora finetune` over data axes, on cut sequences: four processes, then one, train one run."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.run.test_finetune import RECIPE, chat, metrics, tplora
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.world

ALONE = [
    "--set", "parallel.tp_size=1", "--set", "parallel.fsdp_size=1",
    "--set", "train.per_device_train_batch_size=2",
]  # fmt: skip
"""The same rows a step in one process."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    write_checkpoint("llama", folder / "base", vocab_size=512, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(folder / "base")
    recipe = (
        RECIPE.replace("tp_size = 2", "tp_size = 2\nfsdp_size = 2\nsequence_parallel = true")
        .replace("lora_dropout = 0.1\n", "")
        .replace("batch_size = 2", "batch_size = 1")
    )
    (folder / "recipe.toml").write_text(recipe + 'save_strategy = "steps"\nsave_steps = 2\n')
    (folder / "train.jsonl").write_text("\n".join(chat(n) for n in range(14)) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(chat(n) for n in range(20, 25)) + "\n")
    return folder


@pytest.fixture(scope="module")
def four(place) -> Path:
    done = tplora(place, "finetune", "recipe.toml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "4: fsdp_size 2 x tp_size 2, tp ranks next to each other" in done.stdout
    assert "in plain PEFT" in done.stdout
    return place / "runs" / "recipe"


def _goes_on(run: Path, to: Path) -> Path:
    """What a run looks like that was stopped after its second step."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "adapter")
    shutil.rmtree(to / "checkpoint-4")
    return to


def test_a_run_of_four_processes_goes_on_in_one_and_ends_alike(place, four, tmp_path):
    run = _goes_on(four, tmp_path / "run")
    argv = ["finetune", "recipe.toml", "--output", str(run), "--resume"]
    done = tplora(place, *argv, *ALONE)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"resumed from {run}/checkpoint-2" in done.stdout
    for record, other in zip(metrics(run), metrics(four), strict=True):
        for name in set(record) - {"tokens_per_s", "peak_bytes", "eval_loss"}:
            assert record[name] == pytest.approx(other[name], rel=1e-5), name
    for name, factor in load_file(run / "adapter" / "adapter_model.safetensors").items():
        truth = load_file(four / "adapter" / "adapter_model.safetensors")[name]
        torch.testing.assert_close(factor, truth, rtol=0, atol=2e-5, msg=name)


def test_a_run_of_other_rows_a_step_does_not_go_on(place, four, tmp_path):
    run = _goes_on(four, tmp_path / "run")
    argv = ["finetune", "recipe.toml", "--output", str(run), "--resume"]
    done = tplora(place, *argv, "--set", "parallel.fsdp_size=1")
    assert done.returncode == 1
    assert "parallel: a step had 4 rows, has 2" in done.stderr
    done = tplora(place, *argv, "--set", "train.per_device_train_batch_size=2")
    assert done.returncode == 1
    assert "train.per_device_train_batch_size: was 1, is 2" in done.stderr


def test_torchrun_with_another_number_of_processes_is_one_clear_error(place):
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6"}
    done = tplora(place, "finetune", "recipe.toml", **env)
    assert done.returncode == 1
    assert "parallel: fsdp_size 2 x tp_size 2 needs 4 processes, 6 were started" in done.stderr
