"""Statistics of a tenant's calls, for every way in: how many, what became of them, how quick, by time, server, tool."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from app.config import qualify
from app.core.errors import InputMalformed
from app.core.limits import STATS_TOOLS_MAX, STATS_WINDOW_DAYS_MAX
from app.domain.identity import Principal
from app.edge.parameters import own_name
from app.edge.services import Services
from app.postgres.statistics import Counted, Tally, load_counts, load_counts_of_servers, load_standing

_DAY_S: Final = 86_400
# Up to which length of the window which spans are read.
_SPANS: Final = (
    (3 * 3_600, 60),
    (2 * _DAY_S, 1_800),
    (8 * _DAY_S, 14_400),
    (STATS_WINDOW_DAYS_MAX * _DAY_S, _DAY_S),
)
WINDOW_S_DEFAULT: Final = _DAY_S


@dataclass(frozen=True, slots=True)
class Window:
    """Whole spans: it begins up to one span earlier than was asked for, and ends up to one later."""

    since: datetime
    until: datetime
    span_s: int


def window_of(now: datetime, *, since_ms: int | None, until_ms: int | None) -> Window:
    """The last day unless it is said otherwise; InputMalformed where it is none, or too long."""
    until = now if until_ms is None else _moment(until_ms)
    since = until - timedelta(seconds=WINDOW_S_DEFAULT) if since_ms is None else _moment(since_ms)
    length_s = (until - since).total_seconds()
    if length_s <= 0:
        raise InputMalformed("the window is empty", expected="since before until", remedy="Correct since or until.")
    for length_max_s, span_s in _SPANS:
        # Minutes are kept for two days: what lies further back is read by the half hour.
        is_kept = span_s > 60 or (now - since).total_seconds() < 2 * _DAY_S - 60
        if length_s <= length_max_s and is_kept:
            begins = since.timestamp() // span_s * span_s
            ends = -(-until.timestamp() // span_s) * span_s
            return Window(datetime.fromtimestamp(begins, UTC), datetime.fromtimestamp(ends, UTC), span_s)
    raise InputMalformed(
        "the window is too long",
        expected=f"at most {STATS_WINDOW_DAYS_MAX} days",
        found=f"{length_s / _DAY_S:.0f} days",
        remedy="Ask for a part of it.",
    )


async def load_statistics(
    services: Services,
    principal: Principal,
    window: Window,
    *,
    server_id: str | None = None,
    tool_name: str | None = None,
) -> dict[str, Any]:
    """Of the principal's whole tenant: the caller has verified that it may read that. Tools with the most calls
    come first; of more than STATS_TOOLS_MAX the rest is counted in the totals and named by number."""
    tenant = principal.tenant
    counted = await load_counts(
        services.sessions,
        tenant,
        span_s=window.span_s,
        since=window.since,
        until=window.until,
        server_id=None if server_id is None else qualify(tenant, server_id),
        tool_name=tool_name,
    )
    now = await load_standing(services.sessions, tenant)
    tools = sorted(counted.by_tool.items(), key=lambda one: (-one[1].asked, one[0]))
    minutes = max(1.0, (min(window.until, now_of(services)) - window.since).total_seconds() / 60)
    return {
        "since": _written(window.since),
        "until": _written(window.until),
        "span_s": window.span_s,
        "total": {**_told(counted.total), "asked_per_minute": round(counted.total.asked / minutes, 3)},
        "decided_by": counted.total.decided_by,
        "rules": counted.total.rules,
        "errors": counted.total.errors,
        "now": {"waiting": now.waiting, "held": now.held, "in_flight": now.in_flight},
        "by_time": [{"began": _written(began), **_told(tally)} for began, tally in sorted(counted.by_time.items())],
        "by_server": [
            {"server_id": own_name(tenant, server), **_told(tally)} for server, tally in _by_server(counted).items()
        ],
        "by_tool": [
            {"server_id": own_name(tenant, server), "tool_name": name, **_told(tally)}
            for (server, name), tally in tools[:STATS_TOOLS_MAX]
        ],
        "tools_left_out": max(0, len(tools) - STATS_TOOLS_MAX),
        "folded_leaves": now.folded,
        "tree_size": now.tree_size,
    }


async def load_latency_of_servers(services: Services, tenant: str, *, window_s: int) -> dict[str, dict[str, Any]]:
    """How the tenant's servers have answered lately, by their qualified names."""
    now = now_of(services)
    begins = (now.timestamp() - window_s) // 60 * 60
    counted = await load_counts_of_servers(
        services.sessions, tenant, span_s=60, since=datetime.fromtimestamp(begins, UTC), until=now
    )
    return {server: _lately(window_s, by_time) for server, by_time in counted.items()}


def no_latency(window_s: int) -> dict[str, Any]:
    return _lately(window_s, {})


def _lately(window_s: int, by_time: dict[datetime, Tally]) -> dict[str, Any]:
    minutes = [
        {
            "began": _written(began),
            "asked": tally.asked,
            "failed": tally.failed,
            "p50_ms": tally.percentile_ms(0.5),
            "p95_ms": tally.percentile_ms(0.95),
        }
        for began, tally in sorted(by_time.items())
    ]
    return {"window_s": window_s, **_told(_sum(list(by_time.values()))), "by_minute": minutes}


def _by_server(counted: Counted) -> dict[str, Tally]:
    servers: dict[str, list[Tally]] = {}
    for (server, _), tally in sorted(counted.by_tool.items()):
        servers.setdefault(server, []).append(tally)
    return {server: _sum(tallies) for server, tallies in servers.items()}


def _sum(tallies: list[Tally]) -> Tally:
    """What became of the calls of all of them, and how quick they were."""
    total = Tally()
    for tally in tallies:
        for measure in ("asked", "completed", "failed", "denied", "sent", "replayed"):
            total.add(measure, "", getattr(tally, measure))
        for step, calls in tally.latency.items():
            total.add("latency", str(step), calls)
    return total


def _told(tally: Tally) -> dict[str, Any]:
    return {
        "asked": tally.asked,
        "completed": tally.completed,
        "failed": tally.failed,
        "denied": tally.denied,
        "open": max(0, tally.asked - tally.completed - tally.failed - tally.denied),
        "sent": tally.sent,
        "replayed": tally.replayed,
        "latency": {
            "calls": tally.dispatched,
            "p50_ms": tally.percentile_ms(0.5),
            "p95_ms": tally.percentile_ms(0.95),
            "p99_ms": tally.percentile_ms(0.99),
        },
    }


def now_of(services: Services) -> datetime:
    return datetime.fromisoformat(services.clock.now())


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _written(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")
