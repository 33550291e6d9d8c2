"""The benchmark for a card says so where there is none; its questions have answers at toy size."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from tests.benchmarks.gpu import __main__ as command
from tests.benchmarks.gpu.measure import Size, layers, loss, write_base
from tests.benchmarks.gpu.two_ranks import only_what_gloo_does
from tplora.upstream.rehearsal import ranks_without_peers

CPU = torch.device("cpu")
TOY = Size(
    hidden=64, ffn=128, heads=4, kv_heads=2, layers=1, vocab=16, length=16, r=4,
    head_vocab=300, head_tokens=20, dtype=torch.float32, repeats=2,
)  # fmt: skip


def test_without_a_card_it_is_a_note_and_no_failure(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "RECORDS", tmp_path / "records.jsonl")
    assert command.main() == 0
    assert capsys.readouterr().out.strip() == command.NOTE
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "nf4"])
def test_layers_are_compared(tmp_path, is_packed):
    found = layers(write_base(TOY, tmp_path / "base"), TOY, CPU, is_packed=is_packed)
    assert set(found["seconds"]) == set(found["bytes"]) == {"peft", "tplora"}
    assert found["bytes"]["tplora"] <= 1.1 * found["bytes"]["peft"]


def test_the_loss_is_compared():
    found = loss(TOY, CPU)
    assert found["results"]["peft"] == pytest.approx(found["results"]["tplora"], rel=1e-5)


@pytest.mark.slow
def test_a_cpu_answers_every_question_of_a_card(monkeypatch, tmp_path):
    """Two ranks over gloo as well, with the collectives alone that gloo does on a card."""
    file = tmp_path / "records.jsonl"
    monkeypatch.setattr(command, "RECORDS", file)
    assert command.main(TOY, TOY, CPU) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["question"] for row in rows] == [
        "two ranks, gloo", "two ranks, gloo, bf16", "bf16 layers", "nf4 layers", "loss, 300",
    ]  # fmt: skip
    assert rows[0]["worst"] < 1e-5 < rows[1]["worst"] < 2e-2


def test_what_gloo_would_not_do_on_a_card_is_seen_on_a_cpu():
    with ranks_without_peers(2), only_what_gloo_does():
        dist.all_reduce(torch.ones(2))
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        whole.full_tensor()
        cut = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(AssertionError, match=r"gloo on a card: .*all_gather"):
            cut.full_tensor()


def test_several_cards_are_asked_over_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked = command.questions("path", TOY, TOY, torch.device("cuda", 0))
    assert [name for name in asked if "nccl" in name] == [
        "two cards, nccl",
        "two cards, nccl, bf16",
    ]


def test_past_the_budget_nothing_is_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "BUDGET_S", -1)
    assert command.ask({"one": lambda: {"worst": 0.0}}, tmp_path / "records.jsonl") == 1
    assert "not asked" in capsys.readouterr().out


def test_a_question_that_fails_is_a_row_and_a_status(tmp_path, capsys):
    def fails():
        raise RuntimeError("no such kernel")

    file = tmp_path / "records.jsonl"
    same = {"worst": 1e-9, "is_same": True}
    apart = {"worst": 1.0, "is_same": False}
    assert command.ask({"one": fails, "two": lambda: same, "three": lambda: apart}, file) == 2
    assert "no such kernel" in capsys.readouterr().out
    assert [json.loads(line)["question"] for line in file.read_text().splitlines()] == [
        "one",
        "two",
        "three",
    ]
