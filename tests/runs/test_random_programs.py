"""Random programs through real gateways on PostgreSQL, with random faults, against a model that executes nothing.

A program is a tree of operations, and the run's input. At each request its worker may be lost before it is sent, or
after it was carried out; or the answer alone is lost, and the same is asked of another gateway. A worker that was lost
says nothing of its runs any more, as one that was killed; another attempt goes on. The result, the state and the bank's
book are those of the model. The seed is printed; TGA_SEED repeats it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.conftest import IS_SOAK
from tests.runs.programs import PROGRAMS
from tests.runs.trees import expected, random_tree, tree_program
from tests.runs.worker import REPEATED, Client, Refused, Worker
from tests.runs.world import Caller, RunsWorld, new_id


class Lost(BaseException):
    """The worker is gone, at this request."""


class FaultyClient(Client):
    """Loses requests and answers of puts. The faults end: a run that is hit for ever never gets on."""

    def __init__(self, urls: tuple[str, ...], key: str, chance: random.Random, *, share: float, faults: int) -> None:
        super().__init__(urls, key)
        self._chance = chance
        self._share = share
        self.left = faults

    async def ask(self, method: str, path: str, body: Any = None, *, name: str = "") -> Any:
        fault = ""
        if self.left and name and self._chance.random() < self._share:
            self.left -= 1
            fault = self._chance.choice(["before", "after", "lost"])
        if fault == "before":
            raise Lost
        if fault:
            url = self._chance.choice(self.urls)
            try:
                status, answer = await self.once(method, path, body, url=url)
            except aiohttp.ClientError:
                status, answer = 503, {}
            if status >= 300 and status not in REPEATED:
                raise Refused(status, answer)
            if fault == "after":
                raise Lost
        return await super().ask(method, path, body, name=name)


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("TGA_SEED") or random.randrange(1_000_000))


async def lose_and_go_on(worker: Worker, client: FaultyClient) -> None:
    """Lease and perform; an attempt that is lost is forgotten, so that no heartbeat names it."""
    tasks: set[asyncio.Task[None]] = set()

    async def perform(attempt: Any) -> None:
        try:
            await worker.perform(attempt)
        except Lost:
            return

    async def beat() -> None:
        while True:
            await worker.beat()
            await asyncio.sleep(worker.lease_ms / 4000)

    beating = asyncio.create_task(beat())
    try:
        while True:
            for attempt in await worker.lease(wait_ms=300):
                task = asyncio.create_task(perform(attempt))
                tasks.add(task)
            for task in [task for task in tasks if task.done()]:
                tasks.discard(task)
                task.result()
    finally:
        for task in (beating, *tasks):
            task.cancel()
        await asyncio.gather(beating, *tasks, return_exceptions=True)


@pytest.fixture
async def urls(world: RunsWorld) -> AsyncIterator[tuple[str, str]]:
    config = world.config(lease_ms=1_500)
    one, other = await world.gateway(config=config), await world.gateway(config=config)
    yield one.url, other.url
    await one.kill()
    await other.kill()


@pytest.mark.parametrize("share", [0.0, 0.15])
async def test_random_programs_with_faults_end_as_the_model_says(
    world: RunsWorld, urls: tuple[str, str], seed: int, share: float
) -> None:
    print(f"TGA_SEED={seed}")
    count = 100 if IS_SOAK else 4
    chance = random.Random(seed)
    trees = {new_id("random"): random_tree(chance) for _ in range(count)}
    programs = {"random": tree_program, "paying": PROGRAMS["paying"]}
    faulty = FaultyClient(urls, world.keys["worker"], chance, share=share, faults=5 * count)
    async with faulty as client, Caller(world, *urls) as caller:
        worker = Worker(client, programs, new_id("worker"), slots=50, is_careful=False)
        await worker.register(park_after=1_000)
        current = asyncio.current_task()
        assert current is not None
        working = asyncio.create_task(lose_and_go_on(worker, faulty))
        working.add_done_callback(lambda ended: ended.cancelled() or current.cancel())
        try:
            for run_id, tree in trees.items():
                await caller.start("random", tree, run_id)
            seen = dict(zip(trees, await asyncio.gather(*map(caller.see_through, trees)), strict=True))
        finally:
            if working.done():
                working.result()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        for run_id, tree in trees.items():
            results, log, tools, _ = expected(tree)
            assert seen[run_id]["state"] == "COMPLETED", (seen[run_id], tree, await world.journal(run_id))
            assert seen[run_id]["output"]["value"] == {"results": results, "log": log}, tree
            state = await caller.agent.ask("GET", f"/v1/runs/{run_id}/state")
            assert state["state"] == {"log": log}, (state, tree)
            executions = world.executions(run_id)
            assert (sum(executions.values()), set(executions.values()) - {1}) == (tools, set()), tree
    if share:
        assert faulty.left < 5 * count, "no fault has come"
    await world.verify_all_is_well()
