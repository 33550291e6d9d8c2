"""QLoRA on P ranks is QLoRA in one process: ten steps of plain PEFT, every number.

bitsandbytes computes in float32 at most, so numbers are held to what float32 can show: losses to
1e-5, gradients to 1e-4 of the largest in their tensor. Plain SGD, because AdamW divides a gradient
by its own size, and so makes rounding of one that is nearly zero into a step as long as any other.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import dora
from peft.utils.integrations import dequantize_bnb_weight
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.communication import count_collectives
from tests.models import STEPS, batches, world_size
from tests.quantized import (
    adapted,
    cut_of,
    load_pieces,
    load_whole,
    plain_adapted,
    quantized_linears,
    write_wide,
)
from tests.tiny import write_checkpoint
from tplora.adapter import linear
from tplora.adapter.attach import attach_adapter
from tplora.adapter.loftq import replace_lora_weights_loftq
from tplora.adapter.variants import dora as our_dora
from tplora.base import quantized_product
from tplora.base.load import check_shards
from tplora.errors import ArtifactError, PlanError

pytestmark = pytest.mark.world

LOSS, GRADIENT = 1e-5, 1e-4
LEARNING_RATES = {"lora-bias": 0.05, "beside": 0.05}
"""By what is trained, else 0.1, where these two are unstable: a unit of rounding in plain PEFT's
own factors, 1.2e-7, is 1.2e-4 of a gradient by the last step, and 2.8e-6 at 0.05.
"""
PLANTED = (5, 6)
"""An invocation of aLoRA, in two of three rows."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """``wide("llama")`` is a checkpoint whose pieces are whole blocks."""
    folder, written = tmp_path_factory.mktemp("wide"), {}

    def get(name):
        if name not in written:
            written[name] = str(write_wide(name, folder / name))
        return written[name]

    return get


@pytest.fixture(scope="module")
def recorded(alone, wide, tmp_path_factory):
    """``recorded(name, method, targets)``: path and file of plain PEFT's run, made once."""
    folder, files = tmp_path_factory.mktemp("alone"), {}

    def get(*case):
        if case not in files:
            files[case] = folder / f"{len(files)}.safetensors"
            alone.run(_record, wide(case[0]), *case[1:], files[case])
        return wide(case[0]), files[case]

    return get


def _train(model, see, targets, num_steps=STEPS, checkpointing=False):
    if checkpointing:
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=LEARNING_RATES.get(targets, 0.1))
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        loss = model(**batches(1, PLANTED)[0]).loss
        loss.backward()
        see(f"step {step}: loss", loss)
        for name, parameter in trained.items():
            see(f"step {step}: grad of {name}", parameter.grad)
        optimizer.step()
    for name, parameter in trained.items():
        see(f"{name} after step {num_steps}", parameter)


def _as_on_a_gpu(patch):
    """On a CPU PEFT's DoRA puts an 8-bit weight back without its scales, and runs once (0.21)."""

    def dequantize(module):
        return dequantize_bnb_weight(module.weight, state=getattr(module, "state", None))

    patch.setattr(dora, "dequantize_module_weight", dequantize)


def _record(path, method, targets, file):
    seen = {}
    is_drawn = targets.endswith("dropped")  # PEFT's masks are others
    model = (adapted if is_drawn else plain_adapted)(path, method, targets)
    with pytest.MonkeyPatch.context() as patch:
        _as_on_a_gpu(patch)
        _train(model, lambda what, tensor: seen.update({what: tensor.detach().clone()}), targets)
    losses = [float(seen[f"step {k}: loss"]) for k in (1, STEPS)]
    assert losses[1] < losses[0] - 0.1, f"nothing is learnt: {losses}"
    save_file(seen, file)


def _differences(path, method, targets, file, num_steps=STEPS, checkpointing=False):
    """Every number that is further from the run alone than float32 is."""
    wanted, found = load_file(file), {}

    def see(what, tensor):
        full = tensor.detach()
        full = full.full_tensor() if isinstance(full, DTensor) else full
        there = wanted.pop(what, None)
        if there is None:
            return
        error = float((full - there).abs().max() / there.abs().max().clamp(min=1e-30))
        if error > (LOSS if what.endswith("loss") else GRADIENT):
            found[what] = error

    model = adapted(path, method, targets)
    if targets != "experts":  # whose wrappers hide the parameter that is looked at
        check_shards(model.get_base_model(), model.plan)
    assert model.plan.quantization.names == set(quantized_linears(load_pieces(path, method)))
    _train(model, see, targets, num_steps, checkpointing)
    return found, sorted(wanted)


def _is_the_run_alone(*case):
    found, unseen = _differences(*case)
    assert not found, found
    assert not unseen, f"never seen here: {unseen}"


@pytest.mark.parametrize("method", ["nf4", "nf4-double", "int8"])
def test_ten_steps_equal_plain_peft(world, recorded, method):
    path, file = recorded("llama_bias", method, "all-linear")
    world.run(_is_the_run_alone, path, method, "all-linear", file)


@pytest.mark.parametrize(
    ("size", "name", "targets"),
    [
        (2, "qwen3", "all-linear"),
        (3, "phi3", "all-linear"),
        (2, "qwen3_moe", "experts"),
        (4, "qwen3", "all-linear"),
        (2, "llama", "beside"),
    ],
)
def test_each_family_equals_plain_peft(world_of, recorded, size, name, targets):
    path, file = recorded(name, "nf4-double", targets)
    world_of(size).run(_is_the_run_alone, path, "nf4-double", targets, file)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["nf4-double", "int8"])
@pytest.mark.parametrize("name", ["llama_bias", "qwen3", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_size_of_each_family_equals_plain_peft(world_of, recorded, size, name, method):
    targets = "experts" if name == "qwen3_moe" else "all-linear"
    path, file = recorded(name, method, targets)
    world_of(size).run(_is_the_run_alone, path, method, targets, file)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fp4", "nf4-double", "int8"])
@pytest.mark.parametrize("option", ["dora", "lora-bias", "bias"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_size_of_each_kind_of_lora_equals_plain_peft(
    world_of, recorded, size, option, method
):
    path, file = recorded("llama_bias", method, option)
    world_of(size).run(_is_the_run_alone, path, method, option, file)


@pytest.mark.parametrize(
    ("size", "name", "method", "option"),
    [
        (2, "llama_bias", "nf4-double", "dora"),
        (3, "llama_bias", "int8", "dora"),
        (3, "phi3", "nf4", "dora-rs"),
        (3, "llama_bias", "nf4", "dora-dropped"),
        (2, "llama_bias", "int8", "bias"),
        (3, "llama_bias", "nf4", "bias"),
        (3, "llama_bias", "nf4-double", "lora-bias"),
        (2, "llama_bias", "int8", "lora-bias"),
        (2, "llama_bias", "nf4", "activated"),
        (2, "llama_bias", "nf4-double", "loftq"),
        (3, "phi3", "fp4", "loftq"),
    ],
)
def test_each_kind_of_lora_that_peft_has_equals_its_own(
    world_of, recorded, size, name, method, option
):
    path, file = recorded(name, method, option)
    world_of(size).run(_is_the_run_alone, path, method, option, file)


@pytest.mark.parametrize(
    ("size", "name", "method"), [(3, "llama_bias", "fp4"), (2, "phi3", "int8")]
)
def test_linears_without_an_adapter_equal_plain_peft(world_of, recorded, size, name, method):
    targets = "fused-query" if name == "phi3" else "query"
    path, file = recorded(name, method, targets)
    world_of(size).run(_is_the_run_alone, path, method, targets, file)


def test_activation_checkpointing_changes_nothing(world2, recorded):
    path, file = recorded("phi3", "nf4-double", "all-linear")
    world2.run(_is_the_run_alone, path, "nf4-double", "all-linear", file, STEPS, True)


def test_one_process_equals_plain_peft(alone, recorded):
    path, file = recorded("llama_bias", "int8", "all-linear")
    alone.run(_is_the_run_alone, path, "int8", "all-linear", file)


def _communication(path, method, targets):
    model, batch = adapted(path, method, targets), batches(1, PLANTED)[0]
    model(**batch).loss.backward()
    outputs = []
    forward = count_collectives(lambda: outputs.append(model(**batch)))
    backward = count_collectives(lambda: outputs[0].loss.backward())
    for found in (forward, backward):
        found.pop("wrap_tensor_autograd", None)
    return forward, backward


@pytest.mark.parametrize("method", ["nf4-double", "int8"])
def test_a_decoder_layer_takes_two_collectives_each_way(world, wide, method):
    for forward, backward in world.run(_communication, wide("llama"), method, "all-linear"):
        assert forward == {"all_reduce": 2 * 2 + 1, "all_gather": 1}  # embedding; head
        assert backward == {"all_reduce": 2 * 2 + 1 - 1 + 1}  # head; frozen embedding; bucket


def _broken(path, method, targets, file, break_it):
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        return _differences(path, method, targets, file, num_steps=1)[0]


def _without_input_gradients(patch):
    patch.setattr(quantized_product, "replicate_input", lambda x, group: x)


def _with_the_bias_on_every_rank(patch):
    def multiply(module, x, bias, original=quantized_product.multiply):
        return original(module, x, quantized_product.local_bias(module))

    patch.setattr(quantized_product, "multiply", multiply)


def _with_gradients_of_rounded_codes(patch):
    backward = quantized_product._EightBitProduct.backward

    def broken(ctx, grad):
        ctx.scales = ctx.scales.roll(1)
        return backward(ctx, grad)

    patch.setattr(quantized_product._EightBitProduct, "backward", staticmethod(broken))


def _with_norms_of_the_unscaled_weight(patch):
    def dequantize(module, dtype, original=our_dora.dequantize):
        return original(module, dtype) * 1.01

    patch.setattr(our_dora, "dequantize", dequantize)


def _with_biases_that_forget_rows(patch):
    backward = quantized_product._EightBitProduct.backward

    def broken(ctx, grad):
        *others, bias = backward(ctx, grad)
        return *others, None if bias is None else grad[0].sum(dim=0)

    patch.setattr(quantized_product._EightBitProduct, "backward", staticmethod(broken))


@pytest.mark.parametrize(
    ("method", "targets", "break_it"),
    [
        ("nf4", "query", _without_input_gradients),
        ("nf4", "query", _with_the_bias_on_every_rank),
        ("int8", "query", _with_gradients_of_rounded_codes),
        ("nf4-double", "dora", _with_norms_of_the_unscaled_weight),
        ("int8", "bias", _with_biases_that_forget_rows),
    ],
)
def test_parity_sees(world2, recorded, method, targets, break_it):
    path, file = recorded("llama_bias", method, targets)
    assert all(world2.run(_broken, path, method, targets, file, break_it))


def _merge_is_refused(path):
    model = adapted(path, "nf4", "query")
    with pytest.raises(PlanError, match="merge the saved adapter into the unquantised base"):
        model.merge_adapter()
    assert model.is_loaded_in_4bit is False  # else trl would cast the factors
    assert model.get_base_model().is_loaded_in_4bit is True
    head = load_pieces(path, "nf4", llm_int8_skip_modules=["q_proj"])
    with pytest.raises(PlanError, match="add 'lm_head' to quantization"):
        attach_adapter(head, LoraConfig(target_modules=["v_proj"]))


def test_merging_in_place_and_a_quantised_head_are_refused(world2, wide):
    world2.run(_merge_is_refused, wide("llama"))


def _loftq_needs_the_base_before(path, other, packed):
    model = attach_adapter(load_pieces(path, "nf4"), LoraConfig(target_modules=["q_proj"]))
    for folder, said in (
        (other, r"is \[192, 96\] in F64, and \[768, 192\] in 16 or 32 bits is needed"),
        (packed, r"is \[73728, 1\] in U8"),
        (f"{path}/nowhere", "is no folder of a base"),
        (str(Path(path).parent), "holds no model"),
    ):
        with pytest.raises(ArtifactError, match=said):
            replace_lora_weights_loftq(model, folder)
    eight = attach_adapter(load_pieces(path, "int8"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(PlanError, match="is on no layer in 4 bits"):
        replace_lora_weights_loftq(eight)
    many = LoraConfig(target_modules=["q_proj"], r=193)
    with pytest.raises(PlanError, match="at most 192 of its weight's vectors"):
        replace_lora_weights_loftq(attach_adapter(load_pieces(path, "nf4"), many))


def test_loftq_without_the_weights_that_it_is_of_is_refused(world2, wide, tmp_path):
    other = write_checkpoint("llama", tmp_path / "other", hidden_size=96, head_dim=16)
    load_whole(wide("llama"), "nf4").save_pretrained(tmp_path / "packed")
    world2.run(_loftq_needs_the_base_before, wide("llama"), str(other), str(tmp_path / "packed"))


def _eval_then_train(path, method, file):
    """bitsandbytes packs a weight anew out of training, and then has no gradient for it."""
    model = adapted(path, method, "all-linear")
    batch = batches(1, PLANTED)[0]
    with torch.no_grad():
        found = model.eval()(**batch).loss
    model.train()
    loss = model(**batch).loss
    torch.testing.assert_close(found, loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.detach(), load_file(file)["step 1: loss"], rtol=LOSS, atol=0)
    loss.backward()
    first = model.get_base_model().model.layers[0].self_attn.q_proj
    assert first.lora_B["default"].weight.grad is not None
    assert world_size() == 1 or cut_of(first.get_base_layer()).dim == 0


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_evaluation_computes_what_training_does(world2, alone, recorded, method):
    path, file = recorded("llama_bias", method, "all-linear")
    for one in (alone, world2):
        one.run(_eval_then_train, path, method, file)


def test_the_layers_use_the_product_that_is_tested_here():
    assert linear.multiply is quantized_product.multiply
