"""A plain function that returns a coroutine, as `lambda: work(order)` does: called in a thread, awaited outside."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.patience import HANG_S
from tga_sdk.threads import Threads

_EXECUTOR = ThreadPoolExecutor(2)


async def called(fn: Callable[[], Any]) -> Any:
    return await Threads(_EXECUTOR, lambda: None).called(fn)


async def work(number: int) -> int:
    await asyncio.sleep(0)
    return number + 1


async def test_what_the_coroutine_returns_is_returned() -> None:
    assert await called(lambda: work(1)) == 2
    assert await called(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await called(lambda: 1 // 0)


@pytest.mark.parametrize("is_made_before", [True, False])
async def test_a_coroutine_that_nobody_awaits_any_more_is_closed(is_made_before: bool) -> None:
    """A run that is cancelled, or has lost its lease, leaves no complaint of Python's behind."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    made: list[Any] = []

    def make() -> Any:
        begun.set()
        go_on.wait()
        made.append(work(1))
        ended.set()
        return made[0]

    calling = asyncio.create_task(called(make))
    await asyncio.to_thread(begun.wait)
    if is_made_before:
        go_on.set()
        ended.wait()  # this loop does not turn meanwhile: the thread is done, and its result not yet here
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    go_on.set()
    await asyncio.to_thread(ended.wait)
    async with asyncio.timeout(HANG_S):
        while inspect.getcoroutinestate(made[0]) != inspect.CORO_CLOSED:
            await asyncio.sleep(0.001)
