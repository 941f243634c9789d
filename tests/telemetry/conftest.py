"""One PostgreSQL, one bank and one parent of processes, as for runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runs.world import RunsWorld, worlds


@pytest.fixture(scope="session")
def started_world() -> Iterator[RunsWorld]:
    yield from worlds()


@pytest.fixture(scope="module")
def world(started_world: RunsWorld) -> Iterator[RunsWorld]:
    started_world.renew()
    yield started_world
    started_world.kill_processes()
