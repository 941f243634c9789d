"""What a run of one step asks of the database: two commits, and next to nothing besides (RUNS 9).

Statements are counted, not time. A look for ready runs and an announcement come at most once a tick, however many runs
there are, and on a slow machine there are more ticks: those are bounded by the time that it took.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.api.runs import shown
from app.clock import SystemClock
from app.core.limits import RUN_ANNOUNCE_TICK_MS, RUN_READY_AGAIN_MS
from app.domain.ledger.plans import Ledger, Plan
from app.domain.runs.engine import leasing
from app.domain.runs.engine.calling import AnswerTold
from app.domain.runs.engine.messages import LeaseRequest, PutRequest
from app.domain.runs.engine.viewing import view, view_of_born
from app.postgres.database import Database
from app.postgres.sessions import Sessions
from tests.runs.engines import PROGRAM, WORKER, Engine, open_engine, step
from tests.runs.world import until

RUNS = 12
SLOTS = 4
COMPLETE = {"type": "complete", "output": {"tier": "inline", "value": 1}, "positions": 1}
# What a statement is for, by what is in it.
KNOWN = {
    "tga.append(": "append",
    "tga.hold_ready_runs": "look",
    "pg_notify": "announcement",
    "tga.beat_worker": "beat",
}


class Asked(Counter[str]):
    """How often the database was asked, by what for; what is not known here by its text."""

    under_way = 0  # statements that are not answered yet


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    counted = Asked()
    fetch, commit = Sessions.fetch, Sessions.commit

    def count(statement: str) -> None:
        counted[next((name for part, name in KNOWN.items() if part in statement), statement)] += 1

    async def fetching(self: Sessions, statement: str, *arguments: Any) -> Any:
        count(statement)
        counted.under_way += 1
        try:
            return await fetch(self, statement, *arguments)
        finally:
            counted.under_way -= 1

    async def committing(self: Sessions, statement: str, *arguments: Any) -> Any:
        count(statement)
        return await commit(self, statement, *arguments)

    monkeypatch.setattr(Sessions, "fetch", fetching)
    monkeypatch.setattr(Sessions, "commit", committing)
    return counted


class _Told:
    """Stored runs, of which one method is another."""

    def __init__(self, runs: Any, announce: Any) -> None:
        self._runs = runs
        self.announce = announce

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runs, name)


async def perform(engine: Engine, run_id: str) -> None:
    """The worker has more slots than it gets runs, as a real one has: it would take others that are ready."""
    waiting = asyncio.create_task(engine.lease(SLOTS, wait_ms=60_000))
    await asyncio.sleep(0)
    started = await engine.start(run_id)
    assert started.state == "RUNNING"  # start and lease are one commit
    (run,) = await waiting
    answer = await engine.put(run, run.sequence_number, step("1"), then=COMPLETE)
    assert answer.directive == "DONE"


async def test_a_run_of_one_step_is_two_commits_and_reads_nothing(database: Database, asked: Asked) -> None:
    async with open_engine(database.gateway_url) as engine:
        assert await engine.lease() == []
        await perform(engine, "first")  # from here on worker and program are known
        asked.clear()
        began = time.monotonic()
        for number in range(RUNS):
            await perform(engine, f"run-{number}")
        took_ms = (time.monotonic() - began) * 1000
        found = asked.copy()
    assert found.pop("append") == 2 * RUNS
    # Of the run's end; that it was born to a worker who waits here is told to none.
    assert found.pop("announcement", 0) <= min(1 + RUNS, 2 + took_ms / RUN_ANNOUNCE_TICK_MS)
    assert found.pop("look", 0) <= 2 + took_ms / RUN_READY_AGAIN_MS
    assert found.pop("beat", 0) <= took_ms / (30_000 / 6)
    assert not found


async def test_a_put_is_one_commit_and_reads_nothing(database: Database, asked: Asked) -> None:
    async with open_engine(database.gateway_url) as engine:
        await engine.start("putting")
        (run,) = await engine.lease()
        seen = run.sequence_number
        await asyncio.sleep(2 * RUN_ANNOUNCE_TICK_MS / 1000)
        asked.clear()
        for number in range(1, RUNS + 1):
            seen = (await engine.put(run, seen, step(str(number)))).sequence_number
        found = asked.copy()
    found.pop("announcement", None)  # of the lease, if it was late
    assert found == {"append": RUNS}


async def test_workers_that_ask_again_and_again_are_looked_for_once_in_a_while(
    database: Database, asked: Asked
) -> None:
    async with open_engine(database.gateway_url) as engine:
        assert await engine.lease() == []
        asked.clear()
        began = time.monotonic()
        for _ in range(RUNS):
            waiting = asyncio.create_task(engine.lease(wait_ms=60_000))
            await asyncio.sleep(0.005)  # time enough to begin a look, if there is reason to
            await until(lambda: asked.under_way == 0)  # of a look whose worker has left nothing is remembered
            waiting.cancel()
            await asyncio.wait([waiting])
        took_ms = (time.monotonic() - began) * 1000
        assert asked["look"] <= 2 + took_ms / RUN_READY_AGAIN_MS


async def test_a_gateway_does_not_listen_to_itself(database: Database, asked: Asked) -> None:
    async with open_engine(database.gateway_url) as here, open_engine(database.gateway_url) as there:
        told: list[str] = []
        announcing = here.engine.ports.runs.announce

        async def announce(run_ids: Any) -> None:
            told.append("\n".join(run_ids))
            await announcing(run_ids)

        object.__setattr__(here.engine.ports, "runs", _Told(here.engine.ports.runs, announce))
        await here.start("changed")
        await until(lambda: bool(told))
        for engine, is_news in ((here.engine, False), (there.engine, True)):
            async with engine.watchers.watching("changed") as changed:
                engine.heard(told[0])
                assert changed.is_set() is is_news


async def test_a_run_that_no_announcement_told_of_is_found_a_moment_later(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways that do not hear each other: what one has just not found is looked for again."""
    monkeypatch.setattr(leasing, "RUN_READY_POLL_MS", 3_600_000)
    monkeypatch.setattr(leasing, "RUN_READY_AGAIN_MS", 500)
    async with open_engine(database.gateway_url) as here, open_engine(database.gateway_url) as there:
        assert await here.lease() == []
        assert (await there.start("unheard")).state == "SCHEDULED"
        (run,) = await here.lease(wait_ms=20_000)
        assert run.run_id == "unheard"


async def test_what_a_start_answers_without_reading_is_what_reading_would_say(database: Database, asked: Asked) -> None:
    async with open_engine(database.gateway_url) as engine:
        ports = engine.engine.ports
        ready = await engine.start("ready", {"n": 1})
        assert len(await engine.lease()) == 1  # before the other's worker waits
        waiting = asyncio.create_task(engine.lease(wait_ms=60_000))
        await asyncio.sleep(0)
        asked.clear()
        leased = await engine.start("leased")
        assert asked["append"] == 1
        assert leased.born is not None
        told = shown(await view_of_born(ports, leased.born), "default")
        assert set(asked) <= {"append", "look", "announcement"}
        assert told == shown(await view(ports, "leased"), "default")
        assert len(await waiting) == 1
        assert ready.born is not None
        was = shown(await view_of_born(ports, ready.born), "default")
        assert (was["state"], was["sequence_number"], was["notice"]) == ("SCHEDULED", 1, None)
        again = await engine.start("ready", {"n": 1})
        assert (again.replayed, again.born) == (True, None)


async def test_a_run_that_waits_for_a_known_worker_is_three_commits_and_reads_nothing(
    database: Database, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is at work when it is started, and asks a moment later: as one does that has many runs at once."""
    # On a slow machine that moment may be long, and a worker that was silent for a while beats again.
    monkeypatch.setattr(leasing, "RUN_SALT_KEPT_MS", 600_000)
    async with open_engine(database.gateway_url, lease_ms=600_000) as engine:
        assert await engine.lease() == []  # else the first run may be started before its worker is known, and waits
        ports, leasing_here = engine.engine.ports, engine.engine.leasing
        await perform(engine, "first")  # from here on worker and program are known
        asked.clear()
        started = await engine.start("ready")
        assert started.state == "SCHEDULED"
        assert started.born is not None
        has_worker = leasing_here.has_seen_worker("default", "onboard", f"1@{PROGRAM}")
        assert has_worker
        told = shown(await view_of_born(ports, started.born, has_worker=has_worker), "default")
        (run,) = await engine.lease()
        answer = await engine.put(run, run.sequence_number, step("1"), then=COMPLETE)
        assert answer.directive == "DONE"
        found = asked.copy()
        assert found.pop("append") == 3
        assert set(found) <= {"look", "announcement"}
        assert told["notice"] is None
        kept = await ports.salts.load("ready")
        assert (run.salt, run.draw_salt) == (kept.digests.hex(), kept.draws.hex())


async def test_the_salt_of_a_run_that_no_worker_asks_for_is_not_kept_in_memory(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "RUN_SALT_KEPT_MS", 200)
    async with open_engine(database.gateway_url) as engine:
        await engine.start("first")
        assert list(engine.engine.leasing._born) == ["first"]
        await until(lambda: not engine.engine.leasing._born)
        await engine.start("second")  # the timer of the first one is over
        await until(lambda: not engine.engine.leasing._born)
        found = await engine.lease(2)
        for run in found:
            assert run.salt == (await engine.engine.ports.salts.load(run.run_id)).digests.hex()
        assert {run.run_id for run in found} == {"first", "second"}
        monkeypatch.setattr(leasing, "RUN_SALTS_KEPT_MAX", 3)
        monkeypatch.setattr(leasing, "RUN_SALT_KEPT_MS", 60_000)
        for number in range(5):
            await engine.start(f"many-{number}")
        assert list(engine.engine.leasing._born) == ["many-2", "many-3", "many-4"]


async def test_a_worker_is_taken_to_live_as_long_as_the_store_would_say_so(database: Database) -> None:
    clock = Late()
    async with open_engine(database.gateway_url, clock=clock) as engine:
        leasing_here, program = engine.engine.leasing, f"1@{PROGRAM}"
        assert not leasing_here.has_seen_worker("default", "onboard", program)
        assert await engine.lease() == []
        assert leasing_here.has_seen_worker("default", "onboard", program)
        assert not leasing_here.has_seen_worker("acme", "onboard", program)
        assert not leasing_here.has_seen_worker("default", "onboard", f"2@{PROGRAM}")
        clock.late_ms = 30_000
        assert not leasing_here.has_seen_worker("default", "onboard", program)
        assert await engine.lease() == []
        assert leasing_here.has_seen_worker("default", "onboard", program)
        other = [{"name": "another", "version": "1", "program_digest": PROGRAM}]
        request = {"worker": "worker-one", "name": "here", "procedures": other, "slots": 1, "wait_ms": 0}
        assert await leasing_here.lease(LeaseRequest.made_of(request), WORKER) == []
        assert not leasing_here.has_seen_worker("default", "onboard", program)  # it offers another one now


class Late(SystemClock):
    """Its monotonic time is ahead by what a test says."""

    late_ms = 0

    def monotonic_ms(self) -> float:
        return super().monotonic_ms() + self.late_ms


class Gate:
    """A ledger that stores nothing while it is closed."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.waiting = 0

    def around(self, ledger: Ledger) -> Ledger:
        gate = self

        class Gated:
            async def commit(self, plan: Plan) -> None:
                gate.waiting += 1
                await gate.opened.wait()
                gate.waiting -= 1
                await ledger.commit(plan)

            def __getattr__(self, name: str) -> Any:
                return getattr(ledger, name)

        return cast("Ledger", Gated())


async def test_a_start_that_comes_while_its_workers_leases_are_recorded_is_one_commit(database: Database) -> None:
    gate = Gate()
    async with open_engine(database.gateway_url, wrap=gate.around) as engine:
        await engine.start("before")
        gate.opened.clear()
        waiting = asyncio.create_task(engine.lease(2, wait_ms=60_000))
        await until(lambda: gate.waiting == 1)  # the lease of what was ready
        meanwhile = asyncio.create_task(engine.start("meanwhile"))
        await until(lambda: gate.waiting == 2)
        late = asyncio.create_task(engine.start("late"))  # for which it has no slot
        await until(lambda: gate.waiting == 3)
        gate.opened.set()
        assert [run.run_id for run in await waiting] == ["before", "meanwhile"]
        assert (await meanwhile).state == "RUNNING"
        assert (await late).state == "SCHEDULED"


async def test_a_start_is_rather_for_a_worker_that_waits_than_for_one_whose_leases_are_recorded(
    database: Database,
) -> None:
    gate = Gate()
    async with open_engine(database.gateway_url, wrap=gate.around) as engine:
        await engine.start("before")
        gate.opened.clear()
        busy = asyncio.create_task(engine.lease(2, wait_ms=60_000))
        await until(lambda: gate.waiting == 1)
        idle = asyncio.create_task(engine.lease(2, "worker-two", wait_ms=60_000))
        await until(lambda: engine.engine.leasing.waiting == 2)
        meanwhile = asyncio.create_task(engine.start("meanwhile"))
        await until(lambda: gate.waiting == 2)
        gate.opened.set()
        assert [run.run_id for run in await idle] == ["meanwhile"]
        assert [run.run_id for run in await busy] == ["before"]
        assert (await meanwhile).state == "RUNNING"


async def test_a_workers_answer_does_not_wait_for_starts_that_come_when_its_leases_are_recorded(
    database: Database,
) -> None:
    """Else it would never be answered where starts keep coming."""
    gate = Gate()
    async with open_engine(database.gateway_url, wrap=gate.around) as engine:
        waiting = asyncio.create_task(engine.lease(3, wait_ms=60_000))
        await until(lambda: bool(engine.engine.leasing.waiting))
        gate.opened.clear()
        slow = asyncio.create_task(engine.start("slow"))
        await until(lambda: gate.waiting == 1)
        (waiter,) = engine.engine.leasing._waiting
        waiter.woken.set()  # as by a start that is stored before the other
        await until(lambda: not waiter.takes_starts)
        late = asyncio.create_task(engine.start("late"))
        await until(lambda: gate.waiting == 2)
        gate.opened.set()
        assert [run.run_id for run in await waiting] == ["slow"]
        assert ((await slow).state, (await late).state) == ("RUNNING", "SCHEDULED")


@pytest.mark.parametrize(
    ("intent", "answer", "is_told"),
    [
        (8, 9, True),  # after entry 5, which the worker has seen: its two puts, its intent, the answer
        (8, 10, False),  # something came between intent and answer: a signal, an answer to another branch
        (9, 10, False),  # something came before the intent
        (4, 6, False),  # the intent of an attempt before
        (4, 9, False),
    ],
)
def test_an_answer_is_told_unread_only_where_nothing_else_was_recorded(intent: int, answer: int, is_told: bool) -> None:
    """What others have recorded meanwhile is told with it: then the journal is read."""
    request = {"lease": "l" * 20, "attempt": 1, "after_seq": 5, "puts": [step("1"), step("2")]}
    record: Any = SimpleNamespace(entry=SimpleNamespace(sequence_number=answer))
    assert AnswerTold(record, intent).follows(PutRequest.made_of(request)) is is_told
