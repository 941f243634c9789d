"""Loaded by schemathesis (SCHEMATHESIS_HOOKS): real ids where it can only guess, and a note of every answer.

Only cases that are meant to be valid are touched: what was made to be wrong stays wrong.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis import Case, GenerationMode

_place = os.environ.get("TGA_TEST_OUTSIDE")
_known: dict[str, Any] = json.loads(Path(_place, "known.json").read_text()) if _place else {}
_open: set[str] = {one["trace_id"] for one in _known.get("traces", ()) if one["waiting"] is not None}
_turns: dict[str, itertools.count[int]] = {}


def _turn(operation: str) -> int:
    return next(_turns.setdefault(operation, itertools.count()))


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    if not _known or case.meta is None:
        return
    label = case.operation.label
    turn = _turn(label)
    if label.endswith("/events") and case.path_parameters.get("trace_id") in _open:
        # It has learnt the id of a trace that is not finished, whose stream does not end.
        case.path_parameters["trace_id"] = _known["finished"][0]["trace_id"]
    if case.meta.generation.mode != GenerationMode.POSITIVE:
        return
    if turn % 4 == 3:
        return  # as it was made: an id that nobody has
    if "trace_id" in case.path_parameters:
        of = "finished" if label.endswith("/events") else "traces"
        known = _known[of][turn % len(_known[of])]
        case.path_parameters["trace_id"] = known["trace_id"]
        if isinstance(case.body, dict) and turn % 4 != 2:
            for digest in ("action_request_digest", "tool_call_digest"):
                if digest in case.body and known.get(digest):
                    case.body[digest] = known[digest]
    elif label.endswith("/pin"):
        tool = _known["tools"][turn % len(_known["tools"])]
        case.path_parameters.update(server_id="bank", tool_name=tool["tool_name"])
        if isinstance(case.body, dict):
            case.body["definition_digest"] = tool["definition_digest"]
    elif label == "POST /v1/tool-calls" and isinstance(case.body, dict):
        arguments = {"amount": 13 if turn % 8 == 5 else turn}
        tool_name = ("charge", "refund", "balance", "fail")[turn % 4 if turn % 8 != 5 else 0]
        case.body.update(server_id="bank", tool_name=tool_name, arguments=arguments)
        if turn % 16 > 4:
            case.headers.pop("Idempotency-Key", None)
            case.body["idempotency_key"] = f"outside-{turn}"


@schemathesis.hook
def after_call(context: schemathesis.HookContext, case: Case, response: schemathesis.Response) -> None:
    if _place:
        with Path(_place, "answers.jsonl").open("a") as file:
            file.write(json.dumps([case.operation.label, response.status_code, round(response.elapsed, 3)]) + "\n")
