import json

import pytest
import torch

from tests.artifact.tiny import change_tensors, write_adapter, write_base
from tplora.artifact.adapter_dir import read_adapter
from tplora.artifact.adapter_fit import check_fits_base
from tplora.errors import ArtifactError

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(base, tmp_path):
    return write_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])


def _edit_config(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_pairs_carry_module_shape_and_scaling_as_peft_would(base, tmp_path):
    folder = write_adapter(
        base,
        tmp_path / "adapter",
        target_modules=["q_proj", "embed_tokens"],
        rank_pattern={"layers.1.self_attn.q_proj": 2},
        alpha_pattern={"q_proj": 3},
        use_rslora=True,
    )
    pairs = {pair.module: pair for pair in read_adapter(folder).pairs}
    assert sorted(pairs) == [
        "model.embed_tokens",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    assert pairs["model.embed_tokens"].weight_shape == (50, 32)
    assert pairs["model.embed_tokens"].scaling == 6 / 2
    assert pairs["model.layers.0.self_attn.q_proj"].scaling == 3 / 2
    assert pairs["model.layers.1.self_attn.q_proj"].scaling == 3 / 2**0.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t | {f"{Q0}.lora_A.weight": torch.zeros(0)}, r"q_proj.lora_A.weight is empty"),
        (
            lambda t: t | {f"{Q0}.lora_B.weight": t[f"{Q0}.lora_B.weight"] / 0},
            r"q_proj.lora_B.weight has 128 values that are not finite",
        ),
        (
            lambda t: {k: v for k, v in t.items() if k != f"{Q0}.lora_B.weight"},
            r"q_proj.lora_A.weight has no lora_B beside it",
        ),
        (
            lambda t: t | {f"{Q0}.lora_A.weight": t[f"{Q0}.lora_A.weight"][:2].clone()},
            r"q_proj.lora_A.weight has shape \[2, 32\], dim 0 has to be r = 4",
        ),
        (
            lambda t: t | {f"{Q0}.lora_B.weight": t[f"{Q0}.lora_B.weight"][:, :2].clone()},
            r"q_proj.lora_B.weight has shape \[32, 2\], dim 1 has to be r = 4",
        ),
        (lambda t: {"other": torch.ones(1)}, "holds no LoRA factor"),
    ],
)
def test_a_bad_tensor_is_refused_by_name(adapter, change, said):
    change_tensors(adapter, change)
    with pytest.raises(ArtifactError, match=said):
        read_adapter(adapter)


@pytest.mark.parametrize(("factor", "dim", "size"), [("A", 1, 32), ("B", 0, 32)])
def test_a_factor_cut_like_a_shard_does_not_fit_the_base(adapter, factor, dim, size):
    key = f"{Q0}.lora_{factor}.weight"
    change_tensors(adapter, lambda t: t | {key: t[key].narrow(dim, 0, size // 2).clone()})
    found = read_adapter(adapter)
    shapes = {f"{pair.module}.weight": pair.weight_shape for pair in found.pairs}
    shapes["model.layers.0.self_attn.q_proj.weight"] = (32, 32)
    with pytest.raises(ArtifactError, match=r"q_proj.*a shard of the full one was saved"):
        check_fits_base(found, shapes)


@pytest.mark.parametrize(("rows", "said"), [(50, "with 50 tokens, the base has 48"), (25, "shard")])
def test_a_head_of_other_tokens_is_told_from_a_shard(base, tmp_path, rows, said):
    folder = write_adapter(base, tmp_path / "adapter", target_modules=["lm_head"])
    key = "base_model.model.lm_head.lora_B.weight"
    change_tensors(folder, lambda t: t | {key: t[key][:rows].clone()})
    with pytest.raises(ArtifactError, match=said):
        check_fits_base(read_adapter(folder), {"lm_head.weight": (48 if rows == 50 else 50, 32)})


def test_a_module_that_the_base_lacks_does_not_fit(adapter):
    with pytest.raises(ArtifactError, match="which the base does not have"):
        check_fits_base(read_adapter(adapter), {})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "holds no adapter_config.json"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "is not JSON"),
        (lambda f: _edit_config(f, peft_type="IA3"), "peft_type is 'IA3'; IA3 changes weights"),
        (lambda f: _edit_config(f, use_newer=True), "use_newer not known to the installed peft"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "holds neither adapter_model"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 20), "is damaged"),
    ],
)
def test_a_missing_or_damaged_file_is_named(adapter, spoil, said):
    spoil(adapter)
    with pytest.raises(ArtifactError, match=said):
        read_adapter(adapter)


def test_an_unknown_field_that_is_off_does_not_matter(adapter):
    _edit_config(adapter, use_newer=None)
    assert len(read_adapter(adapter).pairs) == 4
