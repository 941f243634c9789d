from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.world import Database, World, worlds


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    yield from worlds()


@pytest.fixture
def base(world: World) -> Iterator[Database]:
    """A ledger of its own, empty."""
    database = world.make_database()
    yield database
    world.drop_database(database)
