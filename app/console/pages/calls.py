"""Tool calls: what happened, how often, how fast?"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from app.console.components import moment
from app.console.gateway_api import ApiProblem
from app.console.rendering import PATH
from app.console.visit import HOURS, Visit
from app.core.limits import CONSOLE_ROWS_MAX

STATES: Final = ("PENDING", "AUTHORIZED", "EXECUTING", "held", "COMPLETED", "FAILED", "DENIED")


async def show(visit: Visit) -> Response:
    """Filters stand in the address; each that applies can be taken away by itself."""
    given, asked = visit.query, dict[str, str | int | None]()
    filters = dict[str, str]()
    for name in ("state", "tool", "principal_id", "key", "since"):
        if given.get(name):
            filters[name] = given[name]
    if (state := filters.get("state")) in STATES:
        if state == "held":
            asked |= {"state": "EXECUTING", "waiting": "operator"}
        else:
            asked["state"] = state
    server_id, _, tool_name = filters.get("tool", "").partition("/")
    asked |= {"server_id": server_id or None, "tool_name": tool_name or None}
    asked |= {"principal_id": filters.get("principal_id"), "idempotency_key": filters.get("key")}
    asked["since"] = visit.since(filters.get("since"))
    problem: ApiProblem | None = None
    page: dict[str, Any] = {"items": [], "next": None}
    try:
        page = await visit.api.get("/v1/traces", **asked, cursor=given.get("cursor"), limit=CONSOLE_ROWS_MAX)
    except ApiProblem as refused:
        if refused.status != 400:
            raise
        problem = refused
    tools = await visit.api.get("/v1/tools")
    return await visit.page(
        "calls.html",
        nav="Tool calls",
        status=200 if problem is None else problem.status,
        calls=page["items"],
        problem=None if problem is None else problem.document,
        filters=filters,
        chips=[(_said(name, value), _address(filters, without=name)) for name, value in filters.items()],
        older=None if page["next"] is None else _address(filters, cursor=page["next"]),
        newest=_address(filters) if given.get("cursor") else None,
        is_first=not given.get("cursor"),
        tools=sorted(f"{one['server_id']}/{one['tool_name']}" for one in tools["items"]),
        states=STATES,
        hours=HOURS,
        metrics=await _metrics(visit, filters, server_id or None, tool_name or None),
    )


async def _metrics(
    visit: Visit, filters: dict[str, str], server_id: str | None, tool_name: str | None
) -> dict[str, Any] | None:
    """How often and how fast, in the time and of the tool that the filters name; None for who sees only its own."""
    window = filters["since"] if filters.get("since") in HOURS else next(iter(HOURS))
    since = visit.clock.after(-HOURS[window] * 3_600_000)
    try:
        stats = await visit.api.find("/v1/stats", since=since, server_id=server_id, tool_name=tool_name)
    except ApiProblem:
        return None  # an unknown tool: the list says so
    if stats is None:
        return None
    first, step_ms = moment(stats["since"]), stats["span_s"] * 1000
    places = max(2, round(HOURS[window] * 3_600_000 / step_ms) + 1)
    asked, slow = [0] * places, [0] * places
    for one in stats["by_time"]:
        place = int((moment(one["began"]) - first).total_seconds() * 1000 // step_ms)
        if 0 <= place < places:
            asked[place], slow[place] = one["asked"], one["latency"]["p95_ms"] or 0
    total, states = stats["total"], list[dict[str, Any]]()
    shares = (("completed", "ok", "check-f", "COMPLETED"), ("failed", "bad", "x-f", "FAILED"))
    x = 0.0
    for name, tone, icon, state in (*shares, ("denied", "none", "slash", "DENIED"), ("open", "wait", "clock", None)):
        width = 100 * total[name] / total["asked"] if total["asked"] else 0.0
        kept = {key: value for key, value in filters.items() if key != "state"} | {"since": window}
        address = None if state is None else _address(kept | {"state": state})
        share = {"x": round(x, 2), "width": round(width, 2), "address": address}
        states.append({"name": name, "calls": total[name], "tone": tone, "icon": icon, **share})
        x += width
    return {
        "window": window,
        "of": filters.get("tool"),
        "total": total,
        "now": stats["now"],
        "states": states,
        "rate": _rate(total["asked_per_minute"]),
        "asked": _line(asked),
        "slow": _line(slow),
        "asked_max": max(asked),
        "slow_max": max(slow),
        "step": {60: "minute", 1800: "half hour", 14400: "four hours", 86400: "day"}[stats["span_s"]],
    }


def _rate(a_minute: float) -> str:
    """As often as people say it: a minute, or else an hour or a day."""
    rate, words = a_minute, "a minute"
    if rate < 1:
        rate, words = a_minute * 60, "an hour"
    if rate < 0.95:
        rate, words = a_minute * 1440, "a day"
    return f"{rate:,.0f} {words}" if rate >= 5 else f"{rate:.1f} {words}".replace(".0 ", " ")


def _line(values: list[int]) -> str:
    """The points of a line over a picture of 100 by 30."""
    top, last = max(values) or 1, len(values) - 1
    return " ".join(f"{100 * n / last:.2f},{28 - 26 * value / top:.2f}" for n, value in enumerate(values))


async def find(visit: Visit) -> Response:
    """By id, key or digest: one hit is opened, several are listed, none says so."""
    sought = visit.query.get("q", "").strip()
    found: list[dict[str, Any]] = []
    if sought:
        try:
            found = (await visit.api.get("/v1/find", q=sought))["items"]
        except ApiProblem as problem:
            if problem.status != 400:
                raise
    if len(found) == 1:
        kind = "calls" if found[0]["kind"] == "trace" else "runs"
        return visit.go(f"/{kind}/{found[0]['id']}")
    return await visit.page("found.html", nav="Tool calls", sought=sought, found=found)


def _address(filters: dict[str, str], *, without: str | None = None, **more: str) -> str:
    kept = {name: value for name, value in filters.items() if name != without} | more
    return f"{PATH}/calls" + (f"?{urlencode(kept)}" if kept else "")


def _said(name: str, value: str) -> str:
    words = {
        "state": "{}",
        "tool": "tool {}",
        "principal_id": "asked by {}",
        "key": "key {}",
        "since": "asked in the {}",
    }
    return words[name].format(value[:80])
