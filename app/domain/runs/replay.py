"""Fold a run's journal into where the run stands, verifying every record on the way.

The fold is the one judge of what a record may say beyond what the table admits: the attempt is the current one, the
address is the next (frontier.py), an end agrees with what has begun there, an answer is of an intent that is open, and
wakes the run exactly when that was all it waited for. Engine and verification use it alike, and `fold` from a
checkpoint gives what `fold` from nothing gives, at every cut (I4).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from app.core.chain import Head
from app.core.digest import Digest, digest_of
from app.core.errors import (
    ChecksumMismatch,
    ConcurrentExecution,
    InvalidTransition,
    RecoveryFailed,
    RunAnswerUnasked,
    RunPositionTaken,
    SchemaViolation,
    TgaError,
)
from app.core.limits import RUN_SIGNAL_IDS_KEPT
from app.domain.ledger.records import Record, StreamDocuments
from app.domain.runs.agreement import verify_count, verify_same
from app.domain.runs.documents import (
    RUN_MODELS,
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
from app.domain.runs.frontier import Begun, Frontier
from app.domain.runs.paths import ROOT, is_isolated, is_scope_inside
from app.domain.runs.state import apply_changes
from app.domain.runs.timing import verify_by_time
from app.domain.runs.transitions import RUN

RunRecord = Record[RunLogEntry, RunDocument]
RUN_DOCUMENTS: Final = StreamDocuments(RunLogEntry, RUN_MODELS)

# Who may answer an operation of each kind. All others end with a checkpoint of the worker's own.
_ANSWERED_BY: Final[dict[str, frozenset[str]]] = {
    "tool": frozenset({"tool", "operator", "timer"}),
    "ask": frozenset({"person", "timer", "operator"}),
    "sleep": frozenset({"timer"}),
    "signal": frozenset({"signal", "timer"}),
    "child": frozenset({"child"}),
}


class Appended(NamedTuple):
    """What the fold looks at of an entry."""

    sequence_number: int
    from_state: str
    to_state: str
    artifact_digest: str
    recorded_at: str


class WaitingSignal(NamedTuple):
    """A signal that no operation has received yet, and the entry that holds its value."""

    name: str
    signal_id: str
    sequence_number: int


@dataclass(slots=True)
class Run:
    """Where a run stands after its last record. Changed in place by `fold_next`, and by nothing else.

    `attempt` is the last lease's number, 0 before the first; `failures` how many attempts in a row ended without a
    checkpoint; `fenced` the last attempt whose late worker was recorded.
    """

    run_id: str
    head: Head
    updated_at: str
    # From the start, or the last resumption, which may accept another program.
    started_at: str
    version: str
    program_digest: str
    # Of the attempt.
    attempt: int = 0
    failures: int = 0
    fenced: int = 0
    worker: tuple[str, str] | None = None  # principal and name of the last one that had it
    not_before: str | None = None
    # Of the journal.
    frontier: Frontier = field(default_factory=Frontier)
    signals: list[WaitingSignal] = field(default_factory=list)
    signal_ids: list[str] = field(default_factory=list)  # of the last that came: a repeat is the same signal
    state: dict[str, Any] = field(default_factory=dict)
    has_left_children: bool = False  # an operation that started a child was closed before the child had answered it
    # While it is WAITING.
    awaits: list[str] = field(default_factory=list)
    wake: str = "ANY"

    def to_json(self) -> dict[str, Any]:
        """As an execution checkpoint holds it."""
        sequence_number, entry_digest, phase, artifact_digest = self.head
        return {
            **({"has_left_children": True} if self.has_left_children else {}),
            "artifact_digest": artifact_digest,
            "attempt": self.attempt,
            "awaits": list(self.awaits),
            "entry_digest": entry_digest,
            "failures": self.failures,
            "fenced": self.fenced,
            "frontier": self.frontier.to_json(),
            "not_before": self.not_before,
            "phase": phase,
            "program_digest": self.program_digest,
            "run_id": self.run_id,
            "sequence_number": sequence_number,
            "signal_ids": list(self.signal_ids),
            "signals": [list(signal) for signal in self.signals],
            "started_at": self.started_at,
            "state": copy.deepcopy(self.state),
            "updated_at": self.updated_at,
            "version": self.version,
            "wake": self.wake,
            "worker": None if self.worker is None else list(self.worker),
        }

    @classmethod
    def from_json(cls, stated: dict[str, Any]) -> Self:
        stated = dict(stated)
        head = Head(*(stated.pop(name) for name in ("sequence_number", "entry_digest", "phase", "artifact_digest")))
        return cls(
            **{
                **stated,
                "head": head,
                "frontier": Frontier.from_json(stated["frontier"]),
                "signals": [WaitingSignal(*signal) for signal in stated["signals"]],
                "state": copy.deepcopy(stated["state"]),
                "worker": None if stated["worker"] is None else (stated["worker"][0], stated["worker"][1]),
            }
        )


def fold(records: Iterable[RunRecord], *, start: Run | None = None, source: Run | None = None) -> Run | None:
    """The run after all records, from `start` on, which is changed. `source`: for a fork, the run that it was forked
    from, as it stood at that entry. Errors name the stream and the entry."""
    run = start
    for record in records:
        run = fold_next(run, record, source=source)
    return run


def fold_next(run: Run | None, record: RunRecord, *, source: Run | None = None) -> Run:
    """The run after one more record, or the first check that fails; `run` is then as it was."""
    head = Head.unborn(RUN) if run is None else run.head
    entry, artifact = record
    try:
        if run is not None and entry.run_id != run.run_id:
            raise SchemaViolation("the entry is of another run", expected=run.run_id, found=entry.run_id)
        moved = RUN_DOCUMENTS.verify_next(head, record)
        if artifact is None:
            raise RecoveryFailed("the artifact's payload is missing", expected=entry.artifact_digest, found="nothing")
        place = Appended(moved.sequence_number, head.state, moved.state, entry.artifact_digest, entry.recorded_at)
        return _applied(run, artifact, place, moved, source)
    except TgaError as error:
        raise error.at(stream=record.stream, sequence_number=head.sequence_number + 1) from error.__cause__


def fold_planned(
    run: Run | None, artifact: RunDocument, moved: Head, *, recorded_at: str, source: Run | None = None
) -> Run:
    """As `fold_next`, for an entry that was planned on the run's own head: its place and links are right by
    construction, and the table admits it. Raises what the fold raises; the run may then be half changed."""
    head = Head.unborn(RUN) if run is None else run.head
    place = Appended(moved.sequence_number, head.state, moved.state, moved.artifact_digest or "", recorded_at)
    try:
        return _applied(run, artifact, place, moved, source)
    except TgaError as error:
        raise error.at(stream=RUN.stream(artifact.run_id), sequence_number=moved.sequence_number) from error.__cause__


def _applied(run: Run | None, artifact: RunDocument, place: Appended, moved: Head, source: Run | None) -> Run:
    if run is None:
        run = _born(artifact, place, source)
    else:
        _APPLY[type(artifact)](run, artifact, place)
    run.head = moved
    run.updated_at = place.recorded_at
    return run


def _born(start: RunDocument, place: Appended, source: Run | None) -> Run:
    if not isinstance(start, RunStart):
        raise RecoveryFailed("a run begins with its start", found=start.artifact_type)
    run = Run(
        run_id=start.run_id,
        head=Head.unborn(RUN),
        updated_at=place.recorded_at,
        started_at=start.started_at,
        version=start.version,
        program_digest=start.program_digest,
    )
    origin = start.forked_from
    if origin is not None:
        if source is None:
            raise RecoveryFailed("the run that this one was forked from is missing", expected=origin.run_id)
        found = (source.run_id, source.head.sequence_number, source.head.entry_digest)
        if found != (origin.run_id, origin.sequence_number, origin.entry_digest):
            raise ChecksumMismatch("the fork names another origin", expected=origin.entry_digest, found=found)
        run.frontier = source.frontier.copy()
        run.frontier.begun.clear()  # it begins anew, under the fork's own keys
        run.state = copy.deepcopy(source.state)
        run.signals = []
        apply_changes(run.state, origin.state_change)
    return run


def _attempt(run: Run, artifact: RunAttempt, entry: Appended) -> None:
    if artifact.change == "LEASED":
        verify_same("the next attempt", run.attempt + 1, artifact.attempt)
        verify_same("the program", run.program_digest, artifact.program_digest)
        run.attempt = artifact.attempt
        run.worker = (artifact.worker.principal_id, artifact.worker.name)
        run.not_before = None
        run.awaits = []
    elif artifact.change == "FENCED":
        is_old = artifact.attempt < run.attempt or (artifact.attempt == run.attempt and entry.from_state != "RUNNING")
        if not is_old or artifact.attempt <= run.fenced:
            raise ChecksumMismatch(
                "the fenced attempt is not over, or was recorded before",
                expected=f"an attempt after {run.fenced}, before {run.attempt}",
                found=artifact.attempt,
            )
        run.fenced = artifact.attempt
    else:
        _verify_attempt(run, artifact.attempt)
        run.failures += artifact.change != "RELEASED"
        run.not_before = artifact.not_before


def _intent(run: Run, intent: RunIntent, entry: Appended) -> None:
    _verify_attempt(run, intent.attempt)
    _verify_try(run, intent.path, intent.try_number)
    begun = Begun(
        entry.artifact_digest,
        intent.kind,
        intent.name,
        intent.input_digest,
        intent.due_at,
        intent.retries,
        entry.sequence_number,
        entry.recorded_at,
        0,
        intent.escalates_at,
        intent.has_default,
    )
    run.frontier.begin(intent.path, begun)


def _checkpoint(run: Run, checkpoint: RunCheckpoint, _: Appended) -> None:
    path, frontier = checkpoint.path, run.frontier
    _verify_attempt(run, checkpoint.attempt)
    frontier.verify_next(path)
    _verify_try(run, path, checkpoint.try_number)
    begun = frontier.begun.get(path)
    performed = (checkpoint.kind, checkpoint.name, checkpoint.input_digest)
    if begun is not None and performed != (begun.kind, begun.name, begun.input_digest):
        raise RunPositionTaken(
            f"another operation has begun at {path}",
            expected=f"{begun.kind} {begun.name}",
            found=" ".join(performed[:2]),
        )
    if checkpoint.kind in _ANSWERED_BY:
        raise InvalidTransition(
            f"a {checkpoint.kind} ends with an answer", expected="run_answer", found="run_checkpoint"
        )
    if checkpoint.outcome == "INTERRUPTED" and begun is None:
        raise InvalidTransition("only what has begun can be interrupted", expected="an intent", found=f"none at {path}")
    verify_count("the number of operations inside", frontier.performed_inside(path), checkpoint.inner)
    if not is_isolated(path):
        apply_changes(run.state, checkpoint.state_change)
    run.has_left_children |= _has_open_children(frontier, path)
    if checkpoint.outcome == "RETRY":
        frontier.retry(path)
    else:
        frontier.end(path, failed=checkpoint.outcome != "OK")
    run.failures = 0


def _answer(run: Run, answer: RunAnswer, entry: Appended) -> None:
    path = answer.path
    begun = run.frontier.begun.get(path)
    if begun is None or begun.intent_digest != answer.intent_digest:
        found = "nothing has begun there" if begun is None else f"intent {begun.intent_digest}"
        raise RunAnswerUnasked(f"nobody waits for this answer at {path}", expected=answer.intent_digest, found=found)
    if answer.answered_by.type not in _ANSWERED_BY.get(begun.kind, frozenset()):
        raise RunAnswerUnasked(
            f"a {begun.kind} is not answered so",
            expected=" or ".join(sorted(_ANSWERED_BY.get(begun.kind, frozenset()))) or "a checkpoint",
            found=answer.answered_by.type,
        )
    verify_by_time(begun, answer)
    wakes = entry.from_state == "WAITING" and wakes_with(run, path)
    verify_same("`wakes`", "YES" if wakes else "NO", answer.wakes)
    if answer.answered_by.type == "signal":
        _receive(run, begun.name, answer.answered_by.id)
    if answer.outcome == "RETRY":
        if run.frontier.try_of(path) > begun.retries:
            raise RunAnswerUnasked(
                f"operation {path} is not tried again", expected=f"{begun.retries} retries", found="one more"
            )
        run.frontier.retry(path)
    else:
        run.frontier.end(path, failed=answer.outcome != "OK")
    run.awaits = [] if wakes else [awaited for awaited in run.awaits if awaited != path]


def _escalation(run: Run, escalation: RunEscalation, _: Appended) -> None:
    path = escalation.path
    begun = run.frontier.begun.get(path)
    if begun is None or begun.intent_digest != escalation.intent_digest:
        found = "nothing has begun there" if begun is None else f"intent {begun.intent_digest}"
        raise RunAnswerUnasked(f"no such question is open at {path}", expected=escalation.intent_digest, found=found)
    if begun.level >= len(begun.escalates_at):
        raise RunAnswerUnasked(
            f"operation {path} is not escalated", expected=f"{len(begun.escalates_at)} levels", found=escalation.level
        )
    verify_same("the next level of the escalation", begun.level + 1, escalation.level)
    if escalation.escalated_at < begun.escalates_at[begun.level]:
        raise ChecksumMismatch(
            "a question was escalated before its time",
            expected=begun.escalates_at[begun.level],
            found=escalation.escalated_at,
        )
    run.frontier.begun[path] = begun._replace(level=escalation.level)


def wakes_with(run: Run, path: str) -> bool:
    """Whether an answer at this address ends the run's wait."""
    return path in run.awaits and (run.wake == "ANY" or len(run.awaits) == 1)


def _receive(run: Run, name: str, signal_id: str) -> None:
    # The first of that name: signals are received in the order in which they came.
    waiting = next((signal for signal in run.signals if signal.name == name), None)
    if waiting is None or waiting.signal_id != signal_id:
        raise RunAnswerUnasked(
            "the signal is not the next of its name", expected=waiting and waiting.signal_id, found=signal_id
        )
    run.signals.remove(waiting)


def _signal(run: Run, signal: RunSignal, entry: Appended) -> None:
    run.signals.append(WaitingSignal(signal.name, signal.signal_id, entry.sequence_number))
    run.signal_ids = [*run.signal_ids[1 - RUN_SIGNAL_IDS_KEPT :], signal.signal_id]


def waits_for_nobody(path: str, begun: Begun | None) -> InvalidTransition:
    return InvalidTransition(
        "a run waits only for what others can end",
        expected="a tool, ask, sleep, signal or child that has begun",
        found=f"{begun.kind if begun else 'nothing'} at {path}",
    )


def _suspension(run: Run, suspension: RunSuspension, _: Appended) -> None:
    _verify_attempt(run, suspension.attempt)
    for path in suspension.awaits:
        begun = run.frontier.begun.get(path)
        if begun is None or begun.kind not in _ANSWERED_BY:
            raise waits_for_nobody(path, begun)
    verify_count("how many different addresses it awaits", len(set(suspension.awaits)), len(suspension.awaits))
    run.awaits = list(suspension.awaits)
    run.wake = suspension.wake


def _end(run: Run, end: RunEnd, entry: Appended) -> None:
    _verify_attempt(run, end.attempt)
    if end.positions is not None:
        verify_count("the number of operations", run.frontier.positions, end.positions)
    if entry.to_state in RUN.terminal_states:
        run.has_left_children |= _has_open_children(run.frontier, ROOT)
        run.frontier.begun.clear()
    run.awaits = []


def _resumption(run: Run, resumption: RunResumption, _: Appended) -> None:
    frontier = frontier_after(run.frontier, resumption)
    found = digest_of_frontier(frontier)
    if found != resumption.frontier_digest:
        raise ChecksumMismatch(
            "the resumption states another frontier", expected=found, found=resumption.frontier_digest
        )
    run.frontier = frontier
    run.failures = 0
    run.not_before = None
    run.started_at = resumption.resumed_at  # its time runs anew
    if resumption.accepts is not None:
        run.version = resumption.accepts.version
        run.program_digest = resumption.accepts.program_digest


def frontier_after(frontier: Frontier, resumption: RunResumption) -> Frontier:
    """The frontier from which a resumed run goes on; the one given stays as it is."""
    after = frontier.copy()
    for resolved in resumption.resolves:
        after.resolve(resolved.path, failed=resolved.outcome != "OK")
    for path in resumption.reopens:
        after.reopen(path)
    return after


def _has_open_children(frontier: Frontier, path: str) -> bool:
    """Whether a child was started inside this operation, or by the whole program, and has not answered."""
    return any(
        begun.kind == "child" and (path == ROOT or is_scope_inside(inner, path))
        for inner, begun in frontier.begun.items()
    )


def _verify_attempt(run: Run, attempt: int) -> None:
    if attempt != run.attempt:  # the fence: what an earlier attempt sends is not of this run any more
        raise ConcurrentExecution("the attempt is not the current one", expected=run.attempt, found=attempt)


def _verify_try(run: Run, path: str, try_number: int) -> None:
    verify_count(f"the try of operation {path}", run.frontier.try_of(path), try_number)


def _born_twice(run: Run, start: RunStart, _: Appended) -> None:
    raise RecoveryFailed("a run starts once", expected="another artifact", found=start.artifact_type)


_APPLY: Final[dict[type[RunDocument], Callable[[Run, Any, Appended], None]]] = {
    RunStart: _born_twice,
    RunAttempt: _attempt,
    RunIntent: _intent,
    RunCheckpoint: _checkpoint,
    RunAnswer: _answer,
    RunEscalation: _escalation,
    RunSignal: _signal,
    RunSuspension: _suspension,
    RunEnd: _end,
    RunResumption: _resumption,
}


def digest_of_frontier(frontier: Frontier) -> Digest:
    """What a resumption states."""
    return digest_of(frontier.to_json())
