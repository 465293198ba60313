from __future__ import annotations

from collections.abc import Iterator

import pytest

from .world import World


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


@pytest.fixture(params=[2, 4], ids=["tp2", "tp4"])
def ranks(request: pytest.FixtureRequest) -> World:
    """The world of two and the world of four, in turn."""
    return request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])
