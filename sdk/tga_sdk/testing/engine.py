"""The in-memory engine of runs: start, lease, put, answer, end, fork; and what time does. Nothing here waits.

It follows the real engine rule by rule (docs/worker-protocol.md), in one process, under one lock: what is decided is
stored. Transcripts of requests that are sent to both hold the two together (tests/sdk/test_transcripts.py).
"""

from __future__ import annotations

from typing import Final

from tga_sdk.testing.clock import read, written
from tga_sdk.testing.run import (
    AT_WORK,
    MemoryRun,
)
from tga_sdk.testing.scheduling import Scheduling
from tga_sdk.testing.store import next_of

ERASED_AFTER_MS: Final = 2_000  # after its end, of a run that is deleted on success


class Engine(Scheduling):
    """All of it, with what time does."""

    def advance(self) -> bool:
        """Do what is due; whether anything was."""
        moved = self._do_agenda() | self.fire_schedules()
        now_ms = self.clock.now_ms()
        for run in list(self.runs.values()):
            before = run.sequence_number
            if run.state in AT_WORK:
                self._sweep(run, now_ms)
            ended = run.end
            is_kept = run.start["policy"]["retention"] == "keep" or run.run_id in self.erased
            is_due = ended is not None and now_ms - read(ended["ended_at"]) >= ERASED_AFTER_MS
            if not is_kept and run.state == "COMPLETED" and is_due and not self._is_referred_to(run.run_id):
                self.erased.add(run.run_id)
            moved |= run.sequence_number > before
        return moved

    def _do_agenda(self) -> bool:
        moved = False
        while due := [one for one in self.agenda if one[0] <= self.clock.now_ms()]:
            first = min(due, key=lambda one: one[:2])
            self.agenda.remove(first)
            first[2]()
            moved = True
        return moved

    def _sweep(self, run: MemoryRun, now_ms: int) -> None:
        policy = run.start["policy"]
        limit = policy["timeout_ms"]
        if limit is not None and read(run.started_at) + limit <= now_ms:
            error = {"type": "RUN_TIMED_OUT", "message": f"it took longer than {limit} ms", "retryable": False}
            self.commit(run, [self._end_of(run, "FAILED", by=("time", "deadline"), error=error)])
        elif run.state == "RUNNING":
            silence = policy["checkpoint_timeout_ms"]
            seen = self.workers.get(run.worker or "")
            calls_a_tool = any(one.said["kind"] == "tool" for one in run.begun.values())
            if seen is None or (not seen.held and now_ms - seen.at_ms >= self.lease_ms):
                self.lose(run, "its worker was not heard of")
            elif silence is not None and now_ms - read(run.updated_at) >= silence and not calls_a_tool:
                self.lose(run, f"no checkpoint came for {silence} ms")
            elif any(
                one.said["kind"] in ("ask", "tool") and (next_of(run, one) or "9") <= written(now_ms)
                for one in run.begun.values()
            ):
                self.answer_due(run)
        elif run.state == "WAITING":
            self.answer_due(run)

    def next_due_ms(self) -> int | None:
        """When the next thing happens by itself, on the gateway's clock."""
        due = [at_ms for at_ms, _, _ in self.agenda]
        for run in self.runs.values():
            policy = run.start["policy"]
            if run.state in AT_WORK and policy["timeout_ms"] is not None:
                due.append(read(run.started_at) + policy["timeout_ms"])
            if run.state == "SCHEDULED" and run.not_before is not None:
                due.append(read(run.not_before))
            if run.state in ("WAITING", "RUNNING"):
                due += [read(at) for intent in run.begun.values() if (at := next_of(run, intent)) is not None]
            if run.state == "RUNNING":
                if policy["checkpoint_timeout_ms"] is not None:
                    due.append(read(run.updated_at) + policy["checkpoint_timeout_ms"])
                seen = self.workers.get(run.worker or "")
                if seen is not None and not seen.held:
                    due.append(seen.at_ms + self.lease_ms)
        return min((at for at in due if at > self.clock.now_ms()), default=None)
