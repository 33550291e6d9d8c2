"""Adapters combined into a new one, and several on one model: as in plain PEFT."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.adapter.models import load_plain, load_tplora, lora, tokens
from tests.models import InDouble
from tplora.adapter.model import TploraModel
from tplora.errors import PlanError

pytestmark = pytest.mark.world

# What is random draws from the model's seed, which the test sets for plain PEFT.
WAYS = {
    "svd": {"combination_type": "svd"},
    "svd-of-rank-2": {"combination_type": "svd", "svd_rank": 2},
    "linear": {"combination_type": "linear"},
    "cat": {"combination_type": "cat"},
    "ties": {"combination_type": "ties", "density": 0.5},
    "ties-svd": {"combination_type": "ties_svd", "density": 0.5},
    "magnitude": {"combination_type": "magnitude_prune", "density": 0.4},
    "dare": {"combination_type": "dare_linear", "density": 0.5},
}
SECOND = {"target_modules": ["q_proj", "o_proj", "embed_tokens"], "lora_alpha": 9}


def _combine(model, settings):
    torch.manual_seed(11)
    model.add_weighted_adapter(["default", "second"], [0.7, -0.4], "both", **settings)
    model.set_adapter("both")
    return model.eval()(tokens()).logits.detach()


def _equals_plain_peft(path, settings):
    ours, plain = load_tplora(path), load_plain(path)
    for model in (ours, plain):
        model.add_adapter("second", lora(**SECOND))
    _copy_factors(plain, ours)
    found, wanted = _combine(ours, settings), _combine(plain, settings)
    return float((found - wanted).abs().max()), float(wanted.abs().max())


def _copy_factors(plain, ours: TploraModel):
    """Both sides hold the numbers of plain PEFT."""
    parameters = dict(plain.named_parameters())
    for adapter in ours.peft_config:
        for name, factor in ours.factors(adapter).items():
            full = parameters[name].detach().double()
            factor.parameter.data.copy_(factor.piece_of(full))
            parameters[name].data = full


@pytest.mark.parametrize("way", WAYS)
def test_a_combined_adapter_is_plain_pefts(world2, checkpoint, way):
    for off, size in world2.run(_equals_plain_peft, checkpoint("llama"), WAYS[way]):
        assert off < 1e-9 * max(size, 1)


def _saved_and_read(path, folder):
    model = load_tplora(path)
    model.add_adapter("second", lora(**SECOND))
    logits = _combine(model, {"combination_type": "cat"})
    model.save_pretrained(folder, selected_adapters=["both"])
    return logits.numpy()


def test_a_combined_adapter_is_saved_like_any_other(world, checkpoint, tmp_path):
    path = checkpoint("llama")
    logits = world.run(_saved_and_read, path, tmp_path)[0]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    again = PeftModel.from_pretrained(base, tmp_path / "both")(tokens()).logits
    assert abs(again.detach().numpy() - logits).max() < 1e-6


def _refused(path):
    model = load_tplora(path)
    model.add_adapter("second", lora(**SECOND, use_dora=True))
    found = []
    for adapters, name in ((["default", "second"], "both"), (["third"], "both"), ([], "x")):
        with pytest.raises(PlanError) as caught:
            model.add_weighted_adapter(adapters, [1.0] * len(adapters), name)
        found.append(str(caught.value))
    return found


def test_what_cannot_be_combined_is_refused_by_name_on_every_rank(world2, checkpoint):
    for found in world2.run(_refused, checkpoint("llama")):
        assert "'second' has use_dora" in found[0]
        assert "no ['third']; the model has default, second" in found[1]


def _switched(path):
    """Two adapters on both sides: one, the other, both at once, none, one deleted."""
    ours, plain = load_tplora(path), load_plain(path)
    for model in (ours, plain):
        model.add_adapter("second", lora(**SECOND))
    _copy_factors(plain, ours)
    off = []

    def compare():
        logits = [model.eval()(tokens()).logits.detach() for model in (ours, plain)]
        off.append(float((logits[0] - logits[1]).abs().max()))

    for name in ("second", "default"):
        for model in (ours, plain):
            model.set_adapter(name)
        compare()
    for model in (ours, plain):
        model.base_model.set_adapter(["default", "second"])
    compare()
    with ours.disable_adapter(), plain.disable_adapter():
        compare()
    for model in (ours, plain):
        model.base_model.set_adapter("default")
        model.delete_adapter("second")
    compare()
    return off


def test_adapters_are_switched_joined_disabled_and_deleted_as_in_plain_peft(world, checkpoint):
    for off in world.run(_switched, checkpoint("llama")):
        assert max(off) < 1e-12


def _trained_beside_a_frozen_one(path):
    """The first adapter is active and frozen, the second is trained on top of it."""
    ours, plain = load_tplora(path), load_plain(path)
    grads = []
    for model in (ours, plain):
        model.add_adapter("second", lora(**SECOND))
    _copy_factors(plain, ours)
    for model in (ours, plain):
        model.base_model.set_adapter(["default", "second"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".second" in name)
        with InDouble():
            loss = model.train()(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all(f.parameter.grad is None for f in ours.factors("default").values())
    return max(
        float((grads[0][name].full_tensor() - wanted).abs().max())
        for name, wanted in grads[1].items()
    )


def test_an_adapter_trains_on_top_of_a_frozen_one(world, checkpoint):
    assert max(world.run(_trained_beside_a_frozen_one, checkpoint("llama"))) < 1e-12
