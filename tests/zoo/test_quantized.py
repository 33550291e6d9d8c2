"""Every architecture in 8 bits, cut over two ranks, is plain PEFT in one process, in float64."""

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import SEED
from tests.quantized import quantization
from tests.zoo.build import architectures, build_model
from tests.zoo.double import Double
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.plan.quantization import plan_quantization
from tplora.upstream import build_meta_model, peft_moved_names

pytestmark = [pytest.mark.world, pytest.mark.slow]

OPTIONS = {"dtype": torch.float64, "experts_implementation": "eager"}
TOLERANCE = 1e-9
NOT_IN_ONE_PROCESS = {"dots3_note_text", "gemma3n_text", "hy_v4", "inkling2_loop_text"}
"""Their code takes a packed weight for numbers; the plan refuses them."""
NOT_COMPARED = {"phimoe"}
"""It samples its experts in training, and bitsandbytes rounds inputs out of it."""
NOT_ADAPTED = ("out_proj", "weight_proj")
"""Which PEFT refuses of mamba's layers, or would not find again."""


def _targets(path):
    """Every quantised linear that PEFT does not take for an expert."""
    config = AutoConfig.from_pretrained(path)
    plan, problems = plan_quantization(
        build_meta_model(config, trust_remote_code=False), quantization("int8")
    )
    assert not problems
    left_out = (*NOT_ADAPTED, *peft_moved_names(config.get_text_config(decoder=True).model_type))
    return sorted(name for name in plan.names if name.rpartition(".")[2] not in left_out)


def _lora(path):
    return LoraConfig(
        r=4, target_modules=_targets(path), task_type="CAUSAL_LM", init_lora_weights=False
    )


@contextlib.contextmanager
def _factors_in_double():
    """PEFT takes the factors' dtype from the base's weights; where these are int8, from torch."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _gradients(model, vocab_size):
    tokens = torch.randint(3, vocab_size, (2, 12), generator=torch.Generator().manual_seed(3))
    with Double():
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), found


def _is_plain_peft(path):
    whole = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=quantization("int8"), device_map={"": "cpu"}, **OPTIONS
    )
    vocab_size = whole.config.get_text_config().vocab_size - 1
    base = load_base(path, tp_size=2, quantization_config=quantization("int8"), **OPTIONS)
    lora = _lora(path)  # before the seed is set: making an architecture may draw numbers
    with _factors_in_double():
        torch.manual_seed(SEED)
        plain = get_peft_model(whole, lora)
        cut = attach_adapter(base, _lora(path), seed=SEED)
    wanted_loss, wanted = _gradients(plain, vocab_size)
    loss, found = _gradients(cut, vocab_size)
    assert abs(loss - wanted_loss) <= TOLERANCE * abs(wanted_loss)
    assert found.keys() == wanted.keys()
    for name, there in wanted.items():
        if there is None:  # of a layer that this input does not reach
            continue
        here = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        worst = float((here - there).abs().max())
        assert worst <= TOLERANCE * max(1.0, float(there.abs().max())), f"{name}: {worst:.2e}"


@pytest.mark.parametrize("model_type", sorted({*architectures()} - NOT_COMPARED))
def test_in_eight_bits_it_is_plain_peft(world2, tmp_path, model_type):
    if model_type in NOT_IN_ONE_PROCESS:
        pytest.skip("its code takes a packed weight for numbers")
    build_model(model_type).save_pretrained(tmp_path / model_type)
    world2.run(_is_plain_peft, str(tmp_path / model_type))
