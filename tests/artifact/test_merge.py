import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.artifact.tiny import VOCAB, change_tensors, load_adapted, write_adapter, write_base
from tests.merging import merge_one
from tplora.artifact import base_tensors, merge, tensor_file
from tplora.artifact.adapter_dir import read_adapter
from tplora.errors import ArtifactError

ALL_LINEAR = {"target_modules": "all-linear"}
IDS = torch.arange(12).view(1, -1) % VOCAB
Q0 = "model.layers.0.self_attn.q_proj"
NORM0 = "model.layers.0.input_layernorm.weight"


def _weights(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def _assert_equals_peft(base, adapter, out):
    """The merged folder holds what peft's own merge holds, and says what the adapted model says."""
    adapted = load_adapted(base, adapter)
    with torch.no_grad():
        logits_adapted = adapted(IDS).logits
        merged = AutoModelForCausalLM.from_pretrained(out)
        logits_merged = merged(IDS).logits
    torch.testing.assert_close(logits_merged, logits_adapted, rtol=0, atol=1e-4)
    expected = adapted.merge_and_unload().state_dict()
    found = merged.state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {
        "one file": write_base(folder / "one"),
        "shards": write_base(folder / "shards", max_shard_size="12KB"),
        "tied": write_base(folder / "tied", tie_word_embeddings=True),
        "tied shards": write_base(
            folder / "tied-shards", tie_word_embeddings=True, max_shard_size="12KB"
        ),
        "bfloat16": write_base(folder / "bfloat16", dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("base", ["one file", "shards"])
@pytest.mark.parametrize(
    "config",
    [
        ALL_LINEAR,
        ALL_LINEAR | {"use_rslora": True, "exclude_modules": ["k_proj"]},
        ALL_LINEAR
        | {"rank_pattern": {"q_proj": 2, "layers.1.mlp.*": 3}, "alpha_pattern": {"up_proj": 11}},
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        ALL_LINEAR | {"use_dora": True},
        {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True, "use_rslora": True},
        ALL_LINEAR | {"modules_to_save": ["lm_head", "input_layernorm"]},
        ALL_LINEAR | {"modules_to_save": ["mlp"], "exclude_modules": ".*mlp.*"},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 49, 7]},
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"lm_head": [5], "embed_tokens": [1, 2]},
        },
    ],
    ids=[
        "all-linear",
        "rslora",
        "patterns",
        "embedding and head",
        "dora",
        "dora at the ends",
        "modules",
        "containers",
        "tokens",
        "tokens at both ends",
    ],
)
def test_a_merge_from_files_equals_pefts_own(bases, tmp_path, base, config):
    adapter = write_adapter(bases[base], tmp_path / "adapter", **config)
    report = merge_one(str(bases[base]), adapter, tmp_path / "out")
    _assert_equals_peft(bases[base], adapter, tmp_path / "out")
    assert report.changed
    assert not report.unchanged
    assert not report.is_untied


def test_files_index_and_untouched_tensors_are_the_bases_byte_for_byte(bases, tmp_path):
    base = bases["shards"]
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    report = merge_one(str(base), adapter, tmp_path / "out")
    before, after = _weights(base), _weights(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(report.changed)
    assert changed == {f"model.layers.{k}.self_attn.q_proj.weight" for k in range(2)}
    index = "model.safetensors.index.json"
    assert json.loads((base / index).read_text()) == json.loads(
        (tmp_path / "out" / index).read_text()
    )
    for file in base.glob("*.safetensors"):
        assert file.stat().st_size == (tmp_path / "out" / file.name).stat().st_size
    assert len(list(base.glob("*.safetensors"))) > 3


def test_the_base_dtype_is_kept_and_only_rounding_is_lost(bases, tmp_path):
    base = bases["bfloat16"]
    adapter = write_adapter(base, tmp_path / "adapter", **ALL_LINEAR)
    merge_one(str(base), adapter, tmp_path / "out")
    after = _weights(tmp_path / "out")
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    factors = load_file(adapter / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{Q0}.lora_{x}.weight"].float() for x in "AB")
    exact = _weights(base)[f"{Q0}.weight"].float() + 6 / 4 * b @ a
    assert torch.equal(after[f"{Q0}.weight"], exact.to(torch.bfloat16))


@pytest.mark.parametrize("bias", [{"lora_bias": True}, {"bias": "lora_only"}, {"bias": "all"}])
def test_biases_are_merged(tmp_path, bias):
    base = write_base(tmp_path / "base", attention_bias=True, mlp_bias=True)
    adapter = write_adapter(base, tmp_path / "adapter", **ALL_LINEAR | bias)
    merge_one(str(base), adapter, tmp_path / "out")
    _assert_equals_peft(base, adapter, tmp_path / "out")
    names = [
        n for n, t in _weights(base).items() if not torch.equal(t, _weights(tmp_path / "out")[n])
    ]
    assert any(name.endswith(".bias") for name in names)


@pytest.mark.parametrize("base", ["tied", "tied shards"])
def test_tokens_of_a_tied_weight_are_trained_on_both_sides(bases, tmp_path, base):
    adapter = write_adapter(
        bases[base], tmp_path / "adapter", **ALL_LINEAR | {"trainable_token_indices": [1, 48]}
    )
    assert not merge_one(str(bases[base]), adapter, tmp_path / "out").is_untied
    _assert_equals_peft(bases[base], adapter, tmp_path / "out")


@pytest.mark.parametrize("base", ["one file", "shards", "tied", "tied shards"])
def test_added_tokens_grow_embedding_head_and_config(bases, tmp_path, base):
    """The adapter holds the rows of its new tokens; the base's files have none."""
    model = AutoModelForCausalLM.from_pretrained(bases[base])
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    model.save_pretrained(tmp_path / "resized")
    new = [VOCAB, VOCAB + 1, VOCAB + 2]
    tokens = new if "tied" in base else {"embed_tokens": new, "lm_head": new}
    adapter = write_adapter(
        tmp_path / "resized",
        tmp_path / "adapter",
        **ALL_LINEAR | {"trainable_token_indices": tokens},
    )
    merge_one(str(bases[base]), adapter, tmp_path / "out")
    _assert_equals_peft(tmp_path / "resized", adapter, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["vocab_size"] == VOCAB + 3


@pytest.mark.parametrize(
    "config",
    [{"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": {"lm_head": [VOCAB]}}],
)
def test_half_of_a_tie_that_would_stay_smaller_is_refused(bases, tmp_path, config):
    model = AutoModelForCausalLM.from_pretrained(bases["tied"])
    model.resize_token_embeddings(VOCAB + 1, mean_resizing=False)
    model.save_pretrained(tmp_path / "resized")
    adapter = write_adapter(tmp_path / "resized", tmp_path / "adapter", **ALL_LINEAR | config)
    with pytest.raises(ArtifactError, match="which the base ties, would keep 50"):
        merge_one(str(bases["tied"]), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_norm_is_not_a_number_of_tokens(bases, tmp_path):
    adapter = write_adapter(bases["one file"], tmp_path / "adapter", modules_to_save=["norm"])
    assert read_adapter(adapter).num_tokens == 0


@pytest.mark.parametrize("base", ["tied", "tied shards"])
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_tied_weight_becomes_two_when_the_adapter_changes_one_side(
    bases, tmp_path, base, targets
):
    adapter = write_adapter(bases[base], tmp_path / "adapter", target_modules=[*targets, "v_proj"])
    report = merge_one(str(bases[base]), adapter, tmp_path / "out")
    assert report.is_untied
    assert not json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits
        expected = load_adapted(bases[base], adapter)(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    kept = {"model.embed_tokens.weight", "lm_head.weight"} - {
        "model.embed_tokens.weight" if "embed" in target else "lm_head.weight" for target in targets
    }
    original = _weights(bases[base])["model.embed_tokens.weight"]
    for name in kept:
        assert torch.equal(_weights(tmp_path / "out")[name], original)


def test_a_tied_weight_that_nobody_changed_stays_one(bases, tmp_path):
    adapter = write_adapter(bases["tied"], tmp_path / "adapter", **ALL_LINEAR)
    assert not merge_one(str(bases["tied"]), adapter, tmp_path / "out").is_untied
    assert "lm_head.weight" not in _weights(tmp_path / "out")
    _assert_equals_peft(bases["tied"], adapter, tmp_path / "out")


def test_the_adapters_tokenizer_wins_as_a_whole_and_weights_of_other_formats_stay_behind(
    bases, tmp_path
):
    base = write_base(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "chat_template.jinja"):
        (base / name).write_text("base")
    for name in ("LICENSE", "README.md", "pytorch_model.bin", "modeling.py"):
        (base / name).write_text("base")
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    merge_one(str(base), adapter, tmp_path / "one")
    assert (tmp_path / "one/tokenizer.json").read_text() == "base"
    (adapter / "tokenizer_config.json").write_text("adapter")
    (adapter / "tokenizer.json").write_text("adapter")
    merge_one(str(base), adapter, tmp_path / "two")
    assert {path.name: path.read_text() for path in (tmp_path / "two").glob("tok*")} == {
        "tokenizer.json": "adapter",
        "tokenizer_config.json": "adapter",
    }
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "LICENSE",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_narrow_base_is_read_a_few_rows_at_a_time(bases, tmp_path, monkeypatch):
    base = bases["bfloat16"]
    adapter = write_adapter(base, tmp_path / "adapter", **ALL_LINEAR)
    merge_one(str(base), adapter, tmp_path / "whole")
    limit, read = 256, []

    def counted(stream, place, rows, **options):
        tensor = tensor_file.read_rows(stream, place, rows, **options)
        read.append((tensor.nbytes, tensor.untyped_storage().data_ptr()))
        return tensor

    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", limit)
    monkeypatch.setattr(base_tensors, "read_rows", counted)
    merge_one(str(base), adapter, tmp_path / "rows")
    assert max(size for size, _ in read) <= limit
    assert len({storage for _, storage in read}) < len(read) / 3, "memory is used again"
    for name, value in _weights(tmp_path / "whole").items():
        assert torch.equal(_weights(tmp_path / "rows")[name], value), name


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora is True, but model.layers.0.self_attn.q_proj has none"),
        ({"lora_bias": True}, "lora_bias is True, but model.layers.0.self_attn.q_proj has none"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' cannot be merged"),
        ({"use_qalora": True}, "use_qalora = True cannot be merged into files"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens = .* cannot be merged"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True cannot be merged"),
    ],
)
def test_more_than_plain_lora_is_refused_by_the_fields_name(bases, tmp_path, config, said):
    adapter = write_adapter(bases["one file"], tmp_path / "adapter", target_modules=["q_proj"])
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ArtifactError, match=said):
        merge_one(str(bases["one file"]), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_is_one_matrix_is_merged_like_a_module(bases, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    base = bases["one file"]
    adapter = write_adapter(
        base, tmp_path / "adapter", target_modules=[], target_parameters=[name], r=3
    )
    merge_one(str(base), adapter, tmp_path / "out")
    wanted = load_adapted(base, adapter).merge_and_unload().get_parameter(name)
    found = load_file(tmp_path / "out" / "model.safetensors")[name]
    assert torch.equal(found, wanted.detach())


def _rename(tensors, old, new):
    return {key.replace(old, new): value for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t | {f"base_model.model.{Q0}.lora_magnitude_vector": torch.ones(32)},
            "use_dora is False, but it holds .*lora_magnitude_vector",
        ),
        (
            lambda t: (
                t | {"base_model.model.model.layers.0.input_layernorm.weight": torch.ones(32)}
            ),
            "input_layernorm.weight is no factor of LoRA, and its config names no such part",
        ),
        (lambda t: _rename(t, "q_proj", "x_proj"), "adapts model.layers.0.self_attn.x_proj, but"),
        (
            lambda t: _rename(t, "model.model.layers", "model.text.layers"),
            "adapts text.layers.0.self_attn.q_proj.*they hold model.layers.0.self_attn.q_proj"
            ".weight: .* another prefix",
        ),
        (
            lambda t: {k: v[:, :16].clone() if "lora_A" in k else v for k, v in t.items()},
            "a shard of the full one was saved",
        ),
        (
            lambda t: t | {f"base_model.model.{Q0}.base_layer.weight": torch.ones(32, 32)},
            "base_layer.weight .* is not the base's",
        ),
    ],
)
def test_an_adapter_tensor_without_a_place_is_refused(bases, tmp_path, change, said):
    adapter = write_adapter(bases["one file"], tmp_path / "adapter", target_modules=["q_proj"])
    change_tensors(adapter, change)
    with pytest.raises(ArtifactError, match=said):
        merge_one(str(bases["one file"]), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sum_that_leaves_the_dtype_is_refused_and_nothing_appears(tmp_path):
    base = write_base(tmp_path / "base", dtype=torch.float16)
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    change_tensors(adapter, lambda t: {key: value * 1e3 for key, value in t.items()})
    with pytest.raises(
        ArtifactError, match=r"q_proj.weight: base plus delta is not finite in torch.fl"
    ):
        merge_one(str(base), adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def _quantise(base):
    path = base / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(config))


def _pack(base):
    path = base / "model.safetensors"
    tensors = load_file(path)
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in tensors.items()}, path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_quantise, r"weights are packed \(gptq\)"),
        (_pack, "is stored as F8_E4M3; only F16"),
        (lambda base: (base / "model.safetensors").unlink(), "holds no model.safetensors.index"),
        (lambda base: (base / "config.json").unlink(), "holds no config.json"),
        (lambda base: (base / "model.safetensors").write_bytes(b"x" * 99), "not a safetensors"),
    ],
)
def test_a_base_that_cannot_be_merged_into_is_named(tmp_path, spoil, said):
    base = write_base(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    spoil(base)
    with pytest.raises(ArtifactError, match=said):
        merge_one(str(base), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_cut_short_and_a_disk_without_room_are_seen_before_writing(
    bases, tmp_path, monkeypatch
):
    base = write_base(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(merge.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ArtifactError, match="10 bytes are free, the merged model takes"):
        merge_one(str(base), adapter, tmp_path / "out")
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match="is cut short"):
        merge_one(str(base), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
