"""The benchmark of merging from files runs, and its clock of memory sees what is taken."""

from tests.benchmarks.merge.measure import Size, measure

TOY = Size(hidden=256, ffn=512, layers=2, vocab=512, shard_bytes=1_000_000, r=4)


def test_it_measures_a_merge_at_toy_size(tmp_path):
    record = measure(TOY, tmp_path, num_repeats=1)
    assert record["base_bytes"] > 2_000_000
    assert record["largest_file"] < 1_100_000
    assert record["peak_bytes"] > 0
    assert record["copy_s"] > 0
    assert record["merge_s"] > 0
