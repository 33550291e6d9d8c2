"""Kinds of adapters, several at once, other dtypes, and merges that were killed on the way."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from peft import BdLoraConfig, KasaConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.artifact.tiny import load_adapted, write_adapter, write_base
from tests.merging import merge_one
from tests.zoo.build import build_model
from tplora.artifact import merge_groups
from tplora.artifact.merge import merge_adapters
from tplora.errors import ArtifactError

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's advice on tied weights and variants

ALL_LINEAR = {"target_modules": "all-linear"}


def _numbers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def _assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"), max_shard_size="12KB")


@pytest.mark.parametrize(
    "config",
    [
        ALL_LINEAR
        | {
            "use_bdlora": BdLoraConfig(
                nblocks=2, target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"],
                match_strict=False,
            )
        },
        ALL_LINEAR | {"kasa_config": KasaConfig()},
        ALL_LINEAR | {"use_dora": True, "use_rslora": True, "r": 1},
        ALL_LINEAR | {"use_bdlora": None, "init_lora_weights": "mica"},
        {"target_modules": [], "target_parameters": ["o_proj.weight", "mlp.up_proj.weight"]},
    ],
    ids=["bdlora", "kasa", "dora and rslora", "mica", "parameters"],
)  # fmt: skip
def test_whatever_peft_merges_is_merged_to_the_same_bits(base, tmp_path, config):
    adapter = write_adapter(base, tmp_path / "adapter", **config)
    merge_one(str(base), adapter, tmp_path / "out")
    _assert_same(
        _numbers(tmp_path / "out"), load_adapted(base, adapter).merge_and_unload().state_dict()
    )


def test_experts_over_several_files_are_merged_one_by_one(tmp_path):
    build_model("qwen3_moe").save_pretrained(tmp_path / "base", max_shard_size="20KB")
    adapter = write_adapter(
        tmp_path / "base",
        tmp_path / "adapter",
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    merge_one(str(tmp_path / "base"), adapter, tmp_path / "out")
    adapted = load_adapted(tmp_path / "base", adapter)
    _assert_same(_numbers(tmp_path / "out"), adapted.merge_and_unload().state_dict())
    files = sorted(path.name for path in (tmp_path / "base").glob("*.safetensors"))
    assert files == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5


def test_a_form_that_cannot_be_written_again_is_refused(tmp_path, monkeypatch):
    """A delta in the wrong expert's rows would be seen: files are converted there and back."""
    build_model("qwen3_moe").save_pretrained(tmp_path / "base")
    adapter = write_adapter(
        tmp_path / "base",
        tmp_path / "adapter",
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj"],
    )
    original = merge_groups.GroupMerger._merged_group

    def swapped(self, group):
        back = type(group).to_files
        monkeypatch.setattr(
            type(group), "to_files", lambda one, found: {n: -t for n, t in back(one, found).items()}
        )
        return original(self, group)

    monkeypatch.setattr(merge_groups.GroupMerger, "_merged_group", swapped)
    with pytest.raises(ArtifactError, match="a form that transformers reads and cannot write"):
        merge_one(str(tmp_path / "base"), adapter, tmp_path / "out")


def test_several_adapters_are_merged_with_their_weights(base, tmp_path):
    one = write_adapter(base, tmp_path / "one", **ALL_LINEAR)
    two = write_adapter(base, tmp_path / "two", target_modules=["q_proj", "embed_tokens"], r=3)
    merge_adapters(str(base), {one: 0.25, two: -1.5}, tmp_path / "out")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), one, "one")
    model.load_adapter(two, "two")
    for module in model.modules():
        for name, weight in (("one", 0.25), ("two", -1.5)):
            if isinstance(module, LoraLayer) and name in module.scaling:
                module.scaling[name] *= weight
    wanted = model.merge_and_unload(adapter_names=["one", "two"]).state_dict()
    _assert_same(_numbers(tmp_path / "out"), wanted)


@pytest.mark.parametrize(
    ("config", "weights", "said"),
    [
        ({"modules_to_save": ["lm_head"]}, (1, 1), "both hold lm_head.weight as a whole"),
        ({"modules_to_save": ["lm_head"]}, (0.5, 1), "lm_head.weight as a whole, which a weight"),
        ({"trainable_token_indices": [3]}, (1, 1), "both hold rows of the same tokens"),
        ({"bias": "all"}, (1, 1), "bias = 'all' changes the base for every other adapter"),
    ],
)
def test_what_two_adapters_cannot_share_is_refused(base, tmp_path, config, weights, said):
    one = write_adapter(base, tmp_path / "one", **ALL_LINEAR | config)
    two = write_adapter(base, tmp_path / "two", **ALL_LINEAR | config)
    adapters = dict(zip((one, two), weights, strict=True))
    with pytest.raises(ArtifactError, match=said):
        merge_adapters(str(base), adapters, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_dtype_is_rounded_to_once(tmp_path):
    base = write_base(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", **ALL_LINEAR)
    merge_adapters(str(base), {adapter: 1}, tmp_path / "out", dtype=torch.bfloat16)
    wanted = load_adapted(base, adapter).merge_and_unload().to(torch.bfloat16).state_dict()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16"


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.merging import merge_one
merge_one(
    sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]),
    progress=lambda line: line.startswith("writing") and "00004" in line and os.kill(
        os.getpid(), signal.SIGKILL
    ),
)
"""


def test_a_killed_merge_goes_on_and_a_spoilt_file_is_written_again(base, tmp_path):
    adapter = write_adapter(base, tmp_path / "adapter", **ALL_LINEAR)
    merge_one(str(base), adapter, tmp_path / "whole")
    command = [sys.executable, "-c", _KILLED, str(base), str(adapter), str(tmp_path / "out")]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    aside = tmp_path / ".out.aside"
    held = sorted(aside.glob("model-*.safetensors"))
    assert len(held) >= 2  # the third may have been on its way to the disk
    held[0].write_bytes(held[0].read_bytes()[:-1] + b"\x00")
    report = merge_one(str(base), adapter, tmp_path / "out")
    assert report.num_kept == len(held) - 1
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        p.name for p in (tmp_path / "whole").iterdir()
    }
    assert not aside.exists()


def _stop_at_the_third_file(line):
    if "00003" in line:
        raise KeyboardInterrupt


def test_what_another_merge_has_left_is_not_taken(base, tmp_path):
    one = write_adapter(base, tmp_path / "one", **ALL_LINEAR)
    two = write_adapter(base, tmp_path / "two", target_modules=["q_proj"])
    with pytest.raises(KeyboardInterrupt):
        merge_one(str(base), one, tmp_path / "out", progress=_stop_at_the_third_file)
    assert list((tmp_path / ".out.aside").iterdir())
    assert merge_one(str(base), two, tmp_path / "out").num_kept == 0
    _assert_same(
        _numbers(tmp_path / "out"), load_adapted(base, two).merge_and_unload().state_dict()
    )
