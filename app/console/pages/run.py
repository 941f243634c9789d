"""One run: where is it, what was the state then, and what does it ask?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from markupsafe import Markup
from starlette.responses import Response

from app.console.gateway_api import ApiProblem
from app.console.scope_folding import OPEN_ALL, fold_scopes
from app.console.shown_text import shown
from app.console.visit import Visit
from app.console.waterfall import Row, Standing, drawn, is_inherited
from app.core.limits import CONSOLE_JSON_CHARS_MAX, CONSOLE_VALUE_CHARS_MAX

RECORDS_SHOWN: Final = 200
QUESTIONS_SHOWN_MAX: Final = 5
OPTIONS_SHOWN_MAX: Final = 40
PROGRAM_CHARS_MAX: Final = 60_000  # of markup: a page stays below 200 KB, whatever is in it
LINE_CHARS_MAX: Final = 500
LINE_MARKUP_CHARS: Final = 40
LINES_BEFORE: Final = 100
EVENTS_SHOWN_MAX: Final = 20
ENDED: Final = frozenset({"COMPLETED", "CANCELLED"})
RESTING: Final = frozenset({"FAILED", "PARKED", "DIVERGED"})


async def show(visit: Visit) -> Response:
    return await _shown(visit)


async def answer(visit: Visit) -> Response:
    """A question's answer, as its form says it; what was typed is kept where the gateway refuses it."""
    form, at = visit.form, _address(visit)
    try:
        question = await _question(visit, form.get("path", ""))
        body = {
            "path": form.get("path"),
            "answer": _said(question["request"], form),
            "intent_digest": form.get("intent_digest"),
        }
        await visit.api.post(f"{_api(visit)}/signals", body)
    except ApiProblem as problem:
        return await _shown(visit, problem=problem, typed=form)
    except ValueError as wrong:
        refused = ApiProblem(
            422,
            {
                "code": "RUN_ANSWER_INVALID",
                "title": "What was typed is not a value that the question takes",
                "detail": f"{wrong}. Nothing was recorded.",
            },
        )
        return await _shown(visit, problem=refused, typed=form)
    return visit.go(at)


async def cancel(visit: Visit) -> Response:
    return await _ask(visit, "cancel", {"rationale": visit.form.get("rationale") or None})


async def retry(visit: Visit) -> Response:
    return await _ask(visit, "retry", {"rationale": visit.form.get("rationale") or None})


async def fork(visit: Visit) -> Response:
    at = visit.form.get("at", "")
    body = {"at": int(at) if at.isdigit() else None, "run_id": visit.form.get("run_id") or None}
    try:
        made = await visit.api.post(f"{_api(visit)}/fork", {name: one for name, one in body.items() if one is not None})
    except ApiProblem as problem:
        return await _shown(visit, problem=problem, typed=visit.form)
    return visit.go(f"/runs/{quote(made.document['run_id'], safe='')}")


async def _ask(visit: Visit, what: str, body: dict[str, Any]) -> Response:
    try:
        await visit.api.post(f"{_api(visit)}/{what}", {name: one for name, one in body.items() if one is not None})
    except ApiProblem as problem:
        return await _shown(visit, problem=problem, typed=visit.form)
    return visit.go(_address(visit))


def _run_id(visit: Visit) -> str:
    return str(visit.request.path_params["run_id"])


def _api(visit: Visit) -> str:
    return f"/v1/runs/{_run_id(visit)}"


def _address(visit: Visit) -> str:
    return f"/runs/{quote(_run_id(visit), safe='')}"


async def _shown(
    visit: Visit, *, problem: ApiProblem | None = None, typed: Mapping[str, str] | None = None
) -> Response:
    run = await visit.api.get(_api(visit), steps=0)  # its operations are drawn from the page of its journal
    last = int(run["sequence_number"])
    at = _number(visit.query.get("at"), low=1, high=last) or last
    after = _number(visit.query.get("after"), low=0, high=last)
    if after is None:  # the page that the chosen entry stands on
        after = (at - 1) // RECORDS_SHOWN * RECORDS_SHOWN
    page, state, questions, program = await asyncio.gather(
        # Without a number from the very begin: a fork's first records are its source's, with numbers below 1.
        visit.api.get(f"{_api(visit)}/checkpoints", after_seq=after or None, limit=RECORDS_SHOWN),
        visit.api.find(f"{_api(visit)}/state", at=at),
        _questions(visit, run),
        visit.api.find(f"/v1/procedures/{run['procedure']}", program_digest=run["program_digest"]),
    )
    records = [one for one in page["items"] if one["sequence_number"] <= last]
    is_open = run["state"] not in ENDED
    later = page["next"] if page["next"] is not None and page["next"] < last else None
    standing = _standing(run["state"], has_later=later is not None)
    picture = drawn(records, visit.clock.now() if standing == "live" or not records else _end_of(records), standing)
    chosen = _chosen(picture.rows, at)
    opened = visit.query.get("open") or None
    events = [told for one in records if (told := _event(one)) is not None]
    earlier = max(0, after - RECORDS_SHOWN) if after else None
    back, forward = (_neighbour(picture.rows, chosen, step) for step in (-1, 1))
    return await visit.page(
        "run.html",
        nav="Runs",
        status=200 if problem is None else problem.status,
        run=run,
        at=at,
        last=last,
        after=after,
        picture=picture,
        chosen=chosen,
        rows=fold_scopes(picture.rows, opened=opened, chosen=chosen),
        opened=opened,
        open_all=OPEN_ALL,
        # Past the first and the last operation of the page: the entry beside it, which stands on another page.
        back=max(1, back.at) if back is not None else after or None,
        forward=max(1, forward.at) if forward is not None else None if later is None else later + 1,
        events=events[-EVENTS_SHOWN_MAX:],
        events_total=len(events),
        earlier=earlier,
        later=later,
        state_then=None if state is None else state["state"],
        changed=[] if chosen is None else [one["at"] for one in chosen.record.get("state_change") or ()],
        questions=questions,
        questions_left=sum(one["kind"] == "ask" for one in run["awaits"]) - len(questions),
        program=_program(program, picture.rows, at, run if at == last else None),
        is_open=is_open,
        axis_end={"live": "now", "page": f"entry {later or last:,}"}.get(standing, run["state"].lower()),
        ended=next((one for one in reversed(records) if one["artifact_type"] == "run_end"), None),
        is_resting=run["state"] in RESTING,
        continue_action="resume_run" if run["state"] in ("PARKED", "DIVERGED") else "retry_run",
        problem=None if problem is None else problem.document,
        typed=typed or {},
    )


def _standing(state: str, *, has_later: bool) -> Standing:
    """Up to where a page of the journal reaches: to now on the last page of a run that goes on or waits."""
    if has_later:
        return "page"
    return "over" if state in ENDED else "resting" if state in RESTING else "live"


def _end_of(records: Sequence[Mapping[str, Any]]) -> str:
    return max(str(one["recorded_at"]) for one in records)


def _number(text: str | None, *, low: int, high: int) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 9:
        return None
    return min(high, max(low, int(text)))


def _chosen(rows: Sequence[Row], at: int) -> Row | None:
    """The operation that the chosen entry ended or began, or else the last one before it."""
    before = [row for row in rows if row.at <= at]
    return max(before, key=lambda row: row.at, default=None)


def _neighbour(rows: Sequence[Row], chosen: Row | None, step: int) -> Row | None:
    ordered = sorted(rows, key=lambda row: row.at)
    if chosen is None:
        return ordered[0] if ordered and step > 0 else None
    place = ordered.index(chosen) + step
    return ordered[place] if 0 <= place < len(ordered) else None


def _event(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What else happened: attempts that ended badly or came back, signals, resumptions, the end."""
    told = _told(record)
    if told is None:
        return None
    icon, words = told
    return {
        "icon": icon,
        "words": f"In the source: {words}" if is_inherited(record) else words,
        "at": record["recorded_at"],
    }


def _told(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Its icon and its words."""
    kind = record["artifact_type"]
    if kind == "run_attempt" and record["change"] != "LEASED":
        worker, number = record["worker"]["name"], record["attempt"]
        words = {
            "LOST": f"{worker} fell silent in attempt {number}. Another worker may take the run over.",
            "FENCED": f"{worker} came back as attempt {number}, which was over. It got STOP; nothing was written.",
            "RELEASED": f"{worker} gave attempt {number} back.",
            "FAILED": f"Attempt {number} failed at {worker}.",
        }[record["change"]]
        return "slash" if record["change"] in ("FENCED", "RELEASED") else "x-f", words
    if kind == "run_signal":
        return "down", f"{record['sent_by']} sent the signal {record['name']}."
    if kind == "run_escalation":
        return "up", f"The question at {record['path']} was escalated."
    if kind == "run_answer" and record["answered_by"]["type"] in ("person", "operator"):
        return "person", f"{record['answered_by']['id']} answered the question at {record['path']}."
    if kind == "run_resumption":
        return "play", f"{record['resumed_by']} had it go on: {record['rationale']}"
    if kind == "run_end":
        return "check" if record["outcome"] == "COMPLETED" else "x", _end_words(record)
    return None


def _end_words(record: Mapping[str, Any]) -> str:
    outcome, by, error = record["outcome"], record["ended_by"], record["error"] or {}
    if outcome == "CANCELLED":
        who = {"person": by["id"], "parent": f"its parent {by['id']}"}.get(by["type"], by["type"])
        return f"It was cancelled by {who}."
    words = {
        "COMPLETED": "It completed.",
        "FAILED": f"It failed: {error.get('type')}.",
        "PARKED": f"It was parked: {error.get('type')}.",
        "DIVERGED": "It diverged: the program is not the one that made this journal.",
    }
    return words[outcome] + (" Its time was over." if by["type"] == "time" else "")


async def _questions(visit: Visit, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first ones that are open. They share the room: many questions with many options stay one small page."""
    open_ = [one for one in run["awaits"] if one["kind"] == "ask"][:QUESTIONS_SHOWN_MAX]
    found = [await _question(visit, one["path"]) for one in open_]
    for one in found:
        most = OPTIONS_SHOWN_MAX // len(found)
        one["options_left"] = max(0, len(one["options"] or ()) - most)
        one["options"] = (one["options"] or [])[:most]
        one["message_chars"] = CONSOLE_VALUE_CHARS_MAX // len(found)
        one["context_chars"] = CONSOLE_JSON_CHARS_MAX // len(found)
    return found


async def _question(visit: Visit, path: str) -> dict[str, Any]:
    """The newest request at this address."""
    found = await visit.api.get(f"{_api(visit)}/checkpoints/{path}")
    intent = [one for one in found["items"] if one["artifact_type"] == "run_intent"][-1]
    request = intent["request"]
    schema = request["answer_schema"]
    return {
        "path": path,
        "name": intent["name"],
        "request": request,
        "intent_digest": intent["artifact_digest"],
        "asked_at": intent["recorded_at"],
        "options": schema.get("enum") if isinstance(schema.get("enum"), list) else None,
        "takes": schema.get("type") if isinstance(schema.get("type"), str) else "a JSON value",
        "default": _plain(request.get("default")),
        "context": _plain(request.get("context")),
    }


def _plain(value: Mapping[str, Any] | None) -> Any:
    """What a Value holds, where it holds it itself."""
    return None if value is None else value.get("value", {"kept as": value.get("tier")})


def _said(request: Mapping[str, Any], form: Mapping[str, str]) -> Any:
    """The answer as JSON. Where the question takes text, it is what was typed; ValueError says what is wrong."""
    text, schema = form.get("answer", ""), request["answer_schema"]
    if request["form"] == "approve":
        if text not in ("yes", "no"):
            raise ValueError("The question takes yes or no")
        return text == "yes"
    if request["form"] == "select" and isinstance(schema.get("enum"), list):
        if not text.isdigit() or int(text) >= len(schema["enum"]):
            raise ValueError("The question takes one of its options")
        return schema["enum"][int(text)]
    if request["form"] == "review":
        said = {"decision": text, "feedback": form.get("feedback") or None}
        edited = form.get("edited", "").strip()
        return {**said, "edited": _read(edited)} if edited else said
    return text if schema.get("type") == "string" else _read(text)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"This is not JSON: {error}") from None


def _program(
    found: Mapping[str, Any] | None, rows: Sequence[Row], at: int, run: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The text of a submitted program, and where it is: `run`, which is given where it is looked at as it stands, waits
    at the lines of what it awaits; else it is the line of the last operation up to the chosen entry."""
    source = None if found is None else found.get("source")
    if not isinstance(source, str):
        return None
    awaited = [one["source"] for one in (run or {}).get("awaits", ()) if one["is_awaited"] and one["source"]]
    newest = max((row for row in rows if row.source and row.at <= at), key=lambda row: row.at, default=None)
    places = awaited or ([] if newest is None or newest.source is None else [newest.source])
    here = sorted({line for place in places if (line := _number(place.rpartition(":")[2], low=1, high=10**9))})[:16]
    lines = source.split("\n")
    shown_lines = _lines_shown(lines, 1)
    if here and here[0] > len(shown_lines):
        shown_lines = _lines_shown(lines, max(1, here[0] - LINES_BEFORE))
    return {"lines": shown_lines, "total": len(lines), "here": here, "is_waiting": bool(awaited)}


def _lines_shown(lines: Sequence[str], first: int) -> list[tuple[int, Markup]]:
    """From this line on as many as there is room for, each with its number."""
    made, left = list[tuple[int, Markup]](), PROGRAM_CHARS_MAX
    for number, line in enumerate(lines[first - 1 :], first):
        text = shown(line, chars_max=LINE_CHARS_MAX)
        left -= len(text) + LINE_MARKUP_CHARS
        if left < 0:
            break
        made.append((number, text))
    return made
