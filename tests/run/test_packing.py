"""`tplora finetune` with packed rows or autocast: the run of two ranks is that of one process."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.run.test_finetune import RECIPE, chat, metrics, tplora
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer
from tests.zoo.build import build_model
from tplora.errors import DataError, PlanError, RecipeError
from tplora.recipe.check import read_recipe
from tplora.run.preflight import plan_recipe, tokenize_recipe_rows

PACKED = RECIPE.replace("max_steps = 4", 'max_steps = 4\nsave_strategy = "steps"\nsave_steps = 1')
PACKED += "packing = true\nmax_length = 96\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_checkpoint("llama", folder / "base", vocab_size=512, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(folder / "base")
    (folder / "recipe.toml").write_text(PACKED)
    for name, first, end in (("train", 0, 40), ("eval", 50, 59)):
        rows = [chat(number) for number in range(first, end)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def _run(place, name, *changes):
    argv = [word for change in changes for word in ("--set", change)]
    done = tplora(place, "finetune", "recipe.toml", *argv, "--output", name)
    assert done.returncode == 0, done.stderr + done.stdout
    return place / name, done.stdout


@pytest.mark.slow
@pytest.mark.world
def test_a_packed_run_is_that_of_one_process_and_resumes_bit_for_bit(place):
    cut, said = _run(place, "cut")
    assert "data.train: 40 rows in " in said
    assert "packs of up to 96 tokens" in said
    whole, _ = _run(place, "whole", "parallel.tp_size=1")
    for a, b in zip(metrics(cut), metrics(whole), strict=True):
        for name in set(a) - {"tokens_per_s", "peak_bytes"}:
            assert a[name] == pytest.approx(b[name], rel=1e-5), (name, a, b)
    shutil.rmtree(cut / "adapter")
    before = (cut / "checkpoint-4" / "optimizer.pt").read_bytes()
    shutil.rmtree(cut / "checkpoint-4")
    shutil.rmtree(cut / "checkpoint-3")
    done = tplora(place, "finetune", "recipe.toml", "--output", "cut", "--resume")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (cut / "checkpoint-4" / "optimizer.pt").read_bytes() == before
    other = ("--output", "cut", "--resume", "--set", "train.packing=false")
    assert "train.packing: was true" in tplora(place, "finetune", "recipe.toml", *other).stderr


@pytest.mark.slow
@pytest.mark.world
def test_a_run_under_autocast_is_verified_without_it(place):
    """Two ranks are as near to one process as that is to a run in float32."""
    runs = {
        name: _run(place, name, f"parallel.tp_size={size}", f"train.bf16={is_on}")[0]
        for name, size, is_on in (("a", 1, "false"), ("b", 1, "true"), ("c", 2, "true"))
    }
    losses = {name: [r["loss"] for r in metrics(run) if "loss" in r] for name, run in runs.items()}
    truth, one, two = (torch.tensor(losses[name]) for name in "abc")
    assert float((one - truth).norm()) > 0
    assert float((two - truth).norm()) <= 2 * float((one - truth).norm())
    for run in runs.values():
        record = json.loads((run / "adapter" / "verify.json").read_text())
        assert record["max_abs_diff"] < 1e-3
    assert load_file(runs["c"] / "adapter" / "adapter_model.safetensors")


# ---- before anything loads


def _read(place, *changes):
    return read_recipe(place / "recipe.toml", changes)


def test_a_model_whose_rows_read_each_other_is_refused_without_a_weight(place, tmp_path):
    build_model("gpt_oss").config.save_pretrained(tmp_path / "base")  # and nothing else
    base = f'model.pretrained_model_name_or_path="{tmp_path}/base"'
    targets = 'lora.target_modules=["q_proj"]'
    with pytest.raises(PlanError, match=r"train\.packing = true: gpt_oss: its layers have not"):
        plan_recipe(_read(place, base, targets), tp_size=2)
    plan_recipe(_read(place, base, targets, "train.packing=false"), tp_size=2)


def test_autocast_is_refused_where_it_was_not_compared(place):
    plan_recipe(_read(place, "train.bf16=true"), tp_size=2)
    with pytest.raises(PlanError, match=r"the base is held in float16; set model\.dtype to one of"):
        plan_recipe(_read(place, "train.bf16=true", 'model.dtype="float16"'), tp_size=2)
    with pytest.raises(RecipeError, match=r"train\.bf16 = true .*multiplies in its own dtype"):
        _read(place, "train.bf16=true", "quantization.load_in_4bit=true")


def test_packs_are_counted_where_a_step_needs_them(place):
    assert next(tokenize_recipe_rows(_read(place))).num_rows == 40
    with pytest.raises(DataError, match=r"packs, but one step takes 36; give more rows"):
        next(tokenize_recipe_rows(_read(place, "train.per_device_train_batch_size=18")))
    joined = ("train.packing=false", "train.padding_free=true")
    more = (*joined, "train.per_device_train_batch_size=18")
    assert next(tokenize_recipe_rows(_read(place, *more))).num_rows == 40
