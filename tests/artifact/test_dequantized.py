"""A quantised base's files, unpacked: the numbers that bitsandbytes' own layers multiply by."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.quantized import (
    METHODS,
    load_whole,
    quantization,
    quantized_linears,
    values_of,
    write_wide,
)
from tests.tiny import write_checkpoint
from tplora.artifact.dequantized import is_packed, write_dequantized
from tplora.artifact.tensor_file import read_places
from tplora.base import quantized_whole
from tplora.errors import ArtifactError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint in several files."""
    folder = tmp_path_factory.mktemp("base")
    single = write_wide("llama_bias", folder / "single")
    model = AutoModelForCausalLM.from_pretrained(single, dtype=torch.float32)
    model.save_pretrained(folder / "base", max_shard_size="1MB")
    assert len(list((folder / "base").glob("*.safetensors"))) > 2
    return folder / "base"


@pytest.fixture(scope="module")
def packed(base, tmp_path_factory):
    """``packed("nf4")`` is the same, as transformers saves it quantised."""
    folder, written = tmp_path_factory.mktemp("packed"), {}

    def get(method):
        if method not in written:
            written[method] = folder / method
            model = load_whole(str(base), method)
            model.save_pretrained(written[method], max_shard_size="500KB")
        return written[method]

    return get


def _weights(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def _write(folder, out, method=None, dtype=torch.float32):
    out.mkdir()
    given = None if method is None else quantization(method)
    write_dequantized(folder, out, dtype=dtype, given=given)
    return out


def _is_what_layers_hold(out, base, seen):
    found, before = _weights(out), _weights(base)
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        module = name.removesuffix(".weight")
        wanted = values_of(seen[module]) if module in seen else before[name]
        rtol = 1e-6 if seen.get(module) and seen[module].weight.dtype == torch.int8 else 0
        torch.testing.assert_close(tensor, wanted, rtol=rtol, atol=0, msg=name)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert not quantized_linears(model)
    assert model.dtype == torch.float32


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_is_what_bitsandbytes_multiplies_by(base, packed, tmp_path, method):
    seen = quantized_linears(load_whole(str(base), method))
    on_its_way = _write(base, tmp_path / "on-its-way", method)
    _is_what_layers_hold(on_its_way, base, seen)
    folder = packed(method)
    assert is_packed(folder)
    assert not is_packed(base)
    unpacked = _write(folder, tmp_path / "unpacked")
    _is_what_layers_hold(unpacked, base, seen)
    for name in ("index.json", "safetensors"):
        assert len(list(unpacked.glob(f"*.{name}"))) == len(list(folder.glob(f"*.{name}")))


@pytest.mark.parametrize("hidden_size", [120, 90])
@pytest.mark.parametrize("method", ["nf4", "nf4-double"])
def test_rows_may_be_of_any_width(tmp_path, method, hidden_size):
    odd = {"hidden_size": hidden_size, "heads": (3, 3), "head_dim": 10, "intermediate_size": 75}
    wide = write_checkpoint("llama", tmp_path / "wide", **odd)
    AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).save_pretrained(
        tmp_path / "odd"
    )
    whole = load_whole(str(tmp_path / "odd"), method)
    whole.save_pretrained(tmp_path / "packed")
    seen = quantized_linears(whole)
    for out in (
        _write(tmp_path / "odd", tmp_path / "on-its-way", method),
        _write(tmp_path / "packed", tmp_path / "unpacked"),
    ):
        _is_what_layers_hold(out, tmp_path / "odd", seen)


def test_it_is_rounded_from_the_dtype_that_it_was_held_in(base, tmp_path):
    out = _write(base, tmp_path / "out", "nf4", torch.bfloat16)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.bfloat16,
        quantization_config=quantization("nf4"),
        device_map={"": "cpu"},
    )
    found = _weights(out)
    for name, linear in quantized_linears(model).items():
        there = found[f"{name}.weight"]
        assert there.dtype == torch.bfloat16
        assert torch.equal(there, values_of(linear).to(torch.bfloat16)), name
    kept = "model.embed_tokens.weight"
    assert torch.equal(found[kept], _weights(base)[kept]), "nobody touches it"


def test_one_weight_is_in_memory_at_a_time(base, tmp_path, monkeypatch):
    alive = []

    def rounded(weight, config, original=quantized_whole.rounded):
        alive.append(weight.numel())
        return original(weight, config)

    monkeypatch.setattr(quantized_whole, "rounded", rounded)
    _write(base, tmp_path / "out", "nf4")
    assert len(alive) == 14
    assert max(alive) == 768 * 192


def _without(folder, out, name):
    shutil.copytree(folder, out)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop(name, None) is not None:
            save_file(tensors, file, metadata={"format": "pt"})
            return out
    raise AssertionError(name)


SCALES = {
    "nf4": "model.layers.0.self_attn.q_proj.weight.absmax",
    "nf4-double": "model.layers.1.mlp.down_proj.weight.quant_state.bitsandbytes__nf4",
    "int8": "model.layers.0.self_attn.q_proj.SCB",
}


@pytest.mark.parametrize("method", SCALES)
def test_a_packed_weight_without_its_scales_is_an_error(packed, tmp_path, method):
    broken = _without(packed(method), tmp_path / "broken", SCALES[method])
    module = SCALES[method].rpartition("_proj")[0] + "_proj"
    with pytest.raises(ArtifactError, match=rf"{module}\.weight cannot be unpacked: .*whole copy"):
        _write(broken, tmp_path / "out")


def test_a_weight_that_is_missing_is_an_error(base, tmp_path):
    broken = _without(base, tmp_path / "broken", "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ArtifactError, match=r"holds no model\.layers\.1\.mlp\.up_proj\.weight"):
        _write(broken, tmp_path / "out", "nf4")


def test_files_that_are_cut_short_or_missing_are_errors(base, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    file = sorted(broken.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="is cut short"):
        _write(broken, tmp_path / "short", "nf4")
    file.unlink()
    with pytest.raises(ArtifactError, match=f"names {file.name}, which is missing"):
        _write(broken, tmp_path / "missing", "nf4")
    for path in [*broken.glob("*.safetensors"), *broken.glob("*.index.json")]:
        path.unlink()
    with pytest.raises(ArtifactError, match="holds neither"):
        _write(broken, tmp_path / "none", "nf4")


def test_another_method_is_refused(base, tmp_path):
    other = tmp_path / "gptq"
    shutil.copytree(base, other)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"packed \(gptq\), and only bitsandbytes'"):
        is_packed(other)
    assert read_places(next(other.glob("*.safetensors")))
