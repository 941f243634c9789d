"""The protocol needs no SDK of ours: a worker in plain Node runs a program, is killed at a moment of it, and another
goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import IS_SOAK
from tests.runs.world import Caller, RunsWorld, new_id, sampled, until

NODE = shutil.which("node")
PROGRAM = Path(__file__).with_name("node_worker.mjs")
MOMENTS = [
    f"{name}.{when}"
    for name in ("lease", "put", "tool", "ask", "sleep", "suspend", "complete", "page")
    for when in ("before", "answered")
]
MOMENTS += ["body.before", "body.done"]

pytestmark = pytest.mark.skipif(NODE is None, reason="no `node` on this machine: install Node.js 18 or newer")


@contextlib.asynccontextmanager
async def node(world: RunsWorld, url: str, die_at: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "TGA_API_KEY": world.keys["worker"]}
    process = await asyncio.create_subprocess_exec(
        str(NODE), str(PROGRAM), url, new_id("node"), die_at, env=environment
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_worker_in_another_language_survives_being_killed(world: RunsWorld) -> None:
    gateway = await world.gateway(config=world.config(lease_ms=500))
    async with node(world, gateway.url), Caller(world, gateway.url) as caller:

        async def is_registered() -> bool:
            status, _ = await caller.agent.once("GET", "/v1/procedures/node-order")
            return bool(status == 200)

        await until(is_registered)
    for moment in ["", *sampled(MOMENTS, 3, is_soak=IS_SOAK)]:
        run_id = new_id()
        async with Caller(world, gateway.url) as caller:
            await caller.start("node-order", {"amount": 4}, run_id)
            async with node(world, gateway.url, moment) as dying:
                seeing = asyncio.create_task(caller.see_through(run_id))
                if moment:
                    assert await dying.wait() == -signal.SIGKILL
                    async with node(world, gateway.url):
                        seen = await seeing
                else:
                    seen = await seeing
        assert seen["state"] == "COMPLETED", (moment, seen)
        assert seen["output"]["value"] == ["node", ["amount", "charge_id"], True]
        assert list(world.executions(run_id).values()) == [1], moment
    await world.verify_all_is_well()
    await gateway.kill()
