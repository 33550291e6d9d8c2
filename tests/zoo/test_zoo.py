"""Every causal architecture that carries a TP plan: exact at tp_size 2, or refused by name.

Per architecture, on a tiny random checkpoint: an adapter on every linear layer that can have one,
random factors, two batches; the loss and every gathered gradient against plain PEFT in one process,
float64, ranks seeded differently. What is not in ``PROVEN`` has to be refused before weights load.
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.zoo.build import VOCAB, architectures, build_model, tiny_config
from tplora.adapter.attach import attach_adapter
from tplora.adapter.factor import shard_full
from tplora.base.load import check_shards, load_base
from tplora.errors import PlanError
from tplora.plan.architectures import KNOWN_FAULTS, PROVEN
from tplora.plan.build import build_plan
from tplora.plan.facts import read_facts
from tplora.plan.style import STYLES
from tplora.upstream import build_meta_model, local_shard, peft_moved_names, peft_refusal

ALL = architectures()
# Models that compute parts in float32 whatever the dtype of their weights.
LOSS_RTOL, GRAD_RTOL = 1e-5, 1e-5


def adaptable(config) -> LoraConfig:
    """LoRA on every linear layer of the model that an adapter can be exact on, by name."""
    model = build_meta_model(copy.deepcopy(config), trust_remote_code=False)
    moved = peft_moved_names(config.model_type)
    probe = LoraConfig(target_modules=["x"])
    head = model.get_output_embeddings()
    fit, unfit = set(), set()
    for module in read_facts(model).modules:
        leaf = module.name.rpartition(".")[2]
        is_fit = (
            module.kind == "linear"
            and module.has_plain_forward
            and module.style in STYLES["linear"]
            and leaf not in moved
            and model.get_submodule(module.name) is not head
            and peft_refusal(probe, model, module.name) is None
        )
        (fit if is_fit else unfit).add(module.name)
    return LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=sorted({name.rpartition(".")[2] for name in fit}),
        exclude_modules=sorted(unfit),
        task_type="CAUSAL_LM",
    )


def _parity(path: str, lora: LoraConfig) -> None:
    config = AutoConfig.from_pretrained(path)
    plan = build_plan(config, copy.deepcopy(lora), tp_size=2)
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    base = load_base(path, tp_size=2, **options)
    check_shards(base, plan)
    model = attach_adapter(base, copy.deepcopy(lora), plan=plan).train()
    truth = get_peft_model(AutoModelForCausalLM.from_pretrained(path, **options), lora).train()
    factors, parameters = model.factors(), dict(truth.named_parameters())
    assert set(factors) == {name for name, p in parameters.items() if p.requires_grad}
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, factor in factors.items():
            parameters[name].normal_(std=0.1, generator=draw)
            shard = shard_full(parameters[name], factor.plan, factor.mesh)
            local_shard(factor.parameter).copy_(shard)
    for step in range(2):
        ids = torch.randint(3, VOCAB, (4, 16), generator=draw)
        losses = []
        for one in (model, truth):
            one.zero_grad()
            torch.manual_seed(step)  # routers that sample in training
            losses.append(one(input_ids=ids, labels=ids, use_cache=False).loss)
            losses[-1].backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=LOSS_RTOL), f"step {step}"
        _compare(factors, parameters, step)


def _compare(factors, parameters, step) -> None:
    largest = max(float(p.grad.norm()) for p in parameters.values() if p.grad is not None)
    assert largest > 0, "no gradient at all"
    num_compared = 0
    for name, factor in factors.items():
        here, there = factor.parameter.grad, parameters[name].grad
        if here is None and there is None:
            continue  # a layer whose output this model drops
        zero = torch.zeros_like(parameters[name])
        here = zero if here is None else here.full_tensor()
        there = zero if there is None else there
        scale = max(float(there.norm()), 1e-7 * largest)
        error = float((here - there).norm()) / scale
        assert error < GRAD_RTOL, f"step {step}: grad of {name}: {error:.2g} off"
        num_compared += 1
    assert num_compared > len(factors) / 2


@pytest.mark.world
@pytest.mark.parametrize("model_type", sorted(PROVEN))
def test_an_adapter_on_every_layer_is_exact(world2, model_type, tmp_path):
    build_model(model_type).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    world2.run(_parity, str(tmp_path), adaptable(config))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]], ids=["all-linear", "q_proj"])
@pytest.mark.parametrize("model_type", sorted(set(ALL) - PROVEN))
def test_what_is_not_proven_is_refused_by_name_before_weights_load(model_type, targets):
    with pytest.raises(PlanError) as caught:
        build_plan(tiny_config(model_type), LoraConfig(target_modules=targets), tp_size=2)
    assert f"parallel.tp_size = 2: {model_type.removesuffix('_text')}" in str(caught.value)


def test_every_name_is_an_architecture_and_stands_in_one_list_only():
    assert set(ALL) >= PROVEN
    assert not PROVEN & set(KNOWN_FAULTS)
    assert len(PROVEN) >= 100
