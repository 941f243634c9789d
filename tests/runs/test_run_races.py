"""Races over many connections and two gateways: no wake-up is lost, one of two answers wins, no run is leased twice, a
run is cancelled or completed and not both."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tests.runs.programs import PROGRAMS
from tests.runs.worker import Attempt, Client, Worker, inline
from tests.runs.world import Caller, RunsWorld, new_id

RACES = 200 if IS_SOAK else 30
PATH_OF_ASK = {"path": "1", "name": "pay", "input_digest": "a" * 64}
ASKED = {"form": "approve", "message": "Pay?", "answer_schema": {"type": "boolean"}}


@pytest.fixture(scope="module")
def urls(world: RunsWorld) -> tuple[str, str]:
    return asyncio.run(two_gateways(world))


async def two_gateways(world: RunsWorld) -> tuple[str, str]:
    config = world.config(lease_ms=60_000)
    return (await world.gateway(config=config)).url, (await world.gateway(config=config)).url


async def leased(world: RunsWorld, client: Client, caller: Caller, count: int) -> dict[str, Attempt]:
    """So many runs, started and leased to one worker."""
    worker = Worker(client, {"asks": PROGRAMS["asks"]}, new_id("worker"), slots=100)
    await worker.register()
    for _ in range(count):
        await caller.start("asks", None, new_id())
    found: dict[str, Attempt] = {}
    while len(found) < count:
        found.update({attempt.run_id: attempt for attempt in await worker.lease()})
    return found


async def put(client: Client, attempt: Attempt, url: str, **body: Any) -> Any:
    whole = {"lease": attempt.lease, "attempt": attempt.number, "after_seq": attempt.leased["sequence_number"], **body}
    status, answer = await client.once("POST", f"/v1/runs/{attempt.run_id}/checkpoints", whole, url=url)
    assert status == 200, answer
    return answer


async def test_suspend_against_two_answers_loses_no_wake_up_and_has_one_winner(
    world: RunsWorld, urls: tuple[str, str]
) -> None:
    async with world.client("worker", *urls) as client, Caller(world, *urls) as caller:
        attempts = await leased(world, client, caller, RACES)
        told: Counter[str] = Counter()

        async def answer(run_id: str, said: bool, url: str) -> bool:
            body = {"path": "1", "answer": said}
            status, found = await caller.person.once("POST", f"/v1/runs/{run_id}/signals", body, url=url)
            assert status == 200 or found["code"] == "RUN_ANSWER_UNASKED", found
            return bool(status == 200)

        async def race(number: int, attempt: Attempt) -> None:
            near, far = urls[number % 2], urls[(number + number // 2) % 2]
            asked = {"type": "ask", **PATH_OF_ASK, "request": ASKED}
            await put(client, attempt, near, puts=[asked])
            suspend = {"type": "suspend", "awaits": ["1"]}
            suspended, *won = await asyncio.gather(
                put(client, attempt, near, puts=[asked], then=suspend),
                answer(attempt.run_id, True, far),
                answer(attempt.run_id, False, near),
            )
            assert won.count(True) == 1
            told[suspended["directive"]] += 1
            if suspended["directive"] == "CONTINUE":
                (news,) = suspended["news"]
                assert news["value"]["value"] is won[0]

        await asyncio.gather(*(race(*one) for one in enumerate(attempts.values())))
        print(told)
        heir = Worker(client, {"asks": PROGRAMS["asks"]}, new_id("worker"), slots=100)
        woken: set[str] = set()
        while len(woken) < told["SUSPENDED"]:
            woken |= {attempt.run_id for attempt in await heir.lease()}
        assert woken <= set(attempts)
        for attempt in attempts.values():
            await caller.agent.ask("POST", f"/v1/runs/{attempt.run_id}/cancel", {})
    await world.verify_all_is_well()


async def test_no_run_is_leased_twice_by_eight_that_ask_at_once(world: RunsWorld, urls: tuple[str, str]) -> None:
    count = 200 if IS_SOAK else 40
    async with world.client("worker", *urls) as client, Caller(world, *urls) as caller:
        workers = [Worker(client, {"steps": PROGRAMS["steps"]}, new_id("worker"), slots=5) for _ in range(8)]
        await workers[0].register()
        started = {new_id() for _ in range(count)}
        await asyncio.gather(*(caller.start("steps", {"count": 0}, run_id) for run_id in started))
        given: list[str] = []

        async def lease(worker: Worker, url: str) -> None:
            asked = {
                "worker": worker.worker_id,
                "name": "w",
                "procedures": worker.offered(),
                "slots": 5,
                "wait_ms": 200,
            }
            while len(given) < count:
                status, answer = await client.once("POST", "/v1/worker/lease", asked, url=url)
                assert status == 200, answer
                given.extend(run["run_id"] for run in answer["runs"])
                done = {"type": "complete", "output": inline(None), "positions": 0}
                for run in answer["runs"]:
                    await put(client, Attempt(worker, run), url, then=done)

        await asyncio.gather(*(lease(worker, urls[number % 2]) for number, worker in enumerate(workers)))
    assert Counter(given) == Counter(started)
    await world.verify_all_is_well()


async def test_a_run_is_cancelled_or_completed_and_both_are_told_which(world: RunsWorld, urls: tuple[str, str]) -> None:
    async with world.client("worker", *urls) as client, Caller(world, *urls) as caller:
        attempts = await leased(world, client, caller, 100 if IS_SOAK else 20)

        async def cancel(run_id: str, url: str) -> bool:
            status, answer = await caller.agent.once("POST", f"/v1/runs/{run_id}/cancel", {}, url=url)
            assert status == 200 or answer["code"] == "RUN_ENDED", answer
            return bool(status == 200)

        async def race(number: int, attempt: Attempt) -> str:
            done = {"type": "complete", "output": inline("done"), "positions": 0}
            is_cancelled, answer = await asyncio.gather(
                cancel(attempt.run_id, urls[number % 2]),
                put(client, attempt, urls[(number + number // 2) % 2], then=done),
            )
            seen = await caller.look(attempt.run_id)
            if is_cancelled:
                assert (seen["state"], answer["directive"], answer["reason"]) == ("CANCELLED", "STOP", "CANCELLED")
            else:
                assert (seen["state"], answer["directive"]) == ("COMPLETED", "DONE")
            return str(seen["state"])

        print(Counter(await asyncio.gather(*(race(*one) for one in enumerate(attempts.values())))))
    await world.verify_all_is_well()
