"""Schedules of the in-memory gateway: they start runs when its clock has come, or is moved, to their times."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from tga_sdk.canonical import NotCanonical, canonical
from tga_sdk.testing import messages as m
from tga_sdk.testing.answering import Answering
from tga_sdk.testing.clock import read, written
from tga_sdk.testing.cron import Cron, CronInvalid
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.schema import misfit

CATCH_UP_MAX: Final = 100
LATE_MS: Final = 60_000


@dataclass
class MemorySchedule:
    """`said` is what it was made of. `since_ms`: when; an interval counts from there."""

    name: str
    said: dict[str, Any]
    principal: str
    since_ms: int
    next_at: str | None
    last_at: str | None = None
    last_run_id: str | None = None
    last_error: str | None = None

    def after_ms(self, at_ms: int) -> int | None:
        """The first of its times that is later."""
        return next_ms(self.said["spec"], self.since_ms, at_ms)

    def item(self) -> dict[str, Any]:
        said = self.said
        return {
            "name": self.name,
            "procedure": said["procedure"],
            "version": said["version"],
            "spec": copy.deepcopy(said["spec"]),
            "missed": said["missed"],
            "principal_id": self.principal,
            "next_at": self.next_at,
            "last_at": self.last_at,
            "last_run_id": self.last_run_id,
            "last_error": self.last_error,
        }


class Scheduling(Answering):
    """With `fires_schedules` off they are kept and start nothing: where time is moved on until nothing is due, they
    would never let it end."""

    fires_schedules = True

    def set_schedule(self, name: str, body: m.ScheduleBody, principal: str) -> MemorySchedule:
        """The same again changes nothing."""
        said = body.to_json()
        verify_spec(said["spec"])
        try:
            if len(canonical(said["input"])) > m.INLINE_BYTES_MAX:
                raise Problem("INPUT_TOO_LARGE", "the input", expected=f"at most {m.INLINE_BYTES_MAX} bytes")
        except NotCanonical as error:
            raise Problem("INPUT_MALFORMED", str(error)) from None
        schema = self.find_program(body.procedure, body.version).said["input_schema"]
        found = None if schema is None else misfit(schema, said["input"])
        if found is not None:
            place, _, expected = found.partition(": ")
            raise Problem("SCHEMA_VIOLATION", f"the input at {_pointer(place)}", expected=expected)
        known = self.schedules.get(name)
        if known is not None and known.principal == principal and canonical(known.said) == canonical(said):
            return known
        now_ms = self.clock.now_ms()
        next_at = next_ms(said["spec"], now_ms, now_ms)
        made = MemorySchedule(name, said, principal, now_ms, None if next_at is None else written(next_at))
        self.schedules[name] = made
        return made

    def load_schedule(self, name: str) -> MemorySchedule:
        found = self.schedules.get(name)
        if found is None:
            raise Problem("SCHEDULE_NOT_FOUND", f"there is no schedule {name}")
        return found

    def fire_schedules(self) -> bool:
        """Start the runs of those that are due; whether there were any."""
        now_ms, fired = self.clock.now_ms(), False
        for schedule in list(self.schedules.values()):
            if self.fires_schedules and schedule.next_at is not None and read(schedule.next_at) <= now_ms:
                self._fire(schedule, now_ms)
                fired = True
        return fired

    def next_schedule_ms(self) -> int | None:
        times = [read(one.next_at) for one in self.schedules.values() if one.next_at is not None]
        return min(times, default=None) if self.fires_schedules else None

    def _fire(self, schedule: MemorySchedule, now_ms: int) -> None:
        times: list[int] = []
        at_ms: int | None = read(schedule.next_at or "")
        while at_ms is not None and at_ms <= now_ms:
            times.append(at_ms)
            at_ms = schedule.after_ms(at_ms)
        first, missed = schedule.next_at, schedule.said["missed"]
        schedule.next_at = None if at_ms is None else written(at_ms)
        times = times[-CATCH_UP_MAX:] if missed == "all" else times[-1:]
        if missed == "skip":
            times = [one for one in times if one >= now_ms - LATE_MS]
        started, error = None, None
        for one in times:
            run_id = f"{schedule.name}:{written(one)}"
            try:
                given = self.value_of(schedule.said["input"])
                program = self.judged(schedule.said["procedure"], schedule.said["version"], given)
                trigger = ("schedule", schedule.name)
                self.start(program, given, schedule.principal, run_id=run_id, trigger=trigger)
                started = run_id
            except Problem as problem:
                error = f"{problem.code}: {problem.told()}"
        if times or error:
            schedule.last_at = written(times[-1]) if times else first
            schedule.last_run_id, schedule.last_error = started, error


def verify_spec(spec: dict[str, Any]) -> None:
    if spec["type"] == "interval":
        return
    _zone(spec["time_zone"])
    try:
        if Cron.of(spec["expression"]).after(datetime(2026, 1, 1, tzinfo=UTC), ZoneInfo("UTC")) is None:
            raise CronInvalid("expected a time within 50 years, found none")
    except CronInvalid as error:
        raise Problem(
            "SCHEMA_VIOLATION", "the cron expression", expected="fields that cron knows", found=error
        ) from None


def next_ms(spec: dict[str, Any], since_ms: int, at_ms: int) -> int | None:
    """The first time of a schedule that is later than `at_ms`, and than the schedule itself."""
    at_ms = max(since_ms, at_ms)
    if spec["type"] == "interval":
        every: int = spec["every_ms"]
        return since_ms + every * ((at_ms - since_ms) // every + 1)
    after = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=at_ms)
    found = Cron.of(spec["expression"]).after(after, _zone(spec["time_zone"]))
    return None if found is None else round(found.timestamp() * 1000)


def _pointer(place: str) -> str:
    """`at $.items[2].amount` as a JSON pointer."""
    return re.sub(r"\.|\[(\d+)\]", r"/\1", place.removeprefix("at $")) or "the top"


def _zone(name: str) -> ZoneInfo:
    try:
        if name == "localtime":
            raise KeyError(name)
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        expected = "a name of the IANA database, as Europe/Berlin"
        raise Problem("SCHEMA_VIOLATION", "the time zone", expected=expected, found=name) from None
