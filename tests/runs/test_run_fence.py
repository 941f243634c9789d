"""The fence, with real processes: a worker that is stopped (SIGSTOP) until its lease is over and another has taken its
run comes back (SIGCONT). Whatever it does next is answered with STOP before it has any effect.

Gateways are stopped likewise, between what they have decided and what they store: a stale timer, a stale answer and a
stale takeover do nothing.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.runs.programs import PROGRAMS
from tests.runs.worker import Attempt, Worker, inline
from tests.runs.world import Caller, RunsWorld, new_id, until, working

LEASE_MS = 5_000
"""Who is stopped loses it; who beats keeps it, also on a machine that lets nothing run for a second or two."""


async def attempts(world: RunsWorld, run_id: str) -> list[str]:
    journal = await world.journal(run_id)
    return [f"{one['change']} {one['attempt']}" for one in journal if one["artifact_type"] == "run_attempt"]


async def traces_of(world: RunsWorld, run_id: str) -> int:
    """How many tool calls of this run the ledger knows of."""
    rows = await world.fetch("SELECT count(*) FROM tga.claims WHERE idempotency_key LIKE $1", f"run:{run_id}/%")
    return int(rows[0][0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at", ["put", "intent", "tool", "complete"])
async def test_a_worker_that_was_away_is_stopped_before_it_has_any_effect(world: RunsWorld, at: str) -> None:
    gateway = await world.gateway(config=world.config(lease_ms=LEASE_MS))
    run_id = new_id()
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        heir = Worker(client, PROGRAMS, f"heir-{run_id}")
        await heir.register()
        await caller.start("fenced", None, run_id)
        zombie = await world.worker(gateway.url, stop_at=(f"{at}.before", 0), is_careful=False)
        await until(zombie.is_stopped)
        before = await traces_of(world, run_id)
        taken = await leased(heir, run_id)
        assert taken.number == 2
        beating = asyncio.create_task(beat_for_ever(heir))
        zombie.signal(signal.SIGCONT)

        async def is_fenced() -> bool:
            return "FENCED 1" in await attempts(world, run_id)

        await until(is_fenced)
        await until(lambda: zombie.has_said("ended"))
        assert [one["ended"] for one in zombie.said() if "ended" in one][:1] == [[run_id, "STOP LEASE_LOST"]]
        assert await traces_of(world, run_id) == before, "a call of the old attempt was born"
        assert sum(world.executions(run_id).values()) == before
        await zombie.kill()
        await heir.perform(taken)
        beating.cancel()
        async with working(world, gateway.url):  # should the heir be lost, too, on a machine that is busy
            seen = await caller.see_through(run_id)
    assert seen["output"]["value"] == ["first", "once", ["amount", "charge_id"]]
    told = await attempts(world, run_id)
    assert told[:3] == ["LEASED 1", "LOST 1", "LEASED 2"]
    assert told.count("FENCED 1") == 1
    assert list(world.executions(run_id).values()) == [1]
    await world.verify_all_is_well()
    await gateway.kill()


async def leased(worker: Worker, run_id: str) -> Attempt:
    """The next lease of this run; the one before has to be lost first."""
    while True:
        for attempt in await worker.lease(wait_ms=1_000):
            if attempt.run_id == run_id:
                worker.holding[run_id] = attempt
                return attempt


async def beat_for_ever(worker: Worker) -> None:
    while True:
        await worker.beat()
        await asyncio.sleep(0.25)


async def test_old_attempt_is_stopped_with_200(world: RunsWorld) -> None:
    """Whatever it sends, however often; that it came is recorded once, and nothing else."""
    gateway = await world.gateway(config=world.config(lease_ms=LEASE_MS))
    run_id = new_id()
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        one, other = (Worker(client, PROGRAMS, f"{name}-{run_id}") for name in ("one", "other"))
        await one.register()
        await caller.start("fenced", None, run_id)
        old = await leased(one, run_id)
        new = await leased(other, run_id)  # the first is silent
        beating = asyncio.create_task(beat_for_ever(other))
        journal = await world.journal(run_id)
        step = {"path": "1", "name": "first", "input_digest": "a" * 64}
        sent: list[dict[str, Any]] = [
            {"puts": [{"type": "step", **step}]},
            {"then": {"type": "tool", **without_name(step), **CALL}},
            {"then": {"type": "child", **step, "procedure": "paying", "input": inline(None)}},
            {"then": {"type": "complete", "output": inline(1), "positions": 0}},
            {"then": {"type": "fail", "error": {"type": "E", "message": "m", "retryable": False}}},
            {"then": {"type": "release"}},
        ]
        for body in [*sent, *sent]:
            whole = {"lease": old.lease, "attempt": 1, "after_seq": 2, **body}
            status, answer = await client.once("POST", f"/v1/runs/{run_id}/checkpoints", whole)
            assert (status, answer["directive"], answer["reason"]) == (200, "STOP", "LEASE_LOST"), body
        beat = {"worker": one.worker_id, "name": "one", "runs": [{"run_id": run_id, "lease": old.lease}]}
        status, answer = await client.once("POST", "/v1/worker/heartbeat", beat)
        assert (status, answer["runs"][0]["directive"]) == (200, "STOP")
        assert [one["artifact_type"] for one in (await world.journal(run_id))[len(journal) :]] == ["run_attempt"]
        assert await attempts(world, run_id) == ["LEASED 1", "LOST 1", "LEASED 2", "FENCED 1"]
        assert await traces_of(world, run_id) == 0
        # A lease that was never given is as good as an old one.
        whole = {"lease": "x" * 32, "attempt": 2, "after_seq": 2, **sent[1]}
        status, answer = await client.once("POST", f"/v1/runs/{run_id}/checkpoints", whole)
        assert (status, answer["directive"]) == (200, "STOP")
        await other.perform(new)
        beating.cancel()
        async with working(world, gateway.url):
            verified = await caller.see_through(run_id)
    assert verified["state"] == "COMPLETED"
    await world.verify_all_is_well()
    await gateway.kill()


CALL = {"server_id": "bank", "tool_name": "charge", "arguments": {"amount": 9}}


def without_name(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "name"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", ["run_attempt.LOST", "run_answer.timer", "run_answer.person"])
async def test_a_gateway_that_was_away_stores_nothing_that_is_not_so_any_more(world: RunsWorld, place: str) -> None:
    """It stops between what it decided and what it stores; another gateway does the same meanwhile, and more."""
    is_lost = place == "run_attempt.LOST"
    config = world.config(lease_ms=LEASE_MS if is_lost else 600_000)
    slow = await world.gateway(config=config, stop_at=f"commit:{place}")
    run_id = new_id()
    async with Caller(world, slow.url) as caller, world.client("worker", slow.url) as client:
        first = Worker(client, PROGRAMS, f"first-{run_id}")
        await first.register()
        await caller.start({"run_answer.timer": "sleeps"}.get(place, "asks"), None, run_id)
        attempt = await leased(first, run_id)
        if not is_lost:
            await first.perform(attempt)
        late = None
        if place == "run_answer.person":
            await until_state(caller, run_id, "WAITING")
            said = {"path": "2", "answer": True}
            late = asyncio.create_task(caller.person.once("POST", f"/v1/runs/{run_id}/signals", said, url=slow.url))
        await until(slow.is_stopped)
        quick = await world.gateway(config=config)
        async with Caller(world, quick.url) as other, world.client("worker", quick.url) as client_2:
            heir = Worker(client_2, PROGRAMS, f"heir-{run_id}")
            if place == "run_answer.person":
                assert await other.answer(run_id, "2", False)
            taken = await leased(heir, run_id)
            beating = asyncio.create_task(beat_for_ever(heir))
            before = await world.journal(run_id)
            assert len([one for one in before if one.get("change") == "LEASED"]) == 2
            looks = slow.places["hold_due"]
            slow.signal(signal.SIGCONT)
            # Two looks later it is through with what it was about to do.
            await until(lambda: slow.places["hold_due"] >= looks + 2)
            if late is not None:
                status, problem = await late
                assert (status, problem["code"]) == (409, "RUN_ANSWER_UNASKED")
            assert await world.journal(run_id) == before
            await heir.perform(taken)
            beating.cancel()
            async with working(world, quick.url):
                seen = await other.see_through(run_id)
    assert seen["state"] == "COMPLETED"
    answers = [one["path"] for one in await world.journal(run_id) if one["artifact_type"] == "run_answer"]
    assert len(answers) == len(set(answers))
    await slow.kill()
    await quick.kill()
    await world.verify_all_is_well()


async def until_state(caller: Caller, run_id: str, state: str) -> None:
    async def is_so() -> bool:
        return bool((await caller.look(run_id))["state"] == state)

    await until(is_so)
