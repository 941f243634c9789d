"""A tool call that takes longer than its run waits for it: the run is told TIMEOUT, in every replay; the call goes on.

The calls here need an approval, so that a test says when they are over. The same programs run on the gateway in memory
and on a real one, and leave the same journal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bank import bank_tables
from tests.conftest import IS_SOAK
from tests.runs.world import Process, RunsWorld, new_id, sampled, until
from tests.sdk.gateways import POLICY
from tests.sdk.programs import hurried
from tests.sdk.workers import worker_of
from tga_sdk import AsyncClient, Context, Flow, Step, TimedOut, Worker, call_tool, procedure
from tga_sdk.journal import Journal
from tga_sdk.testing import MemoryGateway, crash_everywhere_async, needs_approval

CUTS = [(f"{name}.{when}", 0) for name in ("tool", "put") for when in ("before", "answered")]


def patience(ctx: Context[Any]) -> float:
    return 0.05 if ctx.attempt == 1 else 600


@procedure(name="timing-fails")
async def fails(ctx: Context[Any], input: Any) -> Any:
    return await ctx.tool("bank", "refund", {"amount": 5}, timeout=patience(ctx))


@procedure(name="timing-nested")
async def nested(ctx: Context[Any], input: Any) -> Any:
    """The step around it is tried again: it waits for the same call."""
    tries: list[int] = []

    async def body() -> Any:
        tries.append(1)
        return await ctx.tool("bank", "refund", {"amount": 5}, timeout=0.05 if len(tries) == 1 else 600)

    return await ctx.step("around", body, retry=1)


refunding = Flow(
    "timing-flow",
    data=dict,
    steps=[Step("refund", call_tool("bank", "refund", {"amount": 5}, into="paid", timeout=0.05), retry=0)],
)
PROGRAMS = [hurried, fails, nested, refunding]


@dataclass
class Place:
    """A gateway of either kind, with a worker that serves the programs."""

    agent: AsyncClient
    person: AsyncClient
    executions: Callable[[str], list[str]]

    async def approve(self, run_id: str, key: str = "") -> None:
        """The call of this run, and of this key where one is named, when it is there; approved, and over."""
        while not (waiting := [one async for one in self._waiting(run_id, key)]):
            await asyncio.sleep(0.01)
        await self.person.approve(waiting[0], rationale="as agreed")
        async with asyncio.timeout(60):
            while (await self.person.trace(waiting[0].trace_id)).state != "COMPLETED":
                await asyncio.sleep(0.01)

    async def _waiting(self, run_id: str, key: str) -> AsyncIterator[Any]:
        for one in await self.person.approvals():
            has = (await self.person.trace(one.trace_id or "")).idempotency_key or ""
            if has.startswith(f"run:{run_id}/") and key in ("", has):
                yield one

    async def until_state(self, run_id: str, *states: str) -> Any:
        async with asyncio.timeout(60):
            while (run := await self.agent.status(run_id)).state not in states:
                await asyncio.sleep(0.01)
        return run

    async def outline(self, run_id: str) -> list[tuple[Any, ...]]:
        """What its journal says of operations: who did what, where, in which try, and how it ended."""
        found = []
        for one in await self.person.checkpoints(run_id):
            if one["artifact_type"] in ("run_intent", "run_answer", "run_checkpoint"):
                by = one.get("answered_by", {}).get("type")
                request = one.get("request", {})
                key = request.get("idempotency_key", "").removeprefix(f"run:{run_id}")
                found.append((one["artifact_type"], one["path"], one.get("try_number"), one.get("outcome"), by, key))
        return found


@contextlib.asynccontextmanager
async def served(worker: Worker, ready: asyncio.Event) -> AsyncIterator[None]:
    task = asyncio.create_task(worker.run(signals=False))
    await ready.wait()
    try:
        yield
    finally:
        worker.stop()
        await task


@contextlib.asynccontextmanager
async def in_memory() -> AsyncIterator[Place]:
    gateway = MemoryGateway(tools={"bank.refund": needs_approval(lambda amount: {"amount": amount})})
    ready = asyncio.Event()
    worker = Worker(gateway.url, gateway.key, PROGRAMS, transport=gateway.transport, on_ready=ready.set)
    client = AsyncClient(gateway.url, gateway.key, transport=gateway.transport)

    def executions(run_id: str) -> list[str]:
        return [effect.key or "" for effect in gateway.effects if effect.run_id == run_id]

    async with served(worker, ready), client:
        yield Place(client, client, executions)


def configured(world: RunsWorld, lease_ms: int) -> Path:
    path = world.place / f"timing-{lease_ms}.toml"
    (world.place / "timing.cedar").write_text(POLICY)
    settings = {"timeout_ms": 60_000, "max_attempts": 3, "max_concurrency": 64}
    text = bank_tables(world.bank.url, settings, {"refund": ""}) + '[policy]\nfile = "timing.cedar"\n\n'
    path.write_text(text + f"[runs]\nlease_ms = {lease_ms}\n")
    return path


@contextlib.asynccontextmanager
async def real(world: RunsWorld) -> AsyncIterator[Place]:
    gateway = await world.gateway(config=configured(world, 60_000))
    ready = asyncio.Event()
    worker = worker_of([gateway.url], world.keys["worker"], procedures=PROGRAMS, on_ready=ready.set)
    agent = AsyncClient(gateway.url, world.keys["agent"])
    person = AsyncClient(gateway.url, world.keys["supervisor"])
    async with served(worker, ready), agent, person:
        yield Place(agent, person, lambda run_id: sorted(world.executions(run_id).elements()))
    await gateway.kill()


async def goes_on_without_it(place: Place) -> list[list[tuple[Any, ...]]]:
    """The program goes on; the approval that comes later has its effect, and the run's journal says nothing of it."""
    await place.agent.start("sdk-hurried", None, run_id := new_id("hurried"))
    async with asyncio.timeout(60):
        while not any(one[:2] == ("run_intent", "3") for one in await place.outline(run_id)):
            await asyncio.sleep(0.01)
    before = await place.outline(run_id)
    assert place.executions(run_id) == []
    await place.approve(run_id)
    assert await place.outline(run_id) == before
    assert place.executions(run_id) == [f"run:{run_id}/1"]
    await place.agent.signal(run_id, "go", "gone")
    assert await place.agent.result(run_id, timeout=60) == ["TIMEOUT", "after", "gone"]
    return [await place.outline(run_id)]


async def waits_for_the_same_call_again(place: Place) -> list[list[tuple[Any, ...]]]:
    """Tried again by a person, or by the step around it: the same key, and one effect."""
    await place.agent.start("timing-fails", None, failed := new_id("fails"))
    run = await place.until_state(failed, "FAILED")
    assert run.error["type"] == "TIMEOUT"
    await place.agent.retry(failed)
    await place.approve(failed)
    assert (await place.agent.result(failed, timeout=60))["amount"] == 5
    await place.agent.start("timing-nested", None, inside := new_id("nested"))
    async with asyncio.timeout(60):
        while ("run_intent", "1.1", 2, None, None, "/1.1") not in await place.outline(inside):
            await asyncio.sleep(0.01)
    await place.approve(inside)
    assert (await place.agent.result(inside, timeout=60))["amount"] == 5
    assert place.executions(failed) + place.executions(inside) == [f"run:{failed}/1", f"run:{inside}/1.1"]
    return [await place.outline(failed), await place.outline(inside)]


async def fails_its_flow(place: Place) -> list[list[tuple[Any, ...]]]:
    await place.agent.start("timing-flow", {}, run_id := new_id("flow"))
    run = await place.until_state(run_id, "FAILED")
    refund = next(one for one in run.steps if one["name"] == "refund")
    assert (run.error["type"], refund["status"]) == ("TIMEOUT", "failed")
    return [await place.outline(run_id)]


async def is_not_answered_by_another_try(place: Place) -> list[list[tuple[Any, ...]]]:
    """A worker that makes a new call after a time-out: the late effect of the first is not taken for the second's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "going_try", lambda self, path: None)
        await place.agent.start("timing-fails", None, run_id := new_id("late"))
        await place.until_state(run_id, "FAILED")
        await place.agent.retry(run_id)
        async with asyncio.timeout(60):
            while ("run_intent", "1", 2, None, None, "/1/r1") not in await place.outline(run_id):
                await asyncio.sleep(0.01)
        before = await place.outline(run_id)
        await place.approve(run_id, f"run:{run_id}/1")
        assert await place.outline(run_id) == before
        await place.approve(run_id, f"run:{run_id}/1/r1")
        await place.agent.result(run_id, timeout=60)
    assert place.executions(run_id) == [f"run:{run_id}/1", f"run:{run_id}/1/r1"]
    return [await place.outline(run_id)]


SCENARIOS = [goes_on_without_it, waits_for_the_same_call_again, is_not_answered_by_another_try, fails_its_flow]


async def test_both_gateways_leave_the_same_journal(world: RunsWorld) -> None:
    async with in_memory() as memory, real(world) as place:
        for scenario in SCENARIOS:
            assert await scenario(memory) == await scenario(place), scenario.__name__
    await world.verify_all_is_well()


async def ended(process: Process) -> None:
    await until(lambda: not process.is_alive())


async def test_a_worker_killed_while_it_waits(world: RunsWorld) -> None:
    gateway = await world.gateway(config=configured(world, 500))
    agent = AsyncClient(gateway.url, world.keys["agent"])
    person = AsyncClient(gateway.url, world.keys["supervisor"])
    place = Place(agent, person, lambda run_id: sorted(world.executions(run_id).elements()))
    async with agent, person:
        for cut in sampled(CUTS, 1, is_soak=IS_SOAK):
            dying = await world.sdk_worker(gateway.url, die_at=cut)
            await agent.start("sdk-hurried", None, run_id := new_id("killed"))
            await agent.signal(run_id, "go", "gone")
            await ended(dying)
            next_one = await world.sdk_worker(gateway.url)
            assert await agent.result(run_id, timeout=60) == ["TIMEOUT", "after", "gone"], cut
            answers = [one for one in await place.outline(run_id) if one[0] == "run_answer" and one[1] == "1"]
            assert answers == [("run_answer", "1", None, "TIMEOUT", "timer", "")], cut
            await next_one.kill()
    await world.verify_all_is_well()
    await gateway.kill()


async def test_crashes_at_every_operation_of_it() -> None:
    @procedure(name="timing-crashed")
    async def crashed(ctx: Context[Any], input: Any) -> list[str]:
        said = []
        for _ in range(2):
            try:
                await ctx.tool("bank", "refund", {"amount": 5}, timeout=3600)
            except TimedOut as error:
                said.append(error.type)
            said.append(await ctx.step("after", lambda: "after"))
        return said

    def never(amount: int) -> int:
        raise AssertionError("nobody has approved it")

    report = await crash_everywhere_async(crashed, None, tools={"bank.refund": needs_approval(never)})
    assert report.calm.output["value"] == ["TIMEOUT", "after"] * 2


async def test_a_call_that_hangs_is_left_alone_and_its_effect_is_in_the_book() -> None:
    """The tool is being executed when its time is over, in a branch beside one that works."""
    let_go = asyncio.Event()

    async def refund(amount: int) -> int:
        await let_go.wait()
        return amount

    @procedure(name="timing-beside")
    async def beside(ctx: Context[Any], input: Any) -> list[Any]:
        async def waits() -> str:
            try:
                return str(await ctx.tool("bank", "refund", {"amount": 5}, timeout=0.05))
            except TimedOut as error:
                return error.type

        async def works() -> int:
            return await ctx.step("works", lambda: 1)

        return await ctx.gather(waits, works)

    gateway = MemoryGateway(tools={"bank.refund": refund})
    ready = asyncio.Event()
    worker = Worker(gateway.url, gateway.key, [beside], transport=gateway.transport, on_ready=ready.set)
    async with served(worker, ready), AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
        await client.start("timing-beside", None, run_id="r-1")
        assert await client.result("r-1", timeout=60) == ["TIMEOUT", 1]
        assert gateway.effects == []
        let_go.set()
        async with asyncio.timeout(60):
            while not gateway.effects:
                await asyncio.sleep(0.01)
    assert [(effect.key, effect.result) for effect in gateway.effects] == [("run:r-1/1:1.1", 5)]
