"""A worker that waits for runs is given one as soon as it is ready: by what happens, not by looking now and then.

The gateways here look by themselves only after an hour, and hold a run for as long: what is not found because of an
event is not found within the worker's one question.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from app.domain.runs.engine.ports import Due
from app.gateway.runs import RunSweep
from app.postgres.database import Database
from tests.conftest import Admin
from tests.runs.engines import PROGRAM, Engine, open_engine
from tests.runs.processes import ClockAhead
from tests.runs.programs import PROGRAMS
from tests.runs.test_engine import policy
from tests.runs.worker import Worker
from tests.runs.world import Caller, Process, RunsWorld, new_id, until

WAIT_MS = 60_000


@pytest.fixture(autouse=True)
def no_process_stays(world: RunsWorld) -> Iterator[None]:
    yield
    world.kill_processes()


async def has_died(process: Process) -> None:
    await until(lambda: not process.is_alive())


async def test_a_lost_run_is_leased_when_its_pause_is_over_also_on_another_gateway(world: RunsWorld) -> None:
    judge = await world.gateway(config=world.config(lease_ms=2_000), is_patient=True)
    other = await world.gateway(config=world.config(lease_ms=600_000), is_patient=True)  # finds no worker lost
    run_id = new_id()
    async with Caller(world, judge.url) as caller, world.client("worker", other.url) as client:
        heir = Worker(client, PROGRAMS, f"heir-{run_id}")
        await heir.register()
        await caller.start("fenced", None, run_id)
        for _ in range(2):  # the second loss has a pause: nothing was recorded in between
            await has_died(await world.worker(judge.url, die_at=("body.before", 0)))
        (taken,) = await heir.lease(wait_ms=WAIT_MS)
        assert (taken.run_id, taken.number) == (run_id, 3)
        attempts = [one for one in await world.journal(run_id) if one["artifact_type"] == "run_attempt"]
        assert [one["change"] for one in attempts][:5] == ["LEASED", "LOST", "LEASED", "LOST", "LEASED"]
        assert attempts[1].get("not_before") is None
        assert attempts[3]["at"] < attempts[3]["not_before"] <= attempts[4]["at"]
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {"rationale": "seen"})


async def test_a_lease_that_could_not_be_recorded_gives_its_run_back(world: RunsWorld) -> None:
    gateway = await world.gateway(is_patient=True, config=world.config(lease_ms=600_000))
    run_id = new_id()
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, f"worker-{run_id}")
        await worker.register()
        await caller.start("fenced", None, run_id)
        locker = await asyncpg.connect(world.database.admin_url)
        try:
            await locker.execute("SELECT pg_advisory_lock(tga.stream_lock_key($1::text))", f"run:{run_id}")
            waiting = asyncio.create_task(worker.lease(wait_ms=WAIT_MS))
            await until(lambda: gateway.places["hold_ready"] > 1 or waiting.done())  # it was refused, and looks again
        finally:
            await locker.close()
        (taken,) = await waiting
        assert (taken.run_id, taken.number) == (run_id, 1)


@pytest.fixture
async def engine(database: Database) -> AsyncIterator[Engine]:
    async with open_engine(database.gateway_url, lease_ms=600_000) as opened:
        yield opened


@pytest.mark.parametrize("is_waiting_first", [True, False], ids=["with_its_start", "held"])
async def test_a_worker_that_has_waited_longer_than_a_lease_keeps_the_run_that_it_gets(
    engine: Engine, admin: Admin, is_waiting_first: bool
) -> None:
    """Its heartbeats may be rarer than that: only a lease tells it how often they are wanted."""
    leasing = engine.engine.leasing
    if not is_waiting_first:
        await engine.start("r")
        await admin.execute("UPDATE tga.runs SET due_at = 'infinity'")
    waiting = asyncio.create_task(engine.lease(wait_ms=WAIT_MS))
    await until(lambda: bool(leasing._waiting))
    # So long ago that it asked.
    await admin.execute("UPDATE tga.workers SET seen_at = seen_at - interval '1 hour'")
    leasing._seen = {worker: (at_ms - 3_600_000, said) for worker, (at_ms, said) in leasing._seen.items()}
    if is_waiting_first:
        await engine.start("r")
    else:
        await admin.execute("UPDATE tga.runs SET due_at = now()")
        leasing.kick()
    (leased,) = await waiting
    await engine.engine.sweeping.sweep(judges_workers=True)
    assert (await engine.engine.ports.runs.load("r")).run.head.state == "RUNNING"
    assert leased.attempt == 1


@pytest.mark.parametrize("ahead_ms", [3_600_000, -3_600_000])
async def test_what_is_ready_is_ready_by_the_stores_clock(database: Database, ahead_ms: int) -> None:
    """At once, and after a pause: the gateway that records it has another clock, and delays and hurries nothing."""
    async with open_engine(database.gateway_url, lease_ms=600_000, clock=ClockAhead(ahead_ms)) as engine:
        await engine.start("r")
        (leased,) = await engine.lease()
        await engine.put(leased, 2, then={"type": "release", "not_before_ms": 60_000})
        ready = await engine.engine.ports.runs.hold_ready("default", [("onboard", f"1@{PROGRAM}")], 5)
    assert ready.runs == []
    assert ready.next_ms is not None
    assert 30_000 < ready.next_ms <= 60_000


@pytest.mark.parametrize("ahead_ms", [3_600_000, -3_600_000])
async def test_what_is_due_at_once_is_due_by_the_stores_clock(database: Database, admin: Admin, ahead_ms: int) -> None:
    """Here that the payloads of a run that has ended are erased."""
    async with open_engine(database.gateway_url, lease_ms=600_000, clock=ClockAhead(ahead_ms)) as engine:
        await engine.start("r", policy=policy(retention="delete_on_success"))
        (leased,) = await engine.lease()
        await engine.put(leased, 2, then={"type": "complete", "output": {"tier": "inline", "value": 1}, "positions": 0})
        late = await admin.fetchval("SELECT extract(epoch FROM clock_timestamp() - due_at) FROM tga.runs")
    assert 0 <= late < 600


async def test_where_nothing_will_be_due_the_store_says_so_and_the_sweep_looks_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, looks = engine.engine.ports.runs, 0
    hold_due = runs.hold_due

    async def counted(**asked: int | None) -> Due:
        nonlocal looks
        looks += 1
        assert looks == 1, "an idle gateway would ask without end"
        return await hold_due(**asked)  # type: ignore[arg-type]

    assert (await hold_due(limit=10, worker_silent_ms=None)).next_ms is None
    assert (await runs.hold_ready("default", [("onboard", f"1@{PROGRAM}")], 5)).next_ms is None
    monkeypatch.setattr(runs, "hold_due", counted)
    await RunSweep(engine.engine).once()
    assert looks == 1
