"""Overview: does anything need me, is the record sound?"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from typing import Any, Final

from starlette.responses import Response

from app.console.components import between_ms, moment, span
from app.console.gateway_api import ApiProblem
from app.console.pages.acts import described
from app.console.shown_text import summary_of
from app.console.visit import Visit, counted, log_strip

_SHOWN: Final = 12
_RECENT_SHOWN: Final = 8
_HELD_COUNTED: Final = 99
_PEOPLE_SHOWN: Final = 6
_SOON_MS: Final = 3_600_000
_BARS: Final = 49  # a day of half hours, and the one that has begun


async def show(visit: Visit) -> Response:
    waiting, held, servers, tools, recent, stats, note, ready, standing, heads, acts = await asyncio.gather(
        visit.api.get("/v1/approvals", limit=_SHOWN),
        _held(visit),
        visit.api.find("/v1/servers"),
        visit.api.find("/v1/tools"),
        visit.api.get("/v1/traces", limit=_RECENT_SHOWN),
        visit.api.find("/v1/stats", **_last_day(visit)),
        _note(visit),
        visit.api.find("/readyz"),
        visit.api.find("/v1/log/standing"),
        visit.api.find("/v1/log/heads", limit=1),
        visit.api.find("/v1/acts", limit=_PEOPLE_SHOWN),
    )
    strip = log_strip(note, ready, standing)
    changed = [one for one in (tools or {"items": []})["items"] if one["pin"]["status"] == "quarantined"]
    now = visit.clock.now()
    needs = _needs(waiting["items"], held, changed, now)
    return await visit.page(
        "overview.html",
        nav="Overview",
        waiting=counted(waiting["count"]),
        held=held[:_HELD_COUNTED],
        more_held=len(held) > _HELD_COUNTED,
        changed=changed,
        needs=needs[:_SHOWN],
        needs_more=max(0, len(needs) - _SHOWN) or waiting["next"] is not None,
        servers=(servers or {"items": []})["items"],
        recent=recent["items"],
        people=None if acts is None else [described(one) for one in acts["items"]],
        signed_at=None if heads is None or not heads["items"] else heads["items"][0]["signed_at"],
        unsigned=None if stats is None or strip["size"] is None else max(0, stats["tree_size"] - strip["size"]),
        chart=_chart(stats),
        record=strip,
        root=_root(note),
    )


async def _held(visit: Visit) -> list[dict[str, Any]]:
    """Calls whose outcome is unknown, the newest first; one more than are counted."""
    page: dict[str, Any] = await visit.api.get("/v1/traces", waiting="operator", limit=_HELD_COUNTED + 1)
    return list(page["items"])


async def _note(visit: Visit) -> str | None:
    try:
        return await visit.api.text("/v1/log/checkpoint")
    except ApiProblem:
        return None


def _root(note: str | None) -> str | None:
    """In hex, as everywhere else; a note has it in base64."""
    lines = (note or "").split("\n")
    try:
        return b64decode(lines[2], validate=True).hex() if len(lines) > 3 else None
    except ValueError:
        return None


def _last_day(visit: Visit) -> dict[str, str]:
    return {"since": visit.clock.after(-86_400_000)}


def _needs(
    waiting: list[dict[str, Any]], held: list[dict[str, Any]], changed: list[dict[str, Any]], now: str
) -> list[dict[str, Any]]:
    """What needs someone, by urgency: what expires within the hour, held calls from the oldest on, what expires later,
    changed tools."""
    rows = []
    for one in sorted(waiting, key=lambda item: item["expires_at"] or "9999"):
        left_ms = between_ms(now, one["expires_at"])
        due = "no expiry" if left_ms is None else f"{span(left_ms, whole=True)} left"
        common = {"due": due, "is_soon": left_ms is not None and left_ms < _SOON_MS, "who": one["principal_id"]}
        if one["kind"] == "call":
            more = {"kind": "call", "item": one, "summary": summary_of(one["arguments"])}
        else:
            more = {"kind": "question", "item": one, "summary": (one["request"] or {}).get("message") or one["name"]}
        rows.append(common | more)
    for one in sorted(held, key=lambda item: str(item["updated_at"])):
        since = span((moment(now) - moment(one["updated_at"])).total_seconds() * 1000, whole=True)
        rows.append({"kind": "held", "item": one, "due": f"for {since}", "is_soon": True, "summary": None, "who": None})
    rows += [
        {"kind": "changed", "item": one, "due": "", "is_soon": False, "summary": None, "who": None} for one in changed
    ]
    return sorted(rows, key=lambda row: not row["is_soon"])


def _chart(stats: dict[str, Any] | None) -> dict[str, Any] | None:
    """Bars of the last day by half hour; spans without calls are left out of the statistics, and are empty here."""
    if stats is None or not stats["by_time"]:
        return None
    first, span_ms = moment(stats["since"]), stats["span_s"] * 1000
    bars: list[dict[str, Any]] = [{"total": 0, "failed": 0, "denied": 0} for _ in range(_BARS)]
    for one in stats["by_time"]:
        place = int((moment(one["began"]) - first).total_seconds() * 1000 // span_ms)
        if 0 <= place < _BARS:
            bars[place] = {"total": one["asked"], "failed": one["failed"], "denied": one["denied"]}
    bars = bars[1:]  # the window may begin one span before the day does
    top = max((bar["total"] for bar in bars), default=0)
    if not top:
        return None
    scale = 148 / top
    for place, bar in enumerate(bars):
        bar["x"] = place * 20 + 3
        for name in ("total", "failed", "denied"):
            bar[f"{name}_h"] = round(bar[name] * scale, 1)
    sums = {name: sum(bar[name] for bar in bars) for name in ("total", "failed", "denied")}
    return {"bars": bars, "top": top, "sums": sums}
