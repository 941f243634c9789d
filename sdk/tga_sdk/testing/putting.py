"""Puts: what a worker has done, recorded under its lease; a repeat is recognised by content."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import Any

from tga_sdk.canonical import canonical
from tga_sdk.testing import messages as m
from tga_sdk.testing.leasing import Leasing
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.run import (
    AT_WORK,
    MemoryRun,
    Record,
    is_of_worker,
    is_same,
    waits_for_nobody,
)
from tga_sdk.testing.schema import verify_schema
from tga_sdk.testing.store import Made, Stored, verify_size


class Putting(Leasing):
    def reason_to_stop(self, run: MemoryRun, body: m.PutRequest) -> str | None:
        is_known = body.after_seq <= run.sequence_number  # else it goes by a history that was lost
        if run.state == "RUNNING" and run.lease == body.lease and run.attempt == body.attempt and is_known:
            return None
        if run.state == "CANCELLED":
            return "CANCELLED"
        return "LEASE_LOST" if run.state in AT_WORK else "ENDED"

    def put(self, run_id: str, body: m.PutRequest, *, holds: bool) -> Stored:
        """Everything but tools and children. HOLD: it would be suspended, and may wait here a while before."""
        run = self.load(run_id)
        made, is_then_there = self.not_yet_there(run, body)
        if is_then_there:
            directive = "SUSPENDED" if isinstance(body.then, m.ThenSuspend) else "DONE"
            return Stored(directive, run.sequence_number, None, run.state)
        stop = self.reason_to_stop(run, body)
        if stop is not None:
            return Stored("STOP", run.sequence_number, stop)
        then = body.then
        if isinstance(then, m.ThenSuspend):
            if holds:
                self.answer_due(run)
            self.add_puts(run, made, lambda: self._suspension(run, then, body.attempt, holds=holds))
            if run.state == "WAITING":
                return Stored("SUSPENDED", run.sequence_number, None, run.state)
            is_woken = not self._open_paths(run, then)
            return Stored("CONTINUE" if is_woken else "HOLD", run.sequence_number)
        ending = self._ending(run, body)
        self.add_puts(run, made, lambda: ending)
        if ending:
            return Stored("DONE", run.sequence_number, None, run.state)
        return Stored("CONTINUE", run.sequence_number)

    @staticmethod
    def _open_paths(run: MemoryRun, then: m.ThenSuspend) -> list[str]:
        """What the run would wait for; nothing when that is over already."""
        open_paths = [path for path in then.awaits if path in run.begun]
        is_woken = len(open_paths) < len(then.awaits) if then.wake == "ANY" else not open_paths
        return [] if is_woken else open_paths

    def _suspension(self, run: MemoryRun, then: m.ThenSuspend, attempt: int, *, holds: bool) -> list[Made]:
        for path in then.awaits:
            if run.has_never_begun(path):  # else it would be answered at once, again and again
                raise waits_for_nobody(path, "nothing")
        open_paths = self._open_paths(run, then)
        if holds or not open_paths:
            return []
        said = {"run_id": run.run_id, "attempt": attempt, "awaits": open_paths, "wake": then.wake}
        return [Made("run_suspension", said)]

    def add_puts(self, run: MemoryRun, made: Sequence[Made], then: Callable[[], Sequence[Made]]) -> None:
        """Puts and what comes then in one commit; a signal that is there already is received with its intent."""
        whole: list[Made] = []
        taken: set[str] = set()
        for one in made:
            if one.artifact_type == "run_intent" and one.said["kind"] == "ask":
                verify_schema("answer_schema", one.said["request"]["answer_schema"])
            whole.append(one)
            if one.artifact_type == "run_intent" and one.said["kind"] == "signal":
                name = one.said["name"]
                there = next((s for s in run.signals if s.name == name and s.signal_id not in taken), None)
                if there is not None:
                    taken.add(there.signal_id)
                    value = run.records[there.sequence_number - 1].said["value"]
                    whole.append(self._answer(run, one.said, by=("signal", there.signal_id), value=value))
        self.commit(run, whole, then)

    def not_yet_there(self, run: MemoryRun, body: m.PutRequest) -> tuple[list[Made], bool]:
        """What the puts make and is not recorded, all or none; and whether what comes `then` is recorded."""
        made = [self._made(run, put, body.attempt) for put in body.puts]
        if run.sequence_number <= body.after_seq:
            return made, False
        recent = run.records[body.after_seq : body.after_seq + m.PAGE_RECORDS_MAX]
        mine = [record for record in recent if is_of_worker(record, body.attempt)]
        if len(mine) < len(made) or not all(is_same(record, *one) for record, one in zip(mine, made, strict=False)):
            return made, False
        return [], len(mine) > len(made) and _records(mine[len(made)], body.then)

    def answered(
        self, run_id: str, body: m.PutRequest, stored: Stored, result: Any = None, *, principal: str
    ) -> dict[str, Any]:
        run = self.load(run_id)
        if stored.directive == "STOP" and stored.reason == "LEASE_LOST":
            self._record_fenced(run, body, principal)
        news = []
        if stored.directive == "CONTINUE" and stored.sequence_number > body.after_seq + len(body.puts):
            news = self.news(run, body.after_seq, body.attempt)
        if result is None and stored.state is not None:
            result = {"state": stored.state}
        return {
            "directive": stored.directive,
            "reason": stored.reason,
            "sequence_number": stored.sequence_number,
            "news": news,
            "result": result,
        }

    def _record_fenced(self, run: MemoryRun, body: m.PutRequest, principal: str) -> None:
        is_over = body.attempt < run.attempt or (body.attempt == run.attempt and run.state != "RUNNING")
        if run.state in AT_WORK and is_over and body.attempt > run.fenced:
            lease, worker = run.lease, run.worker
            name = {"principal_id": principal, "name": principal}
            why = f"the lease of attempt {body.attempt} is over"
            self.commit(run, [self._attempt(run, "FENCED", body.attempt, worker=name, reason=why)])
            run.lease, run.worker = lease, worker

    def _ending(self, run: MemoryRun, body: m.PutRequest) -> list[Made]:
        then, by = body.then, ("worker", f"attempt-{body.attempt}")
        if isinstance(then, m.ThenComplete):
            output = then.output.to_json()
            verify_size(output, "the output")
            return [self._end_of(run, "COMPLETED", by=by, output=output, positions=then.positions)]
        if isinstance(then, m.ThenDiverge):
            told = then.divergence
            message = f"at {told.path} the journal has {told.recorded}, the program performs {told.performed}"
            error = {"type": "RUN_DIVERGED", "message": message, "retryable": False}
            return [self._end_of(run, "DIVERGED", by=by, error=error, divergence=told.to_json())]
        if isinstance(then, m.ThenFail):
            retry, error = run.start["policy"]["retry"], then.error.to_json()
            if then.error.retryable and run.failures < retry["retries"]:
                pause_ms = min(retry["first_ms"] << min(run.failures, 30), retry["max_ms"]) * 0.75
                not_before = self.later(pause_ms)
                return [self._attempt(run, "FAILED", run.attempt, error=error, not_before=not_before)]
            return [self._end_of(run, "FAILED", by=by, error=error)]
        if isinstance(then, m.ThenRelease):
            not_before_at = None if then.not_before_ms is None else self.later(then.not_before_ms)
            return [self._attempt(run, "RELEASED", run.attempt, reason=then.reason, not_before=not_before_at)]
        return []

    def _made(self, run: MemoryRun, put: Any, attempt: int) -> Made:
        """The document that records this put."""
        named = {"run_id": run.run_id, "attempt": attempt}
        if isinstance(put, m.CheckpointPut):
            said = {name: value for name, value in put.to_json().items() if name != "type"}
            _verify_checkpoint(put)
            if isinstance(put.value, m.SecretSaid):
                said["value"] = self._sealed(run, put)
            else:
                verify_size(said["value"], put.path)
            return Made("run_checkpoint", {**named, **said})
        request: dict[str, Any] = {}
        if isinstance(put, m.AskPut):
            request = put.request.to_json()
            if request["callback"] is None:  # it is not called here, and recorded all the same
                del request["callback"]
            verify_size(request["context"], put.path)
            verify_size(request["default"], put.path)
        elif isinstance(put, m.SleepPut):
            request = {"wakes_at": put.wakes_at}
        elif isinstance(put, m.SignalPut):
            request = {"expires_at": put.expires_at}
        return self._intent(run, put.type, put.name, put, attempt, request)

    def _sealed(self, run: MemoryRun, put: m.CheckpointPut) -> dict[str, Any]:
        value = put.value.value  # type: ignore[union-attr]  # a secret's
        commitment = hmac.new(run.salt, canonical(["secret", put.path, value]), hashlib.sha256).hexdigest()
        self.secrets[commitment] = value
        ref = {"sha256": commitment, "size_bytes": len(canonical(value)), "media_type": "application/octet-stream"}
        return {"tier": "secret", "ref": {**ref, "serializer": "bytes"}, "commitment": commitment}


def _verify_checkpoint(put: m.CheckpointPut) -> None:
    is_ok, wrong = put.outcome == "OK", None
    if put.resume == "snapshot" and isinstance(put.value, m.TransientValue):
        raise Problem(
            "RUN_TIER_INVALID",
            f"operation {put.path} is transient and would be skipped",
            expected="recompute",
            found="snapshot",
        )
    if is_ok != (put.value is not None) or is_ok != (put.error is None):
        wrong = "an operation that succeeded has a value, any other an error"
    elif not is_ok and put.state_change:
        wrong = "what a failed operation changed is dropped"
    elif put.resume == "recompute" and put.state_change:
        wrong = "what is recomputed changes no state"
    if wrong is not None:
        raise Problem("SCHEMA_VIOLATION", f"RunCheckpoint at /: Value error, {wrong}")


def _records(record: Record, then: Any) -> bool:
    """Whether this record, the worker's next, is what came of `then`."""
    said, kind = record.said, record.artifact_type
    match then:
        case m.ThenSuspend():
            return kind == "run_suspension" and set(said["awaits"]) <= set(then.awaits)
        case m.ThenComplete():
            is_end = kind == "run_end" and said["outcome"] == "COMPLETED"
            return is_end and canonical(said["output"]) == canonical(then.output.to_json())
        case m.ThenDiverge():
            return kind == "run_end" and said["divergence"] == then.divergence.to_json()
        case m.ThenFail():
            return kind in ("run_end", "run_attempt") and said["error"] == then.error.to_json()
        case m.ThenRelease():
            return kind == "run_attempt" and said["change"] == "RELEASED"
        case m.ThenTool() | m.ThenChild():
            return kind == "run_intent" and (said["path"], said["try_number"]) == (then.path, then.try_number)
        case _:
            return False
