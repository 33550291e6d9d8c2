"""The benchmark of a step's overhead runs, and counts what it says it counts."""

import pytest

from tests.benchmarks.step_overhead.measure import Size, on_ranks, summary
from tests.models import CUT


@pytest.mark.world
def test_it_measures_both_kinds_at_toy_size(world2, checkpoint):
    path = checkpoint("llama", **CUT)
    for records in world2.run(on_ranks, path, Size(num_layers=2), 2):
        assert len(records) == 4
        assert {record["num_factors"] for record in records} == {28}
        assert all(number > 0 for part in summary(records).values() for number in part.values())
