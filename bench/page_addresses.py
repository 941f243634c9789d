"""Every page of the console and every list of the API, with each filter, at the first, a middle and the last page."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from app.edge.cursors import list_cursor

STATES: Final = ("PENDING", "AUTHORIZED", "EXECUTING", "COMPLETED", "FAILED", "DENIED")
STATUSES: Final = ("running", "waiting", "waiting_for_human", "completed", "failed", "cancelled", "parked", "diverged")
WINDOWS: Final = ("last hour", "last 24 h", "last 7 days")


def addresses(ask: Callable[[str], Any], ids: dict[str, str], long: int, places: dict[str, Any]) -> dict[str, str]:
    """By name. `ask`: the document of a GET; `ids`: real calls by what became of them, and a run of `long` entries.
    `places`: where pages in the middle and the last ones begin."""
    digest = ask(f"/v1/traces/{ids['done']}")["action_request_digest"]
    now = datetime.now(UTC)
    middle, oldest = _trace_cursor(now - timedelta(days=3.5)), list_cursor("traces", places["call"])
    started = now - timedelta(days=3.5)
    paths = {
        "overview": "/console/",
        "approvals": "/console/approvals",
        "approvals, later": f"/console/approvals?cursor={_waiting_cursor(places['waits_middle'])}",
        "approvals, last": f"/console/approvals?cursor={_waiting_cursor(places['waits'])}",
        "approval": f"/console/approvals/{ids['waits']}",
        "calls": "/console/calls",
        "calls, middle": f"/console/calls?cursor={middle}",
        "calls, last": f"/console/calls?cursor={oldest}",
        **{f"calls {state}": f"/console/calls?state={state}" for state in (*STATES, "held")},
        **{f"calls {since}": f"/console/calls?{_query(since=since)}" for since in WINDOWS},
        "calls of a tool": "/console/calls?tool=bank/charge",
        "calls of a tool, middle": f"/console/calls?tool=bank/charge&cursor={middle}",
        "calls of a tool, failed": "/console/calls?tool=bank/charge&state=FAILED",
        "calls of a tool, often failed": "/console/calls?tool=bank/fail&state=FAILED",
        "calls of a tool, seldom": "/console/calls?tool=bank/seldom",
        "calls of no tool": "/console/calls?tool=bank/none",
        "calls of an agent": "/console/calls?principal_id=agent-7",
        "calls of an agent, failed": "/console/calls?principal_id=agent-7&state=FAILED",
        "calls of an agent, seldom": "/console/calls?principal_id=seldom",
        "calls of no agent": "/console/calls?principal_id=stranger",
        "calls by key": "/console/calls?key=made-777",
        "call": f"/console/calls/{ids['done']}",
        "call held": f"/console/calls/{ids['held']}",
        "find id": f"/console/find?q={ids['done']}",
        "find key": "/console/find?q=done-4",
        "find nothing": "/console/find?q=no-such-key",
        "find digest": f"/console/find?q={digest}",
        "runs": "/console/runs",
        "runs, middle": f"/console/runs?cursor={list_cursor('runs', f'{_micros(started)}.999999')}",
        **{f"runs {status}": f"/console/runs?status={status}" for status in STATUSES},
        "runs of a procedure": "/console/runs?procedure=onboard",
        "runs seldom": "/console/runs?prefix=seldom-",
        "runs often": "/console/runs?prefix=often-",
        "long run": f"/console/runs/{ids['long']}",
        "long run, at": f"/console/runs/{ids['long']}?at={long * 3 // 4}",
        "long run, first": f"/console/runs/{ids['long']}?at=1",
        "ledger": "/console/ledger",
        "what people did": "/console/acts",
        "servers": "/console/servers",
        "policy": "/console/policy",
    }
    lists = {
        "traces": "/v1/traces?limit=200",
        "traces until": f"/v1/traces?limit=200&{_query(until=_said(started))}",
        "traces FAILED, DENIED": "/v1/traces?limit=200&state=FAILED,DENIED",
        "traces of a server": "/v1/traces?limit=200&server_id=bank",
        "traces waiting": "/v1/traces?limit=25&waiting=supervisor",
        "traces waiting, middle": f"/v1/traces?limit=25&waiting=supervisor&cursor={middle}",
        "approvals 200": "/v1/approvals?limit=200",
        "stats": "/v1/stats",
        **{f"stats {days} d": f"/v1/stats?{_query(since=_said(now - timedelta(days=days)))}" for days in (1, 7)},
        "stats of a tool": "/v1/stats?server_id=bank&tool_name=charge",
        "runs 200": "/v1/runs?limit=200",
        "long run": f"/v1/runs/{ids['long']}",
        "long run journal": f"/v1/runs/{ids['long']}/checkpoints?limit=200&after_seq={long // 2}",
        "long run state": f"/v1/runs/{ids['long']}/state?at={long * 3 // 4}",
        "heads": "/v1/log/heads",
        "verification": f"/v1/traces/{ids['done']}/verification",
        "keys": "/v1/keys",
        "acts": "/v1/acts?limit=200",
        "policy sets": "/v1/policy/sets",
        "procedures": "/v1/procedures",
        "metrics": "/metrics",
    }
    return paths | {f"API {name}": path for name, path in lists.items()}


def _query(**given: str) -> str:
    return urllib.parse.urlencode(given)


def _said(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _micros(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000)


def _trace_cursor(moment: datetime) -> str | None:
    digits = f"{int(moment.timestamp() * 1000):012x}"
    return list_cursor("traces", f"{digits[:8]}-{digits[8:]}-7000-8000-000000000000")


def _waiting_cursor(ends: datetime) -> str | None:
    return list_cursor("approvals", f"{_micros(ends)}.1.")
