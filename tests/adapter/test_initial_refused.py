"""What an init from all of W asks for, and cannot have, is refused by name before it is done."""

import json

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from peft.tuners.lora.config import EvaConfig, LoraGAConfig

from tests.adapter.initial import GRADIENT
from tests.models import CUT, lora
from tests.tiny import tiny_config
from tests.zoo.build import tiny_config as tiny_moe_config
from tplora.adapter.attach import attach_adapter
from tplora.adapter.original import _plain_config
from tplora.base.load import load_base
from tplora.errors import PlanError
from tplora.plan.build import build_plan
from tplora.plan.cost import factor_bytes
from tplora.plan.lora import build_lora_config

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama", **CUT)


def _refusals(path):
    base = load_base(path, tp_size=dist.get_world_size(), dtype=torch.float32)
    for settings, words in REFUSED.values():
        with pytest.raises(PlanError, match=words):
            attach_adapter(base, lora(**settings))
    model = attach_adapter(base, lora(init_lora_weights="pissa"))  # the refusals left it as it was
    with pytest.raises(PlanError, match="adapters beside it were not trained on"):
        model.add_adapter("second", lora())
    with pytest.raises(PlanError, match="has changed the base's weights"):
        model.delete_adapter("default")


REFUSED = {
    "eva": ({"init_lora_weights": "eva"}, "in one process, save, and start from that folder"),
    "corda": ({"init_lora_weights": "corda"}, "has no eigens; call peft's preprocess_corda"),
    "lora_ga": (GRADIENT, "has no _peft_loraga_grad; call peft's preprocess_loraga"),
    "no-config": ({"init_lora_weights": "lora_ga"}, "lora.lora_ga_config: missing"),
    "unread": ({"lora_ga_config": LoraGAConfig()}, "is read by init_lora_weights = 'lora_ga'"),
    "odd": ({"init_lora_weights": "orthogonal", "r": 3}, "an even r is needed"),
    "large": ({"init_lora_weights": "pissa", "r": 25}, "has r = 25; at most 24"),
    "twice": ({"init_lora_weights": "mica", "use_dora": True}, "peft has it without"),
    "activated": (
        {"init_lora_weights": "pissa", "alora_invocation_tokens": [1]},
        "cannot be had with alora_invocation_tokens",
    ),
    "embedding": (
        {"kasa_config": {}, "target_modules": ["embed_tokens"]},
        "is an embedding, where peft does not have it",
    ),
}


def test_what_cannot_be_exact_is_refused_and_leaves_the_base(world2, path):
    world2.run(_refusals, path)


def _tied(path):
    base = load_base(path, tp_size=dist.get_world_size(), dtype=torch.float32)
    with pytest.raises(PlanError, match="lm_head shares its weight with the embedding"):
        attach_adapter(base, lora("ends", init_lora_weights="olora"))


def test_a_tied_head_is_not_taken_from(world2, checkpoint):
    world2.run(_tied, checkpoint("qwen2_tied", **CUT))


def test_an_adapter_that_began_with_eva_is_started_from(tmp_path):
    """Its factors are in the file; only making them needs whole inputs."""
    lora(init_lora_weights="eva", eva_config=EvaConfig()).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["init_lora_weights"] == "eva"
    config = tiny_config("llama")
    started = build_lora_config({"adapter_name_or_path": str(tmp_path)}, config)
    only_read = LoraConfig.from_pretrained(tmp_path)
    only_read.inference_mode = True
    for one in (started, only_read):
        assert build_plan(config, one, tp_size=2).layers
    only_read.inference_mode = False
    with pytest.raises(PlanError, match="initialize_lora_eva_weights in one process"):
        build_plan(config, only_read, tp_size=2)


def test_an_adapter_of_twice_the_rank_may_have_alphas_that_are_not_whole(tmp_path):
    _plain_config(lora("patterns")).save_pretrained(tmp_path)
    started = build_lora_config({"adapter_name_or_path": str(tmp_path)}, tiny_config("llama"))
    assert started.lora_alpha == pytest.approx(8 * 2**0.5)
    assert started.alpha_pattern["down_proj"] == pytest.approx(5 * 2**0.5)
    assert build_plan(tiny_config("llama"), started, tp_size=2).layers


@pytest.mark.parametrize(
    ("peft_type", "words"),
    [("IA3", "IA3 changes weights by another rule"), ("NEXT", "its peft_type is 'NEXT'; only")],
)
def test_another_method_is_not_started_from(tmp_path, peft_type, words):
    saved = {"peft_type": peft_type, "target_modules": ["q_proj"], "feedforward_modules": []}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    with pytest.raises(PlanError) as caught:
        build_lora_config({"adapter_name_or_path": str(tmp_path)}, tiny_config("llama"))
    (problem,) = caught.value.problems
    assert problem.startswith("lora.adapter_name_or_path = ")
    assert words in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "q_proj("},
        {"exclude_modules": "q_proj("},
        {"rank_pattern": {"*": 3}},
        {"alpha_pattern": {"q_proj(": 3.5}},
        {"alpha_pattern": {"q_proj": -1.0}},
        {"target_modules": ["all-linear"]},
        {"target_modules": "all_linear"},
    ],
)
def test_patterns_that_peft_cannot_read_are_refused_by_key(changes):
    with pytest.raises(PlanError) as caught:
        build_plan(tiny_config("llama"), lora(**changes), tp_size=2)
    (problem,) = caught.value.problems
    assert problem.startswith(f"lora.{next(iter(changes))} = ")


def test_a_plan_counts_what_is_trained_and_no_frozen_b():
    config = tiny_config("llama")
    usual, frozen = (
        build_plan(config, lora(init_lora_weights=i), tp_size=2) for i in (True, "mica")
    )
    b = sum(layer.b.numel for layer in usual.layers)
    assert usual.num_trainable - frozen.num_trainable == b
    assert factor_bytes(frozen, 0) == factor_bytes(usual, 0)
    assert factor_bytes(frozen, 0, only_trained=True) < factor_bytes(usual, 0, only_trained=True)


def test_experts_have_no_such_init():
    config = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=[],
        target_parameters=["mlp.experts.down_proj"],
        init_lora_weights="pissa",
    )
    with pytest.raises(PlanError, match="is a parameter, where peft does not have it"):
        build_plan(tiny_moe_config("qwen3_moe"), config, tp_size=2)


@pytest.mark.parametrize(("dtype", "is_refused"), [("float64", True), ("bfloat16", False)])
def test_a_base_in_float64_has_no_singular_vectors_of_peft(dtype, is_refused):
    config = tiny_config("llama")
    if not is_refused:
        assert build_plan(config, lora(init_lora_weights="pissa"), tp_size=2, dtype=dtype).layers
        return
    with pytest.raises(PlanError, match=r"the base is held in float64; set model\.dtype"):
        build_plan(config, lora(init_lora_weights="pissa"), tp_size=2, dtype=dtype)
