"""Sample runs that name one another: with their traces, parents and sources, in the order of their appends."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from app.core.limits import RUN_CHECKPOINT_EVERY_ENTRIES
from app.domain.ledger.plans import Ledger, Plan, PlannedCheckpoint, PlannedEntry, ScheduleRow, Sealed
from app.domain.runs.checkpoints import checkpoint_of
from app.domain.runs.documents import RunDocument
from app.domain.runs.replay import Run, RunRecord, fold_next
from app.domain.runs.waiting import waiting_for
from app.domain.tga.replay import LogRecord
from tests.runs import journal
from tests.runs.journal import Journal
from tests.traces import EXECUTOR, completed_trace, time_at, trace_id

TRACE: Final = 900  # the number of the trace that a sample run calls a tool with


class SampleRun(Journal):
    """A journal whose documents are of its own run: `run.add("intent", "1", ...)` appends journal.intent(...)."""

    def __init__(self, run_id: str, *, source: Run | None = None, **started: Any) -> None:
        self.run_id = run_id
        super().__init__(journal.start(run_id, **started), source=source)

    def add(self, what: str, *positional: Any, **changed: Any) -> str:
        """The digest of what was added."""
        self.append(self.made(what, *positional, **changed))
        return self.last_digest

    def made(self, what: str, *positional: Any, **changed: Any) -> RunDocument:
        made: RunDocument = partial(getattr(journal, what), run_id=self.run_id)(*positional, **changed)
        return made


def small(run_id: str = "small") -> SampleRun:
    run = SampleRun(run_id)
    run.add("attempt", 1)
    run.add("checkpoint", "1", state_change=[{"op": "set", "at": "/n", "to": 1}])
    run.add("checkpoint", "2")
    run.add("end", positions=2)
    return run


def nested() -> SampleRun:
    """Nesting, a gather with a tool and a question, a lost attempt, late workers, a failure and its retry."""
    run = SampleRun("nested")
    run.add("attempt", 1)
    run.add("checkpoint", "1.1")
    run.add("checkpoint", "1", inner=1, state_change=[{"op": "set", "at": "/plan", "to": [1]}])
    slept = run.add("intent", "2:1.1", "sleep", "nap")
    asked = run.add("intent", "2:2.1", "ask", "pay")
    run.add("suspension", "2:1.1", "2:2.1", wake="ALL")
    run.add("answer", "2:1.1", slept, "timer")
    run.add("answer", "2:2.1", asked, "timer", wakes="YES")
    run.add("attempt", 2)
    run.add("attempt", 2, "LOST")
    run.add("attempt", 3)
    run.add("attempt", 1, "FENCED")
    run.add("checkpoint", "2", "gather", "both", inner=2, attempt=3)
    run.add("signal", "paid", "s-1")
    paid = run.add("intent", "3", "signal", "paid", attempt=3)
    run.add("answer", "3", paid, "signal", answered_by={"type": "signal", "id": "s-1"})
    run.add("checkpoint", "4.1", attempt=3)
    run.add("checkpoint", "4.2", outcome="ERROR", attempt=3)
    run.add("checkpoint", "4", outcome="ERROR", attempt=3, inner=2)
    run.add("end", "FAILED", attempt=3, positions=4)
    run.append(journal.resumption(run.run, run_id="nested", reopens=["4"]))
    run.add("attempt", 4)
    run.add("checkpoint", "4.2", attempt=4, try_number=2)
    run.add("checkpoint", "4", attempt=4, try_number=2, inner=2)
    run.add("end", attempt=4, positions=4)
    return run


def interrupted() -> SampleRun:
    """An at-most-once step that nobody may perform again; an operator says how it ended."""
    run = SampleRun("interrupted")
    run.add("attempt", 1)
    run.add("intent", "1", "step", "charge")
    run.add("attempt", 1, "LOST")
    run.add("attempt", 2)
    run.add("checkpoint", "1", "step", "charge", outcome="INTERRUPTED", attempt=2)
    run.add("end", "PARKED", attempt=2, positions=1)
    word = {"path": "1", "outcome": "OK", "value": journal.inline("charged"), "error": None}
    run.append(journal.resumption(run.run, run_id="interrupted", resolves=[word]))
    return run


def with_tool(trace: Sequence[LogRecord]) -> SampleRun:
    run = SampleRun("with-tool")
    run.add("attempt", 1)
    named = trace[0].entry.trace_id
    called = run.add("intent", "1", request={"trace_id": named, "idempotency_key": "run:with-tool/1", "retries": 0})
    effect = {"tier": "effect", "trace_id": named, "tool_effect_digest": trace[-1].entry.artifact_digest}
    run.add("answer", "1", called, value=effect)
    run.add("end", positions=1)
    return run


def begun_child(begun: str) -> SampleRun:
    return SampleRun(
        "child",
        procedure="pay",
        trigger={"type": "child", "id": "parent"},
        parent={"run_id": "parent", "path": "1", "intent_digest": begun},
    )


def parent_and_child() -> tuple[SampleRun, SampleRun]:
    parent = SampleRun("parent")
    parent.add("attempt", 1)
    request = {"child_run_id": "child", "procedure": "pay", "version": "1"}
    begun = parent.add("intent", "1", "child", "pay", request=request)
    parent.add("suspension", "1")
    child = begun_child(begun)
    child.add("attempt", 1)
    child.add("end")
    returned = {"tier": "run", "run_id": "child", "entry_digest": child.run.head.entry_digest}
    parent.add("answer", "1", begun, "child", wakes="YES", value=returned)
    return parent, child


def fork_of(source: Journal, at: int, run_id: str = "fork") -> SampleRun:
    """A run that goes on from an entry of another, with a state of its own, and calls what that one performed."""
    stood = at_entry(source, at)
    origin = {
        "run_id": stood.run_id,
        "sequence_number": at,
        "entry_digest": stood.head.entry_digest,
        "state_change": [{"op": "set", "at": "/forked", "to": True}],
    }
    fork = SampleRun(run_id, source=stood, trigger={"type": "fork", "id": stood.run_id}, forked_from=origin)
    fork.add("attempt", 1)
    fork.add("checkpoint", str(stood.frontier.positions + 1))
    return fork


def at_entry(journal_: Journal, number: int) -> Run:
    run: Run | None = None
    for record in journal_.records[:number]:
        run = fold_next(run, record, source=journal_.source)
    assert run is not None
    return copy.deepcopy(run)


def diverged() -> SampleRun:
    run = SampleRun("diverged")
    run.add("attempt", 1)
    run.add("checkpoint", "1")
    run.add("checkpoint", "2")
    run.add("end", "DIVERGED")
    return run


def long(entries: int = 2 * RUN_CHECKPOINT_EVERY_ENTRIES + 5) -> SampleRun:
    """A run with execution checkpoints that are due."""
    run = SampleRun("long")
    run.add("attempt", 1)
    for position in range(1, entries - 2):
        run.add("checkpoint", str(position), state_change=[{"op": "set", "at": "/last", "to": position}])
    run.add("end", positions=entries - 3)
    return run


def samples() -> tuple[list[LogRecord], list[SampleRun]]:
    """A trace, and runs of every sort; those that others name come before them."""
    trace = list(completed_trace(TRACE))
    first, (parent, child) = small(), parent_and_child()
    fork = fork_of(first, 3)
    runs = [first, nested(), interrupted(), with_tool(trace), parent, child, fork, fork_of(fork, 3, "fork-of-fork")]
    return trace, [*runs, diverged()]


def planned(records: Sequence[RunRecord]) -> list[PlannedEntry]:
    made = []
    for entry, artifact in records:
        assert artifact is not None
        made.append(PlannedEntry(entry.body_bytes(), artifact.to_bytes()))
    return made


async def store(
    ledger: Ledger,
    run: Journal,
    *,
    entries_a_plan: int = 7,
    sealed: Sealed | None = None,
    schedule: ScheduleRow | None = None,
) -> None:
    """Append a whole journal, in plans, as a gateway does: with execution checkpoints where they are due. `sealed`
    comes with the birth, `schedule` with each plan."""
    folded: Run | None = None
    for first in range(0, len(run.records), entries_a_plan):
        page, checkpoint, before = run.records[first : first + entries_a_plan], None, first
        for record in page:
            folded = fold_next(folded, record, source=run.source)
            if folded.head.sequence_number // RUN_CHECKPOINT_EVERY_ENTRIES > before // RUN_CHECKPOINT_EVERY_ENTRIES:
                checkpoint = checkpoint_of(folded, created_at=time_at(first))
                before = folded.head.sequence_number
        assert folded is not None
        await commit(ledger, folded, planned(page), checkpoint, sealed=None if first else sealed, schedule=schedule)


async def commit(
    ledger: Ledger,
    run: Run,
    entries: Sequence[PlannedEntry],
    checkpoint: PlannedCheckpoint | None = None,
    **more: Any,
) -> None:
    plan = Plan(f"run:{run.run_id}", EXECUTOR, None, entries, checkpoint=checkpoint, waiting_after=waiting_for(run))
    await ledger.commit(plan._replace(**more))


def sample_trace_id() -> str:
    return trace_id(TRACE)
