"""Runs: which programs need someone?"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from app.console.visit import HOURS, Visit
from app.core.limits import RUN_LISTED_ENTRIES_MAX

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
BOXES_MAX: Final = RUN_LISTED_ENTRIES_MAX
FILTERS: Final = ("prefix", "status", "procedure", "since")
_SIDE_CHARS_MAX: Final = 100
# A box each: its class, its height, and what one and many of them are called.
_STEP: Final = ("b-step", 12, "step", "steps")
_STEPS: Final = {
    "tool": ("b-tool", 12, "tool call", "tool calls"),
    "turn": ("b-model", 12, "model turn", "model turns"),
    "model": ("b-model", 12, "model turn", "model turns"),
    "sleep": ("b-sleep", 11, "sleep", "sleeps"),
}
_FAILED: Final = ("b-fail", 11, "failed", "failed")
_OPEN: Final = ("b-wait", 11, "open", "open")
_ENTRIES: Final = {
    "run_checkpoint": ("b-step", 12, "checkpoint", "checkpoints"),
    "run_intent": ("b-wait", 7, "begin of an operation", "begins of operations"),
    "run_answer": ("b-tool", 12, "answer", "answers"),
    "run_attempt": ("b-scope", 4, "change of the attempt", "changes of attempts"),
}
_OTHER: Final = ("b-model", 4, "other entry", "other entries")


async def show(visit: Visit) -> Response:
    given = {name: visit.query.get(name) for name in FILTERS}
    if given["status"] not in STATUSES:
        given["status"] = None
    if given["since"] not in HOURS:
        given["since"] = None
    asked = {**given, "since": visit.since(given["since"])}
    listed, needing, questions, procedures = await asyncio.gather(
        visit.api.get("/v1/runs", limit=50, newest=BOXES_MAX, cursor=visit.query.get("cursor"), **asked),
        _needing(visit),
        visit.api.find("/v1/approvals", limit=100),
        visit.api.find("/v1/procedures", limit=100),
    )
    open_ones = {one["run_id"]: one["request"] for one in (questions or {"items": []})["items"] if one["kind"] == "run"}
    described = await asyncio.gather(*(visit.api.find(f"/v1/runs/{one['run_id']}", steps=BOXES_MAX) for one in needing))
    return await visit.page(
        "runs.html",
        nav="Runs",
        needing=[
            _needs(one, whole, open_ones.get(one["run_id"])) for one, whole in zip(needing, described, strict=True)
        ],
        runs=[one | {"boxes": boxes_of_journal(one["journal"])} for one in listed["items"]],
        legend=[(kind[0], kind[1], kind[2]) for kind in (*_ENTRIES.values(), _OTHER)],
        older=_address({**given, "cursor": listed["next"]}) if listed["next"] else None,
        newest=_address(given) if visit.query.get("cursor") else None,
        given=given,
        statuses=STATUSES,
        hours=HOURS,
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
    return {"run": run, "who": who, "what": what, "boxes": boxes_of_steps(whole)}


def _side(said: str) -> str:
    """What one of the two sides has there; a long one does not hide the other."""
    return said if len(said) <= _SIDE_CHARS_MAX else f"{said[:_SIDE_CHARS_MAX]}…"


def boxes_of_steps(whole: dict[str, Any] | None) -> dict[str, Any]:
    """The newest operations of a run as boxes, and in words."""
    steps = [] if whole is None else whole["steps"]
    kinds = [_step_kind(step) for step in steps[-BOXES_MAX:]]
    is_all = whole is not None and len(kinds) == len(steps) and not whole["steps_left_out"]
    if is_all:
        return _boxes(kinds, f"{len(kinds)} operation{'s' if len(kinds) != 1 else ''}", f"{len(kinds)}")
    return _boxes(kinds, f"The {len(kinds)} newest operations, there are earlier ones", f"newest {len(kinds)}")


def _step_kind(step: dict[str, Any]) -> tuple[str, int, str, str]:
    if step["status"] in ("failed", "interrupted"):
        return _FAILED
    return _STEPS.get(step["kind"], _STEP) if step["status"] == "completed" else _OPEN


def boxes_of_journal(journal: dict[str, Any] | None) -> dict[str, Any]:
    """The newest entries of a run as boxes, and in words: of how many, and how many of each kind."""
    kinds = [] if journal is None else [_ENTRIES.get(one, _OTHER) for one in journal["newest"]]
    total = 0 if journal is None else journal["entries"]
    if len(kinds) == total:
        return _boxes(kinds, f"{total:,} {'entry' if total == 1 else 'entries'}", f"{total:,}")
    return _boxes(kinds, f"The {len(kinds)} newest of {total:,} entries", f"{len(kinds)} of {total:,}")


def _boxes(kinds: list[tuple[str, int, str, str]], of: str, shown: str) -> dict[str, Any]:
    counted = [f"{kinds.count(kind)} {kind[2] if kinds.count(kind) == 1 else kind[3]}" for kind in dict.fromkeys(kinds)]
    return {"boxes": [kind[:2] for kind in kinds], "label": f"{of}: {', '.join(counted)}", "shown": shown}


def _address(query: dict[str, Any]) -> str:
    given = urlencode([(name, value) for name, value in query.items() if value])
    return f"/console/runs?{given}" if given else "/console/runs"
