"""``[model] add_tokens``, through whole runs: trained, verified, merged, generated with."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.run.test_finetune import RECIPE, metrics, tplora
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer
from tplora.errors import RecipeError
from tplora.run.vocabulary import _check_tied, _with_tokens

pytestmark = pytest.mark.world
NEW = ["<call>", "<result>"]
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def _chat(number: int) -> str:
    turns = [
        {"role": "user", "content": f"what is {number}"},
        {"role": "assistant", "content": f"<call> {number} <result> {number * 2}"},
    ]
    return json.dumps({"messages": turns})


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a run at tp_size 2, one at tp_size 1 and one of a tied model."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = tiny_tokenizer()
    for name, kind in (("base", "llama"), ("tied", "qwen2_tied")):
        size = len(tokenizer)
        write_checkpoint(kind, folder / name, vocab_size=size, max_position_embeddings=256)
        tokenizer.save_pretrained(folder / name)
    recipe = RECIPE.replace('"base"\n', f'"base"\nadd_tokens = {json.dumps(NEW)}\n')
    (folder / "recipe.toml").write_text(recipe.replace("max_steps = 4", "max_steps = 2"))
    for name, numbers in (("train", range(14)), ("eval", range(20, 25))):
        (folder / f"{name}.jsonl").write_text("".join(_chat(n) + "\n" for n in numbers))
    for name, argv in {
        "cut": [],
        "whole": ["--set", "parallel.tp_size=1"],
        "tied-run": [
            "--set",
            "parallel.tp_size=1",
            "--set",
            "model.pretrained_model_name_or_path=tied",
        ],
    }.items():
        done = tplora(folder, "finetune", "recipe.toml", "--output", name, *argv)
        assert done.returncode == 0, done.stderr + done.stdout
    return folder


def test_a_run_with_new_tokens_is_the_run_at_tp_size_1(place):
    there, here = metrics(place / "cut"), metrics(place / "whole")
    for a, b in zip(there, here, strict=True):
        for name in set(a) - {"tokens_per_s", "peak_bytes"}:
            assert a[name] == pytest.approx(b[name], rel=1e-5), (name, a, b)
    found, wanted = (
        load_file(place / run / "adapter" / "adapter_model.safetensors") for run in ("cut", "whole")
    )
    rows = {name for name in found if name.endswith("trainable_tokens_delta")}
    assert {name.split(".")[-3] for name in rows} == {"embed_tokens", "lm_head"}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("run", ["cut", "tied-run"])
def test_a_new_token_is_one_token_in_tokenizer_adapter_and_merged_model(place, run, tmp_path):
    adapter = place / run / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in NEW]
    assert ids == [len(tokenizer) - 2, len(tokenizer) - 1]
    assert tokenizer("<call> 3", add_special_tokens=False)["input_ids"][0] == ids[0]

    done = tplora(place, "export", run, "--merged", str(tmp_path / "merged"))
    assert done.returncode == 0, done.stderr + done.stdout
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.config.vocab_size == len(tokenizer)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == len(tokenizer)

    base = AutoModelForCausalLM.from_pretrained(
        place / ("tied" if run == "tied-run" else "base"), dtype=torch.float32
    )
    base.resize_token_embeddings(len(tokenizer))
    adapted = PeftModel.from_pretrained(base, adapter)
    tokens = torch.tensor([[*ids, 5, 6, ids[0]]])
    found, wanted = merged(tokens).logits, adapted(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_verify_and_generate_know_the_new_tokens(place):
    for argv in (["verify", "cut"], ["generate", "cut", "what is 3", "--max-new-tokens", "3"]):
        done = tplora(place, *argv)
        assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ('["<s>"]', "the tokenizer has '<s>' already"),
        ('["<a>", "<a>"]', "names a token twice"),
        ("[]", "needs a list of one or more, each text in quotes that is not empty\n"),
        ('[""]', "needs a list of one or more, each text in quotes that is not empty\n"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(place, tokens, said):
    done = tplora(place, "plan", "recipe.toml", "--set", f"model.add_tokens={tokens}")
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("settings", "is_tied", "found"),
    [
        ({}, False, {EMBEDDING: [8, 9], HEAD: [8, 9]}),
        ({}, True, {EMBEDDING: [8, 9]}),
        (
            {"trainable_token_indices": {"embed_tokens": [5, 8]}},
            False,
            {"embed_tokens": [5, 8, 9], HEAD: [8, 9]},
        ),
        ({"trainable_token_indices": {EMBEDDING: [5]}}, True, {EMBEDDING: [5, 8, 9]}),
        (
            {"trainable_token_indices": {HEAD: [5]}},
            True,
            {EMBEDDING: [8, 9], HEAD: [5, 8, 9]},
        ),
        ({"modules_to_save": [EMBEDDING]}, False, {HEAD: [8, 9]}),
        ({"modules_to_save": [HEAD], "ensure_weight_tying": True}, True, {}),
    ],
)
def test_new_tokens_join_what_a_recipe_says_of_a_module(settings, is_tied, found):
    assert _with_tokens(LoraConfig(**settings), [EMBEDDING, HEAD], [8, 9], is_tied=is_tied) == found


@pytest.mark.parametrize("saved", ["embed_tokens", EMBEDDING, HEAD])
def test_half_of_a_tie_trained_whole_is_refused_beside_new_tokens(saved):
    lora = LoraConfig(modules_to_save=[saved])
    with pytest.raises(RecipeError, match=r"model\.add_tokens: .*ensure_weight_tying = true"):
        _check_tied(lora, [EMBEDDING, HEAD])
    lora.ensure_weight_tying = True
    _check_tied(lora, [EMBEDDING, HEAD])
