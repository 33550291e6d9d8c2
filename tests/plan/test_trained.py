"""Plans of what is trained beside LoRA's factors, and every refusal by name; no weights."""

import copy

import pytest
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification

from tests.tiny import tiny_config
from tests.zoo import build as zoo
from tplora.errors import PlanError
from tplora.plan.build import build_plan, plan_model
from tplora.plan.coverage import count_coverage
from tplora.plan.report import plan_text

V, H = 127, 24


def _plan(name="llama", *, tp_size=2, targets=("q_proj", "down_proj"), config=None, **settings):
    config = config or tiny_config(name)
    lora = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=list(targets), **settings)
    return build_plan(config, lora, tp_size=tp_size)


def _problems(*args, **kwargs):
    with pytest.raises(PlanError) as raised:
        _plan(*args, **kwargs)
    return raised.value.problems


def _factors(plan):
    """Name, cut dim and whether the gradient is partial."""
    return {
        f"{part.name.removeprefix('model.layers.')}.{leaf}": (
            factor.shape,
            factor.shard_dim,
            factor.is_grad_partial,
        )
        for part in plan.trained
        for leaf, factor in part.factors
    }


def test_modules_are_cut_as_the_base_is():
    found = _factors(_plan("qwen3", modules_to_save=["lm_head", "o_proj", "0.self_attn.q_norm"]))
    assert found == {
        "lm_head.weight": ((V, H), 0, False),
        "0.self_attn.o_proj.weight": ((H, 120), 1, False),
        "1.self_attn.o_proj.weight": ((H, 120), 1, False),
        "0.self_attn.q_norm.weight": ((10,), None, True),
    }


def test_a_name_means_every_module_that_ends_with_it():
    names = [part.name for part in _plan("qwen3", modules_to_save=["norm"]).trained]
    assert len(names) == 4 * 2 + 1
    assert {"model.norm", "model.layers.1.self_attn.k_norm"} < set(names)


def test_biases_are_cut_with_their_outputs_or_added_after_the_sum():
    found = _factors(_plan("llama_bias", bias="lora_only"))
    assert found == {
        **{f"{k}.self_attn.q_proj.bias": ((120,), 0, False) for k in (0, 1)},
        **{f"{k}.mlp.down_proj.bias": ((H,), None, False) for k in (0, 1)},
    }
    assert len(_plan("llama_bias", bias="all").trained) == 2 * 7
    whole = _plan("llama_bias", bias="all", modules_to_save=["q_proj"], targets=["v_proj"])
    assert [p.what for p in whole.trained if p.name.endswith("q_proj")] == ["module"] * 2


def test_tokens_are_whole_rows_that_a_tied_head_follows():
    plan = _plan("qwen2_tied", trainable_token_indices=[3, 126])
    embedding, head = plan.trained
    assert _factors(plan) == {"model.embed_tokens.rows": ((2, H), None, True)}
    assert (head.name, head.tied_to) == ("lm_head", "model.embed_tokens")
    assert embedding.tokens == head.tokens == (3, 126)
    apart = _plan("qwen2_tied", trainable_token_indices={"embed_tokens": [3], "lm_head": [4]})
    assert [part.tied_to for part in apart.trained] == [None, None]
    untied = _plan("llama", trainable_token_indices=[3])
    assert [part.name for part in untied.trained] == ["model.embed_tokens"]


def test_what_is_tied_is_counted_once():
    plan = _plan("qwen2_tied", modules_to_save=["lm_head"], ensure_weight_tying=True)
    assert [(p.name, p.tied_to) for p in plan.trained] == [
        ("model.embed_tokens", None),
        ("lm_head", "model.embed_tokens"),
    ]
    alone = _plan("qwen2_tied")
    assert plan.num_trainable - alone.num_trainable == V * H


def test_the_table_and_the_coverage_name_what_is_trained():
    plan = _plan("llama_bias", modules_to_save=["lm_head", "model.norm"], bias="lora_only")
    text = plan_text(plan)
    assert "trained whole" in text
    assert "bias trained" in text
    assert "not counted from the plan" in " ".join(text.split())
    rows = {row.role: row for row in count_coverage(plan)}
    assert rows["head"].num_adapted == 1
    assert rows["other"].num_adapted == 1 + 4
    assert "2 tokens trained" in plan_text(_plan("qwen2_tied", trainable_token_indices=[3, 4]))


def test_a_classifier_trains_its_head():
    config = tiny_config("llama", num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config)
    lora = LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["q_proj"])
    plan = plan_model(model, lora, tp_size=2, base_dtype="float32")
    assert _factors(plan) == {"score.weight": ((3, H), None, False)}


def test_in_one_process_any_module_can_be_trained():
    plan = _plan("llama", tp_size=1, modules_to_save=["layers.1.mlp"], targets=["q_proj"])
    (part,) = plan.trained
    assert [leaf for leaf, _ in part.factors] == [
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    ]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("llama", {"modules_to_save": ["head2"]}, "modules_to_save: 'head2' matches no module"),
        ("llama", {"modules_to_save": ["lp"]}, "0.mlp holds model.layers.0.mlp.down_proj"),
        ("llama", {"modules_to_save": ["ttn.q_proj"]}, "q_proj has LoRA factors as well"),
        ("llama", {"modules_to_save": ["rotary_emb"]}, "rotary_emb has no parameters"),
        (
            "llama",
            {"modules_to_save": ["layers.1.self_attn"], "targets": ["up_proj"]},
            "is a LlamaAttention; only linear layers, embeddings, norms and routers are exact",
        ),
        ("llama", {"trainable_token_indices": [V]}, f"has no token {V}, only 0 to {V - 1}"),
        ("llama", {"trainable_token_indices": [-1]}, "has no token -1"),
        ("llama", {"trainable_token_indices": [3, 4, 3]}, "is given token 3 twice"),
        (
            "llama",
            {"trainable_token_indices": {"model.embed_tokens": [5], "embed_tokens": [6, 7]}},
            "two entries name model.embed_tokens; put its tokens into one",
        ),
        (
            "qwen2_tied",
            {"trainable_token_indices": {"lm_head": [5]}, "ensure_weight_tying": True},
            "names lm_head without the embedding",
        ),
        ("llama", {"trainable_token_indices": {"wte": [3]}}, "'wte' matches no module"),
        (
            "llama",
            {"trainable_token_indices": [3], "modules_to_save": ["embed_tokens"]},
            "embed_tokens is adapted or trained whole as well",
        ),
        (
            "llama",
            {"trainable_token_indices": {"o_proj": [3]}},
            "is cut on its input (rowwise), not on its tokens",
        ),
        ("llama", {"trainable_token_indices": {"model.norm": [3]}}, "which has no tokens"),
        ("llama", {"ensure_weight_tying": True}, "embedding and head are two weights"),
        ("qwen2_tied", {"ensure_weight_tying": True}, "name one of them there, or leave it out"),
        (
            "qwen2_tied",
            {
                "ensure_weight_tying": True,
                "trainable_token_indices": {"embed_tokens": [3], "lm_head": [4]},
            },
            "are tied and are given other tokens",
        ),
        (
            "qwen2_tied",
            {"trainable_token_indices": [3], "targets": ["lm_head"]},
            "lm_head, tied to model.embed_tokens, is adapted or trained whole as well",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(name, settings, words):
    found = _problems(name, **settings)
    assert any(words in problem for problem in found), found
    assert all(problem.startswith("lora.") for problem in found)
    assert all("; " in problem for problem in found), "what to do instead"


@pytest.mark.parametrize(
    ("model_type", "settings", "words"),
    [
        ("jamba", {"bias": "all"}, "mamba.dt_proj is a Linear whose weight jamba reads"),
        ("jamba", {"modules_to_save": ["dt_proj"]}, "dt_proj is a Linear whose weight jamba reads"),
        ("bamba", {"bias": "all"}, "conv1d is a Conv1d; only linear layers"),
        ("mixtral", {"modules_to_save": ["experts"]}, "is a MixtralExperts; only linear layers"),
        ("phi", {"trainable_token_indices": {"lm_head": [3]}}, "has a bias, which peft leaves out"),
        (
            "phi",
            {"trainable_token_indices": {"lm_head": [3]}},
            "leave it out, and model.add_tokens",
        ),
    ],
)
def test_what_other_models_cannot_have_is_refused_by_name(model_type, settings, words):
    config = copy.deepcopy(zoo.tiny_config(model_type))
    found = _problems(config=config, targets=["q_proj"], **settings)
    assert any(words in problem for problem in found), found
