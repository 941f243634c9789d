"""Judge the streams of a bundle, whose entries come in the order of the tree: all streams through one another.

What is remembered of a stream between two of its entries is small and goes through a port, so that memory stays flat
however many streams are open at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from app.core.canonical import JsonValue, canonical_bytes, parse_object
from app.core.chain import Head
from app.core.digest import GENESIS, Digest, digest_of_bytes
from app.core.errors import RecoveryFailed, SchemaViolation, SequenceGap, SignatureInvalid, TgaError
from app.domain.identity import DEFAULT_TENANT
from app.domain.log.bundle import EntryLine
from app.domain.system.decision_signer import verify_decision_signature
from app.domain.system.documents import SYSTEM, Erasure
from app.domain.system.log import SystemState, fold_system
from app.domain.tga.documents import ActionRequest, ExecutionState, SupervisorDecision
from app.domain.tga.replay import fold_next, head_of, record_from_bytes, verify_next
from app.domain.tga.transitions import TRACE
from app.domain.tga.verification import Keys


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
    system_stream: str
    sequence_number: int
    is_covered: bool  # by the bundle's tree; else it may be younger than lines that still hold what it erased


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
    payloads_erased: int = 0


@dataclass(slots=True)
class StreamJudge:
    """Digests, links, transitions, bindings, signatures and claims. The first wrong entry ends its stream: nothing
    that follows it can be judged."""

    memory: StreamMemory
    complete: bool
    report: StreamReport = field(default_factory=StreamReport)
    systems: dict[str, SystemState] = field(default_factory=dict)
    broken_systems: set[str] = field(default_factory=set)
    keys: Keys = field(default_factory=Keys)

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
        """What can be said only when all entries were seen."""
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
                    "payloads are missing, and no erasure says so",
                    expected="an erasure on a system stream",
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

    def _verify_claim(self, state: ExecutionState, stream: str) -> None:
        """I2: of all calls with one key, one is made."""
        if state.idempotency_key is None:
            return
        claim: list[JsonValue] = [state.server_id, state.tool_name, state.idempotency_key]
        holder = self.memory.claim(digest_of_bytes(canonical_bytes(claim)), stream)
        if holder != stream:  # I2
            raise RecoveryFailed("two traces made a call with one idempotency key", expected=holder, found=stream)

    def _judge_system(self, line: EntryLine) -> None:
        system_id = line.stream.partition(":")[2]
        if system_id in self.broken_systems:
            return
        state = self.systems.get(system_id) or SystemState(system_id)
        try:
            if line.sequence_number != state.head.sequence_number + 1:
                raise SequenceGap(
                    "entries are missing", expected=state.head.sequence_number + 1, found=line.sequence_number
                )
            state = fold_system(state, line.entry, line.artifact, entry_digest=digest_of_bytes(line.entry))
        except TgaError:
            self.broken_systems.add(system_id)
            raise
        finally:
            # What pins say is not needed here, and they would be copied at every step.
            self.systems[system_id] = replace(state, pins={})
        self.keys.of_tenant[system_id] = state.keys
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
                    line.stream,
                    line.sequence_number,
                    line.leaf_index is not None,
                )
            )

    def _verify_erasure(self, erased: Erased) -> Iterator[TgaError]:
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
        elif standing.payloads_present and erased.is_covered:
            yield RecoveryFailed("a payload stands that was erased", found=erased.stream)
        else:
            self.memory.store(erased.stream, replace(standing, is_erased=True))


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
