"""The benchmark of loading in 4 and 8 bits runs, and its clock of memory sees what is taken."""

import time

import pytest
import torch

from tests.benchmarks.quantized.measure import PeakOfProcess, Size, bound, compare, write_base

TOY = Size(hidden=384, ffn=384, layers=1, vocab=64)


@pytest.mark.world
def test_it_measures_a_load_at_toy_size(tmp_path):
    path = write_base(TOY, tmp_path / "base")
    (record,) = compare(TOY, path, path, 2, ["nf4-double"])
    assert record["num_quantized"] == 7
    assert record["held"] < record["bound"]
    assert record["held"] == pytest.approx(record["weight_bytes"], rel=0.1)  # and the scales


def test_eight_bits_are_held_in_twice_the_bytes_of_four():
    four, eight = (bound(Size(), method, 2)["held"] for method in ("nf4", "int8"))
    assert 1.5 < eight / four < 2


def test_the_peak_is_what_was_taken_and_given_back():
    with PeakOfProcess() as peak:
        taken = torch.ones(64 << 20, dtype=torch.uint8)
        time.sleep(0.1)
        del taken
    assert 60 << 20 < peak.num_bytes < 90 << 20
