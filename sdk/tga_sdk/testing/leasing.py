"""Leases: which worker has which run, and how it is known to live."""

from __future__ import annotations

import copy
import hashlib
import secrets
from typing import Any

from tga_sdk.testing import messages as m
from tga_sdk.testing.clock import read
from tga_sdk.testing.run import (
    AT_WORK,
    MemoryRun,
)
from tga_sdk.testing.starting import Starting
from tga_sdk.testing.store import Seen


class Leasing(Starting):
    def hear(self, worker: str) -> Seen:
        seen = self.workers.setdefault(worker, Seen(0))
        seen.at_ms = self.clock.now_ms()
        return seen

    def lease(self, body: m.LeaseRequest, principal: str) -> list[MemoryRun]:
        """What is ready for this worker now, as much as it has slots for."""
        self.hear(body.worker).programs = self.programs_of(body)
        name = {"principal_id": principal, "name": body.name}
        ready = self.ready(self.workers[body.worker].programs)[: body.slots]
        for run in ready:
            self.commit(run, [self._attempt(run, "LEASED", run.attempt + 1, worker=name)])
            run.lease, run.worker = secrets.token_urlsafe(24), body.worker
        return ready

    def programs_of(self, body: m.LeaseRequest) -> set[tuple[str, str, str]]:
        offered = {(one.name, one.version, one.program_digest) for one in body.procedures}
        for one in body.procedures:
            for version, digest in self.programs.get(one.name, {}):
                if version in one.accepts:
                    offered.add((one.name, version, digest))
        return offered

    def ready(self, programs: set[tuple[str, str, str]]) -> list[MemoryRun]:
        now = self.now()
        return [
            run
            for run in self.runs.values()
            if run.state == "SCHEDULED"
            and (run.not_before is None or run.not_before <= now)
            and (run.start["procedure"], run.version, run.program_digest) in programs
        ]

    def told(self, run: MemoryRun) -> dict[str, Any]:
        """What its worker is told of a run that it was leased."""
        start = run.start
        return {
            "run_id": run.run_id,
            "attempt": run.attempt,
            "lease": run.lease,
            "procedure": start["procedure"],
            "version": run.version,
            "program_digest": run.program_digest,
            "input": copy.deepcopy(start["input"]),
            "salt": run.salt.hex(),
            "draw_salt": run.draw_salt.hex(),
            "sequence_number": run.sequence_number,
            "first_seq": self.first_seq(run),
            "policy": copy.deepcopy(start["policy"]),
            "tenant": "default",
            "started_at": start["started_at"],
            "strict_determinism": start.get("strict_determinism", False),
            "lease_ms": self.lease_ms,
            "traceparent": _traceparent(run),
        }

    def beat(self, body: m.BeatRequest) -> list[dict[str, Any]]:
        self.hear(body.worker)
        listed = {beat.run_id for beat in body.runs}
        for run in self.runs.values():
            is_its = run.state == "RUNNING" and run.worker == body.worker and run.run_id not in listed
            if is_its and self.clock.now_ms() - read(run.updated_at) >= 2 * self.lease_ms // 3:
                self.lose(run, "its worker does not know of the lease")
        return [self._beat(beat) for beat in body.runs]

    def _beat(self, beat: m.Beat) -> dict[str, Any]:
        run = self.runs.get(beat.run_id)
        answer: dict[str, Any] = {"run_id": beat.run_id, "directive": "STOP", "reason": "ENDED"}
        if run is None:
            return {**answer, "sequence_number": 0, "news": []}
        answer["sequence_number"] = run.sequence_number
        if run.state != "RUNNING" or run.lease != beat.lease or beat.after_seq > run.sequence_number:
            lost = "LEASE_LOST" if run.state in AT_WORK else "CANCELLED" if run.state == "CANCELLED" else "ENDED"
            return {**answer, "reason": lost, "news": []}
        news = self.news(run, beat.after_seq, run.attempt) if beat.after_seq > 0 else []
        return {**answer, "directive": "CONTINUE", "reason": None, "news": news}

    def lose(self, run: MemoryRun, reason: str) -> None:
        """The attempt is lost; after too many without a checkpoint in between the run is parked."""
        count = run.failures + 1
        if count >= run.start["policy"]["park_after"]:
            message = f"{count} attempts in a row ended without a checkpoint; the last: {reason}"
            error = {"type": "RUN_PARKED", "message": message, "retryable": True}
            self.commit(run, [self._end_of(run, "PARKED", by=("gateway", self.executor_id), error=error)])
            return
        pause_ms = 0 if run.failures == 0 else min(1_000 << min(run.failures - 1, 16), 60_000)
        not_before = self.later(pause_ms * 0.75) if pause_ms else None
        self.commit(run, [self._attempt(run, "LOST", run.attempt, reason=reason, not_before=not_before)])


def _traceparent(run: MemoryRun) -> str:
    """The trace context of this attempt: follows from the run's id and the attempt's number, as at every gateway."""
    trace_id = hashlib.sha256(f"run {run.run_id}".encode()).digest()[:16]
    span_id = hashlib.blake2b(f"attempt {run.run_id} {run.attempt}".encode(), digest_size=8).digest()
    return f"00-{trace_id.hex()}-{span_id.hex()}-01"
