"""Runs: which programs need someone?"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from app.console.visit import Visit

STATUSES: Final = (
    "running",
    "waiting",
    "waiting_for_human",
    "completed",
    "failed",
    "cancelled",
    "parked",
    "diverged",
)
NEEDING: Final = ("waiting_for_human", "diverged", "parked", "failed")
NEEDING_SHOWN_MAX: Final = 10
FILTERS: Final = ("prefix", "status", "procedure")
_SIDE_CHARS_MAX: Final = 100
_CELL: Final = {"tool": "b-tool", "turn": "b-model", "model": "b-model", "sleep": "b-sleep"}


async def show(visit: Visit) -> Response:
    given = {name: visit.query.get(name) for name in FILTERS}
    if given["status"] not in STATUSES:
        given["status"] = None
    listed, needing, questions, procedures = await asyncio.gather(
        visit.api.get("/v1/runs", limit=50, cursor=visit.query.get("cursor"), **given),
        _needing(visit),
        visit.api.find("/v1/approvals", limit=100),
        visit.api.find("/v1/procedures", limit=100),
    )
    asked = {one["run_id"]: one["request"] for one in (questions or {"items": []})["items"] if one["kind"] == "run"}
    described = await asyncio.gather(*(visit.api.find(f"/v1/runs/{one['run_id']}") for one in needing))
    return await visit.page(
        "runs.html",
        nav="Runs",
        needing=[_needs(one, whole, asked.get(one["run_id"])) for one, whole in zip(needing, described, strict=True)],
        runs=listed["items"],
        older=_address({**given, "cursor": listed["next"]}) if listed["next"] else None,
        newest=_address(given) if visit.query.get("cursor") else None,
        given=given,
        statuses=STATUSES,
        without={name: _address({**given, name: None}) for name in FILTERS},
        procedures=sorted({one["name"] for one in (procedures or {"items": []})["items"]}),
    )


async def _needing(visit: Visit) -> list[dict[str, Any]]:
    """Those that rest until a person does something, the newest of each status."""
    pages = await asyncio.gather(
        *(visit.api.get("/v1/runs", status=status, limit=NEEDING_SHOWN_MAX) for status in NEEDING)
    )
    found = [one for page in pages for one in page["items"]]
    return sorted(found, key=lambda one: str(one["updated_at"]), reverse=True)[:NEEDING_SHOWN_MAX]


def _needs(run: dict[str, Any], whole: dict[str, Any] | None, question: dict[str, Any] | None) -> dict[str, Any]:
    """Whom it needs, and for what, in a sentence."""
    who, what = "An operator", run["notice"] or "its journal says why"
    if run["status"] == "waiting_for_human":
        who, what = "An answer", "" if question is None else question["message"]
    elif whole is not None and whole["divergence"] is not None:
        told = whole["divergence"]
        what = (
            f"at {told['path']} the journal has {_side(told['recorded'])}, "
            f"the program now does {_side(told['performed'])}. The journal is as it was."
        )
    elif whole is not None and whole["error"] is not None:
        what = f"{whole['error']['type']}: {whole['error']['message']}"
    return {"run": run, "who": who, "what": what, "cells": _cells(whole)}


def _side(said: str) -> str:
    """What one of the two sides has there; a long one does not hide the other."""
    return said if len(said) <= _SIDE_CHARS_MAX else f"{said[:_SIDE_CHARS_MAX]}…"


def _cells(whole: dict[str, Any] | None) -> list[str]:
    """The newest operations as boxes."""
    shown = []
    for step in [] if whole is None else whole["steps"][-24:]:
        if step["status"] in ("failed", "interrupted"):
            shown.append("b-fail")
        elif step["status"] != "completed":
            shown.append("b-wait")
        else:
            shown.append(_CELL.get(step["kind"], "b-step"))
    return shown


def _address(query: dict[str, Any]) -> str:
    given = urlencode([(name, value) for name, value in query.items() if value])
    return f"/console/runs?{given}" if given else "/console/runs"
