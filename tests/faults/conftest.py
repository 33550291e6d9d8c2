"""A world of two, a recipe, and the run that nothing stops; once for all faults.

``TPLORA_FAULT_REPEATS=20 pytest tests/faults -m "slow or not slow"`` has each of them 20 times.
"""

import os

import pytest

from tests.faults.running import finetune, write_place
from tests.world import World

REPEATS = int(os.environ.get("TPLORA_FAULT_REPEATS", "1"))


@pytest.fixture(autouse=True, params=range(REPEATS))
def seed(request):
    """Of what a fault leaves to chance; the other ones are only had as often."""
    return request.param


@pytest.fixture(scope="package")
def world2():
    with World(2) as world:
        yield world


@pytest.fixture(scope="package")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="package")
def whole(world2, place):
    assert world2.run(finetune, place, place / "whole") == ["", ""]
    return place / "whole"
