"""Journals for tests: documents of a run with sensible fields, appended one by one to a run that is folded."""

from __future__ import annotations

from typing import Any, Final

from app.core.chain import Head
from app.core.digest import digest_of
from app.domain.runs.documents import (
    RunAnswer,
    RunAttempt,
    RunCheckpoint,
    RunDocument,
    RunEnd,
    RunEscalation,
    RunIntent,
    RunLogEntry,
    RunResumption,
    RunSignal,
    RunStart,
    RunSuspension,
)
from app.domain.runs.replay import RUN_DOCUMENTS, Run, RunRecord, digest_of_frontier, fold_next, frontier_after
from app.domain.runs.transitions import RUN
from tests.traces import EXECUTOR, time_at, uuid7

PROGRAM: Final = "a" * 64
POLICY: Final = {
    "timeout_ms": None,
    "checkpoint_timeout_ms": 60_000,
    "retry": {"retries": 2, "first_ms": 100, "max_ms": 10_000},
    "park_after": 3,
    "on_parent_end": "cancel",
    "retention": "keep",
}
WRONG: Final = {"type": "ValueError", "message": "no such order", "retryable": False}
WORKER: Final = {"principal_id": "worker-1", "name": "host:1"}
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "step": {},
    "tool": {"trace_id": uuid7(1), "idempotency_key": "run:r/1", "retries": 2},
    "ask": {
        "form": "approve",
        "message": "Pay?",
        "context": {"tier": "inline", "value": {"amount": 7}},
        "answer_schema": {"type": "boolean"},
        "expires_at": time_at(60),
        "default": {"tier": "inline", "value": "answer"},
        "webhooks": ["ops"],
        "escalations": [{"at": time_at(20), "webhooks": ["boss"]}, {"at": time_at(40), "webhooks": []}],
    },
    "sleep": {"wakes_at": time_at(60)},
    "signal": {"expires_at": time_at(60)},
    "child": {"child_run_id": "child-1", "procedure": "pay", "version": "1"},
}
ANSWERED_BY: Final = {"tool": "tool", "ask": "person", "sleep": "timer", "signal": "signal", "child": "child"}


def inline(value: Any) -> dict[str, Any]:
    return {"tier": "inline", "value": value}


def identity(kind: str, name: str, given: Any = None) -> dict[str, Any]:
    return {"kind": kind, "name": name, "input_digest": digest_of([kind, name, given])}


def start(run_id: str = "r", **changed: Any) -> RunStart:
    fields: dict[str, Any] = {
        "run_id": run_id,
        "principal": {"principal_id": "agent-1", "tenant": "default", "roles": ["agent"]},
        "procedure": "onboard",
        "version": "1.2.0",
        "program_digest": PROGRAM,
        "input": inline({"user": 7}),
        "started_at": time_at(0),
        "trigger": {"type": "call", "id": None},
        "parent": None,
        "forked_from": None,
        "policy": POLICY,
        "allowed_by": {"policy_digest": "b" * 64, "policy_ids": ["agents-start"]},
        "tags": ["nightly"],
    }
    return RunStart.made_of({**fields, **changed})


def attempt(number: int, change: str = "LEASED", run_id: str = "r", **changed: Any) -> RunAttempt:
    fields: dict[str, Any] = {
        "run_id": run_id,
        "attempt": number,
        "change": change,
        "worker": WORKER,
        "program_digest": PROGRAM,
        "reason": None,
        "error": WRONG if change == "FAILED" else None,
        "not_before": None,
        "at": time_at(1),
    }
    return RunAttempt.made_of({**fields, **changed})


def intent(path: str, kind: str = "tool", name: str = "crm.create", run_id: str = "r", **changed: Any) -> RunIntent:
    fields: dict[str, Any] = {
        "run_id": run_id,
        "attempt": 1,
        "path": path,
        **identity(kind, name),
        "try_number": 1,
        "request": REQUESTS[kind],
    }
    return RunIntent.made_of({**fields, **changed})


def checkpoint(path: str, kind: str = "step", name: str = "plan", run_id: str = "r", **changed: Any) -> RunCheckpoint:
    outcome = changed.get("outcome", "OK")
    fields: dict[str, Any] = {
        "run_id": run_id,
        "attempt": 1,
        "path": path,
        **identity(kind, name),
        "outcome": outcome,
        "value": inline(path) if outcome == "OK" else None,
        "error": None if outcome == "OK" else WRONG,
        "resume": "snapshot",
        "try_number": 1,
        "inner": 0,
        "state_change": [],
        "logs": [],
        "started_at": time_at(2),
        "duration_ms": 3,
        "source": "onboard.py:12",
    }
    return RunCheckpoint.made_of({**fields, **changed})


def answer(path: str, of: str, by: str = "tool", run_id: str = "r", **changed: Any) -> RunAnswer:
    outcome = changed.get("outcome", "OK")
    fields: dict[str, Any] = {
        "run_id": run_id,
        "path": path,
        "intent_digest": of,
        "wakes": "NO",
        "outcome": outcome,
        "value": inline("answer") if outcome == "OK" else None,
        "error": None if outcome == "OK" else WRONG,
        "answered_by": {"type": by, "id": "who"},
        "answered_at": time_at(60 if by == "timer" else 3),
        "signature": None,
    }
    return RunAnswer.made_of({**fields, **changed})


def escalation(path: str, intent_digest: str, level: int = 1, run_id: str = "r", **changed: Any) -> RunEscalation:
    fields: dict[str, Any] = {
        "run_id": run_id,
        "path": path,
        "intent_digest": intent_digest,
        "level": level,
        "announced_to": ["boss"],
        "escalated_at": time_at(20 * level),
    }
    return RunEscalation.made_of({**fields, **changed})


def signal(name: str, signal_id: str, run_id: str = "r", **changed: Any) -> RunSignal:
    fields: dict[str, Any] = {
        "run_id": run_id,
        "name": name,
        "signal_id": signal_id,
        "value": inline("go"),
        "sent_by": "agent-1",
        "sent_at": time_at(4),
    }
    return RunSignal.made_of({**fields, **changed})


def suspension(*awaits: str, run_id: str = "r", **changed: Any) -> RunSuspension:
    fields: dict[str, Any] = {"run_id": run_id, "attempt": 1, "awaits": list(awaits), "wake": "ANY"}
    return RunSuspension.made_of({**fields, **changed})


def end(outcome: str = "COMPLETED", run_id: str = "r", **changed: Any) -> RunEnd:
    divergence = {"path": "2", "recorded": "step plan", "performed": "step pay", "source": "onboard.py:14"}
    fields: dict[str, Any] = {
        "run_id": run_id,
        "attempt": 1,
        "outcome": outcome,
        "output": inline("done") if outcome == "COMPLETED" else None,
        "error": None if outcome == "COMPLETED" else WRONG,
        "divergence": divergence if outcome == "DIVERGED" else None,
        "positions": 0 if outcome == "COMPLETED" else None,
        "ended_by": {"type": "worker", "id": "worker-1"},
        "ended_at": time_at(5),
    }
    return RunEnd.made_of({**fields, **changed})


def resumption(run: Run | None = None, run_id: str = "r", **changed: Any) -> RunResumption:
    """With the digest of the frontier that follows from it, unless another is given."""
    fields: dict[str, Any] = {
        "run_id": run_id,
        "resumed_by": "op-1",
        "rationale": "the server is up again",
        "accepts": None,
        "reopens": [],
        "frontier_digest": "0" * 64,
        "resolves": [],
        "resumed_at": time_at(6),
    }
    made = RunResumption.made_of({**fields, **changed})
    if run is None or "frontier_digest" in changed:
        return made
    digest = digest_of_frontier(frontier_after(run.frontier, made))
    return RunResumption.made_of({**fields, **changed, "frontier_digest": digest})


def advance(
    run: Run | None, artifact: RunDocument, *, executor_id: str, recorded_at: str, source: Run | None = None
) -> tuple[RunRecord, Run]:
    """The record that appends `artifact` to the run, and the run after it; raises where it may not stand."""
    head = Head.unborn(RUN) if run is None else run.head
    planned, _, _ = RUN_DOCUMENTS.plan(
        head, artifact, identity=artifact.run_id, executor_id=executor_id, recorded_at=recorded_at
    )
    record = RunRecord(RunLogEntry.from_body_bytes(planned.entry), artifact)
    return record, fold_next(run, record, source=source)


class Journal:
    """A run and its records. `append` raises what the fold raises, and then nothing is appended."""

    def __init__(self, first: RunStart | None = None, *, source: Run | None = None) -> None:
        self.records: list[RunRecord] = []
        self.source = source
        self.run: Run
        self.append(first or start())

    def append(self, *artifacts: RunDocument) -> RunRecord:
        for artifact in artifacts:
            record, self.run = advance(
                getattr(self, "run", None),
                artifact,
                executor_id=EXECUTOR,
                recorded_at=time_at(len(self.records)),
                source=self.source,
            )
            self.records.append(record)
        return self.records[-1]

    @property
    def last_digest(self) -> str:
        return self.records[-1].entry.artifact_digest


def running(*artifacts: RunDocument) -> Journal:
    """A run that is leased, and these after that."""
    journal = Journal()
    journal.append(attempt(1), *artifacts)
    return journal
