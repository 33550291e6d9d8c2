"""Each rank reads its share of a checkpoint, counted as bytes come out of the files."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from tests.benchmarks.load.measure import Size, counted, read_bytes, seconds, write_base

pytestmark = pytest.mark.world

TOY = Size(hidden=192, ffn=384, layers=2, vocab=576)
SMALL = Size(hidden=480, ffn=1536, layers=6, vocab=8064)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_base(TOY, tmp_path_factory.mktemp("load") / "base")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Of 64 MB: large enough for the sample that is compared to be a small part of it."""
    return write_base(SMALL, tmp_path_factory.mktemp("small") / "base")


def _read_bytes(path: str) -> dict[str, int]:
    """As in a model a hundred times as large, of which half a MiB a weight is little."""
    with mock.patch("tplora.base.sample._SMALL_BYTES", 4096):
        return read_bytes(path)


def test_a_rank_reads_no_more_than_its_share_and_a_tenth_of_it_to_compare(world, small):
    for found in world.run(_read_bytes, small):
        assert found["loading"] == found["share"]
        assert 0 < found["checking"] <= found["share"] / 10


def _unbounded(path: str) -> dict[str, int]:
    with mock.patch("tplora.base.sample.part_bytes", return_value=8 << 20):
        return read_bytes(path)


def test_the_bound_would_be_seen_to_fail(world2, small):
    assert all(one["checking"] > one["share"] / 10 for one in world2.run(_unbounded, small))


def test_a_tied_head_is_read_once(world2, tmp_path):
    path = write_base(Size(hidden=192, ffn=384, layers=2, vocab=576, is_tied=True), tmp_path / "t")
    for found in world2.run(read_bytes, path):
        assert found["loading"] <= 1.1 * found["share"]


def test_a_whole_read_would_be_seen(path):
    """The count is of what is taken out: a rank that took everything would be far over."""
    files = sorted(Path(path).glob("*.safetensors"))
    with counted("tplora.base.verify") as count:
        import tplora.base.verify as reader  # noqa: PLC0415

        with reader.safe_open(files[0], framework="pt") as file:
            names = list(file.keys())
            for name in names:
                file.get_slice(name)[...]
    with safe_open(files[0], framework="pt") as file:
        assert sum(count) == sum(file.get_tensor(name).nbytes for name in names)


def test_both_are_timed(world2, path):
    for kind in ("tplora", "transformers"):
        assert all(wall > 0 < work for wall, work in world2.run(seconds, path, kind))
    assert not torch.distributed.is_initialized()
