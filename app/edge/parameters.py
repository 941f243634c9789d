"""What a reading request may ask for: exactly the parameters that a route has, each once, each well-formed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import parse_qsl

from starlette.requests import Request

from app.config.wording import listed, shown
from app.core.errors import InputMalformed, TraceNotFound
from app.core.limits import (
    FIND_CHARS_MAX,
    LIST_ITEMS_DEFAULT,
    LIST_ITEMS_MAX,
    NAME_CHARS_MAX,
    QUERY_PARAMETERS_MAX,
    RUN_LISTED_ENTRIES_MAX,
    RUN_PAGE_RECORDS_MAX,
    RUN_PATH_CHARS_MAX,
    SAFE_INTEGER_MAX,
)
from app.domain.addresses import OWN_RUN_ID_PATTERN, PATH_PATTERN
from app.domain.identity import Principal
from app.domain.runs.engine.viewing import STATES_OF_STATUS
from app.domain.tga.documents import TraceId
from app.domain.tga.transitions import TRACE
from app.edge.permissions import require, scope_of
from app.edge.services import Services, header_of

_TRACE_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_NAME: Final = re.compile(rf"[!-~]{{1,{NAME_CHARS_MAX}}}")
_MOMENT: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{3})?Z")
_KEY: Final = re.compile(rf"[!-~]([ -~]{{0,{FIND_CHARS_MAX - 2}}}[!-~])?")
_WAITING: Final = ("supervisor", "operator")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,15}")


def parameters(request: Request, *allowed: str) -> dict[str, str]:
    """The query's parameters, or InputMalformed naming the one that the route does not have, or has twice."""
    raw: bytes = request.scope["query_string"]
    if not raw:
        return {}
    try:
        pairs = parse_qsl(
            raw.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=QUERY_PARAMETERS_MAX,
        )
    except ValueError:
        raise _malformed("the query cannot be read", f"name=value pairs, at most {QUERY_PARAMETERS_MAX}") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in allowed:
            raise _malformed("there is no such parameter", listed(allowed) or "no parameter at all", shown(name))
        if name in found:
            raise _malformed(f"the parameter {name} is repeated", "each once")
        found[name] = value
    return found


def number_in(given: dict[str, str], parameter: str) -> int:
    if parameter not in given:
        raise _malformed(f"the parameter {parameter} is missing", "a whole number")
    return _number(parameter, given[parameter], at_most=SAFE_INTEGER_MAX)


def limit_in(given: dict[str, str], *, at_most: int = LIST_ITEMS_MAX) -> int:
    limit = _number("limit", given.get("limit", str(LIST_ITEMS_DEFAULT)), at_most=at_most)
    if limit < 1:
        raise _malformed("limit", f"1 to {at_most}", "0")
    return limit


def steps_in(given: dict[str, str]) -> int:
    """How many of a run's newest steps; 0: none."""
    return _number("steps", given.get("steps", str(RUN_PAGE_RECORDS_MAX)), at_most=RUN_PAGE_RECORDS_MAX)


def newest_in(given: dict[str, str]) -> int:
    """How many of the newest entries of each listed run; 0: none."""
    return _number("newest", given.get("newest", "0"), at_most=RUN_LISTED_ENTRIES_MAX)


def sequence_in(request: Request, given: dict[str, str]) -> int:
    """After which entry to go on: what a client that reconnects has seen counts more than what it once asked for."""
    last = header_of(request.scope, b"last-event-id")
    if last is not None:
        return _number("Last-Event-ID", last, at_most=SAFE_INTEGER_MAX)
    return _number("after_seq", given.get("after_seq", "0"), at_most=SAFE_INTEGER_MAX)


def name_in(given: dict[str, str], parameter: str) -> str | None:
    value = given.get(parameter)
    if value is not None and not _NAME.fullmatch(value):
        raise _malformed(parameter, f"1 to {NAME_CHARS_MAX} printable ASCII characters without spaces", shown(value))
    return value


def states_in(given: dict[str, str]) -> list[str] | None:
    """One state, or several with commas between them."""
    if "state" not in given:
        return None
    states = given["state"].split(",")
    for state in states:
        if state not in TRACE.states:
            raise _malformed("state", f"{listed(TRACE.states)}; several with commas between them", shown(state))
    return states


def waiting_in(given: dict[str, str]) -> str | None:
    waiting = given.get("waiting")
    if waiting is not None and waiting not in _WAITING:
        raise _malformed("waiting", listed(_WAITING), shown(waiting))
    return waiting


def key_in(given: dict[str, str]) -> str | None:
    key = given.get("idempotency_key")
    if key is not None and not _KEY.fullmatch(key):
        raise _malformed("idempotency_key", f"1 to {FIND_CHARS_MAX} printable ASCII characters", shown(key))
    return key


def milliseconds_in(given: dict[str, str], parameter: str) -> int | None:
    """A moment in UTC, as everything here writes it, in milliseconds since 1970."""
    text = given.get(parameter)
    if text is None:
        return None
    try:
        if not _MOMENT.fullmatch(text):
            raise ValueError(text)
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise _malformed(parameter, "a moment such as 2026-01-31T12:00:00.000Z", shown(text)) from None


def status_in(given: dict[str, str]) -> str | None:
    status = given.get("status")
    if status is not None and status not in STATES_OF_STATUS:
        raise _malformed("status", listed(STATES_OF_STATUS), shown(status))
    return status


def prefix_in(given: dict[str, str]) -> str:
    if "prefix" not in given:
        return ""
    if re.fullmatch(OWN_RUN_ID_PATTERN, given["prefix"]) is None:
        raise _malformed("prefix", "the beginning of a run's id", shown(given["prefix"]))
    return given["prefix"]


async def trace_seen_by(services: Services, principal: Principal, request: Request) -> TraceId:
    """The id in the path, if this principal may see the trace; else TraceNotFound, whether it exists or not."""
    require(principal, "read")
    trace_id = request.path_params["trace_id"]
    is_id = _TRACE_ID.fullmatch(trace_id) is not None
    if not is_id or not await services.queries.is_visible(TRACE.stream(trace_id), scope_of(principal)):
        raise TraceNotFound("no such trace")
    return TraceId(trace_id)


def own_name(tenant: str, server_id: str | None) -> str | None:
    """What a tenant calls its server, whose id on the log is qualified."""
    return None if server_id is None else server_id.removeprefix(f"{tenant}/")


def _number(what: str, text: str, *, at_most: int) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > at_most:
        raise _malformed(what, f"a whole number, at most {at_most}", shown(text))
    return int(text)


def _malformed(what: str, expected: str, found: str | None = None) -> InputMalformed:
    return InputMalformed(what, expected=expected, found=found, remedy="Correct the parameter that is named.")


# The same for OpenAPI.
def documented_parameters(*names: str, in_path: Sequence[str] = ()) -> dict[str, Any]:
    """For `openapi_extra`. `in_path`: names of servers and tools, which other routes take as filters."""
    named = [{"name": name, "in": "path", "required": True, "schema": _NAME_SCHEMA} for name in in_path]
    return {"parameters": [*named, *(_DOCUMENTED[name] for name in names)]}


def _query(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


_NAME_SCHEMA: Final = {"type": "string", "pattern": "^[!-~]+$", "minLength": 1, "maxLength": NAME_CHARS_MAX}
_NUMBER_SCHEMA: Final = {"type": "integer", "minimum": 0, "maximum": SAFE_INTEGER_MAX}
_MOMENT_SCHEMA: Final = {"type": "string", "format": "date-time", "pattern": f"^{_MOMENT.pattern}$"}
_KEY_SCHEMA: Final = {"type": "string", "minLength": 1, "maxLength": FIND_CHARS_MAX, "pattern": "^[!-~]([ -~]*[!-~])?$"}
_CURSOR_SCHEMA: Final = {"type": "string", "pattern": "^[A-Za-z0-9_-]+$"}
_DOCUMENTED: Final[dict[str, dict[str, Any]]] = {
    "trace_id": {
        "name": "trace_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "format": "uuid", "pattern": f"^{_TRACE_ID.pattern}$"},
        "example": "019b76da-a800-7000-8000-000000000001",
    },
    "run_id": {
        "name": "run_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": OWN_RUN_ID_PATTERN},
        "example": "order-7",
    },
    "path": {
        "name": "path",
        "in": "path",
        "required": True,
        "description": "The address of an operation.",
        "schema": {"type": "string", "pattern": PATH_PATTERN, "maxLength": RUN_PATH_CHARS_MAX},
        "example": "3",
    },
    "after_number": _query(
        "after_seq",
        "Only records after this number; the journal of a fork begins below 0.",
        {"type": "integer", "minimum": -SAFE_INTEGER_MAX, "maximum": SAFE_INTEGER_MAX},
    ),
    "steps": _query(
        "steps",
        "How many of the newest steps. 0 reads none, and costs the same however long the journal is.",
        {"type": "integer", "minimum": 0, "maximum": RUN_PAGE_RECORDS_MAX, "default": RUN_PAGE_RECORDS_MAX},
    ),
    "newest": _query(
        "newest",
        "Of how many of each run's newest entries to say the kind. Without it `journal` is null.",
        {"type": "integer", "minimum": 0, "maximum": RUN_LISTED_ENTRIES_MAX, "default": 0},
    ),
    "at": _query("at", "After which entry of the journal; without it after the last.", _NUMBER_SCHEMA),
    "limit": _query(
        "limit",
        "How many items at most; there may be fewer, and still a next page.",
        {"type": "integer", "minimum": 1, "maximum": LIST_ITEMS_MAX, "default": LIST_ITEMS_DEFAULT},
    ),
    "records_limit": _query(
        "limit",
        "How many records at most; a page ends earlier at 1 MiB.",
        {"type": "integer", "minimum": 1, "maximum": RUN_PAGE_RECORDS_MAX, "default": RUN_PAGE_RECORDS_MAX},
    ),
    "q": {
        **_query(
            "q",
            "A trace's or run's id, an idempotency key, or the digest of an entry or artifact.",
            _KEY_SCHEMA,
        ),
        "required": True,
    },
    "cursor": _query("cursor", "The `next` of the page before.", _CURSOR_SCHEMA),
    "after": _query(
        "after", "The `next` of an earlier answer; left out, the feed starts at its beginning.", _CURSOR_SCHEMA
    ),
    "after_seq": _query("after_seq", "Only entries after this sequence number.", _NUMBER_SCHEMA),
    "index": {**_query("index", "Which leaf, from 0.", _NUMBER_SCHEMA), "required": True},
    "size": {**_query("size", "Of how many leaves the tree is.", _NUMBER_SCHEMA), "required": True},
    "old": {**_query("old", "The size of the smaller tree.", _NUMBER_SCHEMA), "required": True},
    "new": {**_query("new", "The size of the larger tree.", _NUMBER_SCHEMA), "required": True},
    "status": _query("status", "Only runs of this status.", {"type": "string", "enum": list(STATES_OF_STATUS)}),
    "prefix": _query(
        "prefix",
        "Only runs whose id begins so.",
        {"type": "string", "pattern": OWN_RUN_ID_PATTERN},
    ),
    "state": _query(
        "state",
        "Only traces in this state, or in one of several with commas between them.",
        {"type": "string", "pattern": f"^({'|'.join(TRACE.states)})(,({'|'.join(TRACE.states)}))*$", "maxLength": 200},
    ),
    "waiting": _query("waiting", "Only traces that rest for this role.", {"type": "string", "enum": list(_WAITING)}),
    "idempotency_key": _query("idempotency_key", "Only calls with exactly this key.", _KEY_SCHEMA),
    "since": _query("since", "Only what was asked for at this moment or later.", _MOMENT_SCHEMA),
    "until": _query("until", "Only what was asked for before this moment.", _MOMENT_SCHEMA),
    "server_id": _query("server_id", "Only of this server.", _NAME_SCHEMA),
    "tool_name": _query("tool_name", "Only of this tool.", _NAME_SCHEMA),
    "procedure": _query("procedure", "Only of this procedure.", _NAME_SCHEMA),
    "version": _query("version", "Of this version.", _NAME_SCHEMA),
    "program_digest": _query("program_digest", "With this digest of the program.", _NAME_SCHEMA),
    "principal_id": _query("principal_id", "Only what this principal asked for.", _NAME_SCHEMA),
    "Last-Event-ID": {
        "name": "Last-Event-ID",
        "in": "header",
        "required": False,
        "description": "The id of the last event that was received: the stream goes on after it.",
        "schema": {"type": "string"},
    },
}
