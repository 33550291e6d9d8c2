"""The benchmark for a card says so where there is none; its questions have answers at toy size."""

import json

import pytest
import torch

from tests.benchmarks.gpu import __main__ as command
from tests.benchmarks.gpu.measure import Size, layers, loss, write_base
from tests.benchmarks.gpu.two_ranks import compare

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
def test_two_ranks_on_one_device_are_one_process():
    assert compare(CPU, TOY)["is_same"]


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
