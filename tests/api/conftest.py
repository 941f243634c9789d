"""A gateway's edge on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.api.wire import Front, open_front


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """The edge alone: its runtime answers what the test says."""
    async with open_front() as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_front() -> AsyncIterator[Front]:
    """The same, kept for a module whose tests leave it as they found it: starting and stopping takes time."""
    async with open_front() as opened:
        yield opened
