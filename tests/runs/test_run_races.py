"""Races over many connections and two gateways: no wake-up is lost, one of two answers wins, no run is leased twice, a
run is cancelled or completed and not both."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tests.runs.programs import PROGRAMS
from tests.runs.worker import Attempt, Client, Refused, Worker, inline
from tests.runs.world import Caller, RunsWorld, new_id, until, worlds

RACES = 200 if IS_SOAK else 30
PATH_OF_ASK = {"path": "1", "name": "pay", "input_digest": "a" * 64}
ASKED = {"form": "approve", "message": "Pay?", "answer_schema": {"type": "boolean"}}


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


@pytest.fixture
async def urls(world: RunsWorld) -> AsyncIterator[tuple[str, str]]:
    config = world.config(lease_ms=60_000)
    one, other = await world.gateway(config=config), await world.gateway(config=config)
    yield one.url, other.url
    await one.kill()
    await other.kill()


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


async def test_every_route_repeated_on_another_gateway_is_the_same_and_nothing_is_done_twice(
    world: RunsWorld, urls: tuple[str, str]
) -> None:
    """Each request is sent twice to one gateway, as after a lost answer, and then to the other."""
    run_id = new_id()
    async with world.client("worker", *urls) as client, Caller(world, *urls) as caller:
        worker = Worker(client, {"asks": PROGRAMS["asks"]}, new_id("worker"))
        await worker.register()

        async def three_times(sender: Client, path: str, body: Any) -> list[Any]:
            sent = [await sender.once("POST", path, body, url=url) for url in (urls[0], urls[0], urls[1])]
            assert {status for status, _ in sent} == {200}, sent
            return [answer for _, answer in sent]

        started = await three_times(
            caller.agent, "/v1/runs", {"procedure": "asks", "input": {"n": 1}, "run_id": run_id}
        )
        assert [one["replayed"] for one in started] == [False, True, True]
        with pytest.raises(Refused, match="RUN_ID_TAKEN"):
            await caller.start("asks", {"n": 2}, run_id)
        (attempt,) = await worker.lease()
        where = f"/v1/runs/{run_id}/checkpoints"

        async def thrice(after: int, **body: Any) -> Any:
            whole = {"lease": attempt.lease, "attempt": 1, "after_seq": after, **body}
            before = len(await world.journal(run_id))
            answers = await three_times(client, where, whole)
            strip = [(one["directive"], one["sequence_number"], one["news"]) for one in answers]
            assert strip[0] == strip[1] == strip[2], strip
            return answers[0], len(await world.journal(run_id)) - before

        step: dict[str, Any] = {
            "type": "checkpoint",
            "kind": "step",
            "name": "s",
            "input_digest": "a" * 64,
            "outcome": "OK",
        }
        step |= {"value": inline(1), "started_at": "2026-01-01T00:00:00.000Z", "duration_ms": 1}
        answer, added = await thrice(2, puts=[{**step, "path": "1"}, {**step, "path": "2"}])
        assert added == 2
        call: dict[str, Any] = {
            "type": "tool",
            "path": "4",
            "input_digest": "a" * 64,
            "server_id": "bank",
            "tool_name": "charge",
        }
        call["arguments"] = {"amount": 3}
        answer, added = await thrice(4, puts=[{**step, "path": "3"}], then=call)
        assert (added, answer["news"][-1]["outcome"]) == (3, "OK")
        child = {"type": "child", "path": "5:1.1", "name": "c", "input_digest": "a" * 64, "procedure": "asks"}
        answer, added = await thrice(7, then={**child, "input": inline(None)})
        assert added == 1
        asked = {"type": "ask", **PATH_OF_ASK, "path": "5:2.1", "request": ASKED}
        answer, added = await thrice(8, puts=[asked], then={"type": "suspend", "awaits": ["5:2.1"]})
        assert (added, answer["directive"]) == (2, "SUSPENDED")
        await three_times(caller.agent, f"/v1/runs/{run_id}/signals", {"name": "n", "value": 1, "signal_id": "one"})
        assert [one["artifact_type"] for one in await world.journal(run_id)].count("run_signal") == 1
        await three_times(caller.person, f"/v1/runs/{run_id}/signals", {"path": "5:2.1", "answer": True})
        assert not await caller.answer(run_id, "5:2.1", False), "another answer comes too late"
        answered = [one["path"] for one in await world.journal(run_id) if one["artifact_type"] == "run_answer"]
        assert answered == ["4", "5:2.1"]
        leases: list[Attempt] = []
        while not leases:
            leases = [one for one in await worker.lease() if one.run_id == run_id]
        attempt = leases[0]
        number = attempt.leased["sequence_number"]
        whole = {"lease": attempt.lease, "attempt": attempt.number, "after_seq": number}
        done = {**whole, "then": {"type": "complete", "output": inline("end"), "positions": 4}}
        ends = await three_times(client, where, done)
        assert [one["directive"] for one in ends] == ["DONE"] * 3
        beat = {"worker": worker.worker_id, "name": "w", "runs": [{"run_id": run_id, "lease": attempt.lease}]}
        beats = await three_times(client, "/v1/worker/heartbeat", beat)
        assert {one["runs"][0]["directive"] for one in beats} == {"STOP"}
        pages = [await client.once("GET", f"{where}?after_seq=0", url=url) for url in urls]
        assert pages[0] == pages[1]

        async def is_cancelled() -> bool:
            rows = await world.fetch("SELECT state FROM tga.runs WHERE parent = $1", f"run:{run_id}")
            return [row["state"] for row in rows] == ["CANCELLED"]

        await until(is_cancelled)  # the child: nobody waits for it any more
    assert list(world.executions(run_id).values()) == [1]
    await world.verify_all_is_well()
