"""The gateway that executes a Lua program, and the process that its Lua runs in, are killed on the way: the run has the
result that it has without, each effect is once in the bank's own book, and the ledger verifies.

Sampled with a seed that is printed; more in soak. TGA_SEED repeats a sample.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import IS_SOAK
from tests.crash.world import PATIENCE_S
from tests.lua.hosting import config
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, sampled, until, worlds

PROGRAM = """
double = procedure "double" { input = {n = {type = "number"}}, run = function()
    return step("times", function() return input.n * 2 end)
end }
main = procedure "main" {
    input = {user = {type = "number", required = true}},
    state = {items = {type = "array", default = {}}},
    run = function()
        local paid = tool.bank.charge{amount = input.user}
        for i = 1, 3 do step("row", function() state.items[i] = i end) end
        local both = parallel{
            function() return double({n = 4}) end,
            function() return tool.bank.charge{amount = 2} ~= nil end,
        }
        local approved = Human.approve({message = "ok?"})
        checkpoint(function() table.insert(state.items, "drawn") return math.random() end)
        tool.bank.charge{amount = 3}
        return {count = #state.items, double = both[1], paid = both[2], approved = approved, first = paid ~= nil}
    end
}
"""
RESULT = {"count": 4, "double": 8, "paid": True, "approved": True, "first": True}
ENTRIES = 18  # of its journal, about


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


async def started(world: RunsWorld, gateway: GatewayProcess) -> str:
    run_id = new_id("lua")
    async with Caller(world, gateway.url) as caller:
        said = {"name": "crashing", "language": "lua", "source": PROGRAM}
        await caller.agent.ask("POST", "/v1/procedures", said)
        await caller.start("crashing", {"user": 7}, run_id)
    return run_id


async def verify(world: RunsWorld, gateway: GatewayProcess, run_id: str) -> None:
    async with Caller(world, gateway.url) as caller:
        seen = await caller.see_through(run_id)
    assert (seen["state"], seen["output"] and seen["output"]["value"]) == ("COMPLETED", RESULT), seen
    assert sorted(world.executions(run_id).values()) == [1, 1, 1]


async def reaches(world: RunsWorld, run_id: str, entries: int) -> None:
    async def is_there() -> bool:
        return len(await world.journal(run_id)) >= entries

    async with asyncio.timeout(PATIENCE_S):
        await until(is_there)


async def test_a_gateway_killed_while_it_executes_a_program(world: RunsWorld) -> None:
    path = config(world, lease_ms=3_000)
    gateway = await world.gateway(config=path)
    for entries in sampled(list(range(2, ENTRIES)), 1, is_soak=IS_SOAK):
        run_id = await started(world, gateway)
        async with Caller(world, gateway.url) as caller:
            seeing = asyncio.create_task(caller.see_through(run_id))
            await reaches(world, run_id, entries)
            await gateway.kill()
            seeing.cancel()
            await asyncio.gather(seeing, return_exceptions=True)
        gateway = await world.gateway(config=path)
        await verify(world, gateway, run_id)
    await world.verify_all_is_well()
    await gateway.kill()


async def test_a_lua_process_killed_while_it_executes_a_program(world: RunsWorld) -> None:
    gateway = await world.gateway(config=config(world, lease_ms=60_000))
    for entries in sampled(list(range(2, ENTRIES)), 2, is_soak=IS_SOAK):
        run_id = await started(world, gateway)
        async with Caller(world, gateway.url) as caller:
            seeing = asyncio.create_task(caller.see_through(run_id))
            await reaches(world, run_id, entries)
            for pid in children_of(gateway.pid):
                os.kill(pid, signal.SIGKILL)
            await seeing
        await verify(world, gateway, run_id)
    await world.verify_all_is_well()
    await gateway.kill()


def children_of(pid: int) -> list[int]:
    """The Lua processes of a gateway."""
    found = []
    for one in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(one.read_text().rpartition(")")[2].split()[1])
            command = one.with_name("cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid and b"app.lua" in command:
            found.append(int(one.parent.name))
    return found
