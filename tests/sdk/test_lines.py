"""Intents of a Python program have the line that performs them, and a run that waits says where."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest

from tga_sdk import AsyncClient, Context, Worker, procedure
from tga_sdk.testing import MemoryGateway, ScriptedPeople, record_golden_async, replay_golden_async
from tga_sdk.testing.replays import NotTheSame


@procedure(name="child-of-lines")
async def child(ctx: Context[Any]) -> int:
    return 7


@procedure(name="lines")
async def lines(ctx: Context[Any]) -> Any:
    await ctx.tool("bank", "charge", {"amount": 1})
    await ctx.approve("yes?")
    await ctx.sleep(1)
    await ctx.signal("paid")
    await ctx.call(child, child=True)
    return await ctx.step("once", lambda: 1, at_most_once=True)


@procedure(name="lines")
async def changed_lines(ctx: Context[Any]) -> Any:
    await ctx.tool("bank", "charge", {"amount": 1})
    return await ctx.step("another", lambda: 1)


def lines_of(fn: Any) -> list[str]:
    """Where its operations stand."""
    text, first = inspect.getsourcelines(fn.fn)
    return [f"test_lines.py:{first + at}" for at, line in enumerate(text) if " ctx." in line]


def people() -> ScriptedPeople:
    return ScriptedPeople({"approve": True}).signal("paid", 5)


def charge(amount: int) -> dict[str, Any]:
    return {"amount": amount}


async def test_each_intent_has_its_line_and_a_divergence_names_it(tmp_path: Any) -> None:
    path = tmp_path / "lines.json"
    more: dict[str, Any] = {"tools": {"bank.charge": charge}, "people": people(), "also": [child]}
    await record_golden_async(lines, None, path, **more)
    records = json.loads(path.read_text())["records"]
    found = [(one["kind"], one["source"]) for one in records if one["artifact_type"] == "run_intent"]
    assert found == list(zip(["tool", "ask", "sleep", "signal", "child", "step"], lines_of(lines), strict=True))
    await replay_golden_async(lines, path, also=[child])
    with pytest.raises(NotTheSame, match=rf"ask approve \({lines_of(lines)[1]}\)"):
        await replay_golden_async(changed_lines, path)


async def test_a_run_that_waits_says_at_which_line() -> None:
    memory = MemoryGateway(tools={"bank.charge": charge})
    ready = asyncio.Event()
    worker = Worker(memory.url, memory.key, [lines, child], transport=memory.transport, on_ready=ready.set)
    working = asyncio.create_task(worker.run(signals=False))
    async with AsyncClient(memory.url, memory.key, transport=memory.transport) as client:
        await ready.wait()
        await client.start("lines", run_id="waits")
        while (run := await client.status("waits")).status != "waiting_for_human":
            await asyncio.sleep(0.01)
    worker.stop()
    await working
    assert [(one["kind"], one["source"]) for one in run.awaits] == [("ask", lines_of(lines)[1])]
