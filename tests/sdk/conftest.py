"""One PostgreSQL, one bank and one parent of processes for all files here; each file has a database of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.runs.conftest import started_world, world
from tests.runs.world import RunsWorld
from tests.sdk.gateways import Gateways

__all__ = ["started_world", "world"]


@pytest.fixture(scope="module")
def gateways(world: RunsWorld) -> Iterator[Gateways]:
    made = Gateways(world)
    try:
        asyncio.run(made.start())
        yield made
    finally:
        asyncio.run(made.kill())
        made.relay.stop()
