"""Tool calls and children of runs."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any, Final

from tga_sdk.canonical import canonical
from tga_sdk.testing import messages as m
from tga_sdk.testing.clock import read
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.putting import Putting
from tga_sdk.testing.run import (
    TERMINAL,
    MemoryRun,
)
from tga_sdk.testing.store import Stored
from tga_sdk.testing.tools import Call

_FAILED_FOR_GOOD: Final = frozenset({"HTTP_NOT_ALLOWED"})


class Calling(Putting):
    def start_child(self, run_id: str, body: m.PutRequest, then: m.ThenChild, principal: str) -> dict[str, Any]:
        """Puts, the intent and the child's start together."""
        run = self.load(run_id)
        made, is_begun = self.not_yet_there(run, body)
        child_id = then.run_id or "child-" + _digest("child", run_id, then.path, then.try_number)[:32]
        result = {"status": "pending", "run_id": child_id}
        stop = self.reason_to_stop(run, body)
        if stop is not None:
            return self.answered(run_id, body, Stored("STOP", run.sequence_number, stop), principal=principal)
        if is_begun:
            return self.answered(run_id, body, Stored("CONTINUE", run.sequence_number), result, principal=principal)
        refusal, program, version, given = None, None, then.version or "none", then.input.to_json()
        found = self.runs.get(child_id)
        not_taken_up = None if found is None else _not_taken_up(found, run_id, then)
        if found is not None and not_taken_up is None:
            version = found.start["version"]  # it has been started, and is waited for, whatever is admitted now
        else:
            try:
                program = self.judged(then.procedure, then.version, given)
                version = program.said["version"]
                self._verify_descent(run)
                refusal = not_taken_up
            except Problem as problem:
                refusal = problem
        if found is not None and refusal is None and self._has_answered(found, run, body, then.path):
            self.add_puts(run, made, list)
            return self.answered(run_id, body, Stored("CONTINUE", run.sequence_number), result, principal=principal)
        request = {
            "child_run_id": child_id if refusal is None else None,
            "procedure": then.procedure,
            "version": version,
        }
        intent = self._intent(run, "child", then.name, then, body.attempt, request)
        self.add_puts(run, made, lambda: [] if then.path in run.begun else [intent])
        begun = run.begun[then.path]
        if refusal is not None:
            error = {"type": refusal.code, "message": str(refusal), "retryable": False}
            self.commit(run, [self._answer(run, begun.said, by=("child", child_id), error=error)])
        elif program is not None:
            self.start(
                program,
                given,
                run.start["principal"]["principal_id"],
                run_id=child_id,
                trigger=("child", run_id),
                policy=None if then.policy is None else then.policy.to_json(),
                tags=then.tags,
                parent={"run_id": run_id, "path": then.path, "intent_digest": begun.artifact_digest},
            )
        elif found is not None:
            self.tell_parent(found)  # it may have ended while no parent waited for it
        return self.answered(run_id, body, Stored("CONTINUE", run.sequence_number), result, principal=principal)

    def _has_answered(self, child: MemoryRun, run: MemoryRun, body: m.PutRequest, path: str) -> bool:
        """Whether the child has ended since the worker last looked: the answer is among the news."""
        if path in run.begun:
            return False
        news = self.news(run, body.after_seq, body.attempt)
        answers = [one for one in news if one["artifact_type"] == "run_answer" and one["path"] == path]
        return any(one["answered_by"]["id"] == child.run_id for one in answers)

    def _verify_descent(self, run: MemoryRun) -> None:
        """Problem where a child of this run would stand below too many runs, or beside too many that are open."""
        top, levels, above = run, 1, run
        while above.start["parent"] is not None and above.start["parent"]["run_id"] in self.runs:
            levels += 1
            if levels > m.CHILD_LEVELS_MAX:
                raise Problem(
                    "RUN_TOO_DEEP",
                    "a child below so many runs is not started",
                    expected=f"at most {m.CHILD_LEVELS_MAX} levels",
                )
            below, above = above, self.runs[above.start["parent"]["run_id"]]
            top = above if top is below and above.state not in TERMINAL else top
        if len(self.runs) > m.OPEN_BELOW_MAX and self._count_open_below(top) >= m.OPEN_BELOW_MAX:
            raise Problem(
                "RUN_TOO_MANY_CHILDREN",
                f"so many runs below {top.run_id} are open that no more is started",
                expected=f"fewer than {m.OPEN_BELOW_MAX}",
            )

    def _count_open_below(self, top: MemoryRun) -> int:
        found = {top.run_id}  # parents are older than their children, and stand before them
        for run in self.runs.values():
            if run.state not in TERMINAL and (run.start["parent"] or {"run_id": ""})["run_id"] in found:
                found.add(run.run_id)
        return len(found) - 1

    def tell_parent(self, run: MemoryRun) -> None:
        """A run that has ended answers the operation that started it, or that has taken it up again."""
        parent = run.start["parent"] or {"run_id": "", "path": ""}
        told = self.runs.get(parent["run_id"])
        begun = None if told is None else told.begun.get(parent["path"])
        is_awaited = begun is not None and begun.said["request"].get("child_run_id") == run.run_id
        if told is None or begun is None or not is_awaited or run.state not in (*TERMINAL, "FAILED"):
            return
        end, error, value = run.end or {}, None, None
        if run.state != "COMPLETED":
            said = end.get("error") or {"type": f"RUN_{run.state}", "message": f"the child is {run.state}"}
            error = {"type": said["type"], "message": said["message"], "retryable": False}
        if run.state in TERMINAL:
            value = {"tier": "run", "run_id": run.run_id, "entry_digest": run.entry_digest}
        if told.state not in TERMINAL:
            by = ("child", run.run_id)
            self.commit(told, [self._answer(told, begun.said, by=by, value=value, error=error)])

    def begin_tool(self, run_id: str, body: m.PutRequest, then: m.ThenTool, principal: str) -> Call | dict[str, Any]:
        """Puts and intent are recorded, and the call may be made; or the answer, when it is known already."""
        run = self.load(run_id)
        stop = self.reason_to_stop(run, body)
        if stop is not None:
            return self.answered(run_id, body, Stored("STOP", run.sequence_number, stop), principal=principal)
        made, is_begun = self.not_yet_there(run, body)
        started_ms = read(run.start["started_at"])
        called = then.continues_try or then.try_number
        digest = bytes.fromhex(_digest("trace", run_id, then.path, called))
        key = f"run:{run_id}/{then.path}" + (f"/r{called - 1}" if called > 1 else "")
        call = Call(
            trace_id=_uuid7(started_ms.to_bytes(6, "big") + digest[6:]),
            server_id=then.server_id,
            tool_name=then.tool_name,
            arguments=then.arguments,
            key=key,
            principal_id=run.start["principal"]["principal_id"],
            intent=then.intent,
            requested_at=self.now(),
            run_id=run_id,
            path=then.path,
        )
        name = f"{then.server_id}.{then.tool_name}"
        request = {"trace_id": call.trace_id, "idempotency_key": key, "retries": then.retries}
        if then.timeout_ms is not None:
            request["waits_until"] = self.later(then.timeout_ms)
        intent = self._intent(run, "tool", name, then, body.attempt, request)
        begun = run.begun.get(then.path)
        names = ("kind", "name", "input_digest")
        stands = begun is not None and all(begun.said[one] == intent.said[one] for one in names)
        try:
            self.add_puts(run, made, lambda: [] if is_begun or stands else [intent])
        except Problem as problem:
            if problem.code == "RUN_POSITION_TAKEN":
                return self.from_the_journal(run_id, body, then, principal)
            raise
        try:
            return self.tools.begin(call)
        except Problem as problem:
            if then.path in run.begun:
                error = {"type": problem.code, "message": problem.told(), "retryable": False}
                answer = self._answer(run, run.begun[then.path].said, by=("tool", name), error=error)
                self.commit(run, [answer])
            return self.from_the_journal(run_id, body, then, principal)

    def from_the_journal(self, run_id: str, body: m.PutRequest, then: m.ThenTool, principal: str) -> dict[str, Any]:
        """What is recorded of a tool's operation: its answer is among the news."""
        run = self.load(run_id)
        stop = self.reason_to_stop(run, body)
        if stop is not None:
            return self.answered(run_id, body, Stored("STOP", run.sequence_number, stop), principal=principal)
        news = self.news(run, body.after_seq, body.attempt)
        is_there = any(one["artifact_type"] == "run_answer" and one["path"] == then.path for one in news)
        if not is_there and then.path not in run.begun:
            run.verify_next(then.path)
        status = "answered" if is_there else "pending"
        return self.continued(run, news, {"status": status})

    def pending(self, run_id: str, body: m.PutRequest, call: Call) -> dict[str, Any]:
        run = self.load(run_id)
        result = {"status": "pending", "trace_id": call.trace_id, "state": call.state, "waiting": call.waiting}
        return self.continued(run, self.news(run, body.after_seq, body.attempt), result)

    @staticmethod
    def continued(run: MemoryRun, news: list[dict[str, Any]], result: dict[str, Any]) -> dict[str, Any]:
        answer = {"directive": "CONTINUE", "reason": None, "sequence_number": run.sequence_number}
        return {**answer, "news": news, "result": result}

    def tool_ended(self, call: Call) -> None:
        """The run has its answer, if it still waits for it."""
        run = self.runs.get(call.run_id or "")
        begun = None if run is None else run.begun.get(call.path or "")
        if run is None or begun is None or begun.said["kind"] != "tool" or run.state in TERMINAL:
            return
        if begun.said["request"]["trace_id"] != call.trace_id:
            return
        by = ("tool", call.trace_id)
        if call.effect is None:
            why = (call.decision or {}).get("rationale") or "the call was denied"
            error = {"type": "CALL_DENIED", "message": why[:1024], "retryable": False}
            self.commit(run, [self._answer(run, begun.said, by=by, error=error)])
            return
        digest = hashlib.sha256(canonical(call.effect)).hexdigest()
        value = {"tier": "effect", "trace_id": call.trace_id, "tool_effect_digest": digest}
        failed = call.effect["error"]
        if failed is None:
            self.commit(run, [self._answer(run, begun.said, by=by, value=value)])
            return
        is_retryable = call.effect["basis"] != "unknown" and failed["code"] not in _FAILED_FOR_GOOD
        error = {"type": failed["code"], "message": failed["message"][:1024], "retryable": is_retryable}
        may_retry = run.journal.try_of(begun.said["path"]) <= begun.said["request"]["retries"]
        outcome = "RETRY" if is_retryable and may_retry else "ERROR"
        self.commit(run, [self._answer(run, begun.said, by=by, value=value, error=error, outcome=outcome)])


def _digest(what: str, run_id: str, path: str, try_number: int) -> str:
    return hashlib.sha256(f"{what}\0{run_id}\0{path}\0{try_number}".encode()).hexdigest()


def _uuid7(digest: bytes) -> str:
    made = bytearray(digest[:16])
    made[6], made[8] = 0x70 | made[6] & 0x0F, 0x80 | made[8] & 0x3F
    return str(uuid.UUID(bytes=bytes(made)))


def _not_taken_up(found: MemoryRun, run_id: str, then: m.ThenChild) -> Problem | None:
    """Why the run that has the child's id is not the child that was started at this address before."""
    parent = found.start["parent"] or {"run_id": "", "path": ""}
    if (parent["run_id"], parent["path"]) != (run_id, then.path):
        return Problem(
            "RUN_ID_TAKEN", "another run has the child's id", expected="an id that is free", found=found.run_id
        )
    if (found.start["procedure"], found.start["input"]) != (then.procedure, then.input.to_json()):
        return Problem(
            "RUN_ID_TAKEN",
            "the child was started otherwise when the operation around it was tried before",
            expected="the same procedure and input",
            found=found.run_id,
        )
    return None
