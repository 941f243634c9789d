"""What is being added to one run: artifacts, folded as they come, and the plan that commits them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from app.core.canonical import canonical_bytes, measure_bytes
from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import InputTooLarge, InvalidTransition, RunCountMismatch
from app.core.limits import RUN_ENTRIES_MAX, RUN_STATE_BYTES_MAX
from app.domain.clock import Clock
from app.domain.ledger.plans import BlobUse, Plan, PlannedCheckpoint, PlannedEntry, Sealed
from app.domain.runs.agreement import Miscounted
from app.domain.runs.checkpoints import checkpoint_of
from app.domain.runs.documents import (
    Divergence,
    RunAnswer,
    RunAttempt,
    RunCheckpoint,
    RunDocument,
    RunEnd,
    RunError,
    RunEscalation,
    RunIntent,
    RunLogEntry,
    RunStart,
    WorkerName,
)
from app.domain.runs.engine.ports import LoadedRun
from app.domain.runs.referring import blobs_of
from app.domain.runs.replay import RUN_DOCUMENTS, Run, RunRecord, fold_next, fold_planned
from app.domain.runs.schedule import schedule_of
from app.domain.runs.state import verify_levels
from app.domain.runs.transitions import RUN
from app.domain.runs.values import ArtifactValue, SecretValue, Value
from app.domain.runs.waiting import waiting_for

_UNBORN: Final = Head.unborn(RUN)


class Work:
    """A run, and what is added to it. Nothing is stored before its plan is committed; if that is refused, or `add`
    raises, the run is thrown away with it and read again.

    `owner_after`: whose the run is then; it is set by a lease, and gone as soon as the run is not RUNNING any more.
    """

    def __init__(self, loaded: LoadedRun | None, run_id: str, *, executor_id: str, clock: Clock) -> None:
        # Set here for good.
        self.run_id = run_id
        self.stream = RUN.stream(run_id)
        self.executor_id = executor_id if loaded is None or loaded.owner is None else loaded.owner
        self._clock = clock
        self.state_before = None if loaded is None else loaded.run.head.state
        # Changed by `add`.
        self.loaded = loaded
        self.has_news_for_others = False  # something that a worker on another gateway may wait for
        self._entries: list[PlannedEntry] = []
        self.added: list[RunDocument] = []  # the documents of `_entries`
        self._checkpoint: PlannedCheckpoint | None = None
        self._blobs: list[BlobUse] = []
        self._is_rescheduled = False
        # Set by who decides.
        self.owner_after = None if loaded is None else loaded.owner
        self.worker_after = None if loaded is None else loaded.worker
        self.sealed: Sealed | None = None
        self.announce_to: Sequence[str] = ()
        self.must_fence = False  # commit even without entries: the owner is compared
        self.needed_by: list[Plan] = []  # plans of other streams that are stored only together with this one
        self.needs_first = False  # this one is stored only together with the first of them

    def require(self) -> LoadedRun:
        if self.loaded is None:
            raise InvalidTransition("the run has not begun", expected="run_start", stream=self.stream)
        return self.loaded

    @property
    def run(self) -> Run:
        return self.require().run

    @property
    def start(self) -> RunStart:
        return self.require().start

    @property
    def has_entries(self) -> bool:
        return bool(self._entries)

    def last_record(self) -> RunRecord:
        """What was added last, as it will be read from the store."""
        entry = RUN_DOCUMENTS.read(self._entries[-1].entry, None, entry_digest=self.run.head.entry_digest).entry
        return RunRecord(entry, self.added[-1])

    def sizes_bytes(self) -> list[int]:
        """Of the documents in `added`, as they are stored."""
        return [len(planned.artifact) for planned in self._entries]

    def add(self, artifact: RunDocument, *, source: Run | None = None) -> str:
        """Fold one more artifact; its digest. Raises where the run does not admit it."""
        run = None if self.loaded is None else self.loaded.run
        head = _UNBORN if run is None else run.head
        if head.sequence_number >= RUN_ENTRIES_MAX and not isinstance(artifact, RunEnd | RunAttempt):
            raise InputTooLarge("the run is too long", expected=f"{RUN_ENTRIES_MAX} entries", stream=self.stream)
        now = self._clock.now()
        planned, moved, is_admitted = RUN_DOCUMENTS.plan(
            head, artifact, identity=self.run_id, executor_id=self.executor_id, recorded_at=now
        )
        if not is_admitted:  # let the fold judge it: it raises, naming what is wrong
            fold_next(run, RunRecord(RunLogEntry.from_body_bytes(planned.entry), artifact))
        try:
            run = fold_planned(run, artifact, moved, recorded_at=now, source=source)
        except Miscounted as wrong:
            told = RunCountMismatch(wrong.what, expected=wrong.expected, found=wrong.found)
            raise told.at(stream=self.stream, sequence_number=moved.sequence_number) from None
        if self.loaded is None:
            if not isinstance(artifact, RunStart):
                raise InvalidTransition("a run begins with its start", found=artifact.artifact_type)
            self.loaded = LoadedRun(run, artifact, None)
        if isinstance(artifact, RunCheckpoint) and artifact.state_change:
            verify_levels(artifact.state_change)
            self._verify_state_size(artifact)
        elif isinstance(artifact, RunStart) and artifact.forked_from is not None:
            verify_levels(artifact.forked_from.state_change)
        self._entries.append(planned)
        self.added.append(artifact)
        self.has_news_for_others |= isinstance(artifact, RunAnswer)
        self._blobs += [
            BlobUse(moved.sequence_number, Digest(ref.sha256), ref.size_bytes) for ref in blobs_of(artifact)
        ]
        since = self.require().since
        if since.add(moved.sequence_number, len(planned.artifact)):
            self._checkpoint = checkpoint_of(run, created_at=now)
            since.write(moved.sequence_number, len(self._checkpoint.state))
        self._is_rescheduled |= (
            isinstance(artifact, RunAttempt | RunStart | RunEscalation)
            or (isinstance(artifact, RunIntent | RunAnswer) and self._moves_what_is_due(artifact))
            or moved.state != head.state
        )
        return moved.artifact_digest or ""

    def require_blob(self, value: Value) -> None:
        """Refuse all of this where the value is a blob that is not stored: another plan that needs this one refers to
        it, and is not to be refused alone."""
        if isinstance(value, ArtifactValue | SecretValue):
            ref = value.ref
            self._blobs.append(BlobUse(self.run.head.sequence_number, Digest(ref.sha256), ref.size_bytes))

    def lease(self, owner: str, worker: str, name: WorkerName, *, at: str) -> None:
        """A worker begins the next attempt."""
        self.add(self._attempt("LEASED", self.run.attempt + 1, name, at=at))
        self.owner_after, self.worker_after = owner, worker

    def end_attempt(
        self,
        change: Literal["RELEASED", "LOST", "FAILED", "FENCED"],
        *,
        at: str,
        attempt: int | None = None,
        worker: WorkerName | None = None,
        reason: str | None = None,
        error: RunError | None = None,
        not_before: str | None = None,
    ) -> None:
        """The current attempt ends, or, FENCED, an earlier one has come back."""
        number = self.run.attempt if attempt is None else attempt
        principal_id, name_of_worker = self.run.worker or ("nobody", "nobody")
        name = worker or WorkerName(principal_id=principal_id, name=name_of_worker)
        told = self._attempt(change, number, name, at=at, reason=reason, error=error, not_before=not_before)
        self.add(told)

    def end(
        self,
        outcome: Literal["COMPLETED", "FAILED", "PARKED", "DIVERGED", "CANCELLED"],
        *,
        by: Literal["worker", "person", "time", "parent", "gateway"],
        by_id: str,
        at: str,
        output: Value | None = None,
        error: RunError | None = None,
        divergence: Divergence | None = None,
        positions: int | None = None,
    ) -> None:
        self.add(
            RunEnd.made_of(
                {
                    "run_id": self.run_id,
                    "attempt": self.run.attempt,
                    "outcome": outcome,
                    "output": output,
                    "error": error,
                    "divergence": divergence,
                    "positions": positions,
                    "ended_by": {"type": by, "id": by_id},
                    "ended_at": at,
                }
            )
        )

    def _attempt(
        self,
        change: str,
        attempt: int,
        worker: WorkerName,
        *,
        at: str,
        reason: str | None = None,
        error: RunError | None = None,
        not_before: str | None = None,
    ) -> RunAttempt:
        make = RunAttempt.of_known if reason is None and error is None else RunAttempt.made_of
        return make(
            {
                "run_id": self.run_id,
                "attempt": attempt,
                "change": change,
                "worker": worker,
                "program_digest": self.run.program_digest,
                "reason": reason,
                "error": error,
                "not_before": not_before,
                "at": at,
            }
        )

    def plan(self) -> Plan:
        """What stores all of it in one transaction."""
        run, start = self.run, self.start
        owner = self.owner_after if run.head.state == "RUNNING" else None
        if self.loaded is not None:
            self.loaded.owner, self.loaded.worker = owner, self.worker_after if owner else None
        schedule = None
        if self._is_rescheduled:
            schedule = schedule_of(run, start, worker=self.worker_after, now=self._clock.now())
        return Plan(
            stream=self.stream,
            executor_id=self.executor_id,
            owner_after=owner,
            entries=self._entries,
            checkpoint=self._checkpoint,
            waiting_after=waiting_for(run),
            sealed=self.sealed,
            announce_to=self.announce_to,
            schedule=schedule,
            blobs=self._blobs,
        )

    def _verify_state_size(self, checkpoint: RunCheckpoint) -> None:
        """InputTooLarge when the state has grown too large. Measured seldom: what changes add is at most their size."""
        loaded = self.require()
        added = sum(len(canonical_bytes(change.to_json())) for change in checkpoint.state_change)
        if loaded.state_bytes is None or loaded.state_bytes + added > RUN_STATE_BYTES_MAX:
            loaded.state_bytes = measure_bytes(loaded.run.state)
        else:
            loaded.state_bytes += added
        if loaded.state_bytes > RUN_STATE_BYTES_MAX:
            raise InputTooLarge(
                "the run's state is too large",
                expected=f"at most {RUN_STATE_BYTES_MAX} bytes",
                found=loaded.state_bytes,
                remedy="Keep large values as artifacts, and in the state what names them.",
                stream=self.stream,
            )

    def _moves_what_is_due(self, artifact: RunIntent | RunAnswer) -> bool:
        """Whether a question, or a call that is not waited for for ever, has come or gone."""
        if isinstance(artifact, RunIntent):
            return artifact.kind == "ask" or (artifact.kind == "tool" and artifact.due_at is not None)
        return artifact.answered_by.type in ("person", "timer")
