"""The keys of ``[lora]`` and ``[export]`` that tplora adds, through whole runs in one process."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from tests.run.test_finetune import RECIPE, chat, metrics, tplora
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer

START = """
[lora]
adapter_name_or_path = "first"
autocast_adapter_dtype = true
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    write_checkpoint("llama", folder / "base", vocab_size=512, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(folder / "base")
    recipe = RECIPE.replace("tp_size = 2", "tp_size = 1").replace("max_steps = 4", "max_steps = 2")
    first = recipe.replace("r = 4", "r = 4\nuse_dora = true\nloraplus_lr_ratio = 4.0")
    (folder / "first.toml").write_text(first)
    before, rest = recipe.split("[lora]")
    (folder / "second.toml").write_text(before + START + "[data]" + rest.split("[data]")[1])
    (folder / "train.jsonl").write_text("\n".join(chat(n) for n in range(14)) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(chat(n) for n in range(20, 25)) + "\n")
    argv = ["--output", "first", "--set", "export.adapter_dtype=bfloat16"]
    done = tplora(folder, "finetune", "first.toml", *argv)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def factors(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def test_the_adapter_is_written_in_the_dtype_asked_for_and_verified(place):
    assert {factor.dtype for factor in factors(place / "first").values()} == {torch.bfloat16}
    assert any(name.endswith("lora_magnitude_vector") for name in factors(place / "first"))
    done = tplora(place, "verify", "first")
    assert done.returncode == 0, done.stderr + done.stdout


def test_a_run_starts_from_the_adapter_of_another(place):
    done = tplora(place, "finetune", "second.toml", "--output", "second")
    assert done.returncode == 0, done.stderr + done.stdout
    here, before = metrics(place / "second"), metrics(place / "first")
    assert here[0]["eval_loss"] == pytest.approx(before[-1]["eval_loss"], rel=1e-3)
    assert here[-1]["eval_loss"] < before[-1]["eval_loss"]
    config = LoraConfig.from_pretrained(place / "second" / "adapter")
    assert config.use_dora
    assert config.r == 4
    assert {factor.dtype for factor in factors(place / "second").values()} == {torch.float32}


def test_activated_lora_runs_without_checkpointing_and_is_not_merged(place):
    argv = ["--set", "lora.use_dora=false", "--set", "lora.alora_invocation_tokens=[2]"]
    done = tplora(place, "finetune", "first.toml", "--output", "activated", *argv)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "--merged" not in done.stdout
    argv += ["--set", "train.activation_checkpointing=true", "--set", "export.merged=true"]
    done = tplora(place, "plan", "first.toml", *argv)
    assert done.returncode == 1
    assert "peft does not run aLoRA with it" in done.stderr
    assert "alora_invocation_tokens cannot be merged into files" in done.stderr


def test_a_learning_rate_that_nothing_reads_is_refused(place):
    argv = ["--set", "lora.loraplus_lr_embedding=1e-5", "--set", "lora.loraplus_lr_ratio=2"]
    assert tplora(place, "check", "first.toml", *argv).returncode == 0
    text = (place / "first.toml").read_text().replace("loraplus_lr_ratio = 4.0", "")
    (place / "third.toml").write_text(text)
    done = tplora(place, "check", "third.toml", *argv[:2])
    assert done.returncode == 1
    assert "has no effect without loraplus_lr_ratio" in done.stderr


def test_an_adapter_without_a_tokenizer_answers_with_the_base_s(place):
    """As peft alone leaves it."""
    (place / "bare").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(place / "first" / "adapter" / name, place / "bare" / name)
    argv = ["what is 3", "--max-new-tokens", "4"]
    whole, bare = (tplora(place, "generate", folder, *argv) for folder in ("first", "bare"))
    assert bare.returncode == 0, bare.stderr + bare.stdout
    assert bare.stdout == whole.stdout


def test_what_the_adapter_brings_is_not_given_again(place):
    argv = ["--set", "lora.r=8", "--set", "lora.adapter_name_or_path=nowhere"]
    done = tplora(place, "check", "second.toml", *argv)
    assert done.returncode == 1
    assert "lora.r = 8 (--set): comes with the adapter that is started from" in done.stderr
    assert "no such folder; name one that holds adapter_config.json" in done.stderr
