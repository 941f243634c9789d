"""Counts of calls by time, server and tool, from what was folded of the ledger (migrations 0023, 0034). Two indexed
queries, whose cost follows the spans of time and the tools asked for, never the number of calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from app.core.limits import STANDING_COUNTED_MAX
from app.postgres.sessions import Sessions

_STEPS_PER_DOUBLING: Final = 4

_COUNTS: Final = "SELECT * FROM tga.counts_between($1, $2, $3, $4, $5, $6)"
_OF_SERVERS: Final = """
SELECT subject, began, measure, detail, sum(calls)::bigint AS calls
  FROM tga.call_counts
 WHERE tenant = $1 AND span_s = $2 AND began >= $3 AND began < $4
   AND measure IN ('asked', 'completed', 'failed', 'denied', 'sent', 'replayed', 'latency')
 GROUP BY subject, began, measure, detail
"""
_NOW: Final = f"""
SELECT (SELECT count(*) FROM (SELECT FROM tga.at_rest r WHERE r.tenant = $1 AND r.waiting = 'supervisor'
                               AND r.stream >= 'trace:' AND r.stream < 'trace;' LIMIT {STANDING_COUNTED_MAX}) AS w
       ) AS waiting,
       (SELECT count(*) FROM (SELECT FROM tga.at_rest r WHERE r.tenant = $1 AND r.waiting = 'operator'
                               AND r.stream >= 'trace:' AND r.stream < 'trace;' LIMIT {STANDING_COUNTED_MAX}) AS w
       ) AS held,
       (SELECT count(*) FROM (SELECT FROM tga.in_work w JOIN tga.heads h ON h.stream_no = w.stream_no
                               WHERE w.kind = 'trace' AND h.tenant = $1 AND h.is_open AND h.waiting IS NULL
                               LIMIT {STANDING_COUNTED_MAX}) AS w) AS in_flight,
       (SELECT f.next_leaf FROM tga.call_fold f) AS folded,
       (SELECT s.first_index + s.leaves FROM tga.leaf_spans s ORDER BY s.first_index DESC LIMIT 1) AS tree_size
"""  # noqa: S608 - only our own numbers


@dataclass(slots=True)
class Tally:
    """Calls of one span of time, of one tool, or of all. `latency`: calls by step of their time of dispatch."""

    asked: int = 0
    completed: int = 0
    failed: int = 0
    denied: int = 0
    sent: int = 0
    replayed: int = 0
    decided_by: dict[str, int] = field(default_factory=dict)
    rules: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    latency: dict[int, int] = field(default_factory=dict)

    def add(self, measure: str, detail: str, calls: int) -> None:
        match measure:
            case "asked" | "completed" | "failed" | "denied" | "sent" | "replayed":
                setattr(self, measure, getattr(self, measure) + calls)
            case "latency":
                self.latency[int(detail)] = self.latency.get(int(detail), 0) + calls
            case "decided_by" | "rule" | "error":
                named = {"decided_by": self.decided_by, "rule": self.rules, "error": self.errors}[measure]
                named[detail] = named.get(detail, 0) + calls

    @property
    def dispatched(self) -> int:
        return sum(self.latency.values())

    def percentile_ms(self, share: float) -> int | None:
        """The time within which this share of the dispatched calls were answered, rounded up by at most a fifth."""
        wanted, seen = share * self.dispatched, 0
        for step in sorted(self.latency):
            seen += self.latency[step]
            if seen >= wanted and seen > 0:
                return round(2 ** ((step + 1) / _STEPS_PER_DOUBLING))
        return None


@dataclass(slots=True)
class Counted:
    """By when calls were asked for, and by qualified server and tool. By time no page asks who decided, by which rules,
    or with which errors: those are in `total` and `by_tool`."""

    total: Tally
    by_time: dict[datetime, Tally]
    by_tool: dict[tuple[str, str], Tally]


@dataclass(frozen=True, slots=True)
class Standing:
    """What is under way now, counted up to a bound; and how many leaves of the tree were folded."""

    waiting: int
    held: int
    in_flight: int
    folded: int
    tree_size: int


async def load_counts(
    sessions: Sessions,
    tenant: str,
    *,
    span_s: int,
    since: datetime,
    until: datetime,
    server_id: str | None = None,
    tool_name: str | None = None,
) -> Counted:
    """`server_id` is the qualified one. `since` and `until` lie between two spans."""
    counted = Counted(Tally(), {}, {})
    for began, subject, name, measures, details, calls in await sessions.fetch(
        _COUNTS, tenant, span_s, since, until, server_id, tool_name
    ):
        tally = Tally()
        for said in zip(measures, details, calls, strict=True):
            tally.add(*said)
            if began is None:
                counted.total.add(*said)
        if began is None:
            counted.by_tool[subject, name] = tally
        else:
            counted.by_time[began] = tally
    return counted


async def load_counts_of_servers(
    sessions: Sessions, tenant: str, *, span_s: int, since: datetime, until: datetime
) -> dict[str, dict[datetime, Tally]]:
    """By qualified server and time; spans without calls are left out."""
    counted: dict[str, dict[datetime, Tally]] = {}
    for row in await sessions.fetch(_OF_SERVERS, tenant, span_s, since, until):
        tally = counted.setdefault(row["subject"], {}).setdefault(row["began"], Tally())
        tally.add(row["measure"], row["detail"], row["calls"])
    return counted


async def load_standing(sessions: Sessions, tenant: str) -> Standing:
    (row,) = await sessions.fetch(_NOW, tenant)
    return Standing(row["waiting"], row["held"], row["in_flight"], row["folded"], row["tree_size"] or 0)
