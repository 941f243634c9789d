"""What is told of calls: counted, written as a line, and traced as spans. Nothing here waits, and nothing rests on it.

Everything is done in one go when a call has come to rest, from the marks that its execution has left: while it is under
way it costs a look at the clock for each phase.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import Protocol

from app.core.errors import TgaError
from app.core.instruments import Instruments
from app.core.limits import METRIC_SERIES_MAX
from app.core.measuring import SECONDS, Histogram
from app.domain.tga.execution import Answer, TraceExecution
from app.domain.tga.runtime import CheckedCall

logger = logging.getLogger("tga")


class CallLines(Protocol):
    """Where a line for each call goes."""

    def executed(self, execution: TraceExecution, answer: Answer, decision: str, took_ms: float) -> None: ...

    def repeated(self, call: CheckedCall, answer: Answer) -> None: ...

    def refused(self, call: CheckedCall, error: TgaError) -> None: ...


class CallSpans(Protocol):
    """Where the spans of a call go."""

    def executed(self, execution: TraceExecution, answer: Answer, decision: str, now_ms: float) -> None: ...

    def repeated(self, call: CheckedCall, answer: Answer) -> None: ...

    def count(self) -> None:
        """Bring the counters of spans up to date."""
        ...


class CallObserver:
    """The Observer of the runtime, and of what the edge answers without it. A defect here ends no call: it is told of
    once."""

    def __init__(
        self,
        instruments: Instruments,
    ) -> None:
        self._instruments = instruments
        # Set by the server, while it serves: commands that open a gateway count, and write no lines.
        self.lines: CallLines | None = None
        self.spans: CallSpans | None = None
        self._has_failed = False
        # The rows of the phases of servers that were called: looking each up by its labels took half of all counting.
        self._rows: dict[str, _Phases] = {}

    def rested(self, execution: TraceExecution, answer: Answer) -> None:
        try:
            self._rested(execution, answer)
        except Exception:
            self._failed()

    def _rested(self, execution: TraceExecution, answer: Answer) -> None:
        instruments, request, marks = self._instruments, execution.request, execution.marks
        server, made = request.server_id, answer.decision
        decision = "none" if made is None else _DECISIONS[made.decided_by.type, made.decision]
        instruments.calls.add((server, request.tool_name, answer.state, decision))
        rows = self._rows.get(server) or self._rows_of(server)
        began_ms = before_ms = marks[0][1]
        for phase, at_ms in marks[1:]:
            row, took_s = rows[phase], (at_ms - before_ms) / 1000
            row[bisect_left(SECONDS, took_s)] += 1
            row[-1] += took_s
            before_ms = at_ms
        row, took_s = rows["total"], (before_ms - began_ms) / 1000
        row[bisect_left(SECONDS, took_s)] += 1
        row[-1] += took_s
        sent = execution.attempts.sent_by_this_process
        if sent > 1:
            instruments.retries.add((server,), sent - 1)
        effect = answer.effect
        if answer.waiting == "operator":
            instruments.held.add((server,))
        elif effect is not None and effect.error is not None and effect.error.code == "OUTCOME_UNKNOWN":
            instruments.unknown_outcomes.add((server,))
        if self.lines is not None:
            self.lines.executed(execution, answer, decision, before_ms - began_ms)
        if self.spans is not None:
            self.spans.executed(execution, answer, decision, before_ms)

    def _rows_of(self, server: str) -> _Phases:
        rows = _Phases(self._instruments.phase_seconds, server)
        if len(self._rows) < METRIC_SERIES_MAX:
            self._rows[server] = rows
        return rows

    def fenced(self, execution: TraceExecution) -> None:
        self._instruments.fences.add(("trace",))

    def repeated(self, call: CheckedCall, answer: Answer) -> None:
        """Answered from the record."""
        try:
            self._instruments.repeats.add((call.server_id,))
            if self.lines is not None:
                self.lines.repeated(call, answer)
            if self.spans is not None:
                self.spans.repeated(call, answer)
        except Exception:
            self._failed()

    def refused(self, call: CheckedCall, error: TgaError) -> None:
        try:
            self._instruments.refusals.add((error.code,))
            if self.lines is not None:
                self.lines.refused(call, error)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.exception("a defect in the gateway's telemetry; calls go on without it")


class _Phases(dict[str, list[float]]):
    """The rows of one server, by phase, each made when it is first needed."""

    def __init__(self, histogram: Histogram, server: str) -> None:
        super().__init__()
        self._histogram = histogram
        self._server = server

    def __missing__(self, phase: str) -> list[float]:
        row = self[phase] = self._histogram.row((self._server, phase))
        return row

    def __bool__(self) -> bool:
        return True


_DECISIONS = {
    ("policy", "APPROVE"): "policy_approve",
    ("policy", "DENY"): "policy_deny",
    ("person", "APPROVE"): "person_approve",
    ("person", "DENY"): "person_deny",
    ("expiry", "DENY"): "expired",
    ("withdrawal", "DENY"): "withdrawn",
}
