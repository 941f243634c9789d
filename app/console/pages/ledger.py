"""Ledger: can the record be trusted?"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.responses import Response

from app.console.gateway_api import ApiProblem
from app.console.visit import Visit

HEADS_SHOWN: Final = 12
FINDINGS_SHOWN: Final = 20


async def show(visit: Visit) -> Response:
    return await _shown(visit)


async def verify(visit: Visit) -> Response:
    try:
        await visit.api.post("/v1/log/verifications", {})
    except ApiProblem as problem:
        return await _shown(visit, problem=problem)
    return visit.go("/ledger")


async def stop(visit: Visit) -> Response:
    try:
        await visit.api.post(f"/v1/log/verifications/{visit.request.path_params['verification_id']}/stop", {})
    except ApiProblem as problem:
        return await _shown(visit, problem=problem)
    return visit.go("/ledger")


async def _shown(visit: Visit, *, problem: ApiProblem | None = None) -> Response:
    heads, verifications, key = await asyncio.gather(
        visit.api.find("/v1/log/heads", limit=HEADS_SHOWN, cursor=visit.query.get("cursor")),
        visit.api.find("/v1/log/verifications"),
        _key(visit),
    )
    newest_first = [] if verifications is None else verifications["items"]
    items = [] if heads is None else heads["items"]
    newest = items[0] if items and not visit.query.get("cursor") else None
    current = newest_first[0] if newest_first else None
    return await visit.page(
        "ledger.html",
        nav="Ledger",
        status=200 if problem is None else problem.status,
        heads=items,
        older=None if heads is None else heads["next"],
        is_first_page=not visit.query.get("cursor"),
        newest=newest,
        key=key,
        current=None if current is None else _described(current),
        before=newest_first[1:8],
        findings_shown=FINDINGS_SHOWN,
        problem=None if problem is None else problem.document,
    )


async def _key(visit: Visit) -> str | None:
    try:
        return (await visit.api.text("/v1/log/key")).strip()
    except ApiProblem:
        return None


def _described(told: dict[str, Any]) -> dict[str, Any]:
    """A verification with what the ruler shows: how far it has come, and where trust ends."""
    total = told["streams_total"] or 1
    tree = told["tree"]
    percent = 100.0 if told["state"] in ("sound", "wrong") else 100.0 * told["streams"] / total
    trusted = None
    if tree is not None and tree["tree_size"]:
        trusted = round(100.0 * tree["trusted_size"] / tree["tree_size"], 2)
    return {**told, "percent": round(min(100.0, percent), 2), "trusted_percent": trusted}
