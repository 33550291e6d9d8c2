"""A world of two, a recipe, and the run that nothing stops; once for all faults."""

import pytest

from tests.faults.running import finetune, write_place
from tests.world import World


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
