"""Adapters beside one another of which some train tokens: each saves its own, or is refused."""

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.artifact.tiny import write_base
from tplora.adapter.attach import attach_adapter
from tplora.adapter.save import save_adapter
from tplora.errors import PlanError

ROWS = "base_model.model.{}.token_adapter.trainable_tokens_delta"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"), tie_word_embeddings=True)


def _attached(base, first, second):
    model = AutoModelForCausalLM.from_pretrained(base)
    model = attach_adapter(model, LoraConfig(r=2, target_modules=["q_proj"], **first))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], **second))
    return model


EMBEDDING, HEAD = {"trainable_token_indices": [1, 3]}, {"trainable_token_indices": {"lm_head": [2]}}


@pytest.mark.parametrize(("first", "second"), [(EMBEDDING, HEAD), (HEAD, EMBEDDING)])
def test_a_head_that_follows_for_one_and_not_for_another_is_refused(base, first, second):
    with pytest.raises(PlanError, match="lm_head follows the embedding's tokens for one adapter"):
        _attached(base, first, second)


@pytest.mark.parametrize(
    ("first", "second"), [(EMBEDDING, {}), ({}, HEAD), (EMBEDDING, EMBEDDING), ({}, EMBEDDING)]
)
def test_each_adapter_saves_the_tokens_that_it_has(base, tmp_path, first, second):
    model = _attached(base, first, second)
    model.set_adapter("second")
    model(torch.arange(6)[None]).logits.sum().backward()
    save_adapter(model, tmp_path)
    for folder, settings in ((tmp_path, first), (tmp_path / "second", second)):
        held = {key for key in load_file(folder / "adapter_model.safetensors") if "token" in key}
        name = "lm_head" if settings is HEAD else "model.embed_tokens"
        assert held == ({ROWS.format(name)} if settings else set())
