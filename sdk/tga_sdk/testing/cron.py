"""Times of a cron expression, as Debian's cron reads it: five fields, in the local time of a zone.

A time that the clocks skip is at once after the gap, and one that they repeat is the first one; unless the minute or
the hour begins with a star: then time goes on as it does, not in the gap, and both times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

_MONTHS: Final = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
_DAYS: Final = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
_BOUNDS: Final = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_FIELDS: Final = ("minute", "hour", "day of month", "month", "day of week")
_YEARS: Final = 50
_MINUTE: Final = timedelta(minutes=1)


class CronInvalid(ValueError):
    """The expression is none that is known here."""


@dataclass(frozen=True)
class Cron:
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # 0 is Sunday
    either_day: bool  # both the day of month and of week are given: one of them is enough
    is_wild: bool

    @classmethod
    def of(cls, expression: str) -> Cron:
        """CronInvalid says what is wrong. Names of months and days, lists, ranges and steps are known; `L` and `#` are
        not, here alone."""
        fields = expression.upper().split()
        if len(fields) != len(_BOUNDS):
            raise CronInvalid(f"expected five fields: {', '.join(_FIELDS)}; found {len(fields)}")
        minutes, hours, days, months, weekdays = (
            _values(text, *_BOUNDS[place], name=_FIELDS[place], names={3: _MONTHS, 4: _DAYS}.get(place, []))
            for place, text in enumerate(fields)
        )
        either = not fields[2].startswith("*") and not fields[4].startswith("*")
        is_wild = fields[0].startswith("*") or fields[1].startswith("*")
        return cls(minutes, hours, days, months, frozenset(day % 7 for day in weekdays), either, is_wild)

    def after(self, moment: datetime, zone: ZoneInfo) -> datetime | None:
        """The first time that is later, in UTC; None when there is none within 50 years."""
        moment = moment.astimezone(UTC)
        first = moment.astimezone(zone).date() - timedelta(days=1)
        for number in range(366 * _YEARS):
            day = first + timedelta(days=number)
            if self._has_day(day):
                found = min((one for one in self._times(day, zone) if one > moment), default=None)
                if found is not None:
                    return found
        return None

    def _has_day(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return in_month or in_week if self.either_day else in_month and in_week

    def _times(self, day: date, zone: ZoneInfo) -> Iterator[datetime]:
        for hour in sorted(self.hours):
            for minute in sorted(self.minutes):
                local = datetime.combine(day, time(hour, minute), zone)
                once = local.astimezone(UTC)
                is_there = once.astimezone(zone).replace(tzinfo=None) == local.replace(tzinfo=None)
                if is_there:
                    yield once
                    if self.is_wild:
                        yield local.replace(fold=1).astimezone(UTC)
                elif not self.is_wild:
                    yield _gap_end(local, zone)


def _gap_end(local: datetime, zone: ZoneInfo) -> datetime:
    """When the clocks, which skip this time, have been put forward."""
    early = local.replace(fold=1).astimezone(UTC)
    while early.astimezone(zone).replace(tzinfo=None) < local.replace(tzinfo=None):
        early += _MINUTE
    return early


def _values(text: str, low: int, high: int, *, name: str, names: list[str]) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\*|(\w+)(?:-(\w+))?)(?:/(\d+))?", part)
        if match is None:
            raise CronInvalid(f"{name}: {part!r} is none of *, 5, 1-5, */5, 1-5/2 and lists of them")
        step = 1 if match[4] is None else int(match[4])
        if match[1] == "*":
            first, last = low, 6 if high == 7 else high
        else:
            first = _number(match[2], name, names)
            last = _number(match[3], name, names) if match[3] else high if match[4] is not None else first
        if step < 1 or not low <= first <= last <= high:
            raise CronInvalid(f"{name}: expected {low} to {high}, found {part!r}")
        found.update(range(first, last + 1, step))
    return frozenset(found)


def _number(text: str, name: str, names: list[str]) -> int:
    if text in names:
        return names.index(text) + (1 if names is _MONTHS else 0)
    if not text.isdecimal() or not text.isascii():
        raise CronInvalid(f"{name}: {text!r} is no number" + (f" and none of {', '.join(names)}" if names else ""))
    return int(text)
