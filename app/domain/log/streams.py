"""Judge the streams of a bundle, whose entries come in the order of the tree: all streams through one another.

`StreamJudge` sees only entries that the signed head covers, so nothing else can vouch for them: a decision rests on
keys that a covered entry announced before it, a missing payload on a covered erasure. `AfterHeadJudge` sees the rest,
once the first has ended.

What is remembered of a stream between two of its entries is small and goes through a port, so that memory stays flat
however many streams are open at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from app.core.canonical import canonical_bytes, parse_object
from app.core.chain import Head
from app.core.digest import GENESIS, Digest, digest_of_bytes
from app.core.errors import (
    BundleInvalid,
    RecoveryFailed,
    SchemaViolation,
    SequenceGap,
    SignatureInvalid,
    TgaError,
)
from app.domain.identity import DEFAULT_TENANT
from app.domain.ledger.plans import Claim
from app.domain.log.bundle import EntryLine
from app.domain.system.decision_signer import verify_decision_signature
from app.domain.system.documents import SYSTEM, Erasure
from app.domain.system.log import SystemState, fold_system, fold_withheld
from app.domain.tga.documents import ActionRequest, SupervisorDecision
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.replay import fold_next, head_of, record_from_bytes, verify_next
from app.domain.tga.transitions import TRACE
from app.domain.tga.verification import SigningKeys


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a trace stands between two of its entries. `payloads` folds the digests that its entries commit to."""

    head: Head = field(default_factory=lambda: Head.unborn(TRACE))
    state: ExecutionState | None = None  # not known once a payload is missing; not needed once it has ended
    tenant: str | None = None
    payloads: Digest = GENESIS
    payloads_present: int = 0
    payloads_missing: int = 0
    is_broken: bool = False
    is_erased: bool = False

    def to_bytes(self) -> bytes:
        head = self.head
        return canonical_bytes(
            {
                "head": [head.sequence_number, head.entry_digest, head.state, head.artifact_digest],
                "state": None if self.state is None else self.state.to_json(),
                "tenant": self.tenant,
                "payloads": [self.payloads, self.payloads_present, self.payloads_missing],
                "flags": [self.is_broken, self.is_erased],
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Standing:
        """Only for what `to_bytes` wrote: nothing is judged here."""
        read: dict[str, object] = {**parse_object(raw)}
        head, state, payloads, flags = read["head"], read["state"], read["payloads"], read["flags"]
        known = None if state is None else ExecutionState.from_json(state)  # type: ignore[arg-type]
        return cls(Head(*head), known, read["tenant"], *payloads, *flags)  # type: ignore[arg-type, misc]


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure says of the stream that it erased, and where it stands itself."""

    stream: str
    last_sequence_number: int
    last_entry_digest: str
    payloads: str
    key_digest: str | None  # of the claim that the stream had
    system_stream: str
    sequence_number: int


class StreamMemory(Protocol):
    """What is remembered about streams; in flat memory, so probably on disk."""

    def load(self, stream: str) -> Standing | None: ...

    def store(self, stream: str, standing: Standing) -> None: ...

    def all(self) -> Iterator[tuple[str, Standing]]: ...

    def remember_erasure(self, erased: Erased) -> None: ...

    def erasures(self) -> Iterator[Erased]: ...

    def claim(self, key: str, stream: str) -> str:
        """The stream that claimed `key` first: this one, unless another did."""
        ...


@dataclass(slots=True)
class StreamReport:
    entries: int = 0
    traces: int = 0
    traces_unfinished: int = 0
    system_streams: int = 0
    signatures: int = 0
    signatures_by_retired_keys: int = 0
    payloads_erased: int = 0
    payloads_withheld: int = 0


@dataclass(slots=True)
class StreamJudge:
    """Digests, links, transitions, bindings, signatures and claims of covered entries. The first wrong entry ends its
    stream: nothing that follows it can be judged.

    `tenant`: the bundle is this tenant's alone. Other tenants' system entries may then come without their artifacts.
    """

    memory: StreamMemory
    complete: bool
    tenant: str | None = None
    report: StreamReport = field(default_factory=StreamReport)
    systems: dict[str, SystemState] = field(default_factory=dict)
    broken_systems: set[str] = field(default_factory=set)
    keys: SigningKeys = field(default_factory=SigningKeys)

    def judge(self, line: EntryLine) -> Iterator[TgaError]:
        self.report.entries += 1
        try:
            match line.stream.partition(":")[0]:
                case TRACE.name:
                    self._judge_trace(line)
                case SYSTEM.name:
                    self._judge_system(line)
                case _:
                    raise SchemaViolation("no such kind of stream")
        except TgaError as error:
            # The line that was judged, not the place where it should have stood.
            error.stream, error.sequence_number = line.stream, line.sequence_number
            yield error

    def end(self) -> Iterator[TgaError]:
        """What can be said only when all covered entries were seen."""
        self.report.system_streams = len(self.systems)
        for erased in self.memory.erasures():
            for error in self._verify_erasure(erased):
                yield error.at(stream=erased.system_stream, sequence_number=erased.sequence_number)
        for stream, standing in self.memory.all():
            self.report.traces += 1
            self.report.traces_unfinished += standing.head.state not in TRACE.terminal_states
            if standing.is_erased:
                self.report.payloads_erased += standing.payloads_missing
            elif standing.payloads_missing and not standing.is_broken:
                yield RecoveryFailed(
                    "payloads are missing, and no covered erasure says so",
                    expected="an erasure on a system stream, covered by the signed head",
                    found="nothing",
                    stream=stream,
                    sequence_number=standing.head.sequence_number,
                )

    def _judge_trace(self, line: EntryLine) -> None:
        standing = self.memory.load(line.stream) or Standing()
        if standing.is_broken:
            return
        try:
            standing = self._after(standing, line)
        except TgaError:
            standing = replace(standing, state=None, is_broken=True)
            raise
        finally:
            self.memory.store(line.stream, standing)

    def _after(self, standing: Standing, line: EntryLine) -> Standing:
        record = record_from_bytes(line.entry, line.artifact, entry_digest=digest_of_bytes(line.entry))
        _verify_place(line, record.stream, record.entry.sequence_number)
        state: ExecutionState | None = None
        if record.artifact is not None and (standing.state is not None or standing.head.sequence_number == 0):
            state = fold_next(standing.state, record)
            head = head_of(state)
        else:
            head = verify_next(standing.head, record)
        tenant = standing.tenant
        if isinstance(record.artifact, ActionRequest):
            tenant = record.artifact.principal.tenant
            if self.tenant not in (None, tenant):
                raise BundleInvalid("a trace of another tenant than the bundle's", expected=self.tenant, found=tenant)
        if isinstance(record.artifact, SupervisorDecision):
            self._verify_signature(record.artifact, tenant)
        if state is not None and state.state == "EXECUTING":
            self._verify_claim(state, line.stream)
        return Standing(
            head=head,
            state=None if head.state in TRACE.terminal_states else state,
            tenant=tenant,
            payloads=_with_payload(standing.payloads, record.entry.artifact_digest),
            payloads_present=standing.payloads_present + (record.artifact is not None),
            payloads_missing=standing.payloads_missing + (record.artifact is None),
        )

    def _verify_signature(self, decision: SupervisorDecision, tenant: str | None) -> None:
        """A decision of a person is signed by a key that a system stream announced before, for whoever decided."""
        if decision.decided_by.type not in ("person", "withdrawal"):
            return
        if decision.signature is None:
            raise SignatureInvalid("the decision is not signed", expected="a signature", found="none")
        known = self.keys.find(tenant or DEFAULT_TENANT, decision.signature.key_id)
        if known is None:
            raise SignatureInvalid("no system stream announced the key", found=decision.signature.key_id)
        verify_decision_signature(decision, known)
        self.report.signatures += 1
        self.report.signatures_by_retired_keys += known.is_retired

    def _verify_claim(self, state: ExecutionState, stream: str) -> None:
        """I2: of all calls with one key, one is made."""
        if state.idempotency_key is None:
            return
        claim = Claim(state.server_id, state.tool_name, state.idempotency_key, Digest(state.payload_digest))
        holder = self.memory.claim(claim.key_digest(), stream)
        if holder != stream:  # I2
            raise RecoveryFailed("two traces made a call with one idempotency key", expected=holder, found=stream)

    def _judge_system(self, line: EntryLine) -> None:
        system_id = line.stream.partition(":")[2]
        if system_id in self.broken_systems:
            return
        is_withheld = line.artifact is None and self.tenant not in (None, system_id)
        before = self.systems.get(system_id) or SystemState(system_id)
        try:
            state = _system_after(before, line, is_withheld=is_withheld)
        except TgaError:
            self.systems[system_id] = before
            self.broken_systems.add(system_id)
            raise
        self.systems[system_id] = state
        self.keys.of_tenant[system_id] = state.keys
        self.report.payloads_withheld += is_withheld
        erasure = _erasure(line.artifact)
        if erasure is not None:
            payloads = GENESIS
            for digest in erasure.artifact_digests:
                payloads = _with_payload(payloads, digest)
            self.memory.remember_erasure(
                Erased(
                    erasure.erased_stream,
                    erasure.last_sequence_number,
                    erasure.last_entry_digest,
                    payloads,
                    None if erasure.claim is None else erasure.claim.key_digest,
                    line.stream,
                    line.sequence_number,
                )
            )

    def _verify_erasure(self, erased: Erased) -> Iterator[TgaError]:
        holder = erased.stream if erased.key_digest is None else self.memory.claim(erased.key_digest, erased.stream)
        if holder != erased.stream:  # I2
            yield RecoveryFailed("the erased trace had the claim of a key with which another made a call", found=holder)
            return
        standing = self.memory.load(erased.stream)
        if standing is None:
            if self.complete:
                yield RecoveryFailed("the erasure is of a stream that is not here", found=erased.stream)
            return
        if standing.is_broken:
            return
        expected = (standing.head.sequence_number, standing.head.entry_digest, standing.payloads)
        found = (erased.last_sequence_number, erased.last_entry_digest, erased.payloads)
        if found != expected:
            yield RecoveryFailed("the erasure is of something else", expected=expected, found=found)
        elif standing.payloads_present:
            yield RecoveryFailed("a payload stands that was erased", found=erased.stream)
        else:
            self.memory.store(erased.stream, replace(standing, is_erased=True))


class AfterHeadJudge:
    """System entries that no signed head covers, as a continuation of the covered ones. Nothing rests on them: they are
    only said to hang together, or not."""

    def __init__(self, covered: StreamJudge) -> None:
        self._systems = dict(covered.systems)
        self._broken = set(covered.broken_systems)

    def judge(self, line: EntryLine) -> Iterator[TgaError]:
        kind, _, system_id = line.stream.partition(":")
        if system_id in self._broken and kind == SYSTEM.name:
            return
        try:
            if kind != SYSTEM.name:
                raise SequenceGap("only system entries may be newer than the tree")
            before = self._systems.get(system_id) or SystemState(system_id)
            self._systems[system_id] = _system_after(before, line, is_withheld=False)
        except TgaError as error:
            if kind == SYSTEM.name:
                self._broken.add(system_id)
            error.stream, error.sequence_number = line.stream, line.sequence_number
            yield error


def _system_after(state: SystemState, line: EntryLine, *, is_withheld: bool) -> SystemState:
    if line.sequence_number != state.head.sequence_number + 1:
        raise SequenceGap("entries are missing", expected=state.head.sequence_number + 1, found=line.sequence_number)
    if is_withheld:
        return fold_withheld(state, line.entry)
    state = fold_system(state, line.entry, line.artifact, entry_digest=digest_of_bytes(line.entry))
    # What pins say is not needed here, and they would be copied at every step.
    return replace(state, pins={})


def _verify_place(line: EntryLine, stream: str, sequence_number: int) -> None:
    if line.stream != stream:
        raise SchemaViolation("the entry is of another stream", expected=line.stream, found=stream)
    if line.sequence_number != sequence_number:
        raise SequenceGap("the entry has another number", expected=line.sequence_number, found=sequence_number)


def _with_payload(payloads: Digest, digest: str) -> Digest:
    return digest_of_bytes((payloads + digest).encode("ascii"))


def _erasure(artifact: bytes | None) -> Erasure | None:
    if artifact is None or b'"tga/v1/erasure"' not in artifact:
        return None
    body = parse_object(artifact, bytes_max=len(artifact))
    return Erasure.from_json(body) if body.get("schema_id") == "tga/v1/erasure" else None
