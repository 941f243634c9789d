"""Servers and tools: is each tool what it was?"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import quote

from starlette.responses import Response

from app.console.gateway_api import ApiProblem
from app.console.minute_line import minutes_drawn
from app.console.visit import Visit

COMPARED_MAX: Final = 10
DIFF_LINES_MAX: Final = 200
_HEALTH: Final = {"up": ("ok", "check-f"), "down": ("bad", "x-f"), "starting": ("wait", "busy")}


async def show(visit: Visit) -> Response:
    return await _shown(visit)


async def accept(visit: Visit) -> Response:
    """Pin exactly the definition that was shown: its digest goes with the form, and the gateway compares it."""
    form = visit.form
    server_id, tool_name = form.get("server_id", ""), form.get("tool_name", "")
    path = f"/v1/tools/{quote(server_id, safe='')}/{quote(tool_name, safe='')}/pin"
    try:
        await visit.api.post(path, {"definition_digest": form.get("definition_digest")})
    except ApiProblem as problem:
        return await _shown(visit, problem=problem)
    return visit.go(f"/servers?server={quote(server_id, safe='')}")


async def _shown(visit: Visit, *, problem: ApiProblem | None = None) -> Response:
    servers, tools = await asyncio.gather(visit.api.get("/v1/servers"), visit.api.get("/v1/tools"))
    listed, of_all = servers["items"], tools["items"]
    changed = [one for one in of_all if one["pin"]["status"] == "quarantined"]
    compared = await asyncio.gather(*(_compared(visit, one) for one in changed[:COMPARED_MAX]))
    wanted = visit.query.get("server")
    known = {one["server_id"] for one in listed}
    chosen = wanted if wanted in known else next((one["server_id"] for one in listed), None)
    stats = None if chosen is None else await _stats(visit, chosen)
    return await visit.page(
        "servers.html",
        nav="Servers & tools",
        status=200 if problem is None else problem.status,
        servers=[_described(one, changed, visit.clock.now()) for one in listed],
        changed=compared,
        changed_total=len(changed),
        chosen=next((one for one in listed if one["server_id"] == chosen), None),
        tools=[one for one in of_all if one["server_id"] == chosen],
        by_tool={} if stats is None else {one["tool_name"]: one for one in stats["by_tool"]},
        is_counted=stats is not None,
        problem=None if problem is None else problem.document,
    )


async def _stats(visit: Visit, server_id: str) -> dict[str, Any] | None:
    """How often the tools of a server were called in the last day, and how fast they were; None for those who see only
    their own calls."""
    found: dict[str, Any] | None = await visit.api.find(
        "/v1/stats", since=visit.clock.after(-86_400_000), server_id=server_id
    )
    return found


async def _compared(visit: Visit, tool: dict[str, Any]) -> dict[str, Any]:
    """The tool, and what changed in it for those who may see that."""
    path = f"/v1/tools/{quote(tool['server_id'], safe='')}/{quote(tool['tool_name'], safe='')}/pin"
    found = await visit.api.find(path)
    lines = [] if found is None else found["diff"]
    return {
        "tool": tool,
        "diff": [({"-": "del", "+": "add"}.get(line[:1], ""), line[2:]) for line in lines[:DIFF_LINES_MAX]],
        "lines_left_out": max(0, len(lines) - DIFF_LINES_MAX),
        "hidden": [] if found is None else found["hidden"],
        "is_seen": found is not None,
    }


def _described(server: dict[str, Any], changed: list[dict[str, Any]], now: str) -> dict[str, Any]:
    quarantined = len([one for one in changed if one["server_id"] == server["server_id"]])
    tone, icon = _HEALTH.get(server["status"]["state"], ("", "dash"))
    words = server["status"]["state"]
    if quarantined:
        tone, icon, words = "bad", "shield-x", f"{words}, {quarantined} changed"
    line = minutes_drawn(server["lately"]["by_minute"], now)
    return {**server, "tone": tone, "icon": icon, "words": words, "line": line}
