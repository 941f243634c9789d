"""One pool of children for all tests of a file; and no test waits for ever for a limit that does not come."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from app.lua.pool import Pool
from tests.conftest import IS_SOAK
from tests.patience import HANG_S

# Far more than any of these tests takes on a machine that is ten times slower: a bound for what is broken, not for what
# is slow. Where a limit of the sandbox does not end its program, the test would wait for as long as the program runs.
HANGS_S = 40 * HANG_S if IS_SOAK else 5 * HANG_S


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Pool]:
    async with Pool(children=2) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if isinstance(item, pytest.Function) and here in item.path.parents and inspect.iscoroutinefunction(item.obj):
            item.obj = _bounded(item.obj, item.name)


def _bounded(test: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(test)
    async def bounded(*args: Any, **given: Any) -> None:
        try:
            async with asyncio.timeout(HANGS_S) as bound:
                await test(*args, **given)
        except TimeoutError:
            if bound.expired():
                pytest.fail(f"{name} hangs: what should have ended within its limit has not within {HANGS_S:.0f} s")
            raise

    return bounded
