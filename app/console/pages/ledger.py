"""Ledger: can the record be trusted?"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import quote

from starlette.responses import Response

from app.console.gateway_api import ApiProblem
from app.console.kept_heads import Comparison, compare_kept
from app.console.visit import Visit
from app.core.errors import TgaError

HEADS_SHOWN: Final = 12
FINDINGS_SHOWN: Final = 20
BEFORE_SHOWN: Final = 7
_ENTRIES_SHOWN: Final = 50
_PLACES: Final = {"trace": ("/calls/", "/v1/traces/"), "run": ("/runs/", "/v1/runs/")}


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


async def compare(visit: Visit) -> Response:
    """Kept heads against the log. Nothing is recorded: it could be asked of the API with any client."""
    kept = visit.form.get("kept", "")
    if not kept.strip():
        words = "Paste a head that was kept, or choose its file. Nothing was compared."
        return await _shown(visit, problem=ApiProblem(422, {"code": "INPUT_MALFORMED", "detail": words}))
    try:
        return await _shown(visit, comparison=await compare_kept(visit.api, kept), kept=kept)
    except ApiProblem as problem:
        return await _shown(visit, problem=problem, kept=kept)
    except TgaError as error:  # the log's own newest head cannot be believed
        document = {"code": error.code, "detail": f"The newest head of the log: {error.what}"}
        return await _shown(visit, problem=ApiProblem(409, document), kept=kept)


async def _shown(
    visit: Visit, *, problem: ApiProblem | None = None, comparison: Comparison | None = None, kept: str = ""
) -> Response:
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
        place=None if current is None else await _place(visit, current),
        before=newest_first[1 : 1 + BEFORE_SHOWN],
        before_total=max(0, len(newest_first) - 1),
        findings_shown=FINDINGS_SHOWN,
        comparison=comparison,
        kept=kept,
        problem=None if problem is None else problem.document,
    )


async def _place(visit: Visit, told: dict[str, Any]) -> dict[str, Any] | None:
    """The first stream that something is wrong with, entry by entry; what was found stands at its entry."""
    stream = next((one["stream"] for one in told["findings"] if one["stream"] is not None), None)
    if stream is None:
        return None
    kind, _, name = stream.partition(":")
    of_stream = [one for one in told["findings"] if one["stream"] == stream]
    found = {one["sequence_number"]: one for one in reversed(of_stream) if one["sequence_number"] is not None}
    rows = dict[int, dict[str, Any]]()
    page, api = _PLACES.get(kind, (None, None))
    if api is not None:
        try:
            listed = await visit.api.find(f"{api}{quote(name, safe='')}/entries", limit=_ENTRIES_SHOWN)
        except ApiProblem:
            listed = None  # the gateway does not tell what it cannot read: what was found is told without it
        for one in (listed or {"items": []})["items"]:
            entry = one["entry"]
            rows[entry["sequence_number"]] = {"type": entry["artifact_type"], "digest": one["entry_digest"]}
    for number in found:
        rows.setdefault(number, {"type": "entry", "digest": None})
    return {
        "stream": stream,
        "address": None if page is None else f"/console{page}{quote(name, safe='')}",
        "entries": [{"number": number, "finding": found.get(number), **rows[number]} for number in sorted(rows)],
        "unplaced": [one for one in of_stream if one["sequence_number"] is None],
        "streams": len({one["stream"] for one in told["findings"]}),
    }


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
    trusted = broken = None
    if tree is not None and tree["tree_size"]:
        trusted = round(100.0 * tree["trusted_size"] / tree["tree_size"], 2)
        # Without a head that does not fit nobody can tell of anything behind the place that is trusted.
        broken = 100.0 if tree["broken_size"] is None else 100.0 * tree["broken_size"] / tree["tree_size"]
        broken = round(min(100.0, max(trusted, broken)), 2)
    shares = {"percent": round(min(100.0, percent), 2), "trusted_percent": trusted, "broken_percent": broken}
    return {**told, **shares}
