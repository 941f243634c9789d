"""What the scheduler keeps of a run: one row, which follows from the folded journal, so that it can be made anew.

| state | `due_at` is when |
|---|---|
| SCHEDULED | a worker may have it |
| RUNNING | its worker has been silent for too long, if it says how long that is; or a question or call is due |
| WAITING | the first of what it waits for is over, is told to others, or is looked at again |
| PARKED, DIVERGED | never: somebody acts |
| FAILED, COMPLETED, CANCELLED | its parent is told, its children are, or its payloads are erased |

`deadline_at` is the end of the whole run, in the states in which it is at work; of a SCHEDULED run also when one of its
questions is due, because `due_at` says when a worker may have it: nobody who is asked waits for a worker.

The store compares these times with its own clock. What is due at once, and a pause before the next attempt, is said as
`due_in_ms`, too: a gateway whose clock is ahead delays nothing.
"""

from __future__ import annotations

from typing import Final

from app.core.limits import RUN_RECHECK_MAX_MS, RUN_RECHECK_MS
from app.domain.ledger.plans import OpenAsk, ScheduleRow
from app.domain.runs.documents import RunStart
from app.domain.runs.ids import elapsed_ms, later
from app.domain.runs.replay import Run
from app.domain.runs.transitions import RUN

AT_WORK: Final = ("SCHEDULED", "RUNNING", "WAITING")


def schedule_of(run: Run, start: RunStart, *, worker: str | None, now: str) -> ScheduleRow:
    """The row of a run that stands so. `worker`: which process holds it; nobody knows after a rebuild."""
    policy, state = start.policy, run.head.state
    is_at_work = state in AT_WORK
    ends = [] if policy.timeout_ms is None or not is_at_work else [later(run.started_at, policy.timeout_ms)]
    if state == "SCHEDULED":
        ends += [begun.next_at for begun in run.frontier.begun.values() if begun.kind == "ask" and begun.next_at]
    due_at = _due_at(run, start, now)
    return ScheduleRow(
        procedure=start.procedure,
        program=f"{run.version}@{run.program_digest}",
        created_at=start.started_at,
        attempt=run.attempt,
        failures=run.failures,
        worker=worker if state == "RUNNING" else None,
        due_at=due_at,
        due_in_ms=_due_in_ms(state, due_at, now),
        parent=None if start.parent is None else RUN.stream(start.parent.run_id),
        deadline_at=min(ends, default=None),
        forked_from=None if start.forked_from is None else RUN.stream(start.forked_from.run_id),
        asks=[
            OpenAsk(path, begun.sequence_number, begun.due_at, begun.begun_at, begun.level)
            for path, begun in run.frontier.begun.items()
            if begun.kind == "ask"
        ]
        if is_at_work
        else [],
    )


def _due_at(run: Run, start: RunStart, now: str) -> str | None:
    policy = start.policy
    match run.head.state:
        case "SCHEDULED":
            return run.not_before or now
        case "RUNNING":
            return running_due_at(run, start, heard_at=now)
        case "WAITING":
            return min((_over_at(run, path, now) for path in run.awaits), default=None, key=lambda at: at or "9")
        case "COMPLETED" | "CANCELLED" | "FAILED" if start.parent is not None:
            return now  # until the parent is told
        case "COMPLETED" | "CANCELLED" if run.has_left_children:
            return now  # until its children are told
        case "COMPLETED":
            return now if policy.retention == "delete_on_success" else None
        case _:
            return None


def _due_in_ms(state: str, due_at: str | None, now: str) -> int | None:
    if due_at is not None and (state == "SCHEDULED" or due_at == now):
        return max(0, elapsed_ms(now, due_at))
    return None


def running_due_at(run: Run, start: RunStart, *, heard_at: str) -> str | None:
    """When a run that a worker has is looked at: it was silent for too long since `heard_at`, or a question that it has
    asked, and works on beside, expires or is escalated, or a tool call's time is over."""
    silence = start.policy.checkpoint_timeout_ms
    times = [begun.next_at for begun in run.frontier.begun.values() if begun.kind in ("ask", "tool") and begun.next_at]
    return min([*times, *([] if silence is None else [later(heard_at, silence)])], default=None)


def _over_at(run: Run, path: str, now: str) -> str | None:
    begun = run.frontier.begun.get(path)
    if begun is None:
        return now
    if begun.kind in ("tool", "child"):
        # The gateway that ends it tells the run. If that one died in between, looking finds it: the longer it takes,
        # the less often, so that waiting costs nothing.
        waited = elapsed_ms(run.updated_at, now)
        looked_at = later(now, min(max(RUN_RECHECK_MS, waited), RUN_RECHECK_MAX_MS))
        return min(looked_at, begun.due_at or looked_at)
    return begun.next_at
