"""Reduced ranks against the SVD of whole delta weights, and sums against those of PEFT."""

import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.artifact.converting import (
    INPUT,
    PATTERNS,
    SEPARATE,
    check_same,
    convert,
    delta_weights,
    logits,
    write_mixtral,
)
from tests.artifact.tiny import change_tensors, write_adapter, write_base
from tplora.errors import ArtifactError


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("llama"), dtype=torch.float64)


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, PATTERNS, {"lora_dropout": 0.1}])
def test_a_rank_is_reduced_to_the_best_of_that_rank(llama, tmp_path, config):
    targets = [*SEPARATE, "embed_tokens"]
    folder = write_adapter(llama, tmp_path / "in", target_modules=targets, **config)
    change_tensors(folder, lambda tensors: {k: t.double() for k, t in tensors.items()})
    out, found = convert(folder, tmp_path, r=2)
    before, after = (PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64), one)
        for one in (folder, out))  # fmt: skip
    for module, loss in found.losses.items():
        old, new = (
            model.get_submodule(f"base_model.model.{module}").get_delta_weight("default")
            for model in (before, after)
        )
        tail = torch.linalg.svdvals(old)[2:].square().sum().sqrt()
        assert loss.distance == pytest.approx(float(tail), rel=1e-9, abs=1e-12)
        assert float((old - new).norm()) == pytest.approx(float(tail), rel=1e-9, abs=1e-12)
        assert loss.relative == pytest.approx(float(tail / old.norm()), rel=1e-9, abs=1e-12)
    assert max(found.ranks) == 2


def test_a_rank_that_was_not_used_is_dropped_without_loss(llama, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=SEPARATE, r=6)

    def cut(tensors):
        tensors = {key: tensor.double() for key, tensor in tensors.items()}
        for key, tensor in tensors.items():
            if "lora_B" in key:
                tensor[:, 3:] = tensor[:, :3]
        return tensors

    change_tensors(folder, cut)
    out, found = convert(folder, tmp_path, r=3)
    assert all(loss.relative < 1e-14 for loss in found.losses.values())
    check_same(logits(llama, out), logits(llama, folder))
    with pytest.raises(ArtifactError, match="has rank 6; a rank can be reduced, not raised"):
        convert(folder, tmp_path, "no", r=6)


def test_an_adapter_that_does_nothing_loses_nothing(llama, tmp_path):
    folder = write_adapter(llama, tmp_path / "in", target_modules=["q_proj"])
    change_tensors(folder, lambda ts: {k: t * ("lora_A" in k) for k, t in ts.items()})
    _, found = convert(folder, tmp_path, r=1)
    assert [loss.relative for loss in found.losses.values()] == [0, 0]


# PEFT holds weights and their roots in float32, which these numbers are exact in.
@pytest.mark.parametrize(
    ("how", "weights"),
    [("cat", (1, 1)), ("cat", (0.7, -0.4)), ("linear", (1.5, -3)), ("svd", (0.75, 1.5))],
)
def test_a_combination_is_that_of_peft(llama, tmp_path, how, weights):
    targets = ["q_proj", "down_proj", "embed_tokens"]
    one = write_adapter(llama, tmp_path / "one", target_modules=targets)
    two = write_adapter(llama, tmp_path / "two", target_modules=targets, lora_alpha=3)
    change_tensors(one, lambda tensors: {k: t.double() for k, t in tensors.items()})
    change_tensors(
        two,
        lambda tensors: (
            {k: t.double().flip(-1) if "lora_A" in k else t.double() for k, t in tensors.items()}
        ),
    )
    out, _ = convert(one, tmp_path, weight=weights[0], others={two: weights[1]}, how=how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64)
        model = PeftModel.from_pretrained(base, one, adapter_name="one")
        model.load_adapter(two, "two")
        model.add_weighted_adapter(["one", "two"], list(weights), "sum", how)
        model.set_adapter("sum")
        with torch.no_grad():
            said = model.double().eval()(INPUT).logits
    check_same(logits(llama, out), said)


@pytest.mark.parametrize("is_rslora", [False, True])
def test_adapters_of_other_modules_and_ranks_are_summed(llama, tmp_path, is_rslora):
    one, two = (
        write_adapter(llama, tmp_path / name, target_modules=targets, r=r, use_rslora=is_rslora)
        for name, targets, r in (
            ("one", ["q_proj", "v_proj"], 4),
            ("two", ["v_proj", "up_proj"], 3),
        )
    )
    for folder in (one, two):
        change_tensors(folder, lambda tensors: {k: t.double() for k, t in tensors.items()})
    out, found = convert(one, tmp_path, weight=0.7, others={two: -1.3})
    assert found.ranks == (3, 4, 7)
    first, second, whole = (delta_weights(llama, folder) for folder in (one, two, out))
    assert whole.keys() == first.keys() | second.keys()
    for name, delta in whole.items():
        check_same(delta, 0.7 * first.get(name, 0 * delta) - 1.3 * second.get(name, 0 * delta))
    with pytest.raises(ArtifactError, match=r"ranks \[4, 3\], and a linear combination needs one"):
        convert(one, tmp_path, "no", others={two: 1.0}, how="linear")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "magnitude of DoRA"),
        ({"lora_bias": True}, "bias of B"),
        ({"modules_to_save": ["lm_head"]}, "no factor of LoRA"),
        ({"trainable_token_indices": [3]}, "no factor of LoRA"),
    ],
)
def test_what_has_no_sum_is_refused(llama, tmp_path, config, said):
    one = write_adapter(llama, tmp_path / "one", target_modules=["q_proj"])
    two = write_adapter(llama, tmp_path / "two", target_modules=["q_proj"], **config)
    with pytest.raises(ArtifactError, match=said):
        convert(one, tmp_path, others={two: 1.0})
    assert not (tmp_path / "out").exists()


def test_sixteen_bits_keep_what_they_can_and_say_what_they_cannot(llama, tmp_path):
    one = write_adapter(llama, tmp_path / "one", target_modules=["q_proj"])
    change_tensors(one, lambda tensors: {k: t.bfloat16() for k, t in tensors.items()})
    out, _ = convert(one, tmp_path, "half", weight=0.5, others={one: -2.0})
    found = load_file(out / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    with pytest.raises(ArtifactError, match="which bfloat16 cannot hold; keep it with --dtype"):
        convert(one, tmp_path, "no", others={one: 0.3})
    convert(one, tmp_path, "rounded", others={one: 0.3}, dtype="bfloat16")
    with pytest.raises(ArtifactError, match="too large for float16"):
        convert(one, tmp_path, "large", others={one: 1e7}, dtype="float16")


def test_experts_keep_their_order_in_a_sum_and_lose_what_is_said(tmp_path):
    mixtral = write_mixtral(tmp_path / "mixtral")
    targets = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    one = write_adapter(mixtral, tmp_path / "one", target_modules=["q_proj"], **targets)
    change_tensors(one, lambda tensors: {k: t.double() for k, t in tensors.items()})
    out, found = convert(one, tmp_path, weight=0.7, others={one: 0.3})
    assert found.ranks == (8,)
    said = logits(mixtral, one)
    check_same(logits(mixtral, out), said)
    back, found = convert(out, tmp_path, "back", r=4)
    assert all(loss.relative < 1e-13 for loss in found.losses.values())
    check_same(logits(mixtral, back), said)
    renamed, _ = convert(one, tmp_path, "renamed", prefixes={"model.": "model.text."})
    again, _ = convert(renamed, tmp_path, "again", prefixes={"model.text.": "model."})
    check_same(logits(mixtral, again), said)
    fitted, _ = convert(one, tmp_path, "fitted", to_base=str(mixtral))
    check_same(logits(mixtral, fitted), said)


def test_a_base_that_stores_its_weights_transposed_is_nothing_to_the_factors(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 32}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).double().save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    asked = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    folder = write_adapter(base, tmp_path / "in", **asked)
    change_tensors(folder, lambda tensors: {k: t.double() for k, t in tensors.items()})
    twice, _ = convert(folder, tmp_path, "twice", weight=0.3, others={folder: 0.7})
    out, _ = convert(twice, tmp_path, r=4, to_base=str(base))
    check_same(logits(base, out), logits(base, folder))
