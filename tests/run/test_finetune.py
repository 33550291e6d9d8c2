"""`tplora finetune` from the outside: real processes, a tiny model, the run's folder, bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.command import forked_tplora
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer

RECIPE = """
[model]
pretrained_model_name_or_path = "base"
dtype = "float32"
[parallel]
tp_size = 2
check_every_steps = 1
[lora]
r = 4
target_modules = "all-linear"
lora_dropout = 0.1
[data]
train = "train.jsonl"
eval = "eval.jsonl"
assistant_only_loss = true
[train]
max_steps = 4
per_device_train_batch_size = 2
gradient_accumulation_steps = 2
learning_rate = 1e-2
logging_steps = 1
"""


def chat(number: int) -> str:
    return json.dumps(
        {
            "messages": [
                {"role": "user", "content": f"what is {number}" + " and more" * (number % 3)},
                {"role": "assistant", "content": f"the answer is {number * 2}"},
            ]
        }
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a recipe, a base with its tokenizer, and rows."""
    folder = tmp_path_factory.mktemp("place")
    write_checkpoint("llama", folder / "base", vocab_size=512, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(folder / "base")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "train.jsonl").write_text("\n".join(chat(n) for n in range(14)) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(chat(n) for n in range(20, 25)) + "\n")
    return folder


def tplora(place: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(Path.cwd()), "HF_HUB_OFFLINE": "1"} | env
    return forked_tplora(*argv, cwd=place, **env)


def real_tplora(place: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """From nothing, as a person starts it; of every command that starts ranks, once is enough."""
    return subprocess.run(
        [sys.executable, "-m", "tplora", *argv],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def cut(place) -> Path:
    """The run's folder of the recipe at tp_size 2, through the launcher."""
    done = real_tplora(place, "finetune", "recipe.toml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "%|" not in done.stderr, "a progress bar in a pipe"
    (place / "said.txt").write_text(done.stdout)
    return place / "runs" / "recipe"


@pytest.fixture(scope="module")
def whole(place) -> Path:
    """The same recipe in one process."""
    argv = ["--set", "parallel.tp_size=1", "--output", "whole"]
    done = tplora(place, "finetune", "recipe.toml", *argv)
    assert done.returncode == 0, done.stderr + done.stdout
    return place / "whole"


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.world
def test_a_run_at_tp_size_2_is_the_run_at_tp_size_1(cut, whole):
    """With dropout, accumulation, rows of unequal length and a short last step."""
    there, here = metrics(cut), metrics(whole)
    assert [record["step"] for record in there] == [0, 1, 2, 3, 4, 4]
    for a, b in zip(there, here, strict=True):
        for name in set(a) - {"tokens_per_s", "peak_bytes"}:
            assert a[name] == pytest.approx(b[name], rel=1e-5), (name, a, b)
    for name, factor in load_file(cut / "adapter" / "adapter_model.safetensors").items():
        truth = load_file(whole / "adapter" / "adapter_model.safetensors")[name]
        torch.testing.assert_close(factor, truth, rtol=0, atol=2e-5, msg=name)


@pytest.mark.world
def test_the_run_folder_holds_what_it_should(place, cut):
    names = {path.name for path in cut.iterdir()}
    assert names == {
        "adapter", "log.txt", "logs", "loss.png", "metrics.jsonl", "plan.txt",
        "probe.safetensors", "recipe.toml",
    }  # fmt: skip
    record = metrics(cut)[1]
    assert set(record) == {
        "step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "peak_bytes",
    }  # fmt: skip
    assert "self_attn.q_proj" in (cut / "plan.txt").read_text()
    assert "step 4/4  eval_loss" in (cut / "log.txt").read_text()
    assert "dtype" in (cut / "recipe.toml").read_text()
    said = (place / "said.txt").read_text()
    assert "in plain PEFT" in said
    assert said.count("step 1/4") == 1, "one rank talks"


@pytest.mark.world
def test_the_adapter_is_a_normal_peft_folder(place, cut):
    adapter = cut / "adapter"
    base = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter))
    config = LoraConfig.from_pretrained(str(adapter))
    assert config.base_model_name_or_path == str((place / "base").resolve())
    assert {name.rpartition(".")[2] for name in config.target_modules} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    shapes = {
        name.replace(".default", ""): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert (adapter / "chat_template.jinja").is_file()
    assert "evaluation loss" in (adapter / "README.md").read_text()
    modes = {path.stat().st_mode & 0o777 for path in adapter.iterdir()}
    assert len(modes) == 1, "a file that only its owner may read"


@pytest.mark.world
def test_verify_passes_and_fails_when_one_number_changes(place, cut, tmp_path):
    done = tplora(place, "verify", str(cut))
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
    weights = cut / "adapter" / "adapter_model.safetensors"
    kept = weights.read_bytes()
    try:
        at = len(kept) - 4096
        weights.write_bytes(kept[:at] + b"\x40" * 4 + kept[at + 4 :])
        done = tplora(place, "verify", str(cut))
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
    finally:
        weights.write_bytes(kept)


@pytest.mark.world
def test_the_merged_model_loads_and_says_what_base_and_adapter_say(place, cut):
    done = tplora(place, "export", str(cut), "--merged", "merged")
    assert done.returncode == 0, done.stderr
    merged = AutoModelForCausalLM.from_pretrained(place / "merged", dtype="auto")
    base = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(cut / "adapter"))
    ids = torch.tensor([[5, 300, 17, 260, 400]])
    with torch.no_grad():
        found = merged.to(torch.float32)(ids).logits
        torch.testing.assert_close(found, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    assert (place / "merged" / "tokenizer.json").is_file()


@pytest.mark.world
def test_generate_answers_alike_in_one_process_and_in_two(place, cut):
    argv = ["generate", str(cut), "what is 3", "--max-new-tokens", "6"]
    one, two = tplora(place, *argv), tplora(place, *argv, "--tp-size", "2")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert one.stdout.strip()
    assert two.stdout.endswith(one.stdout)


@pytest.mark.world
@pytest.mark.slow
def test_a_run_that_diverges_stops_and_saves_nothing(place):
    argv = ["--output", "diverged", "--set", "train.learning_rate=1e30"]
    done = tplora(place, "finetune", "recipe.toml", *argv)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "is nan" in line or "is inf" in line
    assert not (place / "diverged" / "adapter").exists()
    assert line.removeprefix("error: ") in (place / "diverged" / "log.txt").read_text()
    records = metrics(place / "diverged")
    assert all(value == value for record in records for value in record.values())


@pytest.mark.world
def test_it_runs_inside_torchrun_and_ends_when_a_rank_is_killed(place):
    """A killed rank ends the run within seconds, and nothing is saved."""
    argv = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tplora",
            "finetune", "recipe.toml", "--output", "torchrun", "--set",
            "train.max_steps=100000"]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, *argv],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        wait_for(place / "torchrun" / "metrics.jsonl", text='"step": 2')
        ranks = children_of(launcher.pid)
        os.kill(ranks[-1], signal.SIGKILL)
        killed = time.monotonic()
        launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert time.monotonic() - killed < 40
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert not (place / "torchrun" / "adapter").exists()


def wait_for(path: Path, *, text: str, timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not (path.is_file() and text in path.read_text()):
        assert time.monotonic() < end, f"{path} never had {text}"
        time.sleep(0.02)  # a step of a tiny model takes little longer


def children_of(pid: int) -> list[int]:
    """The ranks that a launcher started."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in listed if b"tplora" in cmdline(child))


def cmdline(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_folder_that_holds_a_run_is_refused_before_anything_starts(place, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "metrics.jsonl").write_text("{}\n")
    done = tplora(place, "finetune", "recipe.toml", "--output", str(tmp_path / "full"))
    assert done.returncode == 1
    assert "already holds a run" in done.stderr
    assert "--overwrite" in done.stderr


def test_too_few_rows_and_a_wrong_world_size_are_one_line_each(place):
    few = ["--output", "few", "--set", "train.per_device_train_batch_size=30"]
    done = tplora(place, "check", "recipe.toml", *few[2:])
    assert done.returncode == 1
    assert "14 rows, but one step takes 60" in done.stderr
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    done = tplora(place, "finetune", "recipe.toml", "--output", "three", **ranks)
    assert done.returncode == 1
    assert "parallel: tp_size 2 needs 2 processes, 3 were started" in done.stderr
