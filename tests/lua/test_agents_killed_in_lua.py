"""An agent of a Lua program with tools of the gateway: a real gateway, a real tool server, and a model behind HTTP. The
gateway, and the processes that Lua runs in, are killed after every entry of the journal. Each effect is once in the
tool server's own book, a recorded turn is not asked of the model again, and the result is what it is without.

Sampled with a seed that is printed; all entries in soak. TGA_SEED repeats a sample.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tests.lua.hosting import config
from tests.lua.models import NAME, ModelServer, asked, model_server
from tests.lua.test_lua_crashes import children_of, reaches
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, sampled, worlds

PROGRAM = f"""
main = procedure "main" {{
    input = {{task = {{type = "string", required = true}}}},
    state = {{ok = {{type = "boolean"}}}},
    run = function()
        local W = agent "worker" {{
            model = "{NAME}",
            system_prompt = "Charge.",
            tools = {{tool.bank.charge, tool.bank.balance}},
        }}
        W({{message = input.task}})
        local first = W.output
        tool.bank.charge{{amount = 100}}
        state.ok = Human.approve({{message = "Once more?"}})
        W({{message = "again"}})
        return {{first = first, second = W.output, ok = state.ok, said = #W.messages}}
    end
}}
"""
TURNS: list[list[Any]] = [
    [asked(1, "bank__charge", amount=5), asked(2, "bank__balance")],
    ["Twice more.", asked(3, "bank__charge", amount=6), asked(4, "bank__charge", amount=7)],
    ["charged"],
    [asked(5, "bank__charge", amount=8)],
    ["charged again"],
]
RESULT = {"first": "charged", "second": "charged again", "ok": True, "said": 10}
CHARGES = 5
FIRST_ENTRY = 3  # start and lease are no work of the program


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


@pytest.fixture(scope="module")
def model() -> Iterator[ModelServer]:
    with model_server(TURNS) as served:
        yield served


async def started(caller: Caller) -> str:
    run_id = new_id("agent")
    said = {"name": "charging", "language": "lua", "source": PROGRAM}
    await caller.agent.ask("POST", "/v1/procedures", said)
    await caller.start("charging", {"task": run_id}, run_id)
    return run_id


async def verify(world: RunsWorld, gateway: GatewayProcess, model: ModelServer, run_id: str) -> int:
    """How many entries its journal has."""
    async with Caller(world, gateway.url) as caller:
        seen = await caller.see_through(run_id)
    assert (seen["state"], seen["output"] and seen["output"]["value"]) == ("COMPLETED", RESULT), seen
    executed = world.executions(run_id)
    assert sorted(count for key, count in executed.items()) == [1] * len(executed)
    journal = await world.journal(run_id)
    charged = [one for one in journal if one.get("name") == "bank.charge" and one["artifact_type"] == "run_intent"]
    assert len(charged) == CHARGES
    assert len({one["request"]["idempotency_key"] for one in charged} & executed.keys()) == CHARGES
    turns = [one for one in journal if one.get("kind") == "turn" and one["artifact_type"] == "run_checkpoint"]
    assert len(turns) == len(TURNS)
    paid = model.paid(run_id)
    assert set(paid) == set(range(1, len(TURNS) + 1))
    assert sum(paid.values()) - len(TURNS) <= 1, f"only the turn that was under way is asked, and paid, again: {paid}"
    return len(journal)


async def entries_of_a_calm_run(world: RunsWorld, gateway: GatewayProcess, model: ModelServer) -> int:
    async with Caller(world, gateway.url) as caller:
        run_id = await started(caller)
    entries = await verify(world, gateway, model, run_id)
    assert sum(model.paid(run_id).values()) == len(TURNS)
    return entries


@pytest.mark.one_in(4)
async def test_the_gateway_is_killed(world: RunsWorld, model: ModelServer) -> None:
    path = config(world, lease_ms=3_000)
    gateway = await world.gateway(config=path, model_at=model.url)
    last = await entries_of_a_calm_run(world, gateway, model)
    for entries in sampled(list(range(FIRST_ENTRY, last)), 1, is_soak=IS_SOAK):
        async with Caller(world, gateway.url) as caller:
            run_id = await started(caller)
            seeing = asyncio.create_task(caller.see_through(run_id))
            await reaches(world, run_id, entries)
            await gateway.kill()
            seeing.cancel()
            await asyncio.gather(seeing, return_exceptions=True)
        gateway = await world.gateway(config=path, model_at=model.url)
        await verify(world, gateway, model, run_id)
    await world.verify_all_is_well()
    await gateway.kill()


@pytest.mark.one_in(4)
async def test_the_processes_that_lua_runs_in_are_killed(world: RunsWorld, model: ModelServer) -> None:
    gateway = await world.gateway(config=config(world, lease_ms=60_000), model_at=model.url)
    last = await entries_of_a_calm_run(world, gateway, model)
    for entries in sampled(list(range(FIRST_ENTRY, last)), 2, is_soak=IS_SOAK):
        async with Caller(world, gateway.url) as caller:
            run_id = await started(caller)
            seeing = asyncio.create_task(caller.see_through(run_id))
            await reaches(world, run_id, entries)
            for pid in children_of(gateway.pid):
                os.kill(pid, signal.SIGKILL)
            await seeing
        await verify(world, gateway, model, run_id)
    await world.verify_all_is_well()
    await gateway.kill()
