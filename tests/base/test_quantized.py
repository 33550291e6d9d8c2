"""What a rank holds of a quantised base is, bit for bit, its piece of the whole quantised base."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, FineGrainedFP8Config

from tests.quantized import (
    METHODS,
    cut_of,
    load_pieces,
    load_whole,
    quantized_linears,
    values_of,
    write_wide,
)
from tests.tiny import write_checkpoint
from tplora.base import load, quantized_shard, sample
from tplora.base.cut import Cut
from tplora.base.load import load_base
from tplora.base.verify import check_against_checkpoint
from tplora.errors import ShardError, SourceError
from tplora.upstream import tp_mesh

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved("llama")`` is a checkpoint in float64; with a method, quantised by transformers."""
    folder, written = tmp_path_factory.mktemp("wide"), {}

    def get(name, method=None):
        key = (name, method)
        if key not in written:
            written[key] = folder / f"{name}-{method}"
            if method is None:
                write_wide(name, written[key])
            else:
                load_whole(get(name), method).save_pretrained(written[key])
        return str(written[key])

    return get


def _pieces_are_those_of_the_whole(path, source, methods, whole_method=None):
    for method in methods:
        whole = quantized_linears(load_whole(source, whole_method or method))
        model = load_pieces(path, method)
        pieces = quantized_linears(model)
        assert pieces.keys() == whole.keys()
        assert pieces
        cut_dims = set()
        for name, module in pieces.items():
            cut, found = cut_of(module), values_of(module)
            wanted = cut.piece_of(values_of(whole[name]))
            assert torch.equal(found, wanted), f"{method}: {name}"
            assert module.weight.untyped_storage().nbytes() == module.weight.nbytes, name
            assert not isinstance(module.weight, DTensor)
            cut_dims.add(cut.dim)
        assert cut_dims >= {0, 1}
        assert not any(p.requires_grad for p in model.parameters())
        if method == "saved":
            check_against_checkpoint(model, path, {}, tp_mesh(model).get_group())


@pytest.mark.parametrize("name", ["llama_bias", "phi3", "qwen3_moe"])
def test_pieces_are_bit_for_bit_those_of_the_whole(world, saved, name):
    world.run(_pieces_are_those_of_the_whole, saved(name), saved(name), METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_that_is_quantised_already_is_cut_and_not_rounded_again(world, saved, method):
    path = saved("llama", method)
    world.run(_pieces_are_those_of_the_whole, path, path, ["saved"])


def _storage_and_skips(path):
    changes = {
        "bnb_4bit_quant_storage": torch.bfloat16,
        "llm_int8_skip_modules": ["lm_head", "o_proj"],
    }
    whole = quantized_linears(load_whole(path, "nf4", **changes))
    pieces = quantized_linears(load_pieces(path, "nf4", **changes))
    assert pieces.keys() == whole.keys()
    assert not any(name.endswith("o_proj") for name in pieces)
    for name, module in pieces.items():
        assert module.weight.dtype == torch.bfloat16
        assert torch.equal(values_of(module), cut_of(module).piece_of(values_of(whole[name])))


def test_storage_dtype_and_skipped_modules_are_those_of_one_process(world2, saved):
    world2.run(_storage_and_skips, saved("llama"))


def _scales_of_this_rank_alone(path, method):
    """Without the exchange between ranks: what a shard would be by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cut, "gather", lambda self, piece, per: piece)
        patch.setattr(quantized_shard.dist, "all_reduce", lambda *args, **kwargs: None)
        patch.setattr(quantized_shard, "_nested_state", _own_nested_state)
        patch.setattr(load, "check_against_checkpoint", lambda *_: None)  # it sees int8's
        pieces = quantized_linears(load_pieces(path, method))
    whole = quantized_linears(load_whole(path, method))
    return {
        name.rpartition(".")[2]
        for name, module in pieces.items()
        if not torch.equal(values_of(module), cut_of(module).piece_of(values_of(whole[name])))
    }


def _own_nested_state(plain, codes, groups, offset, cut):
    plain.absmax = quantized_shard.bnb.dequantize_blockwise(codes, groups) + offset
    return plain


def test_scales_that_ranks_do_not_share_are_seen(world2, saved):
    rows = {"o_proj", "down_proj"}
    columns = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    path = saved("llama")
    for found in world2.run(_scales_of_this_rank_alone, path, "nf4-double"):
        assert found == rows | columns
    for found in world2.run(_scales_of_this_rank_alone, path, "int8"):
        assert found <= rows  # the rank that has a row's largest value is right about that row
        assert found


def _one_code_changed(path, method):
    model = load_pieces(path, method)
    group = tp_mesh(model).get_group()
    check_against_checkpoint(model, path, {}, group)
    weight = model.get_submodule("model.layers.1.mlp.down_proj").weight
    if dist.get_rank() == 1:
        weight.data.view(torch.uint8)[-1, -1] ^= 1
    with pytest.raises(ShardError, match=r"layers\.1\.mlp\.down_proj\.weight: what the ranks hold"):
        check_against_checkpoint(model, path, {}, group)


@pytest.mark.parametrize("method", ["nf4-double", "int8"])
def test_one_value_that_is_not_the_checkpoints_is_seen_after_loading(world2, saved, method):
    world2.run(_one_code_changed, saved("llama"), method)


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_one_value_that_is_not_a_quantised_checkpoints_is_seen(world2, saved, method):
    world2.run(_one_code_changed, saved("llama", method), "saved")


def _in_parts(path, method):
    """Of a large weight the first rows or columns are compared; their number divides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "_LARGE_BYTES", 31_000)
        model = load_pieces(path, method)
        weight = model.get_submodule("model.layers.1.mlp.up_proj").weight
        if dist.get_rank() == 1:
            weight.data.view(torch.uint8)[0, 0] ^= 1
        with pytest.raises(ShardError, match=r"layers\.1\.mlp\.up_proj\.weight: what the ranks"):
            check_against_checkpoint(model, path, {}, tp_mesh(model).get_group())


@pytest.mark.parametrize("method", ["nf4-double", "int8"])
def test_of_large_quantised_weights_a_part_is_compared(world2, saved, method):
    world2.run(_in_parts, saved("llama"), method)
    world2.run(_in_parts, saved("llama", method), "saved")


def _without(path, folder, *endings):
    """A copy of a checkpoint that lacks some tensors."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    kept = {k: t for k, t in load_file(file).items() if not k.endswith(endings)}
    save_file(kept, file, metadata={"format": "pt"})
    return str(folder)


def _is_refused(path, method, match):
    with pytest.raises(ShardError, match=match) as found:
        load_pieces(path, method)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("method", "missing"),
    [
        ("nf4", "layers.1.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"),
        ("nf4", "layers.1.mlp.up_proj.weight.absmax"),
        ("int8", "layers.1.mlp.up_proj.SCB"),
    ],
)
def test_a_state_that_is_missing_is_one_error_by_name(world2, saved, tmp_path, method, missing):
    path = _without(saved("llama", method), tmp_path / "broken", missing)
    world2.run(_is_refused, path, "saved", r"layers\.1\.mlp\.up_proj\.weight: ")


def test_a_weight_that_is_missing_is_one_error_by_name(world2, saved, tmp_path):
    path = _without(saved("llama"), tmp_path / "broken", "layers.1.mlp.up_proj.weight")
    world2.run(_is_refused, path, "nf4", r"layers\.1\.mlp\.up_proj\.weight: ")


@pytest.mark.parametrize("block_size", [32, 128])
def test_a_block_size_that_is_not_its_scales_is_one_error_by_name(
    world2, saved, tmp_path, block_size
):
    folder = Path(shutil.copytree(saved("llama", "nf4"), tmp_path / "wrong"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | {"blocksize": block_size}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    world2.run(_is_refused, str(folder), "saved", r"layers\.1\.mlp\.up_proj\.weight: .*blocks")


def test_a_quantised_checkpoint_says_how_in_its_config(saved):
    config = json.loads((Path(saved("llama", "nf4-double")) / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_use_double_quant"] is True


def _other_forms_are_refused(path, narrow, packed):
    _is_refused(narrow, "nf4", r"down_proj\.weight: its rows on a rank are no whole blocks of 64")
    _is_refused(packed, "saved", r"down_proj\.weight: \[120, 46\] in blocks of 64 cannot")
    config = AutoConfig.from_pretrained(path)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ShardError, match="quantised by gptq, which is not known to be exact"):
        load_base(path, tp_size=2, config=config)
    for tp_size in (1, 2):
        with pytest.raises(ShardError, match="quantised by fp8, which is not known to be exact"):
            load_base(path, tp_size=tp_size, quantization_config=FineGrainedFP8Config())


def test_what_cannot_be_cut_is_refused_on_every_rank(world2, saved, tmp_path):
    narrow = write_checkpoint("llama", tmp_path / "narrow", hidden_size=120)
    load_whole(str(narrow), "nf4").save_pretrained(tmp_path / "packed")
    paths = [saved("llama"), str(narrow), str(tmp_path / "packed")]
    world2.run(_other_forms_are_refused, *paths)


def _none_is_what_the_checkpoint_says(path):
    assert quantized_linears(load_base(path, tp_size=1, quantization_config=None))


def test_no_quantization_given_is_what_the_checkpoint_says(alone, saved):
    alone.run(_none_is_what_the_checkpoint_says, saved("llama", "nf4"))


def _is_damaged(path):
    with pytest.raises(SourceError, match="a file of its weights is damaged"):
        load_pieces(path, "nf4")


def test_a_checkpoint_that_is_cut_short_is_one_error(world2, saved, tmp_path):
    shutil.copytree(saved("llama"), tmp_path / "short")
    file = tmp_path / "short" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    world2.run(_is_damaged, str(tmp_path / "short"))
