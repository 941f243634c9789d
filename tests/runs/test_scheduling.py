"""Schedules on the record and in the store: fired once for each time, whoever fires and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from app.core.canonical import parse_object
from app.core.errors import (
    InputTooLarge,
    ProcedureNotFound,
    ScheduleLimitReached,
    ScheduleNotFound,
    SchemaViolation,
    StartDenied,
    StoreUnavailable,
)
from app.domain.identity import Principal
from app.domain.runs import scheduling as scheduling_module
from app.domain.runs.documents import Trigger
from app.domain.runs.procedures import Procedures, ProcedureSaid
from app.domain.runs.scheduling import Fired, Schedules
from app.domain.runs.starting import RunStarted, StartAsked
from app.domain.runs.triggers import Triggers
from app.domain.system.documents import Schedule
from app.postgres.database import Database
from app.postgres.schedules import PostgresSchedules
from tests.conftest import Admin
from tests.invariants.plans import verify_all
from tests.runtime.scripted import Scripted, open_scripted

ADA: Final = Principal(principal_id="ada", tenant="default", roles=["agent"])
DAILY: Final = {"type": "interval", "every_ms": 86_400_000}
PERIOD: Final[dict[str, Any]] = {"type": "interval", "every_ms": 864_000_000}  # so long that none ends during a test


class Starts:
    """Starts once for each id, as the engine does; fails as it is told."""

    def __init__(self) -> None:
        self.asked: list[StartAsked] = []
        self.runs: dict[str, StartAsked] = {}
        self.fails: list[Exception] = []

    async def __call__(self, asked: StartAsked) -> RunStarted:
        self.asked.append(asked)
        if self.fails:
            raise self.fails.pop(0)
        is_new = asked.run_id not in self.runs
        self.runs.setdefault(asked.run_id, asked)
        return RunStarted(asked.run_id, is_new)


def schedule(name: str = "nightly", **changes: Any) -> Schedule:
    said: dict[str, Any] = {"procedure": "onboard", "version": None, "input": {"day": 1}, "spec": DAILY}
    said |= {"missed": "one", "principal": ADA, "system_id": "default", "recorded_by": "ada"}
    return Schedule.made(**{"name": name, "recorded_at": "2026-01-01T00:00:00.000Z", **said, **changes})


def schedules_of(scripted: Scripted, **store: Any) -> Schedules:
    return Schedules(scripted.system.log, PostgresSchedules(scripted.sessions, **store), scripted.clock)


async def recorded(admin: Admin) -> list[str]:
    rows = await admin.fetch(
        "SELECT artifact FROM tga.artifacts WHERE stream = 'system:default' ORDER BY sequence_number"
    )
    found = [parse_object(row["artifact"]) for row in rows]
    return [str(one["schema_id"])[7:] for one in found if "schedule" in str(one["schema_id"])]


async def make_due(admin: Admin, *, periods: int = 1, name: str = "nightly") -> str:
    """Due at one of the schedule's past times: the last one, or so many periods before it."""
    return str(
        await admin.fetchval(
            "UPDATE tga.schedules SET next_at = since"
            " + (floor(extract(epoch FROM clock_timestamp() - since) / $3) - $2) * $3 * interval '1 second'"
            " FROM (SELECT '2026-01-01T00:00:00Z'::timestamptz AS since) AS s"
            " WHERE name = $1 RETURNING to_char(next_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"')",
            name,
            periods,
            PERIOD["every_ms"] // 1000,
        )
    )


async def test_a_schedule_is_recorded_once_and_due_at_its_next_time(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = schedules_of(scripted)
        first = await known.set(schedule())
        again = await known.set(schedule(recorded_at="2026-01-01T05:00:00.000Z"))
        assert first == again
        assert (first.procedure, first.principal_id, first.last_at) == ("onboard", "ada", None)
        assert str(first.next_at).endswith("T00:00:00.000Z")
        assert await recorded(admin) == ["schedule"]
        changed = await known.set(schedule(missed="all"))
        assert (changed.missed, changed.sequence_number > first.sequence_number) == ("all", True)
        assert await known.remove("default", "nightly", removed_by="olga")
        assert not await known.remove("default", "nightly", removed_by="olga")
        with pytest.raises(ScheduleNotFound):
            await known.load("default", "nightly")
        assert await recorded(admin) == ["schedule", "schedule", "schedule_removal"]
        await verify_all(scripted.sessions)


async def test_a_due_schedule_starts_its_run_as_who_made_it_and_is_due_at_the_next_time(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known, start = schedules_of(scripted), Starts()
        await known.set(schedule(spec=PERIOD, missed="all"))
        assert await known.fire_due(start) == []
        due = await make_due(admin, periods=1)
        (fired,) = await known.fire_due(start)
        assert fired.times[0] == due
        asked = start.asked[0]
        assert (asked.principal, asked.procedure, asked.version, asked.input) == (ADA, "onboard", None, {"day": 1})
        assert (asked.run_id, asked.trigger) == (f"nightly:{due}", Trigger(type="schedule", id="nightly"))
        assert len(fired.times) == 2  # that one, and the one after it
        stored = await known.load("default", "nightly")
        assert (stored.last_at, stored.last_run_id) == (fired.times[-1], f"nightly:{fired.times[-1]}")
        assert stored.next_at == fired.next_at
        assert str(stored.next_at) > fired.times[-1]
        assert await known.fire_due(start) == []


async def test_gateways_that_look_at_once_fire_each_time_once(database: Database, admin: Admin) -> None:
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(open_scripted(database.gateway_url)) for _ in range(4)]
        start = Starts()
        for number in range(12):
            await schedules_of(gateways[0]).set(schedule(f"s{number}", spec=PERIOD))
            await make_due(admin, name=f"s{number}")
        fired = await asyncio.gather(*(schedules_of(gateway).fire_due(start) for gateway in gateways))
        names = sorted(one.taken.name for of_gateway in fired for one in of_gateway)
        assert names == sorted(f"s{number}" for number in range(12))
        assert len(start.asked) == len(start.runs) == 12


async def test_what_a_gateway_took_and_did_not_settle_another_starts_again_as_the_same_run(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        start = Starts()
        dying = schedules_of(scripted, hold_ms=0)
        await dying.set(schedule(spec=PERIOD))
        await make_due(admin)
        taken = await PostgresSchedules(scripted.sessions).take_due(10)
        assert len(taken) == 1
        assert await schedules_of(scripted).fire_due(start) == []  # it is held
        await admin.execute("UPDATE tga.schedules SET held_until = clock_timestamp()")
        (first,) = await dying.fire_due(start)
        # As if it had died after the start and before the settling.
        await admin.execute("UPDATE tga.schedules SET next_at = $1::text::timestamptz", taken[0].next_at)
        (second,) = await dying.fire_due(start)
        assert first.run_ids == second.run_ids
        assert len(start.runs) == 1


async def test_a_start_that_the_store_refuses_is_tried_again_and_one_that_is_denied_is_told(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known, start = schedules_of(scripted, hold_ms=0), Starts()
        await known.set(schedule(spec=PERIOD))
        due = await make_due(admin, periods=0)
        start.fails = [StoreUnavailable("away"), StartDenied("the policy does not let ada start onboard 1")]
        assert await known.fire_due(start) == []
        assert (await known.load("default", "nightly")).next_at == due
        (denied,) = await known.fire_due(start)
        assert isinstance(denied.error, StartDenied)
        stored = await known.load("default", "nightly")
        assert (stored.last_at, stored.last_run_id) == (due, None)
        assert stored.last_error == "RUN_START_DENIED: the policy does not let ada start onboard 1"
        assert str(stored.next_at) > due
        await make_due(admin, periods=0)
        await known.fire_due(start)
        stored = await known.load("default", "nightly")
        assert (stored.last_run_id, stored.last_error) == (f"nightly:{due}", None)


async def test_one_schedule_that_cannot_be_fired_stops_no_other(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known, start = schedules_of(scripted), Starts()
        for name in ("a", "b"):
            await known.set(schedule(name, spec=PERIOD))
            await make_due(admin, name=name)
        start.fails = [ProcedureNotFound("nobody has registered a procedure onboard")]
        fired: list[Fired] = await known.fire_due(start)
        assert sorted(one.error is None for one in fired) == [False, True]


async def test_a_schedule_that_is_changed_while_it_is_fired_keeps_what_was_changed(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known, start = schedules_of(scripted), Starts()
        await known.set(schedule(spec=PERIOD))
        await make_due(admin)

        async def changing(asked: StartAsked) -> RunStarted:
            await known.set(schedule(spec=DAILY, missed="skip"))
            return await start(asked)

        await known.fire_due(changing)
        stored = await known.load("default", "nightly")
        assert (stored.missed, stored.spec, stored.last_at) == ("skip", DAILY, None)
        assert str(stored.next_at).endswith("T00:00:00.000Z")


async def test_a_gateway_that_comes_late_settles_neither_what_another_settled_nor_what_was_made_anew(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        store, known, start = PostgresSchedules(scripted.sessions, hold_ms=0), schedules_of(scripted), Starts()
        await known.set(schedule(spec=PERIOD))
        due = await make_due(admin)
        (late,) = await store.take_due(10)
        await known.fire_due(start)
        settled = await known.load("default", "nightly")
        await store.settle(Fired(late, None, [due], [], StartDenied("no")))
        assert await known.load("default", "nightly") == settled
        # Made anew, and due at the same time as before.
        await make_due(admin)
        (late,) = await store.take_due(10)
        await known.set(schedule(spec=PERIOD, missed="all"))
        await make_due(admin)
        made = await known.load("default", "nightly")
        assert made.next_at == late.next_at
        await store.settle(Fired(late, None, [due], [], StartDenied("no")))
        assert await known.load("default", "nightly") == made


async def test_rows_that_were_lost_or_are_too_many_are_made_from_the_record(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = schedules_of(scripted)
        await known.set(schedule("kept"))
        await known.set(schedule("lost"))
        await known.set(schedule("removed"))
        before = await known.load("default", "lost")
        await admin.execute("DELETE FROM tga.schedules WHERE name = 'lost'")
        await admin.execute("CREATE TEMP TABLE kept AS SELECT * FROM tga.schedules WHERE name = 'removed'")
        await known.remove("default", "removed", removed_by="olga")
        await admin.execute("INSERT INTO tga.schedules SELECT * FROM kept")
        due = await make_due(admin, name="kept")
        await known.rebuild(["default"])
        assert await known.load("default", "lost") == before
        assert [one.name for one in await known.page("default", limit=10)] == ["kept", "lost"]
        assert (await known.load("default", "kept")).next_at == due  # what stands is left as it is


async def test_a_change_whose_gateway_died_before_its_row_was_written_is_finished_by_another(
    database: Database, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    async def dies(*_: Any) -> None:
        raise Died

    async with open_scripted(database.gateway_url) as scripted, open_scripted(database.gateway_url) as other:
        dying, living = schedules_of(scripted), schedules_of(other, hold_ms=0)
        await dying.set(schedule("removed"))
        assert await living._store.unfinished(10) == []
        monkeypatch.setattr(dying, "_follow", dies)
        with pytest.raises(Died):
            await dying.set(schedule("made"))
        with pytest.raises(Died):
            await dying.remove("default", "removed", removed_by="olga")
        assert [one.name for one in await living.page("default", limit=10)] == ["removed"]
        await schedules_of(other).finish()  # they may still be under way
        assert [one.name for one in await living.page("default", limit=10)] == ["removed"]
        await living.finish()
        assert [one.name for one in await living.page("default", limit=10)] == ["made"]
        assert await admin.fetchval("SELECT count(*) FROM tga.schedule_changes") == 0


async def test_a_change_that_is_refused_leaves_nothing_to_finish(
    database: Database, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling_module, "SCHEDULES_PER_TENANT_MAX", 0)
    async with open_scripted(database.gateway_url) as scripted:
        with pytest.raises(ScheduleLimitReached):
            await schedules_of(scripted).set(schedule())
        assert await admin.fetchval("SELECT count(*) FROM tga.schedule_changes") == 0


async def test_schedules_are_listed_by_name_in_pages_and_by_who_made_them(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = schedules_of(scripted)
        bob = Principal(principal_id="bob", tenant="default", roles=["agent"])
        for name, who in (("c", ADA), ("a", bob), ("b", ADA)):
            await known.set(schedule(name, principal=who))
        assert [one.name for one in await known.page("default", limit=2)] == ["a", "b"]
        assert [one.name for one in await known.page("default", after="b", limit=2)] == ["c"]
        assert [one.name for one in await known.page("default", principal_id="ada", limit=9)] == ["b", "c"]
        assert await known.page("acme", limit=9) == []


async def test_what_cannot_be_a_schedule_is_refused_and_not_recorded(
    database: Database, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = schedules_of(scripted)
        with pytest.raises(SchemaViolation, match="time zone"):
            await known.set(schedule(spec={"type": "cron", "expression": "0 0 * * *", "time_zone": "Mars/Base"}))
        with pytest.raises(InputTooLarge):
            await known.set(schedule(input={"text": "x" * 40_000}))
        monkeypatch.setattr(scheduling_module, "SCHEDULES_PER_TENANT_MAX", 1)
        await known.set(schedule())
        with pytest.raises(ScheduleLimitReached):
            await known.set(schedule("another"))
        await known.set(schedule(missed="all"))
        assert await recorded(admin) == ["schedule", "schedule"]


# Events


async def listens(known: Procedures, name: str, *events: str) -> None:
    said = ProcedureSaid.made(name=name, program_digest="a" * 64, triggers=[{"event": event} for event in events])
    await known.register(said, ADA)


async def test_an_event_starts_each_procedure_that_listens_once(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        procedures, start = Procedures(scripted.system.log, scripted.clock), Starts()
        await listens(procedures, "welcome", "customer.signed")
        await listens(procedures, "onboard", "customer.signed", "customer.moved")
        await listens(procedures, "refund", "order.returned")
        triggers = Triggers(procedures, start)
        sent = await triggers.send(ADA, "customer.signed", "evt-1", {"name": "Eve"})
        assert [(one.procedure, one.run_id, one.is_new) for one in sent] == [
            ("onboard", "onboard:evt-1", True),
            ("welcome", "welcome:evt-1", True),
        ]
        asked = start.asked[0]
        assert (asked.principal, asked.input) == (ADA, {"name": "Eve"})
        assert asked.trigger == Trigger(type="event", id="evt-1")
        again = await triggers.send(ADA, "customer.signed", "evt-1", {"name": "Eve"})
        assert [one.is_new for one in again] == [False, False]
        assert len(start.runs) == 2
        assert await triggers.send(ADA, "nothing.listens", "evt-1", None) == []
        acme = Principal(principal_id="ada", tenant="acme", roles=["agent"])
        assert await triggers.send(acme, "customer.signed", "evt-1", None) == []


async def test_a_listener_that_cannot_be_started_stops_no_other(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        procedures, start = Procedures(scripted.system.log, scripted.clock), Starts()
        await listens(procedures, "a", "signed")
        await listens(procedures, "b", "signed")
        triggers = Triggers(procedures, start)
        start.fails = [StartDenied("no")]
        first, second = await triggers.send(ADA, "signed", "1", None)
        assert (first.procedure, isinstance(first.error, StartDenied)) == ("a", True)
        assert (second.is_new, second.error) == (True, None)
        start.fails = [StartDenied("no"), StoreUnavailable("away")]
        with pytest.raises(StartDenied):
            await triggers.send(ADA, "signed", "2", None)
