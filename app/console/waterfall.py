"""A page of a run's journal as rows on an axis of time: pure, from the records as the API gives them.

One row an operation, in the order of addresses. Quiet stretches (nothing began or ended for long) are folded to a
narrow strip that says how long it was; between them the axis is to scale.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final, Literal

from app.console.components import moment, span

QUIET_S: Final = 10.0  # shorter pauses are drawn to scale
FOLDS_MAX: Final = 6
BREAKS_DRAWN_MAX: Final = 20
_BREAKS: Final = {"LOST": "lost", "FENCED": "fenced", "FAILED": "failed"}  # in which an attempt did not end well
_WORDS_PERCENT: Final = 20.0  # what the words of a break take of the axis
_FOLD_PERCENT: Final = 7.0
_PATH_SHOWN: Final = 10
_WAITS: Final = frozenset({"ask", "sleep", "signal", "child"})
Standing = Literal["live", "resting", "over", "page"]
# What is said of an operation without an end where nothing is under way: the run rests and may go on, it is over for
# good, or the end stands on a later page.
_OPEN_WORDS: Final[dict[Standing, str]] = {"resting": "open", "over": "never ended", "page": "ends later"}
_NUMBERS: Final = re.compile(r"[0-9]+")
_INSIDE: Final = re.compile(r"(.*?)(?::[0-9]+)?\.[0-9]+")  # of which operation an address is inside
_ICONS: Final = {
    "tool": "tool",
    "turn": "robot",
    "model": "model",
    "ask": "person",
    "sleep": "sleep",
    "gather": "scope",
    "call": "scope",
    "scope": "scope",
    "child": "runs",
}


@dataclass(slots=True)
class Row:
    """One operation. `at`: the entry after which it has ended, or in which it began."""

    path: str
    kind: str
    name: str
    began: datetime
    at: int
    ended: datetime | None = None
    outcome: str = "open"
    tries: int = 1
    attempt: int = 0
    trace_id: str | None = None
    child_run_id: str | None = None
    error: Mapping[str, Any] | None = None
    source: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    is_inherited: bool = False  # of the run that this one was forked from
    open_words: str | None = None
    x: float = 0.0
    width: float = 0.0
    folded_inside: int = 0  # operations of this page that are not drawn (scope_folding.py)
    is_opened: bool = False

    @property
    def depth(self) -> int:
        return min(2, self.path.count("."))

    @property
    def short_path(self) -> str:
        """The end of a long address, which tells it from those around it."""
        return self.path if len(self.path) <= _PATH_SHOWN else f"…{self.path[-_PATH_SHOWN + 1 :]}"

    @property
    def icon(self) -> str:
        return _ICONS.get(self.kind, "step")

    @property
    def bar(self) -> str:
        """The class of its bar: what it was, unless it failed or waits."""
        if self.outcome in ("ERROR", "INTERRUPTED", "TIMEOUT"):
            return "b-fail"
        if self.ended is None and self.icon != "scope":
            return "b-wait" if self.open_words is None else "b-left"
        return {"tool": "b-tool", "turn": "b-model", "model": "b-model", "sleep": "b-sleep"}.get(
            self.kind, "b-scope" if self.icon == "scope" else "b-step"
        )

    @property
    def took(self) -> str:
        if self.kind == "scope":
            return ""
        if self.ended is None:
            return self.open_words or ("waits" if self.kind in _WAITS else "open")
        if self.tries > 1:
            return f"{self.tries} tries"
        return span((self.ended - self.began).total_seconds() * 1000)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the axis: a time of day, in UTC and as it is recorded, or the begin of an attempt or of the source."""

    x: float
    words: str
    time: str = ""


@dataclass(frozen=True, slots=True)
class Break:
    """Where a worker's attempt was lost or failed, or where its late worker was refused. `is_named`: there is room for
    its words on the axis; every one is a line through the rows."""

    x: float
    kind: str
    words: str
    is_named: bool


@dataclass(frozen=True, slots=True)
class Fold:
    x: float
    width: float
    words: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    rows: Sequence[Row]
    folds: Sequence[Fold]
    times: Sequence[Mark]
    attempts: Sequence[Mark]
    breaks: Sequence[Break]
    breaks_total: int


def drawn(records: Sequence[Mapping[str, Any]], until: str, standing: Standing = "live") -> Waterfall:
    """`until`: where the axis ends, which is now only while the run goes on or waits."""
    rows = sorted(_rows(records), key=lambda row: _place(row.path))
    _enclose(rows)
    leased = [one for one in records if one["artifact_type"] == "run_attempt" and one.get("change") == "LEASED"]
    broken = [one for one in records if one["artifact_type"] == "run_attempt" and one.get("change") in _BREAKS]
    axis = _Axis([*_moments(rows), *(moment(one["recorded_at"]) for one in (*leased, *broken))], moment(until))
    for row in rows:
        row.x = axis.at(row.began)
        row.width = max(0.6, axis.at(row.ended or moment(until)) - row.x)
        row.open_words = _OPEN_WORDS.get(standing)
    attempts = _attempt_marks([(axis.at(moment(one["recorded_at"])), one) for one in leased])
    breaks = _named([(axis.at(moment(one["recorded_at"])), one) for one in broken[-BREAKS_DRAWN_MAX:]])
    return Waterfall(rows, axis.folds, axis.marks(), _apart(attempts), breaks, len(broken))


def is_inherited(record: Mapping[str, Any]) -> bool:
    """Whether it is a record of the run that this one was forked from: those have numbers below 1."""
    return int(record["sequence_number"]) < 1


def _attempt_marks(places: Sequence[tuple[float, Mapping[str, Any]]]) -> list[Mark]:
    """Where each attempt began. All that a fork has from its source is one stretch: its attempts are not this run's."""
    inherited = [Mark(x, "source") for x, record in places if is_inherited(record)][:1]
    return [*inherited, *(Mark(x, f"attempt {one['attempt']}") for x, one in places if not is_inherited(one))]


def _rows(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Operations by address. One whose begin stands on a page before shows what its end says of it."""
    rows: dict[str, Row] = {}
    shifts = _clock_shifts(records)
    for record in records:
        path, kind = record.get("path"), record["artifact_type"]
        if path is None:
            continue
        at, recorded = int(record["sequence_number"]), moment(record["recorded_at"])
        row = rows.get(path)
        if kind == "run_intent":
            request = record.get("request") or {}
            row = Row(path, record["kind"], record["name"], recorded, at, tries=record.get("try_number", 1))
            row.trace_id, row.child_run_id = request.get("trace_id"), request.get("child_run_id")
            before = rows.get(path)
            # What a fork begins anew began when the fork did so, and not when its source did.
            if before is not None and before.is_inherited == is_inherited(record):
                row.began = before.began
        elif kind == "run_checkpoint":
            ended = recorded
            if row is None:
                began = moment(record["started_at"]) + shifts[_worker_of(record)]
                ended = min(recorded, began + timedelta(milliseconds=record["duration_ms"]))
            else:
                began = row.began
            row = Row(path, record["kind"], record["name"], began, at, tries=record.get("try_number", 1))
            _end(row, record, ended)
        elif kind == "run_answer":
            row = row or Row(path, "tool", "", recorded, at)
            row.at = at
            _end(row, record, recorded)
        else:
            continue
        row.attempt = record.get("attempt", row.attempt)
        row.is_inherited = is_inherited(record)
        row.source = record.get("source") or row.source
        row.record = record if kind != "run_answer" or not row.record else {**row.record, **record}
        rows[path] = row
    return list(rows.values())


def _worker_of(record: Mapping[str, Any]) -> tuple[bool, int]:
    """By whose clock a record's own times are: an attempt has one worker; a fork's attempts are not its source's."""
    return is_inherited(record), record.get("attempt", 0)


def _clock_shifts(records: Sequence[Mapping[str, Any]]) -> dict[tuple[bool, int], timedelta]:
    """By attempt, how far to move the times of its worker's clock, which need not be that of the store. An operation
    is recorded after it has ended: the shortest time between the two is what the clocks differ by, give or take a
    commit."""
    shifts: dict[tuple[bool, int], timedelta] = {}
    for record in records:
        if record["artifact_type"] == "run_checkpoint":
            ended = moment(record["started_at"]) + timedelta(milliseconds=record["duration_ms"])
            worker, late = _worker_of(record), moment(record["recorded_at"]) - ended
            shifts[worker] = min(shifts.get(worker, late), late)
    return shifts


def _end(row: Row, record: Mapping[str, Any], recorded: datetime) -> None:
    row.outcome, row.error = record["outcome"], record.get("error")
    row.ended = None if row.outcome == "RETRY" else recorded


def _enclose(rows: Sequence[Row]) -> None:
    """An operation lasts at least as long as what is inside of it."""
    by_path = {row.path: row for row in rows}
    for row in reversed(rows):  # the innermost first
        outer = by_path.get(outer_path(row.path) or "")
        if outer is not None:
            outer.began = min(outer.began, row.began)
            if outer.ended is not None and row.ended is not None:
                outer.ended = max(outer.ended, row.ended)


def outer_path(path: str) -> str | None:
    """The operation that an address is inside of."""
    inside = _INSIDE.fullmatch(path)
    return None if inside is None else inside[1]


def _place(path: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBERS.findall(path))


def _moments(rows: Sequence[Row]) -> list[datetime]:
    return [moment_ for row in rows for moment_ in (row.began, row.ended) if moment_ is not None]


def _apart(marks: Sequence[Mark]) -> list[Mark]:
    """Of marks that would stand on one another, the last."""
    kept: list[Mark] = []
    for mark in marks:
        if kept and mark.x - kept[-1].x < 8:
            kept.pop()
        kept.append(mark)
    return kept


def _named(places: Sequence[tuple[float, Mapping[str, Any]]]) -> list[Break]:
    """From the newest back, each that has room for its words beside those that have them."""
    made: list[Break] = []
    free_until = 200.0
    for x, record in reversed(places):
        begin = x if x <= 100.0 - _WORDS_PERCENT else x - _WORDS_PERCENT  # at the end they stand before their line
        is_named = begin + _WORDS_PERCENT <= free_until
        free_until = begin if is_named else free_until
        kind = _BREAKS[record["change"]]
        whose = "source's attempt" if is_inherited(record) else "attempt"
        made.append(Break(x, kind, f"{whose} {record['attempt']} {kind}", is_named))
    return made[::-1]


class _Axis:
    """From moments to percent. Pauses that are long beside all the rest are folded, the longest first."""

    def __init__(self, moments: Sequence[datetime], now: datetime) -> None:
        known = sorted({*moments, now}) if moments else [now]
        pauses = sorted(((after - before).total_seconds(), before, after) for before, after in pairwise(known))
        busy = sum(seconds for seconds, _, _ in pauses)
        folded: set[datetime] = set()
        while pauses and len(folded) < FOLDS_MAX:
            seconds, before, _ = pauses.pop()
            if seconds <= QUIET_S or seconds <= (busy - seconds) / 2:
                break
            folded.add(before)
            busy -= seconds
        drawn_percent = 100.0 - _FOLD_PERCENT * len(folded)
        self.folds: list[Fold] = []
        self._stops: list[tuple[datetime, float]] = [(known[0], 0.0)]
        for before, after in pairwise(known):
            x, seconds = self._stops[-1][1], (after - before).total_seconds()
            width = _FOLD_PERCENT if before in folded else drawn_percent * seconds / busy if busy else 0.0
            if before in folded:
                self.folds.append(Fold(x, width, f"{span(seconds * 1000, whole=True)} later"))
            self._stops.append((after, min(100.0, x + width)))
        self._moments = [when for when, _ in self._stops]

    def at(self, when: datetime) -> float:
        place = bisect_left(self._moments, when)
        if place == 0:
            return self._stops[0][1]
        if place == len(self._stops):
            return 100.0
        (before, x), (after, reached) = self._stops[place - 1 : place + 1]
        whole = (after - before).total_seconds()
        return round(x + (reached - x) * ((when - before).total_seconds() / whole if whole else 0.0), 3)

    def marks(self) -> list[Mark]:
        """Times of day: at the begin, and after each fold; none where two would stand on one another."""
        places = [self._stops[0], *((when, x) for when, x in self._stops if self._ends_a_fold(x))]
        return _apart([Mark(x, f"{when:%H:%M:%S}", when.isoformat()) for when, x in places if x < 88])

    def _ends_a_fold(self, x: float) -> bool:
        return any(abs(fold.x + fold.width - x) < 0.001 for fold in self.folds)
