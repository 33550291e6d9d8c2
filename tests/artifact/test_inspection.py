"""What is said of an adapter's factors, against the same numbers from whole delta weights."""

import io
import json
import re
import shutil

import pytest
import torch
from rich.console import Console

from tests.artifact.tiny import change_tensors, write_adapter, write_base
from tests.command import forked_tplora
from tplora.artifact.comparison import compare_adapters
from tplora.artifact.inspection import inspect_adapter
from tplora.artifact.low_rank_norm import Delta, cosine, distance, inner, norm
from tplora.terminal.adapters import comparison_tables, inspection_tables

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def kept(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "adapter"
    return write_adapter(base, folder, target_modules=["q_proj", "down_proj", "embed_tokens"])


@pytest.fixture
def adapter(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "adapter")


def _whole(a, b, scaling, num_matrices):
    """Every expert's delta weight, by the order in which PEFT stacks the factors."""
    r = a.shape[0] // num_matrices
    return torch.stack(
        [
            scaling * sum(torch.outer(b[:, k * num_matrices + e], a[e * r + k]) for k in range(r))
            for e in range(num_matrices)
        ]
    )


@pytest.mark.parametrize("num_matrices", [1, 3])
@pytest.mark.parametrize("out", [5, 40])
def test_norms_and_products_are_those_of_whole_delta_weights(num_matrices, out):
    torch.manual_seed(0)
    one, other = (
        (torch.randn(r * num_matrices, 20).double(), torch.randn(out, r * num_matrices).double())
        for r in (4, 7)
    )
    made = [
        Delta.of(*pair, scaling=s, num_matrices=num_matrices)
        for pair, s in ((one, 0.5), (other, 3))
    ]
    x, y = (_whole(*pair, s, num_matrices) for pair, s in ((one, 0.5), (other, 3)))
    assert norm(made[0]) == pytest.approx(float(x.norm()), rel=1e-12)
    assert inner(*made) == pytest.approx(float((x * y).sum()), rel=1e-10)
    assert distance(*made) == pytest.approx(float((x - y).norm()), rel=1e-12)
    assert cosine(*made) == pytest.approx(float((x * y).sum() / x.norm() / y.norm()), rel=1e-10)


def test_a_small_distance_keeps_its_digits():
    torch.manual_seed(0)
    a, b = torch.randn(4, 300).double(), torch.randn(200, 4).double()
    near = b + 1e-11 * torch.randn(200, 4)
    one, other = (Delta.of(a, factor, scaling=1, num_matrices=1) for factor in (b, near))
    assert distance(one, other) == pytest.approx(float(((near - b) @ a).norm()), rel=1e-3)
    assert distance(one, one) < 1e-12 * norm(one)


def test_what_is_there_is_said(base, adapter):
    found = inspect_adapter(adapter, base=str(base))
    assert found.coverage == {"linear": (4, 14), "embedding": (1, 1), "head": (0, 1)}
    assert len(found.layers) == 5
    assert found.dtypes == ("float32",)
    assert {layer.r for layer in found.layers} == {4}
    assert [(one.name, one.what) for one in found.others] == [
        ("model.embed_tokens", "the base's weight")
    ]
    assert found.signs == ()


def _zero(tensors):
    return {key: one * 0 if "lora_B" in key else one for key, one in tensors.items()}


def _nan(tensors):
    tensors[f"{Q0}.lora_A.weight"][0, 0] = float("nan")
    return tensors


def _shard(tensors):
    return tensors | {f"{Q0}.lora_B.weight": tensors[f"{Q0}.lora_B.weight"][:16].clone()}


def _half_r(tensors):
    return tensors | {f"{Q0}.lora_A.weight": tensors[f"{Q0}.lora_A.weight"][:2].clone()}


def _alone(tensors):
    return {key: one for key, one in tensors.items() if key != f"{Q0}.lora_B.weight"}


@pytest.mark.parametrize(
    ("change", "signs"),
    [
        (_zero, ["4 of 5 layers have a B of zeros"]),
        (_nan, ["1 of 5 layers have values that are not finite: model.layers.0.self_attn.q_proj"]),
        (_shard, ["layers of 2 shapes; some may be shards", r"make a weight \[16, 32\], the base"]),
        (_half_r, [r"q_proj.lora_A.weight has shape \[2, 32\], dim 0 has to be r = 4"]),
        (_alone, ["has no lora_B beside it"]),
    ],
)
def test_what_looks_wrong_is_said_and_not_refused(base, adapter, change, signs):
    change_tensors(adapter, change)
    found = inspect_adapter(adapter, base=str(base)).signs
    assert len(found) == len(signs), found
    for said, sign in zip(found, signs, strict=True):
        assert re.search(sign, said), said


def test_a_base_of_other_shapes_is_said(adapter, tmp_path):
    other = write_base(tmp_path / "other", hidden_size=64, intermediate_size=44)
    signs = inspect_adapter(adapter, base=str(other)).signs
    (said,) = (sign for sign in signs if "down_proj" in sign)
    assert "model.layers.*.mlp.down_proj: the factors make a weight [32, 44]" in said
    assert "(2 layers)" in said
    assert "cannot be looked at" in inspect_adapter(adapter, base="no/where").signs[0]


def test_two_adapters_are_compared_by_what_they_do(base, adapter, tmp_path):
    """Factors may differ and say the same: (B / 2) (2 A)."""
    same = shutil.copytree(adapter, tmp_path / "same")
    change_tensors(same, lambda t: {k: v * 2 if "lora_A" in k else v for k, v in t.items()})
    change_tensors(same, lambda t: {k: v / 2 if "lora_B" in k else v for k, v in t.items()})
    found = compare_adapters(adapter, same)
    assert found.has_same_targets
    assert found.largest < 1e-14
    assert min(one.cosine for one in found.layers) == pytest.approx(1)
    turned = shutil.copytree(adapter, tmp_path / "turned")
    change_tensors(turned, lambda t: {k: -v if "lora_B" in k else v for k, v in t.items()})
    layers = {one.module: one for one in compare_adapters(adapter, turned).layers}
    assert layers["model.layers.0.self_attn.q_proj"].relative == pytest.approx(2)
    assert layers["model.layers.0.self_attn.q_proj"].cosine == pytest.approx(-1)
    assert layers["model.embed_tokens"].relative < 1e-14
    other = write_adapter(base, tmp_path / "other", target_modules=["q_proj", "k_proj"], r=8)
    found = compare_adapters(adapter, other)
    assert not found.has_same_targets
    assert found.only_second == (
        "model.layers.0.self_attn.k_proj",
        "model.layers.1.self_attn.k_proj",
    )
    assert found.settings["r"] == ("4", "8")
    assert found.layers[0].r == (4, 8)


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_the_terminal(base, adapter, tmp_path, width):
    other = write_adapter(base, tmp_path / "other", target_modules="all-linear", use_dora=True)
    console = Console(width=width, file=io.StringIO())
    console.print(inspection_tables(inspect_adapter(other)))
    console.print(inspection_tables(inspect_adapter(other), by_layer=True))
    console.print(comparison_tables(compare_adapters(adapter, other)))
    lines = console.file.getvalue().splitlines()
    assert {"self_attn.q_proj", "mlp.down_proj"} <= {
        word for line in lines for word in line.split()
    }
    assert max(map(len, lines)) <= width
    assert sum("q_proj" in line for line in lines) >= 3


@pytest.mark.world
def test_json_is_json(adapter, tmp_path):
    change_tensors(adapter, _nan)
    done = forked_tplora("inspect", "adapter", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    assert None in {one["a_norm"] for one in values["layers"]}
    assert values["signs"]
