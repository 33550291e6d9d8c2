"""A quantised base's files, unpacked: the numbers that bitsandbytes' own layers multiply by."""

import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.artifact.tiny import write_adapter
from tests.quantized import (
    METHODS,
    load_whole,
    quantization,
    quantized_linears,
    values_of,
    write_wide,
)
from tests.tiny import write_checkpoint
from tplora.artifact import dequantized
from tplora.artifact.base_tensors import read_whole
from tplora.artifact.dequantized import DequantizedTensors, is_packed
from tplora.artifact.merge import merge_into
from tplora.artifact.tensor_file import read_places
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


def _source(folder, method=None, dtype=torch.float32):
    given = None if method is None else quantization(method)
    return DequantizedTensors(folder, dtype=dtype, given=given)


def _read(folder, *how):
    with _source(folder, *how) as source:
        return {name: read_whole(source, name) for name in source.checkpoint.tensors}


def _is_what_layers_hold(found, base, seen):
    before = _weights(base)
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        module = name.removesuffix(".weight")
        wanted = values_of(seen[module]) if module in seen else before[name]
        rtol = 1e-6 if seen.get(module) and seen[module].weight.dtype == torch.int8 else 0
        torch.testing.assert_close(tensor, wanted, rtol=rtol, atol=0, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_read_is_what_bitsandbytes_multiplies_by(base, packed, method):
    seen = quantized_linears(load_whole(str(base), method))
    _is_what_layers_hold(_read(base, method), base, seen)
    folder = packed(method)
    assert is_packed(folder)
    assert not is_packed(base)
    _is_what_layers_hold(_read(folder), base, seen)


@pytest.mark.parametrize("method", ["nf4-double", "int8"])
def test_a_merge_into_it_is_a_plain_model_of_what_was_trained(base, packed, tmp_path, method):
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    factors = load_file(adapter / "adapter_model.safetensors")
    for folder, how in ((base, (method,)), (packed(method), ())):
        out = tmp_path / f"out-{len(how)}"
        with _source(folder, *how) as source:
            report = merge_into(source, {adapter: 1.0}, out)
        expected = _read(folder, *how)
        for name in report.changed:
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            expected[name] += 1.5 * (factors[f"{key}B.weight"] @ factors[f"{key}A.weight"])
        found = _weights(out)
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        assert len(report.changed) == 2
        model = AutoModelForCausalLM.from_pretrained(out)
        assert not quantized_linears(model)
        assert model.dtype == torch.float32
        for name in ("index.json", "safetensors"):
            assert len(list(out.glob(f"*.{name}"))) == len(list(folder.glob(f"*.{name}")))
        assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == ".") == []


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
    for found in (_read(tmp_path / "odd", method), _read(tmp_path / "packed")):
        _is_what_layers_hold(found, tmp_path / "odd", seen)


def test_it_is_rounded_from_the_dtype_that_it_was_held_in(base, tmp_path):
    shutil.copyfile(base / "config.json", tmp_path / "config.json")
    with _source(base, "nf4", torch.bfloat16) as source:
        source.finish(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.bfloat16,
        quantization_config=quantization("nf4"),
        device_map={"": "cpu"},
    )
    found = _read(base, "nf4", torch.bfloat16)
    for name, linear in quantized_linears(model).items():
        there = found[f"{name}.weight"]
        assert there.dtype == torch.bfloat16
        assert torch.equal(there, values_of(linear).to(torch.bfloat16)), name
    kept = "model.embed_tokens.weight"
    assert torch.equal(found[kept], _weights(base)[kept]), "nobody touches it"


def test_each_weight_is_unpacked_once_and_few_are_in_memory(base, tmp_path, monkeypatch):
    adapter = write_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    alive, most, calls = weakref.WeakSet(), [], []

    class Seen(dequantized._Unpacked):
        def prepare(self):
            super().prepare()
            alive.add(self)
            most.append(len(alive))
            calls.append(self._module)

    monkeypatch.setattr(dequantized, "_Unpacked", Seen)
    with _source(base, "nf4") as source:
        merge_into(source, {adapter: 1.0}, tmp_path / "out")
    assert len(calls) == len(set(calls)) == 14
    assert max(most) <= 4


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
        _read(broken)


def test_a_weight_that_is_missing_is_an_error(base, tmp_path):
    broken = _without(base, tmp_path / "broken", "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ArtifactError, match=r"holds no model\.layers\.1\.mlp\.up_proj\.weight"):
        _read(broken, "nf4")


def test_files_that_are_cut_short_or_missing_are_errors(base, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    file = sorted(broken.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="is cut short"):
        _read(broken, "nf4")
    file.unlink()
    with pytest.raises(ArtifactError, match=f"names {file.name}, which is missing"):
        _read(broken, "nf4")
    for path in [*broken.glob("*.safetensors"), *broken.glob("*.index.json")]:
        path.unlink()
    with pytest.raises(ArtifactError, match=r"holds no model\.safetensors\.index\.json"):
        _read(broken, "nf4")


def test_another_method_is_refused(base, tmp_path):
    other = tmp_path / "gptq"
    shutil.copytree(base, other)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"packed \(gptq\), and only bitsandbytes'"):
        is_packed(other)
    assert read_places(next(other.glob("*.safetensors")))
