"""Worlds that live as long as this folder's tests: starting them takes longer than a test."""

import pytest

from tests.world import kept_worlds


@pytest.fixture(scope="package")
def world_of():
    """``world_of(size)`` is a world of that size."""
    with kept_worlds() as world_of:
        yield world_of


@pytest.fixture(scope="package")
def world4(world_of):
    return world_of(4)


@pytest.fixture(scope="package")
def alone(world_of):
    """One process without a group: the truth that the others are held to."""
    return world_of(1)
