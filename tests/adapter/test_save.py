"""Saving: a normal PEFT folder with full factors, one writer, whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.adapter.models import load_plain, load_tplora, tokens
from tests.communication import Recorded
from tests.models import InDouble
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tplora.adapter.base_record import BASE_RECORD
from tplora.adapter.factor import Factor
from tplora.adapter.save import gather_factors, save_adapter
from tplora.base.fingerprint import BASE
from tplora.errors import ArtifactError

pytestmark = pytest.mark.world

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _key(name: str) -> str:
    """PEFT's file names a factor without the adapter's name."""
    return name.replace(".default", "")


def _save(path: str, folder: str) -> None:
    model, plain = load_tplora(path), load_plain(path)
    save_adapter(model, folder)
    saved = load_file(Path(folder) / WEIGHTS)
    wanted = {_key(n): p.detach() for n, p in plain.named_parameters() if "lora_" in n}
    assert set(saved) == set(wanted)
    for name, tensor in saved.items():
        assert_is_shard(shard=tensor, full=wanted[name], dim=None, what=name, is_exact=True)


def test_the_file_holds_the_full_factors_of_plain_peft(world, checkpoint, tmp_path):
    folder = tmp_path / "deep" / "adapter"
    world.run(_save, checkpoint("llama"), str(folder))
    assert set(_contents(folder)) == {WEIGHTS, CONFIG, BASE_RECORD, "README.md", BASE}
    config = json.loads((folder / CONFIG).read_text())
    assert set(config["target_modules"]) >= {"q_proj", "embed_tokens"}
    assert config["base_model_name_or_path"] == checkpoint("llama")
    assert [p.name for p in folder.parent.iterdir()] == ["adapter"], "something was left aside"


def _logits_and_save(path: str, folder: str) -> list[float]:
    model = load_tplora(path).eval()
    model.save_pretrained(folder)
    return model(input_ids=tokens()).logits.detach().flatten()[:500].tolist()


def test_plain_peft_loads_it_and_computes_the_same_logits(world2, checkpoint, tmp_path):
    path = checkpoint("llama")
    wanted = world2.run(_logits_and_save, path, str(tmp_path / "adapter"))[0]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False)
    found = loaded.to(torch.float64)(input_ids=tokens()).logits.detach().flatten()[:500]
    assert found.tolist() == pytest.approx(wanted, rel=0, abs=1e-11)


def _other_ways(path: str, folder: str) -> None:
    model = load_tplora(path)
    save_adapter(model, f"{folder}/one")
    model.save_pretrained(f"{folder}/two", state_dict={"wrong": torch.ones(1)})
    model.save_pretrained(f"{folder}/three", is_main_process=dist.get_rank() == 0)


def test_every_way_to_save_writes_the_same_files(world2, checkpoint, tmp_path):
    world2.run(_other_ways, checkpoint("llama"), str(tmp_path))
    one, two, three = (_contents(tmp_path / name) for name in ("one", "two", "three"))
    files = {WEIGHTS, CONFIG, BASE_RECORD, "README.md", BASE}
    assert set(one) == set(two) == set(three) == files
    for name in (WEIGHTS, CONFIG):
        assert one[name] == two[name] == three[name], name


def _gathered(path: str) -> tuple[list[int], int]:
    model = load_tplora(path)
    with Recorded() as sent:
        full = gather_factors(model, is_writer=dist.get_rank() == 0)
    assert bool(full) == (dist.get_rank() == 0), "only the writer keeps full factors"
    cut = [f for f in model.factors().values() if f.plan.shard_dim is not None]
    piece = sum(f.parameter.to_local().nbytes for f in cut)
    assert [kind for kind, _ in sent.calls] == ["all_gather"] * len(cut), sent.calls[:6]
    return sent.of("all_gather"), piece


def test_only_cut_factors_are_gathered_and_each_once(world2, checkpoint):
    """At tp_size 2 every cut but the vocabulary's is even; an uneven one travels padded."""
    for sent, piece in world2.run(_gathered, checkpoint("llama", vocab_size=128)):
        assert sum(sent) == piece


def _writers(path: str, folder: str) -> int:
    model = load_tplora(path)
    with mock.patch("os.replace", side_effect=os.replace) as replace:
        save_adapter(model, folder)
    return replace.call_count


def test_only_rank_0_writes(world, checkpoint, tmp_path):
    counts = world.run(_writers, checkpoint("llama"), str(tmp_path / "adapter"))
    assert counts[0] > 0
    assert not any(counts[1:])


def _poison(model: Any, value: float) -> None:
    """One element of one rank's own piece of a cut factor."""
    if dist.get_rank() == dist.get_world_size() - 1:
        factor = next(f for f in model.factors().values() if f.plan.shard_dim is not None)
        with torch.no_grad():
            factor.local()[0, 0] = value


def _refuse_not_finite(path: str, folder: str, value: float) -> None:
    model = load_tplora(path)
    if value != value:
        save_adapter(model, folder)
    dist.barrier()
    before = _contents(Path(folder)) if Path(folder).exists() else {}
    dist.barrier()
    _poison(model, value)
    with pytest.raises(ArtifactError, match=r"lora_embedding_A\.default holds NaN or infinity"):
        save_adapter(model, folder)
    after = _contents(Path(folder)) if Path(folder).exists() else {}
    assert after == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_factor_that_is_not_finite_is_refused_on_every_rank(world, checkpoint, tmp_path, value):
    world.run(_refuse_not_finite, checkpoint("llama"), str(tmp_path / "adapter"), value)
    assert (tmp_path / "adapter").exists() == (value != value), "no folder for nothing"


def _refuse_not_whole(path: str, folder: str) -> None:
    """What a gather that does not communicate gives, one that gives nothing, and none at all."""
    model = load_tplora(path)
    for gathered, said in (
        (lambda factor: factor.local().detach(), r"has shape \(\d+, \d+\) after gathering, the f"),
        (lambda factor: factor.local().detach()[:0], r"has shape \(0, \d+\) after gathering"),
    ):
        with (
            mock.patch.object(Factor, "full", gathered),
            pytest.raises(ArtifactError, match=f"lora_.*{said}"),
        ):
            save_adapter(model, folder)
    with (
        mock.patch("tplora.adapter.save.gather_factors", return_value={}),
        pytest.raises(ArtifactError, match=r"is not among the 0 of \d+ factors"),
    ):
        save_adapter(model, folder)


def test_a_factor_that_is_not_whole_is_refused_on_every_rank(world2, checkpoint, tmp_path):
    world2.run(_refuse_not_whole, checkpoint("llama"), str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter").exists()


def _fail_between(path: str, folder: str) -> None:
    """PEFT writes half of its files and the disk is full."""
    model = load_tplora(path)

    def half(_self: Any, aside: str, **_: Any) -> None:
        (Path(aside) / WEIGHTS).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with (
        mock.patch.object(PeftModel, "save_pretrained", half),
        pytest.raises(ArtifactError, match="No space left on device"),
    ):
        save_adapter(model, folder)


def test_a_save_that_fails_leaves_the_old_adapter_on_every_rank(world, checkpoint, tmp_path):
    folder = tmp_path / "adapter"
    world.run(_save, checkpoint("llama"), str(folder))
    (folder / "tokenizer.json").write_text("{}")
    before = _contents(folder)
    world.run(_fail_between, checkpoint("llama"), str(folder))
    assert _contents(folder) == before
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_files_that_are_not_ours_stay(world2, checkpoint, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / WEIGHTS).write_bytes(b"old")
    world2.run(_save, checkpoint("llama"), str(folder))
    files = {WEIGHTS, CONFIG, BASE_RECORD, "README.md", BASE, "tokenizer.json"}
    assert set(_contents(folder)) == files
    assert (folder / "tokenizer.json").read_text() == "{}"


def _unexpected(path: str, folder: str) -> None:
    """Not an OSError: safetensors and PEFT raise others. No rank may be left waiting."""
    model = load_tplora(path)
    with (
        mock.patch.object(PeftModel, "save_pretrained", side_effect=RuntimeError("serializer")),
        pytest.raises((ArtifactError, RuntimeError), match="serializer"),
    ):
        save_adapter(model, folder)


def test_any_failure_of_the_writer_reaches_every_rank(world2, checkpoint, tmp_path):
    world2.run(_unexpected, checkpoint("llama"), str(tmp_path / "adapter"), timeout_s=10)


def _trained_then_saved(path: str, folder: str) -> None:
    """What is saved is what was trained: the leaf's values, not the first ones."""
    model, plain = load_tplora(path), load_plain(path)
    rows = tokens()
    for one in (model, plain):
        with InDouble():
            one(input_ids=rows, labels=rows).loss.backward()
        trained = [p for p in one.parameters() if p.requires_grad]
        torch.optim.SGD(trained, lr=0.5).step()
    for name, factor in model.factors().items():
        if factor.plan.shard_dim is None:
            assert_same_on_all_ranks(tensor=factor.parameter.detach(), what=name)
    save_adapter(model, folder)
    wanted = {_key(n): p.detach() for n, p in plain.named_parameters()}
    for name, tensor in load_file(Path(folder) / WEIGHTS).items():
        assert_is_shard(shard=tensor, full=wanted[name], dim=None, what=name, atol=1e-11)


def test_a_trained_adapter_is_that_of_one_process(world, checkpoint, tmp_path):
    world.run(_trained_then_saved, checkpoint("llama"), str(tmp_path / "adapter"))
