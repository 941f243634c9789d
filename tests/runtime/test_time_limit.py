"""A time limit ends what takes too long, and nothing else: as `asyncio.timeout` does, which is the judge here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import pytest

from app.domain.ledger.waiting import TimeLimit
from tests.patience import HANG_S

Limit = Callable[[float | None], AbstractAsyncContextManager[Any]]
SOON_S = 0.01


def ours(seconds: float | None) -> AbstractAsyncContextManager[Any]:
    return TimeLimit(seconds, asyncio.get_running_loop())


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def in_time(limit: Limit) -> str:
    async with limit(HANG_S):
        await asyncio.sleep(0)
    return "done"


async def without_a_limit(limit: Limit) -> str:
    async with limit(None):
        await asyncio.sleep(SOON_S)
    return "done"


async def too_late(limit: Limit) -> str:
    async with limit(SOON_S):
        await for_ever()
    return "done"


async def at_once(limit: Limit) -> str:
    async with limit(-1):
        await for_ever()
    return "done"


async def at_once_without_a_wait(limit: Limit) -> str:
    async with limit(0):
        pass
    await asyncio.sleep(SOON_S)
    return "done"


async def what_fails_inside(limit: Limit) -> str:
    async with limit(HANG_S):
        raise KeyError("inside")


async def what_fails_after_the_time(limit: Limit) -> str:
    async with limit(SOON_S):
        try:
            await for_ever()
        finally:
            raise KeyError("late")


async def what_swallows_its_end(limit: Limit) -> str:
    async with limit(SOON_S):
        with suppress(asyncio.CancelledError):
            await for_ever()
    await asyncio.sleep(0)  # the task is not cancelled any more
    return "done"


async def cancelled_by_another(limit: Limit) -> str:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(SOON_S, task.cancel)
    async with limit(HANG_S):
        await for_ever()
    return "done"


async def cancelled_by_both(limit: Limit) -> str:
    task = asyncio.current_task()
    assert task is not None
    async with limit(SOON_S):
        try:
            await for_ever()
        finally:
            task.cancel()
    return "done"


async def the_inner_one_of_two(limit: Limit) -> str:
    async with limit(HANG_S):
        try:
            async with limit(SOON_S):
                await for_ever()
        except TimeoutError:
            await asyncio.sleep(0)
            return "inner"
    return "done"


async def the_outer_one_of_two(limit: Limit) -> str:
    async with limit(SOON_S):
        try:
            async with limit(HANG_S):
                await for_ever()
        except TimeoutError:
            return "inner"
    return "done"


async def outcome(part: Callable[[Limit], Awaitable[str]], limit: Limit) -> tuple[str, int, bool]:
    """What came of it, how often the task was asked to end then, and whether it ended so."""
    told: list[tuple[str, int]] = []

    async def played() -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            said = await part(limit)
        except BaseException as error:
            said = type(error).__name__
        told.append((said, task.cancelling()))

    task = asyncio.create_task(played())
    await asyncio.wait([task])
    return *told[0], task.cancelled()


PARTS = (
    in_time,
    without_a_limit,
    too_late,
    at_once,
    at_once_without_a_wait,
    what_fails_inside,
    what_fails_after_the_time,
    what_swallows_its_end,
    cancelled_by_another,
    cancelled_by_both,
    the_inner_one_of_two,
    the_outer_one_of_two,
)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
async def test_it_does_what_asyncio_does(part: Callable[[Limit], Awaitable[str]]) -> None:
    async with asyncio.timeout(HANG_S):
        assert await outcome(part, ours) == await outcome(part, asyncio.timeout)


async def test_what_is_over_in_time_leaves_no_timer() -> None:
    assert await in_time(ours) == "done"
    limit = TimeLimit(SOON_S, asyncio.get_running_loop())
    async with limit:
        pass
    await asyncio.sleep(3 * SOON_S)  # nobody is cancelled
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
