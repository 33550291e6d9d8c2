"""Plans of tiny models, and every refusal by name; no processes, no weights."""

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import GPT2Config

from tests.tiny import tiny_config
from tplora.errors import PlanError
from tplora.plan import build
from tplora.plan.build import build_plan
from tplora.upstream import build_meta_model

R = 3


def _lora(targets="all-linear", **settings):
    return LoraConfig(task_type="CAUSAL_LM", r=R, target_modules=targets, **settings)


def _plan(name, targets="all-linear", *, tp_size=2, lora=None, **changes):
    config = tiny_config(name, **changes)
    return build_plan(config, _lora(targets, **(lora or {})), tp_size=tp_size)


def _problems(*args, **kwargs):
    with pytest.raises(PlanError) as raised:
        _plan(*args, **kwargs)
    return raised.value.problems


# style, dims of W, A and B that are cut, A's and B's gradient partial, gathers output, splits input
COLUMN = ("colwise", 0, None, 0, True, False, False, False)
COLUMN_GATHERED = ("colwise_gather_output", 0, None, 0, True, False, True, False)
ROW = ("rowwise", 1, 1, None, False, True, False, False)
ROW_SPLIT = ("rowwise_split_input", 1, 1, None, False, True, False, True)
VOCAB = ("embedding_rowwise", 0, 1, None, False, True, False, False)
EXPECTED = {
    "llama": {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), COLUMN),
        **dict.fromkeys(("o_proj", "down_proj"), ROW),
        "embed_tokens": VOCAB,
        "lm_head": COLUMN_GATHERED,
    },
    "phi3": {
        **dict.fromkeys(("qkv_proj", "gate_up_proj", "lm_head"), COLUMN_GATHERED),
        **dict.fromkeys(("o_proj", "down_proj"), ROW_SPLIT),
        "embed_tokens": VOCAB,
    },
    "olmo2": {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "lm_head"), COLUMN_GATHERED),
        "o_proj": ROW_SPLIT,
        **dict.fromkeys(("gate_proj", "up_proj"), COLUMN),
        "down_proj": ROW,
        "embed_tokens": VOCAB,
    },
}
EXPECTED["qwen3"] = EXPECTED["qwen2_tied"] = EXPECTED["llama"]


def _summary(layer):
    return (
        layer.style,
        layer.weight.shard_dim,
        layer.a.shard_dim,
        layer.b.shard_dim,
        layer.a.is_grad_partial,
        layer.b.is_grad_partial,
        layer.gathers_output,
        layer.splits_input,
    )


@pytest.mark.parametrize("tp_size", [2, 3])
@pytest.mark.parametrize("name", EXPECTED)
def test_every_layer_of_a_model_is_planned_by_its_style(name, tp_size):
    expected = EXPECTED[name]
    plan = _plan(name, list(expected), tp_size=tp_size)
    found = {layer.name.rpartition(".")[2]: _summary(layer) for layer in plan.layers}
    assert found == expected
    assert (plan.tp_size, len(plan.layers)) == (tp_size, 2 * (len(expected) - 2) + 2)


def test_at_tp_size_1_nothing_is_cut_and_no_gradient_is_partial():
    for layer in _plan("phi3", tp_size=1).layers:
        assert (layer.weight.shard_dim, layer.a.shard_dim, layer.b.shard_dim) == (None,) * 3
        assert not any((layer.a.is_grad_partial, layer.b.is_grad_partial))
        assert not any((layer.gathers_output, layer.splits_input))


def test_a_plan_knows_full_shapes_bias_and_parameters():
    plan = _plan("llama_bias", ["q_proj", "down_proj"])
    name = "model.layers.1.mlp.down_proj"
    layer = plan.layer(name)
    assert layer is not None
    assert (layer.weight.shape, layer.a.shape, layer.b.shape) == ((24, 46), (R, 46), (24, R))
    assert layer.has_bias
    assert layer.r == R
    assert layer.a.shard_shape(1, 2) == (R, 23)
    assert plan.layer("model.layers.1.mlp.up_proj") is None
    assert plan.num_trainable == 2 * R * ((24 + 120) + (46 + 24))


def test_rank_pattern_sets_the_rank_of_one_layer():
    plan = _plan("llama", ["q_proj", "v_proj"], lora={"rank_pattern": {"v_proj": 5}})
    assert {layer.name.rpartition(".")[2]: layer.r for layer in plan.layers} == {
        "q_proj": R,
        "v_proj": 5,
    }


def test_all_linear_leaves_the_head_and_exclude_modules_leave_what_they_name():
    names = {layer.name.rpartition(".")[2] for layer in _plan("llama").layers}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    kept = _plan("llama", lora={"exclude_modules": ["o_proj", "down_proj"]}).layers
    assert {layer.name.rpartition(".")[2] for layer in kept} == names - {"o_proj", "down_proj"}


def test_a_pattern_as_one_string_is_a_regular_expression():
    plan = _plan("llama", r".*layers\.1\..*(q|v)_proj")
    assert [layer.name for layer in plan.layers] == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]


def test_a_plan_is_a_value_and_the_config_stays_as_it_was():
    lora = _lora()
    before = lora.to_dict()
    first, second = (build_plan(tiny_config("llama"), lora, tp_size=2) for _ in range(2))
    assert first == second
    assert lora.to_dict() == before


def test_planning_reads_no_weight(monkeypatch):
    seen = []

    def keep(*args, **kwargs):
        seen.append(build_meta_model(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(build, "build_meta_model", keep)
    huge = {"hidden_size": 48_000, "intermediate_size": 200_000, "vocab_size": 500_000}
    _plan("llama", tp_size=2, **huge)
    assert {p.device.type for p in seen[0].parameters()} == {"meta"}


# --- refusals


@pytest.mark.parametrize(
    ("style", "what"),
    [
        (
            "a_style_of_tomorrow",
            "cuts model.layers.0.mlp.up_proj.weight and 3 more by style 'a_style_of_",
        ),
        ("packed_colwise", "model.layers.0.mlp.up_proj has style 'packed_colwise', which is not"),
        ("replicate", "model.layers.0.mlp.up_proj has style 'replicate', which is not Llama"),
    ],
)
def test_a_plan_that_is_not_the_models_own_is_refused_by_name(monkeypatch, style, what):
    model = build_meta_model(tiny_config("llama"), trust_remote_code=False)
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.up_proj": style}
    monkeypatch.setattr(build, "build_meta_model", lambda *_, **__: model)
    problem = _problems("llama")[0]
    assert problem.startswith("parallel.tp_size = 2: ")
    assert what in problem


def test_a_subclass_with_its_own_forward_is_adapted_by_its_weight(monkeypatch):
    class ScaledLinear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = build_meta_model(tiny_config("llama"), trust_remote_code=False)
    model.model.layers[0].mlp.up_proj.__class__ = ScaledLinear
    monkeypatch.setattr(build, "build_meta_model", lambda *_, **__: model)
    layer = _plan("llama", tp_size=2).layer("model.layers.0.mlp.up_proj.weight")
    assert (layer.kind, layer.weight.shard_dim, layer.b.shard_dim) == ("parameter", 0, 0)
    (problem,) = _problems("llama", lora={"lora_dropout": 0.1})
    assert "up_proj.weight is adapted inside its module's forward" in problem


@pytest.mark.parametrize(
    ("heads", "tp_size", "works"),
    [
        ((12, 6), 4, "1, 2, 3, 6"),
        ((8, 4), 3, "1, 2, 4"),
        ((12, 1), 2, "1"),
        ((12, 6), 12, "1, 2, 3, 6"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_sizes_that_do(heads, tp_size, works):
    (problem,) = _problems("llama", tp_size=tp_size, heads=heads)
    assert f"parallel.tp_size = {tp_size}:" in problem
    assert f"{heads[0]} attention heads and {heads[1]} key-value heads" in problem
    assert problem.endswith(f"use one of {works}")


def test_heads_need_not_divide_where_projections_are_gathered():
    assert _plan("phi3", tp_size=5).tp_size == 5


def test_a_model_without_a_plan_is_refused_above_tp_size_1():
    config = GPT2Config(n_embd=24, n_head=4, n_layer=1, vocab_size=127, n_positions=32)
    targets = _lora(["lm_head"])
    assert build_plan(config, targets, tp_size=1).layers
    with pytest.raises(
        PlanError, match=r"tp_size = 2: GPT2LMHeadModel has no tensor-parallel plan"
    ):
        build_plan(config, targets, tp_size=2)


def test_modules_that_are_no_linear_layer_are_refused():
    config = GPT2Config(n_embd=24, n_head=4, n_layer=1, vocab_size=127, n_positions=32)
    with pytest.raises(PlanError, match=r"transformer\.h\.0\.attn\.c_attn is a Conv1D"):
        build_plan(config, _lora(["c_attn"]), tp_size=1)


def test_a_target_that_matches_nothing_is_refused_with_near_names():
    problems = _problems("llama", ["q_prj", "v_proj", "lm_haed"])
    assert len(problems) == 2
    assert "'lm_haed' matches no module; did you mean lm_head" in problems[0]
    assert "'q_prj' matches no module; did you mean q_proj" in problems[1]
    assert "the model has down_proj, embed_tokens, gate_proj" in problems[1]


def test_a_pattern_or_exclusion_that_leaves_nothing_is_refused():
    (problem,) = _problems("llama", r".*nothing")
    assert "matches no module" in problem
    (problem,) = _problems("llama", ["q_proj"], lora={"exclude_modules": ["q_proj"]})
    assert "exclude_modules" in problem


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("excluded", "said"),
    [
        (["vision_tower"], "'vision_tower' matches no module; the model has"),
        (["o_proj", "q_projj"], "'q_projj' matches no module"),
        (["mlp"], "'mlp' names model.layers.0.mlp, which holds layers and is none"),
        ("mlp", "'mlp': matches no module's whole name"),
    ],
)
def test_an_exclusion_that_leaves_nothing_out_is_refused(excluded, said, tp_size):
    (problem,) = _problems("llama", lora={"exclude_modules": excluded}, tp_size=tp_size)
    assert said in problem
    _plan("llama", lora={"exclude_modules": excluded, "base_model_name_or_path": "of/a-file"})


def test_the_way_out_that_is_named_for_a_container_works():
    (problem,) = _problems("llama", lora={"exclude_modules": ["mlp"]})
    pattern = problem.rpartition(" as '")[2].removesuffix("'")
    names = {layer.name for layer in _plan("llama", lora={"exclude_modules": pattern}).layers}
    assert names
    assert not any("mlp" in name for name in names)


def test_what_leaves_out_what_would_not_be_adapted_anyway_passes():
    assert _plan("llama", lora={"exclude_modules": ["lm_head", "embed_tokens", "norm"]}).layers


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("name", "targets", "bias", "said"),
    [
        ("llama", "all-linear", "lora_only", 'has no bias; use "none"'),
        ("llama", "all-linear", "all", 'has no bias; use "none"'),
        ("qwen2_tied", ["o_proj"], "lora_only", "those with one are k_proj, q_proj, v_proj"),
    ],
)
def test_biases_that_are_not_there_are_refused(name, targets, bias, said, tp_size):
    (problem,) = _problems(name, targets, lora={"bias": bias}, tp_size=tp_size)
    assert said in problem
    assert _plan(name, ["q_proj"], lora={"bias": bias, "base_model_name_or_path": "a/b"}).layers


def test_what_is_said_of_every_layer_is_said_once():
    error = PlanError([f"lora: model.layers.{n}.mlp is 0.5 of it" for n in range(9)] + ["other"])
    assert error.problems == ("lora: model.layers.0.mlp is 0.5 of it (and 8 more like it)", "other")
    assert PlanError(["a = 0.5: x", "a = 0.6: x"]).problems == ("a = 0.5: x", "a = 0.6: x")


def test_missing_targets_are_refused():
    (problem,) = _problems("llama", None)
    assert "lora.target_modules: missing" in problem


def test_attention_dropout_is_refused_only_where_it_would_differ():
    (problem,) = _problems("llama", attention_dropout=0.1)
    assert "attention_dropout = 0.1" in problem
    assert _plan("llama", tp_size=1, attention_dropout=0.1).layers


@pytest.mark.parametrize("tp_size", [0, -1])
def test_a_tp_size_below_1_is_refused(tp_size):
    problems = _problems("llama", tp_size=tp_size)
    assert "needs a whole number of at least 1" in problems[0]


def test_all_problems_come_at_once():
    problems = _problems("llama", ["q_prj"], tp_size=5, attention_dropout=0.1)
    assert len(problems) == 3
    text = "\n".join(problems)
    for found in ("12 attention heads", "attention_dropout = 0.1", "'q_prj'"):
        assert found in text
