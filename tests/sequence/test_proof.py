"""What may run on a rank's tokens is found from a model's code; what may not is refused by name."""

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from tests.models import lora
from tests.tiny import tiny_config
from tests.zoo.build import architectures
from tests.zoo.build import tiny_config as zoo_config
from tplora.errors import PlanError
from tplora.plan.build import build_plan
from tplora.plan.facts import read_facts
from tplora.plan.report import plan_text
from tplora.plan.sequence_proof import plan_sequence
from tplora.upstream import build_meta_model

REFUSED = (
    "gemma3n_text", "gemma4_text", "hrm_text", "inkling2_loop_text", "inkling2_text", "llama4",
    "llama4_text",
)  # fmt: skip
"""Of the zoo; docs/cost.md names them, too."""


def _planned(config, tp_size=2):
    model = build_meta_model(copy.deepcopy(config), trust_remote_code=False)
    return plan_sequence(model, read_facts(model), tp_size)


@pytest.mark.parametrize("tp_size", [2, 3, 8])
def test_a_llama_gathers_attention_and_mlp_and_scatters_their_row_parallel_layers(tp_size):
    sequence = _planned(tiny_config("llama"), tp_size)
    layers = [f"model.layers.{k}" for k in range(2)]
    assert (sequence.decoder, sequence.entry, sequence.output) == (
        "model",
        layers[0],
        "last_hidden_state",
    )
    assert [(unit.name, unit.row) for unit in sequence.units] == [
        (f"{layer}.{unit}", f"{layer}.{unit}.{row}")
        for layer in layers
        for unit, row in (("self_attn", "o_proj"), ("mlp", "down_proj"))
    ]
    assert set(sequence.on_tokens) == {
        "model.norm",
        *(f"{layer}.{norm}layernorm" for layer in layers for norm in ("input_", "post_attention_")),
    }


def test_experts_are_summed_for_all_tokens_and_cut_after_it():
    sequence = _planned(tiny_config("qwen3_moe"))
    rows = {unit.name.rpartition(".")[2]: unit.row for unit in sequence.units}
    assert rows["mlp"] is None
    assert rows["self_attn"].endswith("o_proj")


def test_dropout_between_layers_is_found():
    assert len(_planned(tiny_config("gpt_neox")).dropouts) == 4


def _layer_that(change):
    """A decoder layer whose own code does something to the residual stream first."""
    forward = LlamaDecoderLayer.forward

    def changed(self, hidden_states, *args, **kwargs):
        return forward(self, change(self, hidden_states), *args, **kwargs)

    return mock.patch.object(LlamaDecoderLayer, "forward", changed)


def _shift(_layer, x):
    return torch.cat([x[:, :1], x[:, :-1]], dim=1)


def _project(layer, x):
    return x + layer.mlp.down_proj(layer.mlp.gate_proj(x))


MIXING = {
    "a token shift": (_shift, "argument .* of model.layers.0.self_attn is not what it is for all"),
    "a sum over tokens": (lambda _, x: x + x.mean(1, keepdim=True), "is not what it is for all"),
    "a running sum": (lambda _, x: x.cumsum(1), "is not what it is for all"),
    "a flip": (lambda _, x: x.flip(1), "is not what it is for all"),
    "dropout of its own": (lambda _, x: nn.functional.dropout(x, 0.1), "is not what it is for all"),
    "a convolution": (
        lambda _, x: nn.functional.avg_pool1d(x.mT, 3, 1, 1).mT,
        "is not what it is for all",
    ),
    "a table of positions": (
        lambda _, x: x + torch.linspace(0, 1, x.shape[1], device=x.device)[:, None],
        "is not what it is for all",
    ),
    "a cut layer by itself": (
        _project,
        "calls model.layers.0.mlp.(gate|down)_proj, whose features",
    ),
}


@pytest.mark.parametrize("what", MIXING)
def test_a_layer_whose_own_code_mixes_tokens_is_refused_by_name(what):
    change, reason = MIXING[what]
    with _layer_that(change), pytest.raises(PlanError, match=f"LlamaForCausalLM cannot .*{reason}"):
        _planned(tiny_config("llama"))


def test_something_of_all_tokens_that_is_brought_along_is_refused():
    kept = {}

    def add_first(layer, x):
        if layer.self_attn.layer_idx == 0:
            kept["embedded"] = getattr(layer, "embedded", x)
        return x + kept["embedded"]

    def embed(self, *args, **kwargs):
        shape = (*kwargs["input_ids"].shape, 24)
        self.layers[0].embedded = torch.ones(shape, device=kwargs["input_ids"].device)
        return forward(self, *args, **kwargs)

    forward = LlamaModel.forward
    with (
        mock.patch.object(LlamaModel, "forward", embed),
        _layer_that(add_first),
        pytest.raises(PlanError, match=r"does not run on some of the tokens .*size of tensor"),
    ):
        _planned(tiny_config("llama"))


@pytest.mark.parametrize("model_type", ["gemma3n_text", "hrm_text"])
def test_parallel_streams_and_two_levels_of_layers_are_refused_before_weights(model_type):
    config, asked = zoo_config(model_type), lora("query")
    with pytest.raises(PlanError, match=r"cannot have its sequence cut .*_parallel = false"):
        build_plan(config, asked, tp_size=2, sequence_parallel=True)


def test_the_plan_says_what_is_cut():
    plan = build_plan(tiny_config("llama"), lora(), tp_size=3, sequence_parallel=True)
    text = " ".join(plan_text(plan).split())
    assert "cut over the 3 ranks but for 4 modules that gather it; 4 row-parallel layers" in text


def test_one_process_has_nothing_to_cut():
    plan = build_plan(zoo_config("gemma3n_text"), lora(), tp_size=1, sequence_parallel=True)
    assert plan.sequence is None


def test_looking_at_a_model_draws_no_random_number():
    before = torch.get_rng_state()
    _planned(tiny_config("gpt_neox"))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_page_names_what_is_refused():
    page = (Path(__file__).parents[2] / "docs/cost.md").read_text(encoding="utf-8")
    assert all(name in page for name in REFUSED)
    assert f"{len(architectures()) - len(REFUSED)} may" in page


@pytest.mark.slow
def test_every_architecture_of_the_zoo_is_planned_or_refused_by_name():
    refused = []
    for model_type in architectures():
        try:
            assert _planned(zoo_config(model_type)).units
        except PlanError:
            refused.append(model_type)
    assert tuple(refused) == REFUSED
