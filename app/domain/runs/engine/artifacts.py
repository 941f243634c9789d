"""From what a worker sends to the documents of its run. The same request makes the same documents, but for the time at
which the gateway recorded them: that is how a repeat is known."""

from __future__ import annotations

from typing import Any, Final

from app.core.canonical import canonical_bytes
from app.core.errors import RunTierInvalid, RunValueTooLarge, SchemaViolation
from app.core.limits import RUN_INLINE_BYTES_MAX
from app.domain.runs.documents import (
    RunAnswer,
    RunAttempt,
    RunCheckpoint,
    RunDocument,
    RunEnd,
    RunIntent,
    RunStart,
    RunSuspension,
)
from app.domain.runs.engine.messages import (
    AskPut,
    CheckpointPut,
    Put,
    SecretSaid,
    SignalPut,
    SleepPut,
    StepPut,
    ThenChild,
    ThenTool,
)
from app.domain.runs.ids import key_of, later, trace_id_of
from app.domain.runs.replay import Run, wakes_with
from app.domain.runs.values import ChildValue, EffectValue, EventValue, InlineValue, TransientValue, Value

# Recorded by the gateway: a repeat has others.
_Begins = AskPut | SleepPut | SignalPut | StepPut | ThenTool | ThenChild
_OF_THE_MOMENT: Final = frozenset({"at", "ended_at", "not_before", "answered_at"})


def document_of(put: Put, run_id: str, attempt: int) -> RunCheckpoint | RunIntent:
    """The document that records this put; SchemaViolation, RunTierInvalid or RunValueTooLarge."""
    if isinstance(put, CheckpointPut):
        if put.resume == "snapshot" and isinstance(put.value, TransientValue):
            raise RunTierInvalid(
                f"operation {put.path} is transient and would be skipped", expected="recompute", found="snapshot"
            )
        if not isinstance(put.value, SecretSaid):
            verify_given(put.value, put.path)
        fields = {name: value for name, value in put.__dict__.items() if name != "type"}
        return RunCheckpoint.made_of({"run_id": run_id, "attempt": attempt, **fields})
    request: dict[str, Any]
    if isinstance(put, AskPut):
        verify_given(put.request.context, put.path)
        verify_given(put.request.default, put.path)
        request = {name: value for name, value in put.request.__dict__.items() if (name, value) != ("callback", None)}
    elif isinstance(put, SleepPut):
        request = {"wakes_at": put.wakes_at}
    elif isinstance(put, SignalPut):
        request = {"expires_at": put.expires_at}
    else:
        request = {}
    return _intent(run_id, attempt, put, put.type, put.name, request)


def tool_intent(then: ThenTool, start: RunStart, attempt: int, *, now: str) -> RunIntent:
    run_id, path, tried = start.run_id, then.path, then.try_number
    called = then.continues_try or tried
    request = {
        "trace_id": trace_id_of(run_id, path, called, started_at=start.started_at),
        "idempotency_key": key_of(run_id, path, called),
        "retries": then.retries,
    }
    if then.timeout_ms is not None:
        request["waits_until"] = later(now, then.timeout_ms)
    name = f"{then.server_id}.{then.tool_name}"
    return _intent(run_id, attempt, then, "tool", name, request)


def child_intent(then: ThenChild, run_id: str, attempt: int, *, child_run_id: str | None, version: str) -> RunIntent:
    request = {"child_run_id": child_run_id, "procedure": then.procedure, "version": version}
    return _intent(run_id, attempt, then, "child", then.name, request)


def _intent(run_id: str, attempt: int, said: _Begins, kind: str, name: str, request: dict[str, Any]) -> RunIntent:
    fields: dict[str, Any] = {
        "run_id": run_id,
        "attempt": attempt,
        "path": said.path,
        "kind": kind,
        "name": name,
        "input_digest": said.input_digest,
        "try_number": said.try_number,
        "request": request,
    }
    if said.source is not None:
        fields["source"] = said.source
    return RunIntent.made_of(fields)


def answer_of(
    run: Run,
    path: str,
    *,
    by: str,
    by_id: str,
    at: str,
    value: Value | dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
    outcome: str | None = None,
) -> RunAnswer:
    """The answer to what has begun at this address, with what the fold expects of `wakes`."""
    begun = run.frontier.begun[path]
    wakes = run.head.state == "WAITING" and wakes_with(run, path)
    return RunAnswer.made_of(
        {
            "run_id": run.run_id,
            "path": path,
            "intent_digest": begun.intent_digest,
            "wakes": "YES" if wakes else "NO",
            "outcome": outcome or ("OK" if error is None else "ERROR"),
            "value": value,
            "error": error,
            "answered_by": {"type": by, "id": by_id[:256]},
            "answered_at": at,
            "signature": None,
        }
    )


def is_of_worker(document: RunDocument | None, attempt: int) -> bool:
    """Whether a worker has put it in this attempt."""
    if isinstance(document, RunCheckpoint | RunIntent | RunSuspension):
        return document.attempt == attempt
    if isinstance(document, RunEnd):
        return document.attempt == attempt and document.ended_by.type == "worker"
    return (
        isinstance(document, RunAttempt) and document.attempt == attempt and document.change in ("RELEASED", "FAILED")
    )


def is_same(recorded: RunDocument | None, made: RunDocument) -> bool:
    """Whether what is recorded is what this request makes, whenever each was made."""
    if type(recorded) is not type(made):
        return False
    return _lasting(recorded) == _lasting(made)


def _lasting(document: RunDocument | None) -> dict[str, Any]:
    if document is None:
        return {}
    said: dict[str, Any] = {name: value for name, value in document.to_json().items() if name not in _OF_THE_MOMENT}
    value = said.get("value")
    if isinstance(value, dict) and value.get("tier") == "secret":
        said["value"] = value["commitment"]  # sealed twice, the same value is other bytes
    return said


def verify_given(value: Value | None, where: str) -> None:
    """Raise unless a worker or a caller may say this value. RunValueTooLarge: it may not stand in the journal itself.
    SchemaViolation: it names what a tool or a child has returned. Who reads the journal gets that from there, so only
    the gateway says it, of the very trace or run that an intent named."""
    if isinstance(value, EffectValue | ChildValue):
        raise SchemaViolation(
            f"the value of {where} names another stream", expected="inline or artifact", found=f"tier {value.tier}"
        )
    if isinstance(value, InlineValue | EventValue):
        try:
            size = len(canonical_bytes(value.value))
        except (ValueError, RecursionError) as error:
            raise SchemaViolation(f"the value of {where} is no JSON that can be recorded", found=error) from None
        if size > RUN_INLINE_BYTES_MAX:
            raise RunValueTooLarge(
                f"the value of {where} is too large for the journal",
                expected=f"at most {RUN_INLINE_BYTES_MAX} bytes inline",
                found=size,
            )
