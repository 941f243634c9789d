from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attack.client import SERVERS
from tests.cli.world import World, open_world


@pytest.fixture(scope="module")
def still_world() -> Iterator[World]:
    """Two tenants, each with a server at the same bank; the gateway is for the test to start."""
    with open_world() as world:
        written = world.config.read_text()
        url = written.split('base_url = "')[1].partition('"')[0]
        world.config.write_text(written + SERVERS.format(url=url))
        yield world


@pytest.fixture(scope="module")
def world(still_world: World) -> World:
    """With its gateway running, in a process of its own."""
    still_world.start()
    return still_world
