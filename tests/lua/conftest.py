"""One pool of children for all tests of a file."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from app.lua.pool import Pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Pool]:
    async with Pool(children=2) as made:
        yield made
