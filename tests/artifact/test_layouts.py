"""Adapters as other tools and older versions leave them: the same numbers, whatever reads them."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.artifact.tiny import write_adapter, write_base
from tests.merging import merge_one
from tplora.artifact.adapter_dir import read_adapter
from tplora.artifact.plain_folder import plain_folder
from tplora.errors import ArtifactError, PlanError
from tplora.plan.lora import build_lora_config
from tplora.saved.keys import plain_keys
from tplora.saved.prefixes import moved_names

SAFE, BIN, CONFIG = "adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"
TARGETS = ["q_proj", "down_proj", "embed_tokens"]
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(base, tmp_path):
    return write_adapter(base, tmp_path / "adapter", target_modules=TARGETS, use_dora=True)


def _named(key, name="default"):
    """As in a model's own state_dict."""
    if key.endswith(".lora_magnitude_vector"):
        return f"{key}.{name}.weight"
    if ".lora_embedding_" in key:
        return f"{key}.{name}"
    return key.replace(".weight", f".{name}.weight") if ".lora_" in key else key


def _bare(key):
    return key.removeprefix("base_model.model.")


LAYOUTS = {
    "peft": lambda key: key,
    "state_dict": _named,
    "another name": lambda key: _named(key, "task_7"),
    "transformers": _bare,
    "bare state_dict": lambda key: _bare(_named(key)),
    "ddp": lambda key: f"module.{_named(key)}",
    "trainer": lambda key: f"model.{key}",
    "compiled": lambda key: f"_orig_mod.{key}",
    "compiled inside": lambda key: key.replace("base_model.model.", "base_model.model._orig_mod."),
    "fsdp": lambda key: key.replace(".mlp.", "._fsdp_wrapped_module.mlp."),
    "checkpointed": lambda key: key.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    "peft in peft": lambda key: f"base_model.model.{key}",
    "dora before 0.11": lambda key: (
        f"{key}.weight" if key.endswith("lora_magnitude_vector") else key
    ),
    "dora with a name": lambda key: (
        f"{key}.default" if key.endswith("lora_magnitude_vector") else key
    ),
}


def _rewrite(folder, rename, *, as_bin=False):
    tensors = {rename(key): one for key, one in load_file(folder / SAFE).items()}
    (folder / SAFE).unlink()
    if as_bin:
        torch.save(tensors, folder / BIN)
    else:
        save_file(tensors, folder / SAFE)


def _edit(folder, change):
    path = folder / CONFIG
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize("as_bin", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_adapter(adapter, layout, as_bin):
    wanted = read_adapter(adapter)
    factors = {key: wanted.tensor(key) for key in wanted.shapes}
    _rewrite(adapter, LAYOUTS[layout], as_bin=as_bin)
    found = read_adapter(adapter)
    assert found.pairs == wanted.pairs
    assert found.dtypes == wanted.dtypes
    assert {key: found.shapes[key] for key in factors} == dict(wanted.shapes)
    for key, factor in factors.items():
        assert torch.equal(found.tensor(key), factor)
    with plain_folder(found) as folder:
        assert (folder == adapter) == (layout == "peft" and not as_bin)
        again = load_file(folder / SAFE)
    assert again.keys() == factors.keys()


@pytest.mark.parametrize("as_bin", [False, True], ids=["safetensors", "bin"])
def test_a_merge_reads_them_as_well(base, tmp_path, as_bin):
    folder = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    merge_one(str(base), folder, tmp_path / "plain")
    _rewrite(folder, _named, as_bin=as_bin)
    merge_one(str(base), folder, tmp_path / "other")
    plain, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "other"))
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[key], other[key]) for key in plain)


def test_whole_modules_and_tokens_of_a_state_dict(base, tmp_path):
    folder = write_adapter(
        base,
        tmp_path / "adapter",
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
        trainable_token_indices=[1, 3],
    )
    wanted = read_adapter(folder)
    tensors = {_named(key): one for key, one in load_file(folder / SAFE).items()}
    head = tensors.pop("base_model.model.lm_head.weight")
    tokens = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    tensors[f"{tokens}.default"] = tensors.pop(tokens)
    tensors["base_model.model.lm_head.modules_to_save.default.weight"] = head
    tensors["base_model.model.lm_head.original_module.weight"] = head + 1
    save_file(tensors, folder / SAFE)
    found = read_adapter(folder)
    assert found.others.keys() == wanted.others.keys() == {"lm_head.weight"}
    assert torch.equal(found.tensor(found.others["lm_head.weight"]), head)
    assert found.trained_tokens == wanted.trained_tokens


def test_a_config_of_an_older_peft_lacks_fields(adapter):
    kept = ("peft_type", "r", "lora_alpha", "target_modules", "bias", "task_type", "use_dora")
    wanted = read_adapter(adapter).pairs
    _edit(adapter, lambda values: {key: values[key] for key in kept} | {"merge_weights": False})
    assert read_adapter(adapter).pairs == wanted
    assert build_lora_config({"adapter_name_or_path": str(adapter)}, None).r == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 10**9}, r"r = 1000000000, a whole number from 1 to"),
        ({"r": True}, r"r = True, a whole number"),
        ({"rank_pattern": {"q_proj": 0}}, "a table of ranks"),
        ({"lora_alpha": float("nan")}, "holds NaN, which is no number of JSON"),
        ({"lora_alpha": "16"}, "lora_alpha = '16', a number above 0 is needed"),
        ({"target_modules": "(q_proj"}, "no regular expression"),
        ({"target_modules": [1]}, "a name or a list of names"),
        ({"base_model_name_or_path": "x\nrm"}, "a name without control characters"),
        ({"megatron_config": {"a": 1}}, "makes peft import what it names"),
        ({"init_lora_weights": "../x"}, "an init of peft is needed"),
        ({"newer_field": 3, "peft_version": "0.99.0"}, r"newer_field not known.*'0.99.0'"),
        ({"task_type": "SING"}, "peft refuses it"),
        ({"use_dora": "yes"}, "true or false is needed"),
    ],
)
def test_a_value_that_no_peft_writes_is_refused(adapter, change, said):
    _edit(adapter, lambda values: values | change)
    with pytest.raises(ArtifactError, match=said):
        read_adapter(adapter)
    with pytest.raises(PlanError, match=r"lora.adapter_name_or_path = .*adapter_config.json"):
        build_lora_config({"adapter_name_or_path": str(adapter)}, None)


def test_a_key_named_twice_is_refused(adapter):
    path = adapter / CONFIG
    path.write_text(path.read_text().rstrip().removesuffix("}") + ', "r": 4}')
    with pytest.raises(ArtifactError, match="holds 'r' twice"):
        read_adapter(adapter)
    path.write_text(" " * (17 << 20))
    with pytest.raises(ArtifactError, match="16,777,216 at most are read"):
        read_adapter(adapter)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["base_model.model.x.lora_A.a.weight", "base_model.model.x.lora_A.b.weight"], "several"),
        (["base_model.model.x.lora_A.weight", "module.base_model.model.x.lora_A.weight"], "twice"),
        (["base_model.model.../x.lora_A.weight"], "no parameter's name"),
        (["base_model.model.x\n.lora_A.weight"], "no parameter's name"),
        (["x" * 2000], "no parameter's name"),
    ],
)
def test_keys_that_are_no_adapters_are_refused(keys, said):
    with pytest.raises(ArtifactError, match=said):
        plain_keys(keys, where="file")


def _spoil_header(folder, change):
    data = (folder / SAFE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(data[8 : 8 + length].decode()).encode()
    (folder / SAFE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_header_that_says_a_tensor_twice_is_refused(adapter):
    def double(text):
        key = f"base_model.model.{Q0}.lora_A.weight"
        return text.rstrip()[:-1] + f', "{key}": {json.dumps(json.loads(text)[key])}}}'

    _spoil_header(adapter, double)
    with pytest.raises(ArtifactError, match=r"holds '.*lora_A.weight' twice"):
        read_adapter(adapter)


@pytest.mark.parametrize("length", [0, 3, 1 << 20, 1 << 62])
def test_a_header_of_another_length_is_refused(adapter, length):
    data = (adapter / SAFE).read_bytes()
    (adapter / SAFE).write_bytes(length.to_bytes(8, "little") + data[8:])
    with pytest.raises(ArtifactError, match="is damaged"):
        read_adapter(adapter)


def test_tensors_that_share_bytes_are_refused(adapter):
    def share(text):
        header = json.loads(text)
        a, b = (f"base_model.model.model.layers.{k}.self_attn.q_proj.lora_A.weight" for k in (0, 1))
        header[a]["data_offsets"] = header[b]["data_offsets"]
        return json.dumps(header)

    _spoil_header(adapter, share)
    with pytest.raises(ArtifactError, match="is damaged"):
        read_adapter(adapter)


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("writes", [pickle.dump, torch.save], ids=["pickle", "archive"])
def test_a_pickle_that_runs_something_is_refused_by_what_it_asks_for(adapter, tmp_path, writes):
    (adapter / SAFE).unlink()
    with (adapter / BIN).open("wb") as file:
        writes({"w": _Runs(tmp_path / "mark")}, file)
    with pytest.raises(
        ArtifactError, match=r"asks for posix.system, which is not run|no pickle of"
    ):
        read_adapter(adapter)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(1).expand(10**7, 10**7), "which the file has no bytes for"),
        (torch.zeros(4, 4).to_sparse(), "no table of tensors"),
        (torch.zeros(4, 4, device="meta"), "no table of tensors"),
        (torch.zeros(4, 32, dtype=torch.int8), "is stored as int8"),
        ([torch.zeros(4)], "no table of tensors"),
    ],
)
def test_a_bin_file_of_other_things_is_refused(adapter, tensor, said, old):
    _rewrite(adapter, lambda key: key, as_bin=True)
    tensors = torch.load(adapter / BIN) | {f"base_model.model.{Q0}.lora_A.weight": tensor}
    torch.save(tensors, adapter / BIN, _use_new_zipfile_serialization=not old)
    with pytest.raises(ArtifactError, match=said):
        read_adapter(adapter)


@pytest.mark.parametrize("name", [SAFE, CONFIG, "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused(base, adapter, tmp_path, name):
    (adapter / "tokenizer_config.json").write_text("{}")
    (adapter / name).touch()
    (adapter / name).rename(tmp_path / "elsewhere")
    (adapter / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="is a link out of its folder"):
        merge_one(str(base), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_hub_cache_links_its_snapshots_to_its_blobs(adapter, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate((SAFE, CONFIG)):
        (adapter / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert len(read_adapter(snapshot).pairs) == 5


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", "", 3, "..", "a\n"])
def test_an_index_names_files_beside_it_alone(adapter, tmp_path, name):
    base = write_base(tmp_path / "base", max_shard_size="20KB")
    path = base / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match="the plain name of a file beside it is needed"):
        merge_one(str(base), adapter, tmp_path / "out")


def test_a_beginning_that_differs_everywhere_is_found():
    old = {f"base_model.model.language_model.model.layers.{n}.q.lora_A.weight" for n in range(12)}
    new = {name.replace("language_model.model.", "model.language_model.") for name in old}
    text = {name.replace("language_model.model.", "model.") for name in old}
    for wanted in (new, text):
        table = moved_names(old, wanted)
        assert table is not None
        assert {name.partition("layers")[2] for name in table} == {
            name.partition("layers")[2] for name in wanted
        }
        assert all(a.partition("layers")[2] == b.partition("layers")[2] for a, b in table.items())
    assert moved_names(old, set(list(new)[:-1])) is None
    assert moved_names(old, {name.replace("layers.3", "layers.33") for name in new}) is None


def test_what_the_model_says_is_the_same(base, tmp_path):
    """Plain PEFT reads the copy that is made for it."""
    from peft import PeftModel  # noqa: PLC0415

    folder = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        said = []
        for rename in (lambda key: key, _named):
            _rewrite(folder, rename)
            with plain_folder(read_adapter(folder)) as plain:
                model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), plain)
                said.append(model(tokens).logits)
        bare = AutoModelForCausalLM.from_pretrained(base)(tokens).logits
    assert torch.equal(*said)
    assert not torch.equal(said[0], bare)
