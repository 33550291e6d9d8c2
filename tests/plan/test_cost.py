"""What a plan says is what a loaded model costs: bytes on each rank, collectives of each step."""

import pytest
from transformers import AutoConfig

from tests.communication import count_collectives
from tests.models import CUT, batches, load, lora
from tests.zoo.build import build_model
from tplora.plan.build import build_plan
from tplora.plan.cost import CollectiveCount, base_bytes, factor_bytes
from tplora.plan.cost import count_collectives as predict
from tplora.plan.lora import expert_parameters
from tplora.plan.report import plan_text
from tplora.upstream import local_shard

pytestmark = pytest.mark.world

FAMILIES = ("llama_bias", "qwen3", "phi3", "olmo2", "qwen2_tied")
TARGETS = ("all-linear", "query", "ends")


def _plan(path, config, tp_size):
    return build_plan(AutoConfig.from_pretrained(path), config, tp_size=tp_size)


def _costs(path, config):
    """What this rank really holds and says in one step that is the last of its accumulation."""
    model, batch = load(path, config), batches(1)[0]
    bytes_by_kind = {True: 0, False: 0}
    for parameter in model.parameters():
        bytes_by_kind[parameter.requires_grad] += local_shard(parameter).nbytes
    outputs = []
    forward = _count(lambda: outputs.append(model(**batch)))
    backward = _count(lambda: outputs[0].loss.backward())
    bucket = model.sync.num_buckets
    count = CollectiveCount(forward=forward, backward=backward - bucket, bucket=bucket)
    return model.plan, bytes_by_kind[False], bytes_by_kind[True], count


def _count(fn):
    found = count_collectives(fn)
    return sum(number for kind, number in found.items() if kind.startswith(("all_", "reduce_")))


def _assert_plan_is_right(world, path, config):
    plan = _plan(path, config, world.size)
    costs = world.run(_costs, path, config)
    for rank, (own, base, factors, count) in enumerate(costs):
        assert own == plan
        assert base == base_bytes(plan, rank, bytes_per_element=plan.base_dtype_bytes)
        assert factors == factor_bytes(plan, rank, bytes_per_element=8)
        assert predict(plan) == count


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_made_without_weights_says_what_the_loaded_model_costs(
    world, checkpoint, name, targets
):
    targets = "fused-query" if (name, targets) == ("phi3", "query") else targets
    _assert_plan_is_right(world, checkpoint(name, **CUT), lora(targets))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("olmo2", {"modules_to_save": ["o_proj", "up_proj", "lm_head"]}),
        ("llama", {"modules_to_save": ["embed_tokens"]}),
        ("qwen2_tied", {"trainable_token_indices": [3, 126]}),
        ("llama_bias", {"bias": "all"}),
    ],
    ids=["modules", "embedding", "tokens", "biases"],
)
def test_what_is_trained_of_the_base_is_counted(world2, checkpoint, name, changes):
    _assert_plan_is_right(world2, checkpoint(name, **CUT), lora("query", **changes))


@pytest.mark.parametrize("name", ["llama", "olmo2"])
@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj", "v_proj"],
        ["k_proj", "up_proj"],
        ["o_proj", "down_proj"],
        ["embed_tokens"],
        ["lm_head"],
        ["layers.1.self_attn.q_proj"],
    ],
    ids="-".join,
)
def test_the_count_is_right_whichever_layers_share_an_input(world2, checkpoint, name, targets):
    config = lora(target_modules=targets)
    _assert_plan_is_right(world2, checkpoint(name, **CUT), config)


def test_layers_without_an_adapter_share_their_input_too(checkpoint):
    few, all_of_them = (
        predict(_plan(checkpoint("llama", **CUT), lora(target_modules=targets), 2))
        for targets in (["q_proj", "v_proj"], "all-linear")
    )
    assert few == all_of_them


@pytest.mark.parametrize("name", FAMILIES)
def test_one_process_communicates_nothing(checkpoint, name):
    plan = _plan(checkpoint(name, **CUT), lora(), 1)
    assert predict(plan) == CollectiveCount(forward=0, backward=0, bucket=0)


def _bytes(path, config):
    model = load(path, config)
    sizes = [(p.requires_grad, local_shard(p).nbytes) for p in model.parameters()]
    return [sum(size for is_factor, size in sizes if is_factor is kind) for kind in (False, True)]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "aria_text"])
def test_bytes_of_experts_are_right_and_their_collectives_are_not_guessed(
    world2, model_type, tmp_path
):
    build_model(model_type).save_pretrained(tmp_path)
    experts = expert_parameters(AutoConfig.from_pretrained(tmp_path))
    config = lora(target_parameters=experts)
    plan = _plan(tmp_path, config, 2)
    assert predict(plan) is None
    assert "not counted from the plan" in plan_text(plan)
    for rank, (base, factors) in enumerate(world2.run(_bytes, str(tmp_path), config)):
        assert base == base_bytes(plan, rank, bytes_per_element=8)
        assert factors == factor_bytes(plan, rank, bytes_per_element=8)


def test_ranks_together_hold_the_adapter_once_and_its_replicas_again(checkpoint):
    plan = _plan(checkpoint("llama", **CUT), lora(), 3)
    replicas = sum(f.numel for la in plan.layers for f in (la.a, la.b) if f.shard_dim is None)
    total = sum(factor_bytes(plan, rank, bytes_per_element=4) for rank in range(3))
    assert total == 4 * (plan.num_trainable + 2 * replicas)
