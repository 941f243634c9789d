from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.world import World, open_world


@pytest.fixture(scope="module")
def still_world() -> Iterator[World]:
    """A world whose gateway is for the test to start; one for each module."""
    with open_world() as world:
        yield world


@pytest.fixture(scope="module")
def world(still_world: World) -> World:
    """With its gateway running."""
    still_world.start()
    return still_world
