"""The benchmark of adapted experts runs, and counts what it says it counts."""

import torch

from tests.benchmarks.experts import __main__ as command
from tests.benchmarks.experts.measure import LiveBytes, Size, compare, summary

TOY = Size(num_experts=4, hidden=16, ffn=8, top_k=2, num_tokens=6, r=2)


def test_it_measures_both_libraries_at_toy_size():
    for implementation, _ in command.RUNS:
        records = compare(TOY, implementation, num_repeats=2)
        assert len(records) == 6
        assert all(number > 0 for number in summary(records).values())


def test_live_bytes_are_those_that_live():
    with LiveBytes() as counted:
        one = torch.ones(256)
        two = one * 2
        one.view(16, 16).add_(1)
        del one
        three = two + 1
        del two, three
    assert counted.peak == 2 * 1024
    assert counted.live == 0
