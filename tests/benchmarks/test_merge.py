"""The benchmark of merging from files runs, and its clock of memory sees what is taken."""

import pytest

from tests.benchmarks.merge.measure import Size, measure, measure_peaks

TOY = Size(hidden=256, ffn=512, layers=2, vocab=512, shard_bytes=1_000_000, r=4)


def test_it_measures_a_merge_at_toy_size(tmp_path):
    record = measure(TOY, tmp_path, num_repeats=1)
    assert record["base_bytes"] > 2_000_000
    assert record["largest_file"] < 1_100_000
    assert record["peak_bytes"] > 0
    assert record["copy_s"] > 0
    assert record["merge_s"] > 0


@pytest.mark.slow
def test_no_way_to_merge_takes_twice_the_largest_file(tmp_path):
    size = Size(hidden=1024, ffn=4096, layers=8, vocab=32000, shard_bytes=100_000_000)
    found = measure_peaks(size, tmp_path)
    assert 90_000_000 < found["largest_file"] < 110_000_000
    bound = 2 * found.pop("largest_file")
    assert {way: peak for way, peak in found.items() if peak > bound} == {}
