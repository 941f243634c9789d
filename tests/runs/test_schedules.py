"""The times of a schedule: one set, whoever asks and from where; clocks that jump; what is missed."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Literal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from app.core.errors import SchemaViolation
from app.core.limits import SCHEDULE_CATCH_UP_MAX, SCHEDULE_LATE_MS
from app.domain.identity import Principal
from app.domain.runs.schedules import (
    Firing,
    Timetable,
    decide_firing,
    latest_times,
    next_after,
    run_of_event,
    run_of_schedule,
    verify_spec,
)
from app.domain.runs.values import RunId
from app.domain.system.documents import CronSpec, IntervalSpec, Schedule

EXAMPLES = 2_000 if os.environ.get("TGA_SOAK") else 60
SINCE = "2026-01-01T00:00:00.000Z"
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Kolkata")


def cron(expression: str, time_zone: str = "Europe/Berlin", since: str = SINCE) -> Timetable:
    return Timetable(CronSpec(type="cron", expression=expression, time_zone=time_zone), since)


def interval(every_ms: int, since: str = SINCE) -> Timetable:
    return Timetable(IntervalSpec(type="interval", every_ms=every_ms), since)


def some(table: Timetable, after: str, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        following = next_after(table, found[-1] if found else after)
        assert following is not None
        found.append(following)
    return found


def local(time: str, zone: str = "Europe/Berlin") -> str:
    return f"{datetime.fromisoformat(time).astimezone(ZoneInfo(zone)):%d %H:%M}"


def written(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


# Clocks that jump. In Berlin 2 o'clock becomes 3 on 29 March 2026, and 3 becomes 2 on 25 October.


def test_a_fixed_time_that_the_clocks_skip_comes_at_once_after_the_gap() -> None:
    found = some(cron("30 2 * * *"), "2026-03-27T12:00:00.000Z", 3)
    assert [local(time) for time in found] == ["28 02:30", "29 03:00", "30 02:30"]


def test_a_fixed_time_that_the_clocks_repeat_comes_once() -> None:
    found = some(cron("30 2 * * *"), "2026-10-24T12:00:00.000Z", 2)
    assert found == ["2026-10-25T00:30:00.000Z", "2026-10-26T01:30:00.000Z"]
    # Also for who asks in the second of the two hours.
    assert next_after(cron("30 2 * * *"), "2026-10-25T01:10:00.000Z") == "2026-10-26T01:30:00.000Z"


def test_times_by_star_follow_time_itself_and_not_the_clocks() -> None:
    for after in ("2026-03-28T23:40:00.000Z", "2026-10-24T23:40:00.000Z"):
        found = [datetime.fromisoformat(time) for time in some(cron("*/30 * * * *"), after, 8)]
        assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(minutes=30)}


def test_a_schedule_in_a_zone_keeps_its_local_time_over_the_year() -> None:
    found = some(cron("0 9 1 * *", "America/New_York"), "2026-01-15T00:00:00.000Z", 12)
    assert {local(time, "America/New_York")[3:] for time in found} == {"09:00"}
    assert len({time[11:13] for time in found}) == 2  # two hours of UTC


@st.composite
def tables(draw: st.DrawFn) -> Timetable:
    if draw(st.booleans()):
        return interval(draw(st.integers(1_000, 40 * 86_400_000)))
    minute = draw(st.sampled_from(["*", "*/7", "0", "30", "15,45", "59"]))
    hour = draw(st.sampled_from(["*", "*/2", "0", "1,2,3", "2", "3", "23"]))
    day, weekday = draw(
        st.sampled_from([("*", "*"), ("1", "*"), ("*", "SUN"), ("L", "*"), ("*", "MON#1"), ("29", "*")])
    )
    return cron(f"{minute} {hour} {day} * {weekday}", draw(st.sampled_from(ZONES)))


moments = st.one_of(
    st.integers(0, 760 * 86_400_000).map(lambda ms: datetime(2025, 12, 1, tzinfo=UTC) + timedelta(milliseconds=ms)),
    # Around the nights in which clocks jump.
    st.tuples(
        st.sampled_from([datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC)]),
        st.integers(-172_800_000, 172_800_000),
    ).map(lambda at: at[0] + timedelta(milliseconds=at[1])),
).map(written)


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables(), moments, st.floats(0, 1))
@example(cron("30 2 * * *"), "2026-10-25T00:30:00.000Z", 0.5)
@example(cron("15,45 2 * * *"), "2026-03-28T12:00:00.000Z", 0.99)
def test_who_asks_from_anywhere_between_two_times_finds_the_same_next(
    table: Timetable, start: str, share: float
) -> None:
    first, second = some(table, start, 2)
    assert max(start, SINCE) < first < second
    between = datetime.fromisoformat(first)
    between += (datetime.fromisoformat(second) - between) * share
    asked = min(written(between), written(datetime.fromisoformat(second) - timedelta(milliseconds=1)))
    assert next_after(table, asked) == second


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables(), moments, st.integers(1, 30), st.integers(1, 40))
def test_the_latest_times_are_the_last_of_all(table: Timetable, start: str, count: int, limit: int) -> None:
    every = some(table, start, count)
    assert latest_times(table, first=every[0], until=every[-1], limit=limit) == every[-limit:]
    last = datetime.fromisoformat(every[-1])
    before_last = written(last - timedelta(milliseconds=1))
    assert latest_times(table, first=every[0], until=before_last, limit=limit) == every[:-1][-limit:]


def test_of_a_year_of_minutes_only_the_last_are_looked_at() -> None:
    found = latest_times(
        cron("* * * * *"), first="2026-01-02T00:00:00.000Z", until="2027-01-02T00:00:00.000Z", limit=100
    )
    assert (len(found), found[0], found[-1]) == (100, "2027-01-01T22:21:00.000Z", "2027-01-02T00:00:00.000Z")


# What was missed


def schedule(missed: Literal["skip", "one", "all"], every_ms: int = 60_000) -> Schedule:
    return Schedule(
        system_id="default",
        recorded_at=SINCE,
        recorded_by="ada",
        name="nightly",
        procedure="onboard",
        version=None,
        input=None,
        spec=IntervalSpec(type="interval", every_ms=every_ms),
        missed=missed,
        principal=Principal(principal_id="ada", tenant="default", roles=["agent"]),
    )


@pytest.mark.parametrize("missed", ["skip", "one", "all"])
def test_a_time_that_is_just_due_is_fired_by_every_policy(missed: Any) -> None:
    fired = decide_firing(schedule(missed), next_at="2026-01-01T00:01:00.000Z", now="2026-01-01T00:01:00.400Z")
    assert fired == Firing(("2026-01-01T00:01:00.000Z",), "2026-01-01T00:02:00.000Z")


@pytest.mark.parametrize(
    ("missed", "expected"),
    [("skip", ["00:05"]), ("one", ["00:05"]), ("all", ["00:01", "00:02", "00:03", "00:04", "00:05"])],
)
def test_of_several_times_the_policy_says_which_are_fired(missed: Any, expected: list[str]) -> None:
    fired = decide_firing(schedule(missed), next_at="2026-01-01T00:01:00.000Z", now="2026-01-01T00:05:30.000Z")
    assert [time[11:16] for time in fired.times] == expected
    assert fired.next_at == "2026-01-01T00:06:00.000Z"


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("one", 1), ("all", 1)])
def test_a_time_that_is_long_past_is_skipped_only_where_that_is_asked_for(missed: Any, count: int) -> None:
    daily = schedule(missed, every_ms=86_400_000)
    late = written(datetime(2026, 1, 2, tzinfo=UTC) + timedelta(milliseconds=SCHEDULE_LATE_MS + 1))
    fired = decide_firing(daily, next_at="2026-01-02T00:00:00.000Z", now=late)
    assert (len(fired.times), fired.next_at) == (count, "2026-01-03T00:00:00.000Z")
    in_time = written(datetime(2026, 1, 2, tzinfo=UTC) + timedelta(milliseconds=SCHEDULE_LATE_MS))
    assert len(decide_firing(daily, next_at="2026-01-02T00:00:00.000Z", now=in_time).times) == 1


def test_even_all_is_bounded_and_the_latest_count() -> None:
    fired = decide_firing(schedule("all"), next_at="2026-01-01T00:01:00.000Z", now="2026-06-01T00:00:00.000Z")
    assert len(fired.times) == SCHEDULE_CATCH_UP_MAX
    assert fired.times[-1] == "2026-06-01T00:00:00.000Z"


def test_what_is_not_due_is_not_fired() -> None:
    fired = decide_firing(schedule("all"), next_at="2026-01-01T00:01:00.000Z", now="2026-01-01T00:00:59.999Z")
    assert fired == Firing((), "2026-01-01T00:01:00.000Z")


# What is refused


@pytest.mark.parametrize(
    ("expression", "zone", "told"),
    [
        ("* * * *", "UTC", "five fields"),
        ("0 * * * * *", "UTC", "five fields"),
        ("61 * * * *", "UTC", "Bad minute"),
        ("0 0 30 2 *", "UTC", "Bad day-of-month"),
        ("x y z a b", "UTC", "Bad"),
        ("0 0 * * *", "Europe/Berlim", "Europe/Berlim"),
        ("0 0 * * *", "localtime", "IANA"),
        ("0 0 * * *", "a/../../etc/passwd", "IANA"),
    ],
)
def test_a_schedule_without_times_is_refused(expression: str, zone: str, told: str) -> None:
    with pytest.raises(SchemaViolation, match=told):
        verify_spec(CronSpec.model_construct(type="cron", expression=expression, time_zone=zone))


# Ids of runs


def test_a_time_gives_the_same_run_whoever_fires_it() -> None:
    assert run_of_schedule("nightly", "2026-01-01T00:00:00.000Z") == "nightly:2026-01-01T00:00:00.000Z"


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True), st.from_regex(r"[!-~]{1,128}", fullmatch=True)
)
def test_every_event_has_a_run_id_of_its_own(procedure: str, event_id: str) -> None:
    run_id = TypeAdapter(RunId).validate_python(run_of_event(procedure, event_id))
    assert "/" not in run_id
    assert run_of_event(procedure, event_id) == run_id
    assert run_of_event(procedure, event_id + "!") != run_id


def test_an_event_id_that_fits_is_readable() -> None:
    assert run_of_event("onboard", "evt-17") == "onboard:evt-17"
    assert run_of_event("onboard", "evt 17").startswith("onboard:")
    assert len(run_of_event("p" * 63, "e" * 128)) == 96
