"""When a schedule starts runs: pure functions of what it says and of a time that is given.

A schedule has a set of times, and each question is about that set: the first time after another, the latest ones up to
another. Cron is read as Debian's cron reads it, in the local time of the schedule's zone:

| the clocks | a fixed local time (`30 2 * * *`)                       | minutes or hours by star (`*/30 * * * *`)    |
|------------|--------------------------------------------------------|-----------------------------------------------|
| skip it    | at once after the gap                                  | as time goes on: not in the gap               |
| repeat it  | once, the first time                                   | both times                                    |

An interval counts from the time when the schedule was recorded, and knows no clocks.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from app.core.digest import digest_of_bytes
from app.core.errors import SchemaViolation
from app.core.limits import SCHEDULE_CATCH_UP_MAX, SCHEDULE_LATE_MS
from app.domain.system.documents import CronSpec, IntervalSpec, Schedule

_CRON_FIELDS = 5
_DIGEST_CHARS = 32
_RUN_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")
_RUN_ID_CHARS_MAX = 96
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Timetable:
    """The times of a schedule. `since`: when it was recorded; none is before that."""

    spec: CronSpec | IntervalSpec
    since: str

    @classmethod
    def of(cls, schedule: Schedule) -> Timetable:
        return cls(schedule.spec, schedule.recorded_at)


@dataclass(frozen=True, slots=True)
class Firing:
    """For which times runs are started now, oldest first, and when the schedule is due next; None: never again."""

    times: tuple[str, ...]
    next_at: str | None


def verify_spec(spec: CronSpec | IntervalSpec) -> None:
    """Raise SchemaViolation unless the times of the schedule can be computed."""
    if isinstance(spec, IntervalSpec):
        return
    _zone(spec.time_zone)
    if len(spec.expression.split()) != _CRON_FIELDS:
        raise SchemaViolation(
            "the cron expression",
            expected="five fields: minute, hour, day of month, month, day of week",
            found=f"{len(spec.expression.split())} fields",
        )
    try:
        next(CronSim(spec.expression, datetime(2026, 1, 1, tzinfo=UTC)))
    except CronSimError as error:
        raise SchemaViolation("the cron expression", expected="fields that cron knows", found=str(error)) from None
    except StopIteration:
        raise SchemaViolation("the cron expression", expected="a time within 50 years", found="none") from None


def next_after(table: Timetable, after: str) -> str | None:
    """The first of its times that is later than `after` and than the schedule itself; None: there is none."""
    start = max(_read(after), _read(table.since))
    found = _next(table, start)
    return None if found is None else _written(found)


def latest_times(table: Timetable, *, first: str, until: str, limit: int) -> list[str]:
    """The latest of its times from `first` to `until`, both included, oldest first, at most `limit` of them."""
    begin, end = _read(first) - _MILLISECOND, _read(until)
    begin = max(begin, _read(table.since))
    span = timedelta(minutes=1)
    # Backwards in steps that double: of a year of missed minutes only the last ones are looked at.
    while True:
        start = max(begin, end - span)
        found: deque[datetime] = deque(maxlen=limit)
        moment = _next(table, start)
        while moment is not None and moment <= end:
            found.append(moment)
            moment = _next(table, moment)
        if len(found) == limit or start <= begin:
            return [_written(moment) for moment in found]
        span *= 2


def decide_firing(schedule: Schedule, *, next_at: str, now: str) -> Firing:
    """What to start when it is `now` and the schedule has been due since `next_at`.

    `skip`: nothing that was missed. `one`: a run for the last time, however many were missed. `all`: a run for each, of
    more than SCHEDULE_CATCH_UP_MAX for the latest.
    """
    table = Timetable.of(schedule)
    if now < next_at:
        return Firing((), next_at)
    limit = SCHEDULE_CATCH_UP_MAX if schedule.missed == "all" else 1
    times = latest_times(table, first=next_at, until=now, limit=limit)
    if schedule.missed == "skip":
        in_time = _written(_read(now) - timedelta(milliseconds=SCHEDULE_LATE_MS))
        times = [time for time in times if time >= in_time]
    return Firing(tuple(times), next_after(table, now))


def run_of_schedule(name: str, time: str) -> str:
    """The id of the run that the schedule starts for this time: whichever gateway starts it, it is the same run."""
    return f"{name}:{time}"


def run_of_event(procedure: str, event_id: str) -> str:
    """The id of the run that an event starts. An event's id that no run's id can hold stands in it as a digest."""
    run_id = f"{procedure}:{event_id}"
    if len(run_id) <= _RUN_ID_CHARS_MAX and _RUN_ID_CHARS.issuperset(event_id):
        return run_id
    return f"{procedure}:{digest_of_bytes(event_id.encode('utf-8'))[:_DIGEST_CHARS]}"


def _next(table: Timetable, after: datetime) -> datetime | None:
    spec = table.spec
    if isinstance(spec, IntervalSpec):
        since, every = _read(table.since), timedelta(milliseconds=spec.every_ms)
        return since + every * ((after - since) // every + 1)
    # In a local hour that is repeated the library may find a time of the first one: look on until it is later.
    found: datetime
    for found in CronSim(spec.expression, after.astimezone(_zone(spec.time_zone))):
        moment = found.astimezone(UTC)
        if moment > after:
            return moment
    return None


@functools.lru_cache(maxsize=1_000)
def _zone(name: str) -> ZoneInfo:
    if name != "localtime":  # of this machine, and not of others
        with contextlib.suppress(OSError, ValueError, KeyError):
            return ZoneInfo(name)
    raise SchemaViolation("the time zone", expected="a name of the IANA database, as Europe/Berlin", found=name)


def _read(time: str) -> datetime:
    return datetime.fromisoformat(time)


def _written(moment: datetime) -> str:
    utc = moment.astimezone(UTC)
    return f"{utc:%Y-%m-%dT%H:%M:%S}.{utc.microsecond // 1000:03d}Z"
