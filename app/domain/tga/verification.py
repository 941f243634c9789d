"""Verify stored streams: every digest, link, transition, artifact, claim, checkpoint and head, in flat memory.

Reads rows as they are stored and trusts nothing about them. Proves that what is stored hangs together; not that
nothing was cut off a tail together with its head, nor that nobody recomputed all of it: signed tree heads show that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import (
    CheckpointMissing,
    ChecksumMismatch,
    InvalidTransition,
    RecoveryFailed,
    SchemaViolation,
    SequenceGap,
    SignatureInvalid,
    TgaError,
)
from app.core.limits import ATTEMPTS_LISTED_MAX
from app.domain.identity import DEFAULT_TENANT
from app.domain.ledger.plans import Claim
from app.domain.ledger.stored import (
    ClaimedKey,
    LedgerReader,
    StoredCheckpoint,
    StoredEntry,
    StoredStream,
    Summary,
)
from app.domain.system.decision_signer import verify_decision_signature
from app.domain.system.documents import SYSTEM, Erasure
from app.domain.system.log import KnownKey, SystemState, fold_system
from app.domain.tga.checkpoints import is_checkpoint_due, verify_erased_checkpoint, verify_stored_checkpoint
from app.domain.tga.documents import ActionRequest, SupervisorDecision, ToolEffect
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.idempotency import claim_of_request, compare_claim, may_lack_claim
from app.domain.tga.replay import LogRecord, fold_next, record_from_bytes, verify_next
from app.domain.tga.seals import Unseals, seal_errors
from app.domain.tga.transitions import TRACE

_WAITS_FOR = {"PENDING": "supervisor", "EXECUTING": "operator"}


@dataclass(slots=True)
class Report:
    """What was checked, and what was found to be wrong."""

    streams: int = 0
    entries: int = 0
    broken_streams: int = 0
    findings: int = 0
    erased_streams: int = 0
    signatures: int = 0
    seals_unopened: int = 0  # there, but without their key nobody can tell whether they are the right ones


@dataclass(slots=True)
class SigningKeys:
    """Signing keys by tenant, as the system streams announce them. System streams come before traces in the order of
    their names, so they are all known when the first trace is read."""

    of_tenant: dict[str, dict[str, KnownKey]] = field(default_factory=dict)

    def find(self, tenant: str, key_id: str) -> KnownKey | None:
        """A gateway's, which speaks for all tenants and cannot be taken from it by registering it; or the tenant's."""
        gateway = self.of_tenant.get(DEFAULT_TENANT, {}).get(key_id)
        if gateway is not None and gateway.principal_id is None:
            return gateway
        return self.of_tenant.get(tenant, {}).get(key_id)


@dataclass(slots=True)
class _Walk:
    """Where the verification of one stream stands.

    After a finding it goes on from what the row claims to be, so that one wrong entry is one finding, and a second
    wrong one is found too; the folded state is then no longer known.
    """

    stored: StoredStream
    keys: SigningKeys
    report: Report
    unseals: Unseals | None = None
    request: ActionRequest | None = None
    head: Head = field(default_factory=lambda: Head.unborn(TRACE))
    state: ExecutionState | None = None
    is_sound: bool = True
    resumes: bool = False
    claim: Claim | None = None
    claim_may_lack: bool = False
    effect_digest: Digest | None = None  # by the entry alone
    artifact_digests: list[str] = field(default_factory=list)  # of an erased stream
    attempts_listed: int | None = None
    checkpoints: Iterator[StoredCheckpoint] = field(init=False)
    next_checkpoint: StoredCheckpoint | None = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoints = iter(self.stored.checkpoints)
        self.next_checkpoint = next(self.checkpoints, None)

    def error(self, error: TgaError, sequence_number: int | None) -> TgaError:
        self.is_sound = False
        return error.at(stream=self.stored.stream, sequence_number=sequence_number)


async def verify_ledger(
    reader: LedgerReader, report: Report, *, unseals: Unseals | None = None
) -> AsyncIterator[TgaError]:
    """Every finding, as it is found; `report` counts along. Without `unseals` sealed secrets are not opened."""
    keys = SigningKeys()
    async for stored in reader.streams():
        found = 0
        async for error in verify_stream(stored, report, keys, unseals):
            found += 1
            yield error
        report.streams += reader.is_asked_for(stored.stream)
        # What is wrong with a system stream is wrong with whatever rests on it.
        report.findings += found
        report.broken_streams += found > 0
    async for error in _verify_keys_once(reader):
        report.findings += 1
        report.broken_streams += 1
        yield error


async def _verify_keys_once(reader: LedgerReader) -> AsyncIterator[TgaError]:
    """I2: a key has one stream. The index that sees to it can be dropped; here only neighbours are compared."""
    before: ClaimedKey | None = None
    async for claimed in reader.claimed_keys():
        if before is not None and before[:3] == claimed[:3]:
            yield RecoveryFailed(
                "two traces hold the claim of one key",
                expected=before.stream,
                found=f"{claimed.stream}, for {claimed.server_id}, {claimed.tool_name}, {claimed.idempotency_key}",
                stream=claimed.stream,
            )
        before = claimed


async def verify_stream(
    stored: StoredStream, report: Report, keys: SigningKeys, unseals: Unseals | None = None
) -> AsyncIterator[TgaError]:
    """Every finding about one stream, each naming the entry where it is, what was expected and what was found."""
    for table in stored.rows_repeated:
        yield RecoveryFailed("the stream has more than one row", expected="one", found=table, stream=stored.stream)
    match stored.stream.partition(":")[0]:
        case TRACE.name:
            verified = _verify_trace(_Walk(stored, keys, report, unseals))
        case SYSTEM.name:
            verified = _verify_system(stored, report, keys)
        case _:
            yield SchemaViolation("no such kind of stream", stream=stored.stream)
            return
    async for error in verified:
        yield error


async def _verify_system(stored: StoredStream, report: Report, keys: SigningKeys) -> AsyncIterator[TgaError]:
    """A system stream is short and everything rests on it: the first wrong entry ends it."""
    state = SystemState(stored.stream.partition(":")[2])
    if stored.erasure is not None:
        yield RecoveryFailed("a system stream is never erased", expected="no erasure", stream=stored.stream)
    try:
        async for row in stored.entries:
            report.entries += row.entry is not None
            if row.entry is None or row.entry_digest is None or row.sequence_number != state.head.sequence_number + 1:
                raise SequenceGap(
                    "entries are missing", expected=state.head.sequence_number + 1, found=row.sequence_number
                )
            state = fold_system(state, row.entry, row.artifact, entry_digest=row.entry_digest)
    except TgaError as error:
        yield error.at(stream=stored.stream, sequence_number=state.head.sequence_number + 1)
    else:
        if stored.head != state.head:
            yield ChecksumMismatch(
                "the log does not end where its head stands",
                expected=stored.head,
                found=state.head,
                stream=stored.stream,
                sequence_number=state.head.sequence_number,
            )
    keys.of_tenant[state.system_id] = state.keys


async def _verify_trace(walk: _Walk) -> AsyncIterator[TgaError]:
    async for row in walk.stored.entries:
        walk.report.entries += row.entry is not None
        for error in _verify_row(walk, row):
            yield error
    for error in _verify_end(walk):
        yield error


def _verify_row(walk: _Walk, row: StoredEntry) -> Iterator[TgaError]:
    if row.entry is None or row.entry_digest is None:
        yield walk.error(
            SequenceGap("an artifact has no entry", expected="an entry", found="nothing"), row.sequence_number
        )
        return
    expected = walk.head.sequence_number + 1
    if row.sequence_number != expected:
        missing = SequenceGap("entries are missing", expected=expected, found=row.sequence_number)
        yield walk.error(missing, expected)
        walk.resumes = True
    # What the row claims to be, for whatever follows it if the row itself cannot be read.
    claimed = Head(row.sequence_number, row.entry_digest, walk.head.state, walk.head.artifact_digest)
    resumes, walk.resumes = walk.resumes, True
    try:
        record = record_from_bytes(row.entry, row.artifact, entry_digest=row.entry_digest)
        if record.stream != walk.stored.stream:
            raise SchemaViolation("the entry is of another stream", expected=walk.stored.stream, found=record.stream)
        entry = record.entry
        claimed = Head(row.sequence_number, row.entry_digest, entry.to_state, Digest(entry.artifact_digest))
        before, walk.resumes = walk.head, False
        if resumes:
            before = _head_that_fits(record, row.sequence_number)
        _note_claim(walk, record)
        if walk.stored.erasure is not None:
            walk.artifact_digests.append(entry.artifact_digest)
            if entry.artifact_type == ToolEffect.artifact_type:
                walk.effect_digest = Digest(entry.artifact_digest)
        if walk.is_sound and walk.stored.erasure is None:
            walk.state = fold_next(walk.state, record)
        else:
            verify_next(before, record)
            if record.artifact is not None and walk.stored.erasure is not None:
                raise RecoveryFailed("a payload stands that was erased", expected="nothing")
        _verify_signature(walk, record)
    except TgaError as error:
        yield walk.error(error, row.sequence_number)
    walk.head = claimed
    yield from _verify_checkpoints(walk)


def _head_that_fits(record: LogRecord, sequence_number: int) -> Head:
    """A head that this record would follow: behind a broken place only what it says of itself can be judged."""
    binds_field = TRACE.rule_of[record.entry.artifact_type].binds_field
    bound = None if binds_field is None else getattr(record.artifact, binds_field, None)
    return Head(sequence_number - 1, Digest(record.entry.prev_entry_digest), record.entry.from_state, bound)


def _verify_signature(walk: _Walk, record: LogRecord) -> None:
    """A decision of a person, or a withdrawal, is signed by a key that the system stream knows for whoever decided."""
    decision = record.artifact
    if not isinstance(decision, SupervisorDecision) or decision.decided_by.type not in ("person", "withdrawal"):
        return
    if decision.signature is None:
        raise SignatureInvalid("the decision is not signed", expected="a signature", found="none")
    tenant = DEFAULT_TENANT if walk.request is None else walk.request.principal.tenant
    known = walk.keys.find(tenant, decision.signature.key_id)
    if known is None:
        raise SignatureInvalid("no system stream knows the key", found=decision.signature.key_id)
    verify_decision_signature(decision, known)
    walk.report.signatures += 1


def _note_claim(walk: _Walk, record: LogRecord) -> None:
    if isinstance(record.artifact, ActionRequest):
        walk.request = record.artifact
        walk.claim = claim_of_request(record.artifact)
    elif isinstance(record.artifact, SupervisorDecision):
        walk.claim_may_lack = may_lack_claim(record.artifact)
    elif isinstance(record.artifact, ToolEffect):
        walk.attempts_listed = len(record.artifact.attempts)


def _verify_checkpoints(walk: _Walk) -> Iterator[TgaError]:
    """I4: every checkpoint up to here hashes to its digest and says what the log folds to at its entry; where one is
    due, there is one."""
    place, stands = walk.head.sequence_number, False
    while walk.next_checkpoint is not None and walk.next_checkpoint.sequence_number <= place:
        checkpoint, walk.next_checkpoint = walk.next_checkpoint, next(walk.checkpoints, None)
        stands |= checkpoint.sequence_number == place
        try:
            state = verify_stored_checkpoint(checkpoint, walk.state if walk.is_sound else None)
            if walk.stored.erasure is not None and walk.is_sound:
                verify_erased_checkpoint(state, walk.head, walk.artifact_digests, walk.stored.claim)
        except TgaError as error:
            yield error.at(stream=walk.stored.stream, sequence_number=checkpoint.sequence_number)
    if not stands and walk.is_sound and is_checkpoint_due(walk.head.state):
        yield CheckpointMissing(
            "the execution checkpoint of the entry is missing", expected=f"one that stands on entry {place}"
        ).at(stream=walk.stored.stream, sequence_number=place)


def _verify_end(walk: _Walk) -> Iterator[TgaError]:
    stored = walk.stored
    last_place = walk.head.sequence_number or None
    for error in _head_errors(walk):
        yield walk.error(error, last_place)
    beside = (_leftover_checkpoints, _claim_errors, _summary_errors, _seal_errors, _erasure_errors)
    for error in (error for errors_of in beside for error in errors_of(walk)):
        yield error.at(stream=stored.stream, sequence_number=last_place)
    listed = walk.attempts_listed
    attempts = 1 + len(stored.dispatch_attempts)
    if walk.is_sound and listed is not None and listed > 0 and min(attempts, ATTEMPTS_LISTED_MAX) != listed:
        yield SequenceGap(
            "the effect lists other attempts than are stored", expected=listed, found=attempts, stream=stored.stream
        )
    elif list(stored.dispatch_attempts) != list(range(2, 2 + len(stored.dispatch_attempts))):
        yield SequenceGap(
            "dispatch attempts are missing",
            expected=f"2 to {1 + len(stored.dispatch_attempts)}",
            found=list(stored.dispatch_attempts),
            stream=stored.stream,
        )


def _head_errors(walk: _Walk) -> Iterator[TgaError]:
    stored, last = walk.stored.head, walk.head
    if stored is None:
        if last.sequence_number > 0:
            yield SequenceGap("the stream has no head", expected=last.sequence_number, found="nothing")
    elif stored.sequence_number != last.sequence_number:
        first_wrong = min(stored.sequence_number, last.sequence_number) + 1
        yield SequenceGap(
            "the log does not end where its head stands",
            expected=stored.sequence_number,
            found=last.sequence_number,
            sequence_number=first_wrong,
        )
    elif stored.entry_digest != last.entry_digest:
        yield ChecksumMismatch(
            "the log's last entry is not the head's", expected=stored.entry_digest, found=last.entry_digest
        )
    elif walk.is_sound and (stored.state, stored.artifact_digest) != (last.state, last.artifact_digest):
        yield InvalidTransition("the head is in another state than the log", expected=last.state, found=stored.state)
    elif walk.is_sound and last.sequence_number > 0:
        # What recovery goes by: a trace that is wrongly closed or waiting would be left alone for ever.
        should_be_open = last.state not in TRACE.terminal_states
        if walk.stored.is_open != should_be_open:
            yield InvalidTransition(
                "the head says wrongly whether the trace is finished",
                expected=should_be_open,
                found=walk.stored.is_open,
            )
        if walk.stored.waiting not in (None, _WAITS_FOR.get(last.state)):
            yield InvalidTransition(
                f"a trace that is {last.state} does not wait for that",
                expected=_WAITS_FOR.get(last.state, "nobody"),
                found=walk.stored.waiting,
            )


def _summary_errors(walk: _Walk) -> Iterator[TgaError]:
    """Lists and expiry go by what the head says of the birth; it must be what the birth says."""
    found, request = walk.stored.summary, walk.request
    if found is None or request is None or not walk.is_sound:
        return
    said = request.principal
    expected = Summary(said.tenant, said.principal_id, request.server_id, request.tool_name, request.expires_at)
    if found != expected:
        yield RecoveryFailed(
            "the head says another thing of the trace than its request", expected=expected, found=found
        )


def _seal_errors(walk: _Walk) -> Iterator[TgaError]:
    sealed = walk.stored.sealed
    if sealed is not None and walk.unseals is None:
        walk.report.seals_unopened += 1
    if walk.stored.erasure is not None:
        if sealed is not None:
            yield RecoveryFailed("secrets stand that were erased", expected="nothing")
    elif walk.is_sound and walk.request is not None:
        yield from seal_errors(
            walk.request,
            sealed,
            is_finished=walk.head.state in TRACE.terminal_states,
            may_lack=walk.claim_may_lack,
            unseals=walk.unseals,
        )


def _erasure_errors(walk: _Walk) -> Iterator[TgaError]:
    """Payloads may be gone only if a system stream says so, of exactly this stream as it stands."""
    stored = walk.stored.erasure
    if stored is None:
        return
    walk.report.erased_streams += 1
    try:
        if stored.erasure is None:
            raise RecoveryFailed(
                "the erasure is not on the record", expected=f"{stored.system_stream}, entry {stored.sequence_number}"
            )
        erasure = Erasure.from_bytes(stored.erasure)
        expected = (walk.stored.stream, walk.head.sequence_number, walk.head.entry_digest)
        found = (erasure.erased_stream, erasure.last_sequence_number, erasure.last_entry_digest)
        if found != expected:
            raise RecoveryFailed("the erasure is of something else", expected=expected, found=found)
        if walk.is_sound and erasure.artifact_digests != walk.artifact_digests:
            raise RecoveryFailed(
                "the erasure names other payloads", expected=walk.artifact_digests, found=erasure.artifact_digests
            )
        tenant = None if walk.stored.summary is None else walk.stored.summary.tenant
        if tenant is not None and stored.system_stream != SYSTEM.stream(tenant):
            raise RecoveryFailed(
                "another tenant's system stream has the erasure",
                expected=SYSTEM.stream(tenant),
                found=stored.system_stream,
            )
        _verify_erased_claim(walk.stored, erasure, stored.claim_salt)
    except TgaError as error:
        yield error
    settled = walk.effect_digest if walk.stored.claim is not None else None
    if walk.is_sound and walk.stored.claim_effect != settled:
        yield RecoveryFailed("claim and log disagree on the effect", expected=settled, found=walk.stored.claim_effect)


def _verify_erased_claim(stored: StoredStream, erasure: Erasure, salt: bytes | None) -> None:
    """I2: the request that made the claim is gone, but the erasure says what the claim is."""
    if erasure.claim is not None:
        erasure.claim.verify(stored.claim, salt=salt)
    elif stored.claim is not None or salt is not None:
        raise RecoveryFailed("the erased trace had no claim", expected="none", found="a claim, or its salt")
    if stored.claim is not None and stored.summary is not None:
        expected, found = stored.claim[:2], (stored.summary.server_id, stored.summary.tool_name)
        if found != expected:
            raise RecoveryFailed("the head names another tool than the claim", expected=expected, found=found)


def _leftover_checkpoints(walk: _Walk) -> Iterator[TgaError]:
    while walk.next_checkpoint is not None:
        beyond, walk.next_checkpoint = walk.next_checkpoint, next(walk.checkpoints, None)
        yield SequenceGap(
            "a checkpoint stands on an entry that is missing",
            expected=f"an entry {beyond.sequence_number}",
            found=f"{walk.head.sequence_number} entries",
            sequence_number=walk.head.sequence_number + 1,
        )


def _claim_errors(walk: _Walk) -> Iterator[TgaError]:
    """I2: the claim is the one that the request makes, and it is settled exactly when the log is."""
    stored = walk.stored
    if walk.head.sequence_number == 0:
        if stored.claim is not None or stored.claim_effect is not None:
            yield SequenceGap("a claim's stream has no entries", expected="entry 1", found="nothing", sequence_number=1)
        return
    if walk.is_sound and walk.state is not None:
        yield from compare_claim(
            stored.claim, stored.claim_effect, made=walk.claim, may_lack=walk.claim_may_lack, state=walk.state
        )
