"""A run's own checks in the verification walk, and all kinds of stream that a gateway's ledger has.

Steps by the numbers of app/domain/ledger/verification.py. In step 6 the record is folded (replay.py: attempts,
frontier, intents and answers, whom an answer wakes); a fork goes on from what its source folds to at the entry that it
names; a person's answer is signed by a key that a system stream announced before it; an answer of a tool names the last
artifact of the very trace that its intent named, one of a child the last entry of the very run, and a child was begun
by the intent that names it. In step 7 a checkpoint is what the journal folds to, and stands where one is due (I4). In
step 11 the head says of the birth what the birth says, and no claim, dispatch attempt or secret stands where there can
be none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from app.core.canonical import JsonValue
from app.core.chain import Head
from app.core.digest import digest_of
from app.core.errors import BundleInvalid, ChecksumMismatch, RecoveryFailed, TgaError
from app.domain.identity import DEFAULT_TENANT
from app.domain.ledger.checks import (
    AnyRecord,
    EntryPlace,
    KindChecks,
    Kinds,
    Reference,
    ReferredBlob,
    Standing,
    StreamChecks,
    Walking,
)
from app.domain.ledger.stored import StoredCheckpoint, StoredEntry, StoredStream, Summary
from app.domain.runs.checkpoints import SinceCheckpoint, verify_stored_checkpoint
from app.domain.runs.documents import RunAnswer, RunIntent, RunStart
from app.domain.runs.referring import referred_by
from app.domain.runs.replay import RUN_DOCUMENTS, Run, fold_planned
from app.domain.runs.requests import AskRequest, ChildRequest, ToolRequest
from app.domain.runs.transitions import RUN
from app.domain.runs.values import ChildValue, EffectValue
from app.domain.system.verification import SIGNED, SigningKeys, SystemKind, verify_signature_of
from app.domain.tga.seals import Unseals
from app.domain.tga.transitions import TRACE
from app.domain.tga.verification import TraceKind

_FORKED: Final = b'"forked_from":{'


def stream_checks(*, unseals: Unseals | None = None) -> Kinds:
    """Every kind of stream that a gateway writes, for one walk. Without `unseals` sealed secrets are not opened."""
    keys = SigningKeys()
    kinds: tuple[KindChecks, ...] = (SystemKind(keys), TraceKind(keys, unseals), RunKind(keys))
    return {kind.name: kind for kind in kinds}


class RunKind(KindChecks):
    """One execution of a program each."""

    documents = RUN_DOCUMENTS
    waits_for = {  # noqa: RUF012
        "SCHEDULED": frozenset({"worker"}),
        "WAITING": frozenset({"person", "signal", "child", "tool", "time"}),
        "FAILED": frozenset({"operator"}),
        "PARKED": frozenset({"operator"}),
        "DIVERGED": frozenset({"operator"}),
    }

    def __init__(self, keys: SigningKeys) -> None:
        self.keys = keys

    def begin(self, stored: StoredStream | None = None) -> StreamChecks:
        return _RunStream(self, keeps_start=stored is not None)

    def restore(self, kept: JsonValue) -> StreamChecks:
        read: dict[str, Any] = kept  # type: ignore[assignment]
        run = None if read["run"] is None else Run.from_json(read["run"])
        named, tenant, begun_by = dict(read["named"]), read["tenant"], read["begun_by"]
        children = dict(read.get("children", {}))  # an earlier version has not kept them
        return _RunStream(self, run, read["is_known"], named, children, tenant=tenant, begun_by=begun_by)

    def rests_on_order(self, row: StoredEntry) -> bool:
        return row.artifact is not None and SIGNED in row.artifact

    def blobs_in(self, record: AnyRecord) -> Iterable[ReferredBlob]:
        for ref, is_sealed in () if record.artifact is None else referred_by(record.artifact):
            yield ReferredBlob(ref.sha256, ref.size_bytes, is_sealed)

    def origin_of(self, artifact: bytes) -> EntryPlace | None:
        if _FORKED not in artifact:
            return None
        try:
            origin = RunStart.from_bytes(artifact).forked_from
        except TgaError:  # said where the record is read
            return None
        return None if origin is None else EntryPlace(RUN.stream(origin.run_id), origin.sequence_number)


@dataclass(slots=True)
class _RunStream(StreamChecks):
    """What is remembered of one run. `keeps_start`: the end will be compared with it; a bundle has no such end."""

    kind: RunKind
    run: Run | None = None  # what the journal folds to, as long as it is known and needed
    is_known: bool = True
    named: dict[str, str] = field(default_factory=dict)  # by address that has begun: trace, run, or default's digest
    children: dict[str, list[str]] = field(default_factory=dict)  # by address that may come again: those it has named
    tenant: str | None = None
    keeps_start: bool = False
    start: RunStart | None = None
    begun_by: str | None = None
    since: SinceCheckpoint = field(default_factory=SinceCheckpoint)
    last_number: int = 0
    is_folded: bool = False  # the record that is verified: all before it was right, and every payload there

    def note(self, record: AnyRecord) -> None:
        self.last_number = record.entry.sequence_number
        if isinstance(record.artifact, RunStart):
            parent, self.tenant = record.artifact.parent, record.artifact.principal.tenant
            self.begun_by = None if parent is None else parent.intent_digest
            if self.keeps_start:
                self.start = record.artifact

    def fold(self, record: AnyRecord) -> None:
        self.is_folded = True  # in `verify`: of a fork the fold rests on another stream, which the walk knows

    def lose_payload(self) -> None:
        self.run, self.is_known = None, False

    def verify(self, record: AnyRecord, row: StoredEntry, walk: Walking) -> None:
        entry, artifact = record
        self.since.add(entry.sequence_number, len(row.artifact or b""))
        is_folded, self.is_folded, source = self.is_folded, False, None
        if isinstance(artifact, RunStart):
            tenant = artifact.principal.tenant
            if walk.tenant not in (None, tenant):
                raise BundleInvalid("a run of another tenant than the bundle's", expected=walk.tenant, found=tenant)
            source = self._find_source(artifact, walk)
        if is_folded and self.is_known and artifact is not None and row.entry_digest is not None:
            moved = Head(entry.sequence_number, row.entry_digest, entry.to_state, entry.artifact_digest)
            self.run = fold_planned(self.run, artifact, moved, recorded_at=entry.recorded_at, source=source)
            self._verify_named(record, EntryPlace(record.stream, entry.sequence_number), walk)
            if entry.to_state in RUN.terminal_states and not self.keeps_start:
                self.run, self.is_known, self.named, self.children = None, False, {}, {}
        if isinstance(artifact, RunAnswer) and artifact.is_of_a_person:
            verify_signature_of(artifact, self.kind.keys, self.tenant or DEFAULT_TENANT, row, walk)

    def _find_source(self, start: RunStart, walk: Walking) -> Run | None:
        """Of a fork: the run that it goes on from, as it stood. The fold is not known where that is not known."""
        origin = start.forked_from
        if origin is None:
            return None
        source = walk.origin(EntryPlace(RUN.stream(origin.run_id), origin.sequence_number))
        if source.entry_digest is None and not walk.may_lack_streams():
            raise RecoveryFailed(
                "the entry that the run was forked from is missing",
                expected=f"entry {origin.sequence_number} of {RUN.stream(origin.run_id)}",
                found="nothing",
            )
        if source.entry_digest not in (None, origin.entry_digest):
            raise ChecksumMismatch(
                "the fork names another origin", expected=source.entry_digest, found=origin.entry_digest
            )
        kept: dict[str, Any] = source.kept or {}  # type: ignore[assignment]
        if kept.get("run") is None:
            walk.report.runs_unfolded += 1
            self.is_known = False
            return None
        return Run.from_json(kept["run"])

    def _verify_named(self, record: AnyRecord, place: EntryPlace, walk: Walking) -> None:
        artifact = record.artifact
        if isinstance(artifact, RunIntent):
            request = artifact.request
            if isinstance(request, ToolRequest):
                self.named[artifact.path] = TRACE.stream(request.trace_id)
            elif isinstance(request, ChildRequest) and request.child_run_id is not None:
                child = self.named[artifact.path] = RUN.stream(request.child_run_id)
                if child not in self.children.get(artifact.path, ()):  # else it is taken up again, and was begun before
                    walk.refer(Reference(place, child, "begun_by", record.entry.artifact_digest))
                self._keep_child(artifact.path, child)
            elif isinstance(request, AskRequest) and request.default is not None:
                self.named[artifact.path] = digest_of(request.default.to_json())
        elif isinstance(artifact, RunAnswer):
            named, value = self.named.get(artifact.path), artifact.value
            if isinstance(value, EffectValue):
                _verify_is_named(artifact.path, named, TRACE.stream(value.trace_id))
                walk.refer(Reference(place, TRACE.stream(value.trace_id), "last_artifact", value.tool_effect_digest))
            elif isinstance(value, ChildValue):
                _verify_is_named(artifact.path, named, RUN.stream(value.run_id))
                walk.refer(Reference(place, RUN.stream(value.run_id), "last_entry", value.entry_digest))
            elif named is not None and artifact.answered_by.type == "timer" and value is not None:
                _verify_is_named(artifact.path, named, digest_of(value.to_json()))
        if self.run is not None and self.named:
            begun = self.run.frontier.begun
            self.named = {path: stream for path, stream in self.named.items() if path in begun}

    def _keep_child(self, path: str, child: str) -> None:
        frontier = None if self.run is None else self.run.frontier
        kept = {at: one for at, one in self.children.items() if frontier is not None and frontier.may_come_again(at)}
        self.children = {**kept, path: list(dict.fromkeys([*kept.get(path, ()), child]))}

    def is_checkpoint_due(self, state: str) -> bool:
        if self.run is None or not self.since.is_missing(self.last_number):
            return False
        self.since.write(self.last_number, self.since.checkpoint_bytes)  # told once
        return True

    def verify_checkpoint(self, checkpoint: StoredCheckpoint, at: Standing) -> None:
        self.since.write(checkpoint.sequence_number, len(checkpoint.state))
        if at.stored is not None and at.stored.erasure is not None:
            raise RecoveryFailed("a checkpoint stands that was erased", expected="nothing")
        is_here = at.is_sound and checkpoint.sequence_number == at.head.sequence_number
        verify_stored_checkpoint(checkpoint, self.run if is_here else None)

    def end(self, stored: StoredStream, at: Standing, walk: Walking) -> Iterator[TgaError]:
        for error in self._end_errors(stored, at):
            yield at.at_last(error)

    def _end_errors(self, stored: StoredStream, at: Standing) -> Iterator[TgaError]:
        if stored.claim is not None or stored.claim_effect is not None:
            yield RecoveryFailed("a run claims no idempotency key", expected="no claim", found=stored.claim)
        if stored.dispatch_attempts:
            yield RecoveryFailed("a run sends nothing itself", expected="no attempts", found=stored.dispatch_attempts)
        if stored.erasure is not None and stored.sealed is not None:
            yield RecoveryFailed("secrets stand that were erased", expected="nothing")
        if at.is_sound and self.run is not None and stored.scheduled_attempt not in (None, self.run.attempt):
            yield RecoveryFailed(
                "the run is scheduled as if it were in another attempt; `tga db rebuild` mends that",
                expected=self.run.attempt,
                found=stored.scheduled_attempt,
            )
        found, start = stored.summary, self.start
        if found is None or start is None or not at.is_sound:
            return
        said = start.principal
        expected = Summary(said.tenant, said.principal_id, start.procedure, start.version, None)
        if found != expected:
            yield RecoveryFailed(
                "the head says another thing of the run than its start", expected=expected, found=found
            )

    def to_json(self) -> JsonValue:
        return {
            "begun_by": self.begun_by,
            "children": {path: [*named] for path, named in self.children.items()},
            "is_known": self.is_known,
            "named": dict(self.named),
            "run": None if self.run is None else self.run.to_json(),
            "tenant": self.tenant,
        }


def _verify_is_named(path: str, named: str | None, found: str) -> None:
    if found != named:
        raise ChecksumMismatch(f"the answer at {path} is not of what its intent names", expected=named, found=found)
