from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.cli.world import World
from tests.conftest import make_home


@pytest.fixture(scope="module")
def still_world() -> Iterator[World]:
    """A world whose gateway is for the test to start; one for each module."""
    home = make_home()
    world = World(home)
    try:
        yield world
    finally:
        world.close()
        shutil.rmtree(home)


@pytest.fixture(scope="module")
def world(still_world: World) -> World:
    """With its gateway running."""
    still_world.start()
    return still_world
