"""The merged files of every architecture are what PEFT makes of it in memory, bit for bit."""

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.merging import merge_one
from tests.zoo.build import architectures, build_model
from tests.zoo.parity import everything
from tplora.upstream.peft_keys import peft_file_keys

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' and peft's advice on odd tiny configs
]
# One of each kind: experts one by one in the files, as stacks, interleaved; tied ends; names that
# transformers changes while it loads; trained parameters of their own.
KINDS = ("qwen3_moe", "llama4_text", "inkling2_text", "gemma3_text", "minimax_m3_vl_text", "dory")


def _write_adapter(base, folder):
    """An adapter on everything that PEFT adapts, under the keys that it reads again."""
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = everything(AutoConfig.from_pretrained(base))
    owners = set(lora.target_modules)
    stacks = [n for n in lora.target_parameters or () if n.rpartition(".")[0] not in owners]
    lora.target_parameters = sorted(stacks) or None
    adapted = get_peft_model(model, lora)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=draw)
    adapted.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    keys = peft_file_keys(AutoModelForCausalLM.from_pretrained(base), lora, tensors)
    save_file({keys[key] or key: tensor for key, tensor in tensors.items()}, file)


def _untied(base):
    """PEFT adds both deltas of a tied pair to one weight, which nobody has trained."""
    model = AutoModelForCausalLM.from_pretrained(base)
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
        model._tied_weights_keys = model.all_tied_weights_keys = {}
    return model


def _numbers(model):
    """Its tensors, without a row for padding that some models clear while they load."""
    row = model.get_input_embeddings().padding_idx
    if row is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[row] = 0
    return model.state_dict()


def _assert_merged_as_by_peft(model_type, folder):
    build_model(model_type).save_pretrained(folder / "base")
    _write_adapter(folder / "base", folder / "adapter")
    report = merge_one(str(folder / "base"), folder / "adapter", folder / "out")
    adapted = PeftModel.from_pretrained(_untied(folder / "base"), folder / "adapter")
    wanted = _numbers(adapted.merge_and_unload())
    found = _numbers(AutoModelForCausalLM.from_pretrained(folder / "out"))
    before = _numbers(AutoModelForCausalLM.from_pretrained(folder / "base"))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert sum(not torch.equal(before[name], wanted[name]) for name in wanted) > 5
    assert len(report.changed) > 5


@pytest.mark.parametrize("model_type", KINDS)
def test_merged_files_are_pefts_merge_bit_for_bit(model_type, tmp_path):
    _assert_merged_as_by_peft(model_type, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in architectures() if name not in KINDS])
def test_the_others_are_too(model_type, tmp_path):
    _assert_merged_as_by_peft(model_type, tmp_path)
