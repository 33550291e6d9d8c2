"""Worlds that live as long as a module's tests; tiny checkpoints that live as long as the run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run side by side

import pytest

from tests.models import CUT, record_run
from tests.tiny import write_checkpoint
from tests.world import World, kept_worlds


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """The whole suite runs in as many processes as there are cores, a part of it in this one."""
    is_whole = config.args == config.getini("testpaths")
    return len(os.sched_getaffinity(0)) if is_whole else 0


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"world{size}")
def world(request):
    """Two ranks, then three: beside 2, 3 finds every hidden half."""
    with World(request.param) as world:
        yield world


@pytest.fixture(scope="module")
def world2():
    with World(2) as world:
        yield world


@pytest.fixture(scope="module")
def world4():
    with World(4) as world:
        yield world


@pytest.fixture(scope="module")
def world_of():
    """``world_of(size)`` is a world of that size, kept for the module."""
    with kept_worlds() as world_of:
        yield world_of


@pytest.fixture(scope="module")
def alone():
    """One process without a group: the truth that the others are held to."""
    with World(1) as world:
        yield world


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """``checkpoint("llama")`` is the path of a tiny random checkpoint, written once per session.

    Only the test process writes; ranks get the path of a finished folder.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    written = {}

    def get(name, **changes):
        key = (name, *sorted(changes.items()))
        if key not in written:
            place = folder / f"{name}-{len(written)}"
            written[key] = write_checkpoint(name, place, **changes)
        return str(written[key])

    return get


def _record(path, case, file):
    record_run(path, case, file, is_plain=case.dropout == 0)


@pytest.fixture(scope="module")
def recorded(alone, checkpoint, tmp_path_factory):
    """``recorded(name, case)``: the checkpoint's path and the file of the run alone, made once.

    Without dropout the run alone is plain PEFT's; its masks are not ours, so with dropout it is
    tplora's own in one process.
    """
    folder, files = tmp_path_factory.mktemp("alone"), {}

    def get(name, case):
        path, key = checkpoint(name, **CUT), (name, repr(case.alone()))
        if key not in files:
            files[key] = folder / f"{len(files)}.safetensors"
            alone.run(_record, path, case.alone(), files[key])
        return path, files[key]

    return get
