"""Counts of calls by time, server and tool, from what was folded of the ledger (migration 0023). Two indexed queries,
whose cost follows the spans of time and the tools asked for, never the number of calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from app.core.limits import APPROVALS_COUNTED_MAX
from app.postgres.sessions import Sessions

_STEPS_PER_DOUBLING: Final = 4

_COUNTS: Final = """
SELECT began, subject, name, measure, detail, sum(calls)::bigint AS calls
  FROM tga.call_counts
 WHERE tenant = $1 AND span_s = $2 AND began >= $3 AND began < $4
   AND ($5::text IS NULL OR subject = $5) AND ($6::text IS NULL OR name = $6)
 GROUP BY GROUPING SETS ((began, measure, detail), (subject, name, measure, detail))
"""
_NOW: Final = f"""
SELECT (SELECT count(*) FROM (SELECT FROM tga.at_rest r WHERE r.tenant = $1 AND r.waiting = 'supervisor'
                               AND r.stream >= 'trace:' AND r.stream < 'trace;' LIMIT {APPROVALS_COUNTED_MAX}) AS w
       ) AS waiting,
       (SELECT count(*) FROM (SELECT FROM tga.at_rest r WHERE r.tenant = $1 AND r.waiting = 'operator'
                               AND r.stream >= 'trace:' AND r.stream < 'trace;' LIMIT {APPROVALS_COUNTED_MAX}) AS w
       ) AS held,
       (SELECT count(*) FROM (SELECT FROM tga.in_work w JOIN tga.heads h ON h.stream_no = w.stream_no
                               WHERE w.kind = 'trace' AND h.tenant = $1 AND h.is_open AND h.waiting IS NULL
                               LIMIT {APPROVALS_COUNTED_MAX}) AS w) AS in_flight,
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
    """By when calls were asked for, and by qualified server and tool."""

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
    for row in await sessions.fetch(_COUNTS, tenant, span_s, since, until, server_id, tool_name):
        said = (row["measure"], row["detail"], row["calls"])
        if row["began"] is not None:
            counted.by_time.setdefault(row["began"], Tally()).add(*said)
            counted.total.add(*said)
        else:
            counted.by_tool.setdefault((row["subject"], row["name"]), Tally()).add(*said)
    return counted


async def load_standing(sessions: Sessions, tenant: str) -> Standing:
    (row,) = await sessions.fetch(_NOW, tenant)
    return Standing(row["waiting"], row["held"], row["in_flight"], row["folded"], row["tree_size"] or 0)
