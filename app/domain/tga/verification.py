"""A trace's own checks in the verification walk. `stream_checks` of app/domain/runs/verification.py has all kinds.

Steps by the numbers of app/domain/ledger/verification.py. In step 6 the record is folded, a decision of a person is
signed by a key that a system stream announced before it, and of all calls with one key one is made (I2). In step 7 a
checkpoint is what the log folds to (I4). In step 11 the claim is the one that the request makes, the head says of the
birth what the birth says, sealed secrets open to what the arguments commit to, and every dispatch attempt is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from app.core.canonical import JsonValue
from app.core.chain import Head
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import BundleInvalid, RecoveryFailed, SequenceGap, TgaError
from app.core.limits import ATTEMPTS_LISTED_MAX
from app.domain.identity import DEFAULT_TENANT
from app.domain.ledger.checks import AnyRecord, KindChecks, Standing, StreamChecks, Walking, WholeStream
from app.domain.ledger.plans import Claim
from app.domain.ledger.stored import StoredCheckpoint, StoredEntry, StoredStream, Summary
from app.domain.system.verification import SIGNED, SigningKeys, verify_signature_of
from app.domain.tga.checkpoints import verify_erased_checkpoint, verify_stored_checkpoint
from app.domain.tga.documents import ActionRequest, SupervisorDecision, ToolCall, ToolEffect
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.idempotency import compare_claim, may_lack_claim
from app.domain.tga.replay import TRACE_DOCUMENTS, fold_linked
from app.domain.tga.seals import Unseals, seal_errors
from app.domain.tga.secrets import MAY_BE_SECRET
from app.domain.tga.transitions import TRACE
from app.domain.tga.usual_artifacts import Asked, read_usual
from app.domain.tga.whole_traces import IN_LINES, ROWS_CALLED, ROWS_DENIED, STORED, read_whole

_SIGNERS: Final = ("person", "withdrawal")


class TraceKind(KindChecks):
    """One governed tool call each; they rest on the keys of system streams."""

    documents = TRACE_DOCUMENTS
    has_whole_streams = True
    waits_for = {"PENDING": frozenset({"supervisor"}), "EXECUTING": frozenset({"operator"})}  # noqa: RUF012

    def __init__(self, keys: SigningKeys, unseals: Unseals | None = None) -> None:
        self.keys = keys
        self.unseals = unseals

    def may_be_whole(self, rows: int, line: bytes) -> bool:
        return rows == ROWS_CALLED or (rows == ROWS_DENIED and b"DENY" in line)

    def read_whole(self, stream: str, spelled: Sequence[bytes], artifacts: Sequence[bytes]) -> WholeStream | None:
        whole = read_whole(TRACE.identity_of(stream).encode(), spelled, artifacts, IN_LINES)
        if whole is None:
            return None
        claim = whole.claim if whole.is_called else None
        return WholeStream(whole.head, None if claim is None else claim.key_digest(), whole.entries)

    def accepts_whole(self, stored: StoredStream) -> bool:
        rows = stored.rows or ()
        if len(rows) not in (ROWS_CALLED, ROWS_DENIED) or not TRACE.has(stored.stream) or _has_more_beside(stored):
            return False
        identity = TRACE.identity_of(stored.stream).encode()
        entries = [row.entry for row in rows if row.entry is not None]
        artifacts = [row.artifact for row in rows if row.artifact is not None]
        if len(entries) != len(rows) or len(artifacts) != len(rows) or MAY_BE_SECRET in artifacts[0]:
            return False
        whole = read_whole(identity, entries, artifacts, STORED)
        if whole is None or whole.head != stored.head or whole.attempts > 1:
            return False
        if [row.entry_digest for row in rows] != [digest.decode("ascii") for digest in whole.entry_digests]:
            return False
        summary = Summary(whole.tenant, whole.principal_id, whole.server_id, whole.tool_name, whole.expires_at)
        if stored.summary != summary or ((whole.is_called or stored.claim is not None) and stored.claim != whole.claim):
            return False
        is_settled = whole.is_called and stored.claim is not None  # I2
        return stored.claim_effect == (whole.head.artifact_digest if is_settled else None)

    def begin(self, stored: StoredStream | None = None) -> StreamChecks:
        return _Trace(self, keeps_request=stored is not None)

    def restore(self, kept: JsonValue) -> StreamChecks:
        read: dict[str, Any] = kept  # type: ignore[assignment]
        trace = _Trace(self, tenant=read["tenant"])
        trace.folded = read["state"]
        return trace

    def rests_on_order(self, row: StoredEntry) -> bool:
        return row.artifact is not None and SIGNED in row.artifact


def _has_more_beside(stored: StoredStream) -> bool:
    """Whether something stands beside the trace that does not stand beside nearly all that have ended."""
    return bool(
        stored.is_open
        or stored.waiting is not None
        or stored.misplaced_in is not None
        or stored.erasure is not None
        or stored.sealed is not None
        or stored.checkpoints
        or stored.dispatch_attempts
        or stored.rows_repeated
    )


@dataclass(slots=True)
class _Trace(StreamChecks):
    """What is remembered of one trace. `keeps_request`: the end will be compared with it; a bundle has no such end, and
    remembers little of many traces at once."""

    kind: TraceKind
    keeps_request: bool = False
    folded: dict[str, Any] | None = None  # the fields of the state, as long as it is known and needed
    tenant: str | None = None
    asked: Asked | None = None
    is_denied_at_once: bool = False  # then it may lack claim and secrets
    effect_digest: Digest | None = None  # by the entry alone
    attempts_listed: int | None = None

    @property
    def state(self) -> ExecutionState | None:
        """What the log folds to."""
        return None if self.folded is None else ExecutionState.of_known(dict(self.folded))

    def follow_usual(self, at: Standing, row: StoredEntry, walk: Walking) -> Head | None:
        head, entry, artifact, entry_digest = at.head, row.entry, row.artifact, row.entry_digest
        number = head.sequence_number + 1
        if entry is None or artifact is None or entry_digest is None or row.sequence_number != number:
            return None
        digest = digest_of_bytes(artifact)
        usual = read_usual(head, self.folded, artifact, digest)
        if usual is None or at.stream != TRACE.stream(usual.trace_id):
            return None
        artifact_type, state, trace_id, moved, asked, attempts = usual
        updated_at = TRACE_DOCUMENTS.time_of_next(
            head, entry, artifact_type=artifact_type, artifact_digest=digest, to_state=state, identity=trace_id
        )
        if updated_at is None or (asked is not None and walk.tenant not in (None, asked.tenant)):
            return None
        if artifact_type == "tool_call" and self._other_caller(at.stream, walk) is not None:
            return None
        # From here on the row is right: remember what `note` and `fold` would.
        moved.update(state=state, sequence_number=number, entry_digest=entry_digest, updated_at=updated_at)
        if asked is not None:
            self.tenant, self.asked = asked.tenant, asked if self.keeps_request else None
        elif artifact_type == "supervisor_decision":
            self.is_denied_at_once = state == "DENIED"
        elif artifact_type == "tool_effect":
            self.effect_digest, self.attempts_listed = digest, attempts
        if state in TRACE.terminal_states and not self.keeps_request:
            self.folded = None
        else:
            self.folded = moved if self.folded is None else {**self.folded, **moved}
        return Head(number, entry_digest, state, digest)

    def note(self, record: AnyRecord) -> None:
        entry, artifact = record
        if isinstance(artifact, ActionRequest):
            self.tenant = artifact.principal.tenant
            if self.keeps_request:
                self.asked = Asked.of(artifact)
        elif isinstance(artifact, SupervisorDecision):
            self.is_denied_at_once = may_lack_claim(artifact)
        elif isinstance(artifact, ToolEffect):
            self.attempts_listed = len(artifact.attempts)
        if entry.artifact_type == ToolEffect.artifact_type:
            self.effect_digest = Digest(entry.artifact_digest)

    def fold(self, record: AnyRecord) -> None:
        self.folded = fold_linked(self.state, record).__dict__

    def lose_payload(self) -> None:
        self.folded = None

    def verify(self, record: AnyRecord, row: StoredEntry, walk: Walking) -> None:
        entry, artifact = record
        if isinstance(artifact, ActionRequest):
            if walk.tenant not in (None, self.tenant):
                raise BundleInvalid(
                    "a trace of another tenant than the bundle's", expected=walk.tenant, found=self.tenant
                )
        elif isinstance(artifact, SupervisorDecision):
            if artifact.decided_by.type in _SIGNERS:
                verify_signature_of(artifact, self.kind.keys, self.tenant or DEFAULT_TENANT, row, walk)
        elif isinstance(artifact, ToolCall):
            self._verify_single_call(record.stream, walk)
        if entry.to_state in TRACE.terminal_states and not self.keeps_request:
            self.folded = None

    def _verify_single_call(self, stream: str, walk: Walking) -> None:
        holder = self._other_caller(stream, walk)
        if holder is not None:  # I2
            raise RecoveryFailed("two traces made a call with one idempotency key", expected=holder, found=stream)

    def _other_caller(self, stream: str, walk: Walking) -> str | None:
        """I2: of all calls with one key, one is made. The stream that made it, if that is not this one."""
        folded = self.folded
        if folded is None or folded["idempotency_key"] is None:
            return None
        claim = Claim(
            folded["server_id"], folded["tool_name"], folded["idempotency_key"], Digest(folded["payload_digest"])
        )
        holder = walk.claim_holder(claim, stream)
        return None if holder == stream else holder

    def verify_checkpoint(self, checkpoint: StoredCheckpoint, at: Standing) -> None:
        state = verify_stored_checkpoint(checkpoint, self.state if at.is_sound else None)
        if at.stored is not None and at.stored.erasure is not None and at.is_sound:
            verify_erased_checkpoint(state, at.head, at.artifact_digests, at.stored.claim)

    def end(self, stored: StoredStream, at: Standing, walk: Walking) -> Iterator[TgaError]:
        for errors_of in (self._claim_errors, self._summary_errors):
            for error in errors_of(stored, at):
                yield at.at_last(error)
        for error in self._seal_errors(stored, at, walk):
            yield at.at_last(error)
        yield from self._attempt_errors(stored, at)

    def _claim_errors(self, stored: StoredStream, at: Standing) -> Iterator[TgaError]:
        """I2: the claim is the one that the request makes, and it is settled exactly when the log is."""
        if stored.erasure is not None:
            settled = self.effect_digest if stored.claim is not None else None
            if at.is_sound and stored.claim_effect != settled:
                yield RecoveryFailed(
                    "claim and log disagree on the effect", expected=settled, found=stored.claim_effect
                )
        if at.head.sequence_number == 0:
            if stored.claim is not None or stored.claim_effect is not None:
                yield SequenceGap(
                    "a claim's stream has no entries", expected="entry 1", found="nothing", sequence_number=1
                )
        elif at.is_sound and (state := self.state) is not None:
            asked = self.asked
            made = None
            if asked is not None and asked.idempotency_key is not None:
                made = Claim(asked.server_id, asked.tool_name, asked.idempotency_key, asked.payload_digest)
            yield from compare_claim(
                stored.claim, stored.claim_effect, made=made, may_lack=self.is_denied_at_once, state=state
            )

    def _summary_errors(self, stored: StoredStream, at: Standing) -> Iterator[TgaError]:
        """Lists and expiry go by what the head says of the birth; it must be what the birth says."""
        found, asked = stored.summary, self.asked
        if found is None or asked is None or not at.is_sound:
            return
        expected = Summary(asked.tenant, asked.principal_id, asked.server_id, asked.tool_name, asked.expires_at)
        if found != expected:
            yield RecoveryFailed(
                "the head says another thing of the trace than its request", expected=expected, found=found
            )

    def _seal_errors(self, stored: StoredStream, at: Standing, walk: Walking) -> Iterator[TgaError]:
        unseals = self.kind.unseals
        if stored.sealed is not None and unseals is None:
            walk.report.seals_unopened += 1
        if stored.erasure is not None:
            if stored.sealed is not None:
                yield RecoveryFailed("secrets stand that were erased", expected="nothing")
        elif at.is_sound and self.asked is not None:
            yield from seal_errors(
                self.asked,
                stored.sealed,
                is_finished=at.head.state in TRACE.terminal_states,
                may_lack=self.is_denied_at_once,
                unseals=unseals,
            )

    def _attempt_errors(self, stored: StoredStream, at: Standing) -> Iterator[TgaError]:
        """Every send after the first has its row, and the effect lists them all. They are of no entry."""
        listed, rows = self.attempts_listed, stored.dispatch_attempts
        attempts = 1 + len(rows)
        if at.is_sound and listed is not None and listed > 0 and min(attempts, ATTEMPTS_LISTED_MAX) != listed:
            yield SequenceGap(
                "the effect lists other attempts than are stored", expected=listed, found=attempts, stream=at.stream
            )
        elif list(rows) != list(range(2, 2 + len(rows))):
            yield SequenceGap(
                "dispatch attempts are missing", expected=f"2 to {attempts}", found=list(rows), stream=at.stream
            )

    def to_json(self) -> JsonValue:
        return {"state": self.folded, "tenant": self.tenant}
