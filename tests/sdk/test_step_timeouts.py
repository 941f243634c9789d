"""A step's time-out holds while its body waits for a time, a person, a signal or a child: on a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import pytest

from tests.patience import HANG_S
from tests.runs.world import new_id
from tests.sdk.gateways import Gateways
from tests.sdk.test_determinism import asking, serving
from tga_sdk import Context, TimedOut, procedure
from tga_sdk.waiting import HELD_TIMEOUT

_numbers = count()
WAITS: dict[str, Callable[[Context[Any], Any], Awaitable[Any]]] = {
    "sleep": lambda ctx, endless: ctx.sleep(3_600),
    "ask": lambda ctx, endless: ctx.approve("May it?"),
    "signal": lambda ctx, endless: ctx.signal("never"),
    "child": lambda ctx, endless: ctx.call(endless, None, child=True),
}


@procedure(name="endless-child")
async def endless(ctx: Context[Any], input: Any) -> Any:
    await ctx.sleep(3_600)


@pytest.mark.parametrize("kind", WAITS)
async def test_a_body_that_waits_longer_is_timed_out(gateways: Gateways, kind: str) -> None:
    @procedure(name=f"impatient-{next(_numbers)}")
    async def program(ctx: Context[Any]) -> Any:
        async def body() -> Any:
            return await WAITS[kind](ctx, endless)

        try:
            return await ctx.step("waits", body, timeout=0.2)
        except TimedOut as error:
            return [str(error), await ctx.step("after", lambda: "after")]

    async with asking(gateways) as client, serving(gateways, program, endless):
        run = await client.start(program.name, None, new_id())
        said, after = await client.result(run.run_id, timeout=HANG_S)
        ends = [one for one in await client.checkpoints(run.run_id) if one["artifact_type"] == "run_checkpoint"]
    assert ("it took longer than 0.2 s" in said, after) == (True, "after")
    assert [(one["name"], one["outcome"]) for one in ends] == [("waits", "ERROR"), ("after", "OK")]


async def test_an_answer_in_time_counts_and_the_worker_has_stayed(gateways: Gateways) -> None:
    @procedure(name=f"patient-{next(_numbers)}")
    async def program(ctx: Context[Any]) -> Any:
        async def body() -> Any:
            return await ctx.signal("go")

        return await ctx.step("waits", body, timeout=HELD_TIMEOUT)

    async with asking(gateways) as client, serving(gateways, program):
        run = await client.start(program.name, None, new_id())
        while not [one for one in await client.checkpoints(run.run_id) if one["artifact_type"] == "run_intent"]:
            await asyncio.sleep(0.01)
        await client.signal(run.run_id, "go", 7)
        assert await client.result(run.run_id, timeout=HANG_S) == 7
        assert (await client.status(run.run_id)).attempt == 1


async def test_a_long_time_out_keeps_no_worker(gateways: Gateways) -> None:
    """The body begins anew in the next attempt, and so does its time."""

    @procedure(name=f"lasting-{next(_numbers)}")
    async def program(ctx: Context[Any]) -> Any:
        async def body() -> Any:
            return await ctx.signal("go")

        return await ctx.step("waits", body, timeout=HELD_TIMEOUT + 1)

    async with asking(gateways) as client, serving(gateways, program):
        run = await client.start(program.name, None, new_id())
        while (await client.status(run.run_id)).state != "WAITING":
            await asyncio.sleep(0.01)
        await client.signal(run.run_id, "go", 7)
        assert await client.result(run.run_id, timeout=HANG_S) == 7
