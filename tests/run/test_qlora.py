"""`tplora finetune` on a base in 4 bits, from the outside: run, verify, generate, merge, resume."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.quantized import WIDE, load_whole, quantized_linears, values_of
from tests.run.test_finetune import RECIPE, chat, metrics, tplora
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer
from tplora.adapter.base_record import BASE_RECORD

pytestmark = pytest.mark.world

QUANTIZATION = """
[quantization]
load_in_4bit = true
bnb_4bit_quant_type = "nf4"
bnb_4bit_use_double_quant = true
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a recipe, a base in bfloat16, the same in 4 bits, and rows."""
    folder = tmp_path_factory.mktemp("place")
    write_checkpoint("llama", folder / "base", vocab_size=512, max_position_embeddings=256, **WIDE)
    tiny_tokenizer().save_pretrained(folder / "base")
    packed = load_whole(str(folder / "base"), "nf4-double")
    packed.save_pretrained(folder / "packed")
    tiny_tokenizer().save_pretrained(folder / "packed")
    saving = 'save_strategy = "steps"\nsave_steps = 2\n'
    (folder / "recipe.toml").write_text(QUANTIZATION + RECIPE + saving)
    (folder / "packed.toml").write_text(RECIPE.replace('"base"', '"packed"'))
    (folder / "train.jsonl").write_text("\n".join(chat(n) for n in range(14)) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(chat(n) for n in range(20, 25)) + "\n")
    return folder


@pytest.fixture(scope="module")
def cut(place) -> Path:
    """The run's folder of the recipe at tp_size 2."""
    done = tplora(place, "finetune", "recipe.toml")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "in plain PEFT" in done.stdout
    return place / "runs" / "recipe"


def _close(here: Path, there: Path) -> None:
    """The same losses to float32's rounding, which AdamW carries on."""
    for a, b in zip(metrics(here), metrics(there), strict=True):
        for name in {"loss", "eval_loss"} & set(a):
            assert a[name] == pytest.approx(b[name], rel=1e-4), (a, b)


def test_a_run_at_tp_size_2_is_the_run_at_tp_size_1(place, cut):
    argv = ["--set", "parallel.tp_size=1", "--output", "whole"]
    done = tplora(place, "finetune", "recipe.toml", *argv)
    assert done.returncode == 0, done.stderr + done.stdout
    _close(cut, place / "whole")
    assert all(t.dtype == torch.float32 for t in _factors(cut).values())  # not trl's bfloat16
    text = " ".join((cut / "plan.txt").read_text().split())
    assert "nf4 with double quantization in 14 linear layers" in text
    assert "nf4 with double quantization" in (cut / "adapter" / "README.md").read_text()


def _factors(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def test_a_checkpoint_that_is_quantised_trains_as_the_one_that_it_was_made_from(place, cut):
    argv = ["--set", "parallel.tp_size=1", "--set", "export.merged=true"]
    done = tplora(place, "finetune", "packed.toml", *argv)
    assert done.returncode == 0, done.stderr + done.stdout
    run = place / "runs" / "packed"
    _close(cut, run)
    for argv in (
        ["verify", str(run)],
        ["generate", str(run), "what is 3", "--max-new-tokens", "4"],
    ):
        done = tplora(place, *argv)
        assert done.returncode == 0, done.stderr + done.stdout
    done = tplora(place, "export", str(run), "--merged", "nowhere", "--into", "original")
    assert done.returncode == 1
    assert "the base's weights are packed (bitsandbytes)" in done.stderr
    assert not (place / "nowhere").exists()
    merged, seen = (
        _weights(_merged(place, run, "--no-evaluate")[0]),
        quantized_linears(load_whole(str(place / "packed"), "saved")),
    )
    assert merged.keys() == _weights(place / "base").keys()
    within = _weights(run / "merged")
    assert all(torch.equal(within[name], merged[name]) for name in merged), "by export.merged"
    for name, linear in seen.items():
        wanted = values_of(linear) + _delta(run, name)
        torch.testing.assert_close(merged[f"{name}.weight"], wanted, rtol=0, atol=1e-6, msg=name)


def test_verify_and_generate_take_the_base_as_it_was_trained_on(place, cut):
    done = tplora(place, "verify", str(cut))
    assert done.returncode == 0, done.stderr + done.stdout
    done = tplora(place, "generate", str(cut), "what is 3", "--max-new-tokens", "8")
    assert "the answer" in done.stdout, done.stderr + done.stdout
    other = place / "unquantised"
    shutil.copytree(cut, other)
    text = (cut / "recipe.toml").read_text()
    table = text[text.index("[quantization]") : text.index("[parallel]")]
    (other / "recipe.toml").write_text(text.replace(table, ""))
    done = tplora(place, "verify", str(other))
    assert done.returncode == 1, "the unquantised base says something else"


def test_a_bare_adapter_is_put_on_the_base_that_it_was_trained_on(place, cut, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(cut / "adapter", bare)
    shutil.copy(cut / "probe.safetensors", bare)
    for folder in (bare, cut / "adapter"):
        done = tplora(place, "verify", str(folder))
        assert done.returncode == 0, done.stderr + done.stdout
    said = [
        tplora(place, "generate", str(folder), "what is 3", "--max-new-tokens", "8").stdout
        for folder in (cut, bare)
    ]
    assert said[0] == said[1] != ""
    assert "load_in_4bit=True" in (bare / "README.md").read_text()
    (bare / BASE_RECORD).unlink()
    done = tplora(place, "verify", str(bare))
    assert done.returncode == 1, "the unquantised base says something else"


def _merged(place: Path, run: Path, *argv: str) -> tuple[Path, str]:
    folder = place / ("merged" + "".join(argv))
    done = tplora(place, "export", str(run), "--merged", str(folder), *argv)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not [path for path in place.iterdir() if path.name.startswith(".")], "left aside"
    return folder, done.stdout


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def _delta(run: Path, name: str) -> torch.Tensor:
    factors = _factors(run)
    a, b = (factors[f"base_model.model.{name}.lora_{key}.weight"] for key in "AB")
    return 8 / 4 * (b @ a)  # PEFT's lora_alpha; r


def _last_eval_loss(run: Path) -> float:
    return [record["eval_loss"] for record in metrics(run) if "eval_loss" in record][-1]


def _said_loss(said: str) -> float:
    return float(re.search(r"eval loss of the merged model: ([\d.]+)", said)[1])


def test_what_is_merged_is_the_model_that_was_trained(place, cut):
    folder, said = _merged(place, cut)
    assert "quantised and unpacked: the model that was trained" in " ".join(said.split())
    assert _said_loss(said) == pytest.approx(_last_eval_loss(cut), abs=2e-4)
    seen = quantized_linears(load_whole(str(place / "base"), "nf4-double"))
    merged, base = _weights(folder), _weights(place / "base")
    assert merged.keys() == base.keys()
    for name in merged:
        module = name.removesuffix(".weight")
        if module in seen:
            wanted = values_of(seen[module]) + _delta(cut, module)
            torch.testing.assert_close(merged[name], wanted, rtol=0, atol=1e-6, msg=name)
        else:
            assert torch.equal(merged[name], base[name]), name
    assert AutoConfig.from_pretrained(folder).dtype == torch.float32
    assert not hasattr(AutoConfig.from_pretrained(folder), "quantization_config")


def test_merging_goes_into_the_base_as_it_was_where_it_is_asked_to(place, cut):
    folder, said = _merged(place, cut, "--into=original")
    assert "which the adapter has not seen" in " ".join(said.split())
    assert abs(_said_loss(said) - _last_eval_loss(cut)) > 1e-3, "rounding weights changes nothing"
    merged, base = _weights(folder), _weights(place / "base")
    name = "model.layers.1.mlp.down_proj"
    wanted = base[f"{name}.weight"].float() + _delta(cut, name)
    torch.testing.assert_close(merged[f"{name}.weight"].float(), wanted, rtol=0, atol=1e-6)
    assert "{" not in said, "a trainer's own line"
    gone = place / "without-rows"
    shutil.copytree(cut, gone)
    recipe = (gone / "recipe.toml").read_text().replace("eval.jsonl", "gone.jsonl")
    (gone / "recipe.toml").write_text(recipe)
    said = _merged(place, gone, "--into=original", "--overwrite")[1]
    assert "its loss was not looked at: data.eval" in said
    assert "eval loss" not in _merged(place, cut, "--into=original", "--no-evaluate")[1]


def test_a_run_resumes_on_a_quantised_base_at_another_tp_size(place, cut, tmp_path):
    run = tmp_path / "killed"
    shutil.copytree(cut, run)
    for name in ("adapter", "checkpoint-4"):
        shutil.rmtree(run / name)
    argv = ["--output", str(run), "--resume", "--set", "parallel.tp_size=1"]
    done = tplora(place, "finetune", "recipe.toml", *argv)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"resumed from {run}/checkpoint-2" in done.stdout
    for name, factor in _factors(run).items():
        torch.testing.assert_close(factor, _factors(cut)[name], rtol=0, atol=1e-3, msg=name)


def test_a_recipe_may_begin_with_what_4_bits_lose(place, cut):
    argv = ["--output", "loftq", "--set", "lora.loftq=true", "--set", "train.eval_on_start=true"]
    argv += ["--set", "train.max_steps=1", "--set", "parallel.tp_size=1"]
    done = tplora(place, "finetune", "recipe.toml", *argv)
    assert done.returncode == 0, done.stderr + done.stdout
    first, without = metrics(place / "loftq")[0], metrics(cut)[0]
    assert first["step"] == without["step"] == 0
    assert abs(first["eval_loss"] - without["eval_loss"]) > 1e-4, "B is not 0 at the start"
    done = tplora(place, "plan", "packed.toml", "--set", "lora.loftq=true")
    assert done.returncode == 1
    assert "set [quantization] load_in_4bit = true" in done.stderr


def test_a_tp_size_that_breaks_blocks_is_refused_before_any_process_starts(place):
    (place / "odd.toml").write_text((place / "recipe.toml").read_text())
    done = tplora(place, "plan", "odd.toml", "--set", "parallel.tp_size=6")
    assert done.returncode == 0, done.stderr
    done = tplora(place, "finetune", "odd.toml", "--set", "parallel.tp_size=8")
    assert done.returncode == 1
    assert "nf4 has blocks of 64 values, and the rows of model.layers.0" in done.stderr
    assert "Traceback" not in done.stderr
