"""The gateway in memory with the tests' own worker and random programs, and what it promises by itself."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
from functools import partial
from typing import Any

import httpx2
import pytest

from tests.conftest import IS_SOAK
from tests.runs.programs import PROGRAMS
from tests.runs.trees import expected, random_tree, tree_program
from tests.runs.worker import Client, Worker
from tests.runs.world import new_id
from tests.sdk.test_transcripts import bank
from tests.sdk.transcripts import PRINCIPALS
from tga_sdk import AsyncClient, ChildError, Context, ValueInvalid, procedure
from tga_sdk import Client as BlockingClient
from tga_sdk import Worker as SdkWorker
from tga_sdk.testing import MemoryGateway, ScriptedPeople, ToolFailed, current_call, needs_approval


class MemoryClient(Client):
    """The tests' client, with a transport within the process."""

    def __init__(self, gateway: MemoryGateway, key: str) -> None:
        super().__init__([gateway.url], key)
        self._headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx2.AsyncClient(transport=gateway.transport, timeout=60)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def once(self, method: str, path: str, body: Any = None, *, url: str | None = None) -> tuple[int, Any]:
        content = None if body is None else json.dumps(body).encode()
        answer = await self._http.request(method, self.urls[0] + path, content=content, headers=self._headers)
        return answer.status_code, json.loads(answer.content)


async def performed(trees: dict[str, Any], worker: Worker, agent: Client, person: Client) -> dict[str, Any]:
    """Run these programs to their end: each one's journal."""
    await worker.register()
    working = asyncio.create_task(worker.work())
    try:
        for run_id, tree in trees.items():
            await agent.ask("POST", "/v1/runs", {"procedure": "random", "input": tree, "run_id": run_id})
        for run_id in trees:
            await see_through(run_id, agent, person)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return {run_id: (await worker.client.ask("GET", f"/v1/runs/{run_id}/checkpoints"))["items"] for run_id in trees}


async def see_through(run_id: str, agent: Client, person: Client) -> None:
    async with asyncio.timeout(60):
        while (seen := await agent.ask("GET", f"/v1/runs/{run_id}"))["state"] != "COMPLETED":
            for awaited in seen["awaits"]:
                said = {"path": awaited["path"], "answer": True}
                if awaited["kind"] == "ask":
                    await person.once("POST", f"/v1/runs/{run_id}/signals", said)
                elif awaited["kind"] == "signal":
                    sent = {"name": awaited["name"], "value": "gone", "signal_id": f"{run_id}-{awaited['path']}"}
                    await agent.once("POST", f"/v1/runs/{run_id}/signals", sent)
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("TGA_SEED") or random.randrange(1_000_000))


async def test_random_programs_end_as_the_model_says(seed: int) -> None:
    print(f"TGA_SEED={seed}")
    chance = random.Random(seed)
    count = 60 if IS_SOAK else 12
    trees = {new_id("random"): random_tree(chance) for _ in range(count)}
    programs = {"random": tree_program, "paying": PROGRAMS["paying"]}
    gateway = MemoryGateway(tools=bank())
    clients = {role: MemoryClient(gateway, who) for role, who in PRINCIPALS.items()}
    worker = Worker(clients["worker"], programs, new_id("worker"), slots=50)
    ours = await performed(trees, worker, clients["agent"], clients["supervisor"])
    for run_id, tree in trees.items():
        results, log, tools, _ = expected(tree)
        assert ours[run_id][-1]["output"]["value"] == {"results": results, "log": log}, tree
        keys = [effect.key for effect in gateway.effects if (effect.key or "").startswith(f"run:{run_id}/")]
        assert (len(keys), len(set(keys))) == (tools, tools), tree


# Its own promises.


@procedure(name="refunds")
async def refunds(ctx: Context[Any]) -> Any:
    return await ctx.tool("bank", "refund", {"amount": 5})


async def served(gateway: MemoryGateway, *procedures: Any) -> tuple[SdkWorker, asyncio.Task[None]]:
    ready = asyncio.Event()
    worker = SdkWorker(gateway.url, gateway.key, procedures, transport=gateway.transport, on_ready=ready.set)
    task = asyncio.create_task(worker.run(signals=False))
    await ready.wait()
    return worker, task


@pytest.mark.parametrize("approve", [True, False])
async def test_a_call_that_needs_an_approval_waits_for_a_person(approve: bool) -> None:
    keys: list[str | None] = []

    def refund(amount: int) -> int:
        keys.append(current_call().key)
        return amount

    gateway = MemoryGateway(tools={"bank.refund": needs_approval(refund)}, skip_waiting=True)
    ScriptedPeople().decide("bank.refund", approve=approve, after=3600, rationale="no").attend(gateway)
    worker, task = await served(gateway, refunds)
    async with AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
        await client.start("refunds", run_id="r-1")
        run = await client.wait("r-1")
    worker.stop()
    await task
    assert run.state == ("COMPLETED" if approve else "FAILED")
    assert keys == (["run:r-1/1"] if approve else [])


async def test_waiting_for_runs_costs_no_processor_time() -> None:
    gateway = MemoryGateway(tools={})
    worker, task = await served(gateway, refunds)
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    worker.stop()
    await task
    assert after.ru_utime - before.ru_utime < 0.1


def test_a_blocking_client_runs_against_it() -> None:
    def fail(amount: int) -> None:
        raise ToolFailed("no money")

    with MemoryGateway(tools={"bank.charge": lambda amount: {"amount": amount}, "bank.fail": fail}) as gateway:
        with BlockingClient(gateway.url, gateway.key, transport=gateway.sync_transport) as client:
            first = client.call("bank", "charge", {"amount": 5}, key="k-1")
            again = client.call("bank", "charge", {"amount": 5}, key="k-1")
            assert (again.output, first.replayed, again.replayed) == (first.output, False, True)
        assert [effect.key for effect in gateway.effects] == ["k-1"]


async def test_one_key_has_one_effect_whatever_is_repeated() -> None:
    made: list[int] = []

    async def charge(amount: int) -> int:
        made.append(amount)
        await asyncio.sleep(0)
        return amount

    gateway = MemoryGateway(tools={"bank.charge": charge})
    async with AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
        await asyncio.gather(*(client.call("bank", "charge", {"amount": 5}, key="k-1") for _ in range(5)))
    assert made == [5]


async def test_moved_time_ends_sleeps_and_later_sleeps_begin_then() -> None:
    gateway = MemoryGateway()
    worker, task = await served(gateway, sleeper)
    async with AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
        await client.start("sleeper", run_id="s-1")
        for path in ("1", "2"):
            await gateway.until(partial(sleeps_at, gateway, path))
            gateway.clock.move(minutes=119)
            await asyncio.sleep(0.05)
            assert sleeps_at(gateway, path)
            gateway.clock.move(minutes=1)
        assert await client.result("s-1") == "slept"
    worker.stop()
    await task


def sleeps_at(gateway: MemoryGateway, path: str) -> bool:
    return [*gateway.engine.load("s-1").begun] == [path]


@procedure(name="sleeper")
async def sleeper(ctx: Context[Any]) -> str:
    await ctx.sleep(7200)
    await ctx.sleep(7200)
    return "slept"


@procedure(name="again")
async def again(ctx: Context[None], input: int) -> list[str]:
    """Starts itself so many times side by side, and so does each of these; what it was told where that was refused."""

    async def one() -> list[str]:
        try:
            return list(await ctx.call(again, input, child=True))
        except ChildError as error:
            return [error.type]

    return [told for branch in await ctx.gather(*[one] * input) for told in branch]


async def test_a_program_that_starts_itself_is_refused_at_a_depth_and_at_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by the real gateway: tests/runs/test_engine.py."""
    gateway = MemoryGateway()
    worker, task = await served(gateway, again)
    async with AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
        monkeypatch.setattr("tga_sdk.testing.messages.CHILD_LEVELS_MAX", 8)
        monkeypatch.setattr("tga_sdk.testing.messages.OPEN_BELOW_MAX", 8)
        for run_id in ("first", "second"):  # those of other runs do not count
            await client.start("again", 1, run_id=run_id)
            assert await client.result(run_id) == ["RUN_TOO_DEEP"]
        monkeypatch.setattr("tga_sdk.testing.messages.OPEN_BELOW_MAX", 7)
        await client.start("again", 1, run_id="third")
        assert await client.result("third") == ["RUN_TOO_MANY_CHILDREN"]
    worker.stop()
    await task


async def test_a_child_that_runs_is_waited_for_although_it_could_not_be_started_any_more() -> None:
    """As by the real gateway: tests/runs/test_engine.py."""
    gateway = MemoryGateway()
    client = MemoryClient(gateway, gateway.key)
    program = {"name": "p", "version": "1", "program_digest": "a" * 64}
    await client.ask("POST", "/v1/procedures", program)
    await client.ask("POST", "/v1/runs", {"procedure": "p", "run_id": "r", "input": 1})
    child: dict[str, Any] = {"type": "child", "path": "1", "name": "it", "input_digest": "b" * 64, "procedure": "p"}
    child["input"] = {"tier": "inline", "value": 1}
    offer = {"worker": "worker-one", "name": "here", "procedures": [program], "slots": 2, "wait_ms": 0}

    async def put(run: dict[str, Any], then: dict[str, Any]) -> Any:
        body = {"lease": run["lease"], "attempt": run["attempt"], "after_seq": run["sequence_number"], "puts": []}
        return await client.ask("POST", f"/v1/runs/{run['run_id']}/checkpoints", {**body, "then": then})

    (run,) = (await client.ask("POST", "/v1/worker/lease", offer))["runs"]
    started = await put(run, child)
    await put({**run, "sequence_number": 3}, {"type": "release", "reason": "so"})
    await client.ask("POST", "/v1/procedures", {**program, "version": "2", "input_schema": {"type": "string"}})
    leased = {one["run_id"]: one for one in (await client.ask("POST", "/v1/worker/lease", offer))["runs"]}
    again_put = await put(leased["r"], child)
    assert (again_put["result"], again_put["news"]) == (started["result"], [])
    await put(leased[started["result"]["run_id"]], {"type": "complete", "output": child["input"], "positions": 0})
    records = (await client.ask("GET", "/v1/runs/r/checkpoints"))["items"]
    assert [one["outcome"] for one in records if one["artifact_type"] == "run_answer"] == ["OK"]
    # It has ended since: who read the journal before, and says the start once more, is told so.
    late = await put(leased["r"], child)
    assert (late["directive"], late["result"]) == ("CONTINUE", started["result"])
    assert [(one["path"], one["outcome"]) for one in late["news"]] == [("1", "OK")]
    assert len((await client.ask("GET", "/v1/runs/r/checkpoints"))["items"]) == len(records)


@procedure(name="too-wide")
async def too_wide(ctx: Context[None], input: int) -> str:
    """It may catch that, and goes on at the same address."""
    done: list[int] = []

    async def branch() -> None:
        done.append(1)

    try:
        await ctx.gather(*[branch] * input)
    except ValueInvalid as error:
        said = f"{len(done)} have run: {error.message}"
        return await ctx.step("told", lambda: said)
    return f"{len(done)} have run"


async def test_a_gather_of_too_many_branches_is_refused_before_any_has_run() -> None:
    gateway = MemoryGateway()
    worker, task = await served(gateway, too_wide)
    async with AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
        for number, told in ((1_000, "1000 have run"), (1_001, "0 have run: gather: expected at most 1000 branches")):
            await client.start("too-wide", number, run_id=f"wide-{number}")
            assert (await client.result(f"wide-{number}")).startswith(told)
    worker.stop()
    await task
