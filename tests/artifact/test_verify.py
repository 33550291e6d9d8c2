import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.artifact.tiny import VOCAB, change_tensors, load_adapted, write_adapter, write_base
from tests.merging import merge_one
from tplora.artifact.probe import choose_probe_rows, logits_at, read_probe, record_probe
from tplora.artifact.verify import verify_adapter, verify_merged, write_record
from tplora.errors import ArtifactError

# peft 0.21.2 asks transformers 5.24 for a property by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ROWS = [[1, 2, 3], [4, 5], list(range(20))]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run(base, tmp_path):
    """An adapter and the probe of the model that it came from."""
    adapter = write_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    model = load_adapted(base, adapter)
    model.train()
    record_probe(model, ROWS, tmp_path / "probe.safetensors", is_writer=True)
    assert model.training
    return adapter, tmp_path / "probe.safetensors"


def _verify(run, base, **options):
    return verify_adapter(run[0], str(base), run[1], **({"dtype": torch.float32} | options))


def test_a_saved_adapter_that_says_what_was_recorded_passes(run, base):
    report = _verify(run, base)
    assert report.passed
    assert report.is_telling
    assert report.max_abs_diff < 1e-5
    assert report.tolerance == pytest.approx(1e-4 * report.max_abs_logit)
    assert report.num_positions == 6


def test_a_merged_model_is_held_to_the_same_record_and_a_wrong_one_fails(run, base, tmp_path):
    merge_one(str(base), run[0], tmp_path / "merged")
    report = verify_merged(tmp_path / "merged", str(base), run[1], dtype=torch.float32)
    assert report.passed
    assert report.top1_agreement == 1
    assert 0 <= report.kl_divergence < 1e-9
    record = json.loads(write_record(report, tmp_path / "merged", compared="merged").read_text())
    assert record["passed"]
    assert record["max_abs_diff"] == report.max_abs_diff
    wrong = verify_merged(base, str(base), run[1], dtype=torch.float32)
    assert not wrong.passed
    assert wrong.kl_divergence > 1e-4


def test_one_changed_factor_fails(run, base):
    key = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    change_tensors(run[0], lambda t: t | {key: t[key].flip(0).contiguous()})
    report = _verify(run, base)
    assert not report.passed
    assert report.max_effect > 0


def test_an_adapter_that_does_nothing_fails_even_if_nothing_was_recorded(run, base):
    change_tensors(run[0], lambda t: {k: v.zero_() if "lora_B" in k else v for k, v in t.items()})
    record_probe(load_adapted(base, run[0]), ROWS, run[1], is_writer=True)
    report = _verify(run, base)
    assert report.max_abs_diff <= report.tolerance
    assert report.max_effect == 0
    assert not report.passed


def test_an_empty_tensor_and_a_shard_are_refused_by_name(run, base):
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    full = load_file(run[0] / "adapter_model.safetensors")[key]
    change_tensors(run[0], lambda t: t | {key: full[:22].clone()})
    with pytest.raises(ArtifactError, match=r"up_proj.lora_B.weight \[22, 4\].*a shard"):
        _verify(run, base)
    change_tensors(run[0], lambda t: t | {key: torch.zeros(0)})
    with pytest.raises(ArtifactError, match=r"up_proj.lora_B.weight is empty"):
        _verify(run, base)


def test_another_base_fails_or_is_named(run, base, tmp_path):
    other = write_base(tmp_path / "other", vocab_size=VOCAB + 1)
    with pytest.raises(ArtifactError, match=r"gives .* name the base that was trained on"):
        _verify(run, other)


def test_bfloat16_passes_within_its_own_tolerance(base, tmp_path):
    adapter = write_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    model = load_adapted(base, adapter, dtype=torch.bfloat16)
    record_probe(model, ROWS, tmp_path / "probe.safetensors", is_writer=True)
    report = verify_adapter(
        adapter, str(base), tmp_path / "probe.safetensors", dtype=torch.bfloat16
    )
    assert report.passed
    assert report.tolerance == pytest.approx(0.05 * report.max_abs_logit)


def test_torchruns_variables_do_not_make_it_distributed(run, base, monkeypatch):
    for name, value in {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert _verify(run, base).passed
    assert not torch.distributed.is_initialized()


def test_probe_rows_are_the_first_long_enough_ones_cut_to_64_tokens():
    rows = [[1], list(range(100)), [], [1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert choose_probe_rows(rows) == [list(range(64)), [1, 2], [3, 4, 5], [6, 7]]
    with pytest.raises(ArtifactError, match="no row has 2 tokens"):
        choose_probe_rows([[1], []])


def test_a_probe_holds_the_last_two_real_positions_of_each_row(run):
    tensors = load_file(run[1])
    assert tensors["positions"].tolist() == [[1, 2], [0, 1], [18, 19]]
    assert tensors["attention_mask"].sum(1).tolist() == [3, 2, 20]
    assert tensors["input_ids"].shape == (3, 20)
    assert tensors["logits"].shape == (3, 2, VOCAB)
    assert tensors["logits"].dtype == torch.float32
    assert [list(row) for row in read_probe(run[1]).rows] == ROWS


def test_only_the_writer_writes(base, tmp_path):
    model = load_adapted(base, write_adapter(base, tmp_path / "a", target_modules=["q_proj"]))
    record_probe(model, ROWS, tmp_path / "probe.safetensors", is_writer=False)
    assert not (tmp_path / "probe.safetensors").exists()


class _Says(nn.Module):
    """A model whose logits are one number."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, input_ids, use_cache):
        logits = self.weight * torch.ones(*input_ids.shape, 5)
        return type("Output", (), {"logits": logits})


def test_logits_that_are_not_finite_are_never_recorded(tmp_path):
    with pytest.raises(ArtifactError, match="logits are not finite"):
        record_probe(_Says(float("nan")), [[1, 2]], tmp_path / "probe", is_writer=True)
    assert list(tmp_path.iterdir()) == []


def test_the_mode_of_the_model_comes_back_after_a_failure():
    model = _Says(1.0).train()
    with pytest.raises(IndexError):
        logits_at(model, [[1, 2]], torch.tensor([[5]]))
    assert model.training


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.unlink(), "is missing; it is written at the end of training"),
        (lambda path: path.write_bytes(b"x" * 30), "is not a probe"),
    ],
)
def test_a_missing_or_damaged_probe_is_named(run, base, spoil, said):
    spoil(run[1])
    with pytest.raises(ArtifactError, match=said):
        _verify(run, base)
