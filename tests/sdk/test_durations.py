"""Times that nobody can wait for are refused where they are said, so that the program can handle it: what the gateway
refuses ends a run. Nothing is recorded of them, and no address is used."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from tests.sdk.workers import memory_working
from tga_sdk import Context, Escalation, ProcedureInvalid, Retry, TgaError, procedure
from tga_sdk.testing import MemoryGateway

IMPOSSIBLE = (-1, -0.5, math.nan, math.inf, -math.inf, 1e300, 2**60, 10**400, 40_000_000_000)


def waits(ctx: Context[Any], seconds: Any) -> dict[str, Callable[[], Awaitable[Any]]]:
    return {
        "sleep": lambda: ctx.sleep(seconds),
        "signal": lambda: ctx.signal("go", timeout=seconds),
        "ask": lambda: ctx.approve("May I?", timeout=seconds),
        "escalation": lambda: ctx.approve("May I?", escalate=Escalation(seconds)),
        "step": lambda: ctx.step("one", lambda: 1, timeout=seconds),
        "tool": lambda: ctx.tool("bank", "charge", {"amount": 1}, timeout=seconds),
    }


async def refusal_of(operation: Callable[[], Awaitable[Any]]) -> str:
    try:
        await operation()
    except TgaError as error:
        return error.code
    return "none"


@procedure
async def handles(ctx: Context[None]) -> dict[str, Any]:
    refused = {
        f"{name} {seconds:g}" if isinstance(seconds, float) else f"{name} {len(str(seconds))}": await refusal_of(wait)
        for seconds in IMPOSSIBLE
        for name, wait in waits(ctx, seconds).items()
    }
    late = [Escalation(5), Escalation(2)], [Escalation(20)]
    for number, levels in enumerate(late):
        asking = partial(ctx.approve, "May I?", escalate=levels, timeout=10)
        refused[f"order {number}"] = await refusal_of(asking)
    refused["two years"] = await refusal_of(lambda: ctx.tool("bank", "charge", {"amount": 1}, timeout=2 * 366 * 86_400))
    await ctx.sleep(0)
    return {"refused": refused, "said": await ctx.step("last", lambda: "it goes on")}


async def test_a_program_can_handle_a_time_that_nobody_can_wait_for() -> None:
    memory = MemoryGateway(tools={"bank.charge": lambda amount: {"amount": amount}})
    async with memory_working(memory, handles) as client:
        run = await client.start(handles)
        output = await client.result(run.run_id, timeout=60)
        recorded = [one["path"] for one in await client.checkpoints(run.run_id) if one["artifact_type"] == "run_intent"]
    memory.close()
    assert len(output["refused"]) == 6 * len(IMPOSSIBLE) + 3
    assert set(output["refused"].values()) == {"RUN_VALUE_INVALID"}, output["refused"]
    assert output["said"] == "it goes on"
    assert recorded == ["1"]


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_pause_that_never_ends_is_no_pause(seconds: float) -> None:
    with pytest.raises(ProcedureInvalid, match="expected a number of seconds"):
        Retry(1, first=seconds, longest=seconds)
