"""Runs, programs, calls and questions as they are shown to callers."""

from __future__ import annotations

import copy
from typing import Any, Final

from tga_sdk.testing.engine import Engine
from tga_sdk.testing.run import MemoryRun, Record
from tga_sdk.testing.store import Program, due_of
from tga_sdk.testing.tools import Call

STATUS: Final = {
    "SCHEDULED": "running",
    "RUNNING": "running",
    "WAITING": "waiting",
    "FAILED": "failed",
    "PARKED": "parked",
    "DIVERGED": "diverged",
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
}
STATUSES: Final = {**{status: status for status in STATUS.values()}, "waiting_for_human": "waiting_for_human"}
_WAITING: Final = {"SCHEDULED": "worker", "FAILED": "operator", "PARKED": "operator", "DIVERGED": "operator"}
_OF_KIND: Final = {"ask": "person", "signal": "signal", "child": "child", "tool": "tool", "sleep": "time"}
_OUTCOME: Final = {"OK": "completed", "RETRY": "retrying", "INTERRUPTED": "interrupted"}


def waiting_of(run: MemoryRun) -> str | None:
    if run.state != "WAITING":
        return _WAITING.get(run.state)
    awaited = {run.begun[path].said["kind"] for path in run.awaits if path in run.begun}
    return next((whom for kind, whom in _OF_KIND.items() if kind in awaited), None)


def status_of(run: MemoryRun) -> str:
    return "waiting_for_human" if waiting_of(run) == "person" else STATUS[run.state]


def run_document(engine: Engine, run: MemoryRun) -> dict[str, Any]:
    """As GET /v1/runs/{run_id} answers it."""
    start, end = run.start, run.end or {}
    parent = start["parent"]
    return copy.deepcopy(
        {
            "run_id": run.run_id,
            "procedure": start["procedure"],
            "version": run.version,
            "program_digest": run.program_digest,
            "state": run.state,
            "status": status_of(run),
            "waiting": waiting_of(run),
            "notice": _notice(engine, run),
            "attempt": run.attempt,
            "failures": run.failures,
            "worker": run.worker_name,
            "principal_id": start["principal"]["principal_id"],
            "input": start["input"],
            "output": end.get("output"),
            "error": end.get("error"),
            "divergence": end.get("divergence"),
            "awaits": _awaits(run),
            "steps": _steps(run),
            "steps_left_out": False,
            "sequence_number": run.sequence_number,
            "entry_digest": run.entry_digest,
            "started_at": start["started_at"],
            "updated_at": run.updated_at,
            "trigger": start["trigger"],
            "parent": None if parent is None else parent["run_id"],
            "forked_from": start["forked_from"],
            "policy": start["policy"],
            "tags": start["tags"],
            "strict_determinism": start.get("strict_determinism", False),
        }
    )


def _awaits(run: MemoryRun) -> list[dict[str, Any]]:
    return [
        {
            "path": path,
            "kind": intent.said["kind"],
            "name": intent.said["name"],
            "due_at": due_of(intent),
            "level": run.levels[path],
            "intent_digest": intent.artifact_digest,
            "is_awaited": path in run.awaits,
            "source": intent.said.get("source"),
        }
        for path, intent in sorted(run.begun.items(), key=lambda item: item[0] not in run.awaits)
    ]


def _steps(run: MemoryRun) -> list[dict[str, Any]]:
    """The operations of the program itself, in their order."""
    steps: dict[str, dict[str, Any]] = {}
    for record in run.records:
        said, kind = record.said, record.artifact_type
        if kind not in ("run_intent", "run_checkpoint", "run_answer") or "." in said["path"]:
            continue
        path = said["path"]
        if kind == "run_answer" and path not in steps:
            continue
        if path not in steps:
            steps[path] = _new_step(said)
        step = steps[path]
        if kind != "run_answer":
            step["tries"], step["attempt"] = said["try_number"], said["attempt"]
        if kind == "run_intent":
            step["status"] = "in_progress"
            continue
        if kind == "run_checkpoint":
            step["started_at"], step["duration_ms"] = said["started_at"], said["duration_ms"]
        step["status"] = _OUTCOME.get(said["outcome"], "failed")
        step["value"], step["error"] = said["value"], said["error"]
    return list(steps.values())


def _new_step(said: dict[str, Any]) -> dict[str, Any]:
    step = {"path": said["path"], "kind": said["kind"], "name": said["name"], "status": "in_progress", "tries": 1}
    return {**step, "attempt": 0, "value": None, "error": None, "started_at": None, "duration_ms": None}


def _notice(engine: Engine, run: MemoryRun) -> str | None:
    procedure = run.start["procedure"]
    if run.state == "SCHEDULED":
        program, now_ms = (procedure, run.version, run.program_digest), engine.clock.now_ms()
        alive = [seen for seen in engine.workers.values() if seen.held or now_ms - seen.at_ms < engine.lease_ms]
        if not any(program in seen.programs for seen in alive):
            return f"no worker for {procedure} {run.version}: start one, or one that accepts this version"
    if run.state == "PARKED":
        return "attempts end without a checkpoint: look at the worker's log, then retry or cancel it"
    if run.state == "DIVERGED":
        return "the program is not the one that wrote the journal: deploy the old one, accept this one, or fork"
    return None


def listed_run(engine: Engine, run: MemoryRun, newest: int = 0) -> dict[str, Any]:
    """`newest`: of how many of its newest entries to say the kind."""
    kinds = [record.artifact_type for record in run.records[-newest:]]
    return {
        "run_id": run.run_id,
        "procedure": run.start["procedure"],
        "version": run.version,
        "state": run.state,
        "waiting": waiting_of(run),
        "attempt": run.attempt,
        "principal_id": run.start["principal"]["principal_id"],
        "started_at": run.start["started_at"],
        "updated_at": run.updated_at,
        "status": status_of(run),
        "notice": _notice(engine, run),
        "journal": {"entries": run.sequence_number, "newest": kinds} if newest else None,
    }


def program_document(program: Program) -> dict[str, Any]:
    said = program.said
    names = ("name", "version", "program_digest", "language", "tags", "triggers")
    shown = {name: copy.deepcopy(said[name]) for name in names}
    return {**shown, "registered_at": program.registered_at, "registered_by": program.registered_by}


def procedure_document(program: Program) -> dict[str, Any]:
    names = ("description", "input_schema", "output_schema", "state_schema", "policy")
    said = {name: copy.deepcopy(program.said[name]) for name in names}
    return {**program_document(program), **said, "source": None, "files": None}  # of submitted programs, which none is


def question(run: MemoryRun, intent: Record) -> dict[str, Any]:
    said = intent.said
    return {
        "kind": "run",
        "run_id": run.run_id,
        "path": said["path"],
        "procedure": run.start["procedure"],
        "principal_id": run.start["principal"]["principal_id"],
        "name": said["name"],
        "request": copy.deepcopy(said["request"]),
        "intent_digest": intent.artifact_digest,
        "asked_at": intent.recorded_at,
        "expires_at": said["request"]["expires_at"],
        "level": run.levels[said["path"]],
        "problem": None,
    }


def approval(call: Call) -> dict[str, Any]:
    return {
        "kind": "call",
        "trace_id": call.trace_id,
        "action_request_digest": call.digest,
        "server_id": call.server_id,
        "tool_name": call.tool_name,
        "principal_id": call.principal_id,
        "principal_roles": None,
        "tool_class": "write",
        "arguments": copy.deepcopy(call.arguments),
        "intent": call.intent,
        "idempotency_key": call.key,
        "policy": None,
        "pin_status": "pinned",
        "on_unknown_outcome": "redispatch",
        "requested_at": call.requested_at,
        "expires_at": None,
        "problem": None,
    }


def trace_document(call: Call) -> dict[str, Any]:
    """As GET /v1/traces/{trace_id} answers it, as far as it is known here: of the artifacts only the effect."""
    artifacts = dict.fromkeys(("action_request", "supervisor_decision", "tool_call"))
    return {
        "trace_id": call.trace_id,
        "state": call.state,
        "waiting": call.waiting,
        "server_id": call.server_id,
        "tool_name": call.tool_name,
        "principal_id": call.principal_id,
        "idempotency_key": call.key,
        "action_request_digest": call.digest,
        "tool_call_id": None if call.effect is None else call.tool_call_id,
        "expires_at": None,
        "attempts": [],
        "artifacts": {**artifacts, "supervisor_decision": call.decision, "tool_effect": copy.deepcopy(call.effect)},
        "erased": False,
    }


def entry_item(run: MemoryRun, record: Record) -> dict[str, Any]:
    """An entry as run events show it."""
    entry = {
        "run_id": run.run_id,
        "sequence_number": record.sequence_number,
        "artifact_type": record.artifact_type,
        "artifact_digest": record.artifact_digest,
        "from_state": record.from_state,
        "to_state": record.to_state,
        "recorded_at": record.recorded_at,
    }
    artifact = {**copy.deepcopy(record.said), "schema_id": f"tga/v1/{record.artifact_type}", "schema_version": "1.0"}
    number, digest = record.sequence_number, record.artifact_digest
    return {"sequence_number": number, "entry_digest": digest, "entry": entry, "artifact": artifact}
