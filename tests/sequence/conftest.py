"""Worlds that live as long as this folder's tests: starting them takes longer than a test."""

import contextlib

import pytest

from tests.world import World


@pytest.fixture(scope="package")
def world_of():
    """``world_of(size)`` is a world of that size."""
    with contextlib.ExitStack() as stack:
        worlds = {}

        def get(size):
            if size not in worlds:
                worlds[size] = stack.enter_context(World(size))
            return worlds[size]

        yield get


@pytest.fixture(params=[2, 3], ids=lambda size: f"world{size}")
def world(request, world_of):
    return world_of(request.param)


@pytest.fixture(scope="package")
def alone(world_of):
    """One process without a group: the truth that the others are held to."""
    return world_of(1)
