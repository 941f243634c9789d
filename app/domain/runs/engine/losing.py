"""What becomes of a run whose attempt is lost."""

from __future__ import annotations

from app.domain.clock import Clock
from app.domain.runs.documents import RunError
from app.domain.runs.engine.work import Work
from app.domain.runs.ids import later


def lose(work: Work, reason: str, *, now: str, clock: Clock) -> None:
    """The attempt is lost. After too many without a checkpoint in between the run is parked, and blocks nobody."""
    run, policy = work.run, work.start.policy
    if run.failures + 1 >= policy.park_after:
        error = RunError(
            type="RUN_PARKED",
            message=f"{run.failures + 1} attempts in a row ended without a checkpoint; the last: {reason}",
            retryable=True,
        )
        work.end("PARKED", by="gateway", by_id=work.executor_id, at=now, error=error)
        return
    pause_ms = 0 if run.failures == 0 else min(1_000 << min(run.failures - 1, 16), 60_000)
    not_before = later(now, int(pause_ms * (0.5 + clock.jitter() / 2))) if pause_ms else None
    work.end_attempt("LOST", at=now, reason=reason, not_before=not_before)
