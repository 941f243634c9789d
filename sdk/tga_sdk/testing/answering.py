"""What others do to a run: answer it, send it signals, cancel it, have it tried again, erase it."""

from __future__ import annotations

import hashlib
from typing import Any

from tga_sdk.canonical import canonical
from tga_sdk.testing import messages as m
from tga_sdk.testing.calling import Calling
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.run import (
    AT_WORK,
    RESTING,
    TERMINAL,
    MemoryRun,
)
from tga_sdk.testing.schema import misfit
from tga_sdk.testing.store import Made


class Answering(Calling):
    def answer(self, run_id: str, body: m.SignalBody, principal: str) -> None:
        run, path = self.load(run_id), body.path or ""
        value = self.value_of(body.answer)
        begun = run.begun.get(path)
        is_ask = begun is not None and begun.said["kind"] == "ask"
        if begun is None or not is_ask or body.intent_digest not in (None, begun.artifact_digest):
            if begun is None and self._is_repeat(run, path, value, principal, body.intent_digest):
                return
            raise Problem(
                "RUN_ANSWER_UNASKED",
                f"no such question is open at {path}",
                expected=body.intent_digest or "a question",
                found=begun.artifact_digest if begun is not None and is_ask else "none",
            )
        found = misfit(begun.said["request"]["answer_schema"], body.answer)
        if found is not None:
            raise Problem("RUN_ANSWER_INVALID", "the answer does not fit the question", expected=found)
        self.commit(run, [self._answer(run, begun.said, by=("person", principal), value=value)])

    def _is_repeat(self, run: MemoryRun, path: str, value: Any, principal: str, digest: str | None) -> bool:
        answers = [one.said for one in run.records if one.artifact_type == "run_answer" and one.said["path"] == path]
        if not answers or digest not in (None, answers[-1]["intent_digest"]):
            return False
        by = answers[-1]["answered_by"]
        is_its = (by["type"], by["id"]) == ("person", principal)
        return is_its and canonical(answers[-1]["value"]) == canonical(value)

    def signal(self, run_id: str, body: m.SignalBody, principal: str) -> None:
        run = self.load(run_id)
        signal_id, value = body.signal_id or self.new_id(), self.value_of(body.value)
        if signal_id in run.signal_ids:
            self._verify_same_signal(run, body.name, signal_id, value)
            return
        if run.state in TERMINAL:
            raise Problem("RUN_ENDED", "the run has ended", found=run.state)
        said = {"run_id": run_id, "name": body.name, "signal_id": signal_id, "value": value}
        made = [Made("run_signal", {**said, "sent_by": principal, "sent_at": self.now()})]
        waiting = [one for one in run.begun.values() if (one.said["kind"], one.said["name"]) == ("signal", body.name)]
        if waiting:
            first = min(waiting, key=lambda one: one.sequence_number)
            made.append(self._answer(run, first.said, by=("signal", signal_id), value=value))
        self.commit(run, made)

    def _verify_same_signal(self, run: MemoryRun, name: str | None, signal_id: str, value: Any) -> None:
        sent = next(
            one.said
            for one in reversed(run.records)
            if one.artifact_type == "run_signal" and one.said["signal_id"] == signal_id
        )
        if sent["name"] != name:
            what = f"the id {signal_id} belongs to a signal of another name"
            raise Problem("RUN_SIGNAL_ID_REUSED", what, expected=sent["name"], found=name)
        if canonical(sent["value"]) != canonical(value):
            raise Problem("RUN_SIGNAL_ID_REUSED", f"the id {signal_id} belongs to a signal with another value")

    def cancel(self, run_id: str, by: tuple[str, str], rationale: str | None) -> None:
        run = self.load(run_id)
        if run.state == "CANCELLED":
            return
        if run.state in TERMINAL:
            raise Problem("RUN_ENDED", "the run has ended", found=run.state)
        error = {"type": "RUN_CANCELLED", "message": rationale or f"cancelled by {by[1]}", "retryable": False}
        self.commit(run, [self._end_of(run, "CANCELLED", by=by, error=error)])

    def resume(self, run_id: str, body: m.RetryBody, principal: str) -> None:
        run = self.load(run_id)
        rationale = body.rationale or "retry"
        accepts = None if body.accepts is None else body.accepts.to_json()
        resolves = [one.to_json() for one in body.resolves]
        if run.state in AT_WORK:  # told again while the run goes on, it changes nothing
            last = next((one.said for one in reversed(run.records) if one.artifact_type == "run_resumption"), None)
            names = ("resumed_by", "rationale", "accepts", "resolves")
            if last is not None and [last[name] for name in names] == [principal, rationale, accepts, resolves]:
                return
        if run.state not in RESTING:
            raise Problem(
                "RUN_ENDED",
                "only a run that rests can be resumed",
                expected="FAILED, PARKED or DIVERGED",
                found=run.state,
            )
        resolved = {one.path for one in body.resolves}
        for path in resolved:
            run.verify_resolvable(path)
        reopens = [path for path in run.failed_last() if path not in resolved] if run.state == "FAILED" else []
        said = {
            "run_id": run_id,
            "resumed_by": principal,
            "rationale": rationale,
            "accepts": accepts,
            "reopens": reopens,
            "frontier_digest": hashlib.sha256(canonical([run.entry_digest, reopens])).hexdigest(),
            "resolves": resolves,
            "resumed_at": self.now(),
        }
        self.commit(run, [Made("run_resumption", said)])

    def erase(self, run_id: str) -> bool:
        """Whether it is new."""
        if run_id in self.erased:
            return False
        run = self.load(run_id)
        if run.state not in TERMINAL:
            raise Problem("RUN_UNFINISHED", "the run is not finished", found=run.state)
        if self._is_referred_to(run_id):
            raise Problem("STREAM_IN_USE", "an open run refers to it", found=run_id)
        self.erased.add(run_id)
        return True

    def _is_referred_to(self, run_id: str) -> bool:
        for other in self.runs.values():
            if other.state in TERMINAL:
                continue
            origin = other.start["forked_from"]
            children = [one.said["request"].get("child_run_id") for one in other.records if "request" in one.said]
            if run_id in children or (origin is not None and origin["run_id"] == run_id):
                return True
        return False

    def tell_relatives(self, run: MemoryRun) -> None:
        """A run has ended: its parent has its answer, its children have no parent that waits for them."""
        self.tell_parent(run)
        if run.state in TERMINAL:
            for child in list(self.runs.values()):
                of = child.start["parent"]
                has_ended = child.state in TERMINAL or child.state == "FAILED"
                is_open_child = of is not None and of["run_id"] == run.run_id and not has_ended
                if is_open_child and child.start["policy"]["on_parent_end"] == "cancel":
                    self.cancel(child.run_id, ("parent", run.run_id), f"run {run.run_id} has ended")
