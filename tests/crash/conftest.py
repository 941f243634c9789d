from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.world import Bank, Database, World, worlds


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    yield from worlds()


@pytest.fixture
def base(world: World) -> Iterator[Database]:
    """A ledger of its own, empty."""
    database = world.make_database()
    yield database
    world.drop_database(database)


@pytest.fixture(scope="module")
def careless(world: World) -> Iterator[Bank]:
    """The bank that does not look at keys."""
    yield world.careless_bank.start()
    world.careless_bank.kill()
