"""Each rank reads its share of a checkpoint, counted as bytes come out of the files."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.benchmarks.load.measure import Size, counted, read_bytes, seconds, write_base

pytestmark = pytest.mark.world

TOY = Size(hidden=192, ffn=384, layers=2, vocab=576)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_base(TOY, tmp_path_factory.mktemp("load") / "base")


def test_a_rank_reads_no_more_than_its_share(world, path):
    for found in world.run(read_bytes, path):
        assert found["share"] <= found["loading"] <= 1.1 * found["share"]


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
        assert all(found > 0 for found in world2.run(seconds, path, kind))
    assert not torch.distributed.is_initialized()
