"""Several gateways on one database: any of them takes any call. One is killed under load; the others go on with its
calls and runs without being asked, callers that try again get their answers, and the bank's own book has each effect
once."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.runs.test_runs_end_to_end import RESULT
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, until, working

GATEWAYS = 3
CALLERS = 9
CALLS = 3
RUNS = 2


async def call(world: RunsWorld, key: str, tool: str, arguments: dict[str, Any], *urls: str) -> dict[str, Any]:
    """Asked again, at the next gateway if one does not answer, until the call has ended."""
    body = {"server_id": "bank", "tool_name": tool, "arguments": arguments, "idempotency_key": key}
    async with world.client("agent", *urls) as client:
        while True:
            answer: dict[str, Any] = await client.ask("POST", "/v1/tool-calls", body)
            if answer["state"] not in ("PENDING", "EXECUTING"):
                return answer


async def left_behind(world: RunsWorld, gateway: GatewayProcess, key: str) -> asyncio.Task[Any]:
    """A call that this gateway has sent, and that the bank takes its time for; its caller asks only once."""
    body = {"server_id": "bank", "tool_name": "slow_charge", "arguments": {"amount": 1, "ms": 1500}}

    async def once() -> None:
        async with world.client("agent", gateway.url) as client:
            await client.once("POST", "/v1/tool-calls", {**body, "idempotency_key": key})

    asked = asyncio.create_task(once())
    await until(lambda: bool(world.bank.requests(key)))
    return asked


async def state_of(world: RunsWorld, key: str) -> str:
    rows = await world.fetch(
        "SELECT h.state FROM tga.heads h JOIN tga.claims c ON c.stream = h.stream WHERE c.idempotency_key = $1", key
    )
    return str(rows[0]["state"]) if rows else "none"


async def test_one_of_several_is_killed_under_load_and_the_others_continue_what_it_had(world: RunsWorld) -> None:
    config = world.config(lease_ms=60_000)
    gateways = [await world.gateway(config=config) for _ in range(GATEWAYS)]
    urls = [gateway.url for gateway in gateways]
    name = new_id("call")

    async def caller(number: int) -> list[dict[str, Any]]:
        own = urls[number % GATEWAYS :] + urls[: number % GATEWAYS]
        return [
            await call(world, f"{name}-{number}-{index}", "slow_charge", {"amount": 1, "ms": 100}, *own)
            for index in range(CALLS)
        ]

    run_ids = [new_id() for _ in range(RUNS)]
    async with working(world, *urls), Caller(world, *urls) as starter:
        for run_id in run_ids:
            await starter.start("everything", {"user": 7}, run_id)
        calling = [asyncio.create_task(caller(number)) for number in range(CALLERS)]
        abandoned = await left_behind(world, gateways[0], f"{name}-abandoned")
        retried = await left_behind(world, gateways[0], f"{name}-retried")
        await gateways[0].kill()
        assert isinstance((await asyncio.gather(abandoned, return_exceptions=True))[0], Exception)
        assert isinstance((await asyncio.gather(retried, return_exceptions=True))[0], Exception)
        # Who asks again, anywhere, is answered; what nobody asks for again is finished all the same.
        answer = await call(world, f"{name}-retried", "slow_charge", {"amount": 1, "ms": 1500}, *urls[1:])
        assert answer["state"] == "COMPLETED"
        answers = [one for answered in await asyncio.gather(*calling) for one in answered]
        assert [one["state"] for one in answers] == ["COMPLETED"] * (CALLERS * CALLS)
        await until(lambda: is_completed(world, f"{name}-abandoned"))
        for run_id in run_ids:
            seen = await starter.see_through(run_id)
            assert (seen["state"], seen["output"]["value"]) == ("COMPLETED", RESULT)
    executed = world.all_executions()
    keys = [f"{name}-{number}-{index}" for number in range(CALLERS) for index in range(CALLS)]
    keys += [f"{name}-abandoned", f"{name}-retried"]
    assert {key: executed[key] for key in keys} == dict.fromkeys(keys, 1)
    for run_id in run_ids:
        assert sorted(world.executions(run_id).values()) == [1, 1]
    await world.verify_all_is_well()


async def is_completed(world: RunsWorld, key: str) -> bool:
    return await state_of(world, key) == "COMPLETED"


async def test_a_repeat_is_answered_by_whichever_gateway_is_asked(world: RunsWorld) -> None:
    gateways = [await world.gateway() for _ in range(2)]
    key = new_id("anywhere")
    answers = [await call(world, key, "charge", {"amount": 1}, gateway.url) for gateway in gateways * 2]
    assert len({answer["tool_call_id"] for answer in answers}) == 1
    assert [answer["replayed"] for answer in answers] == [False, True, True, True]
    assert world.all_executions()[key] == 1
