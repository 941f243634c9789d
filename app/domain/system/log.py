"""A system stream, read and continued: every link verified, and what it says folded into what counts now.

Nobody owns a system stream: several gateways append to it. Each decides in view of the newest state it has read, and
decides again when another was faster.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, Self

from app.core.chain import Head
from app.core.digest import Digest, digest_of_bytes
from app.core.ed25519 import key_id_of
from app.core.errors import (
    ChecksumMismatch,
    ConcurrentExecution,
    OutcomeUnknown,
    SchemaViolation,
    SequenceGap,
    TgaError,
)
from app.core.limits import LIST_ENTRIES_MAX, SYSTEM_APPEND_TRIES_MAX
from app.core.merkle import Hash
from app.core.note import TreeHead
from app.domain.clock import Clock
from app.domain.ledger.owned_stream import NoOwner, OwnedStream, Position, StreamPorts
from app.domain.ledger.plans import BlobUse, Ledger, Plan
from app.domain.ledger.records import Record, StreamDocuments
from app.domain.system.documents import (
    SYSTEM,
    SYSTEM_MODELS,
    LogEpoch,
    PolicySet,
    ProcedureRegistration,
    Schedule,
    ScheduleRemoval,
    SigningKey,
    SystemDocument,
    SystemLogEntry,
    ToolPin,
)
from app.domain.system.programs import KnownSchedule, Procedures, Program, with_program

SystemRecord = Record[SystemLogEntry, SystemDocument]
SYSTEM_DOCUMENTS: Final = StreamDocuments(SystemLogEntry, SYSTEM_MODELS)

ToolKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Pin:
    """What is pinned for a tool, and every definition that was refused in its place since."""

    definition_digest: str
    since: str
    sequence_number: int  # of the entry that pinned it
    quarantined_digests: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KnownKey:
    public_key: bytes
    principal_id: str | None
    is_retired: bool = False

    @classmethod
    def of(cls, document: SigningKey) -> Self:
        return cls(b64decode(document.public_key), document.principal_id, document.change == "retired")


@dataclass(frozen=True, slots=True)
class SystemState:
    """A system stream up to its head, folded."""

    system_id: str
    head: Head = field(default_factory=lambda: Head.unborn(SYSTEM))
    pins: dict[ToolKey, Pin] = field(default_factory=dict)
    keys: dict[str, KnownKey] = field(default_factory=dict)
    policy_digest: str | None = None
    epochs: tuple[LogEpoch, ...] = ()
    procedures: Procedures = field(default_factory=dict)
    schedules: dict[str, KnownSchedule] = field(default_factory=dict)

    @property
    def stream(self) -> str:
        return SYSTEM.stream(self.system_id)


def fold_system(
    state: SystemState, raw_entry: bytes, raw_artifact: bytes | None, *, entry_digest: Digest
) -> SystemState:
    """The state after one more stored row, or the error of the first check that fails, naming stream and entry.

    A system stream's artifacts are never erased: a missing one means that someone removed it.
    """
    try:
        record = SYSTEM_DOCUMENTS.read(raw_entry, raw_artifact, entry_digest=entry_digest)
    except TgaError as error:
        raise error.at(stream=state.stream, sequence_number=state.head.sequence_number + 1) from None
    return fold_next(state, record)


def fold_next(state: SystemState, record: SystemRecord) -> SystemState:
    """The state after one more entry with its artifact, or the error of the first check that fails."""
    entry, document = record
    try:
        if document is None:
            raise ChecksumMismatch("the artifact is missing", expected=entry.artifact_digest, found="nothing")
        if entry.system_id != state.system_id:
            raise SchemaViolation("the entry is of another stream", expected=state.system_id, found=entry.system_id)
        head = SYSTEM_DOCUMENTS.verify_next(state.head, record)
        verify_names(document)
        if isinstance(document, LogEpoch):
            verify_epoch(document, state.epochs)
    except TgaError as error:
        raise error.at(stream=state.stream, sequence_number=state.head.sequence_number + 1) from None
    return _after(replace(state, head=head), document)


def verify_names(document: SystemDocument) -> None:
    """Decisions name a key and a policy by what is made from them: none may stand here under another's name."""
    match document:
        case SigningKey():
            found, expected = document.key_id, key_id_of(b64decode(document.public_key))
        case PolicySet():
            found, expected = document.policy_digest, digest_of_bytes(document.text.encode("utf-8"))
        case _:
            return
    if found != expected:
        raise ChecksumMismatch("a key or policy stands under another's name", expected=expected, found=found)


def verify_epoch(document: LogEpoch, before: Sequence[LogEpoch]) -> None:
    """It ends the log that stood before it, says what that was, and counts right."""
    former = document.former
    expected = (before[-1].epoch + 1, before[-1].origin) if before else (2, former.origin)
    if (document.epoch, former.origin) != expected:
        raise ChecksumMismatch(
            "a new epoch of the log does not follow the one before it",
            expected=f"epoch {expected[0]} after {expected[1]}",
            found=f"epoch {document.epoch} after {former.origin}",
        )
    told = TreeHead(former.origin, former.size, Hash(bytes.fromhex(former.root))).to_text()
    if not former.note.startswith(f"{told}\n") or document.leaves_lost != former.size - document.kept_size:
        raise ChecksumMismatch("a new epoch of the log does not say what its former head says")


def _after(state: SystemState, document: SystemDocument) -> SystemState:
    match document:
        case ToolPin():
            key = (document.server_id, document.tool_name)
            return replace(state, pins={**state.pins, key: _pin_after(state, document)})
        case SigningKey():
            return replace(state, keys={**state.keys, document.key_id: KnownKey.of(document)})
        case PolicySet():
            return replace(state, policy_digest=document.policy_digest)
        case LogEpoch():
            return replace(state, epochs=(*state.epochs, document))
        case ProcedureRegistration():
            program = Program.of(document, state.head.sequence_number)
            return replace(state, procedures=with_program(state.procedures, program))
        case Schedule():
            known = KnownSchedule.of(document, state.head.sequence_number)
            return replace(state, schedules={**state.schedules, document.name: known})
        case ScheduleRemoval():
            return replace(state, schedules={n: s for n, s in state.schedules.items() if n != document.name})
        case _:
            return state


def _pin_after(state: SystemState, document: ToolPin) -> Pin:
    pin = state.pins.get((document.server_id, document.tool_name))
    if document.change == "quarantined" and pin is not None:
        return replace(pin, quarantined_digests=pin.quarantined_digests | {document.definition_digest})
    return Pin(document.definition_digest, document.recorded_at, state.head.sequence_number)


def blobs_of(document: SystemDocument, sequence_number: int) -> list[BlobUse]:
    """What the entry of this document refers to: a system stream is never erased, so these blobs stay."""
    if not isinstance(document, ProcedureRegistration) or document.program_source is None:
        return []
    source = document.program_source
    kept = {one.sha256: one.size_bytes for one in source.files} | {source.sha256: source.size_bytes}
    return [BlobUse(sequence_number, Digest(sha256), size_bytes) for sha256, size_bytes in kept.items()]


def plan_system(state: SystemState, documents: list[SystemDocument], *, executor_id: str, recorded_at: str) -> Plan:
    """One plan that appends these documents where the stream stands now; without an owner, before and after."""
    planned, head = [], state.head
    for document in documents:
        entry, head, _ = SYSTEM_DOCUMENTS.plan(
            head, document, identity=state.system_id, executor_id=executor_id, recorded_at=recorded_at
        )
        planned.append(entry)
    return Plan(stream=state.stream, executor_id=executor_id, owner_after=None, entries=planned)


class SystemRow(NamedTuple):
    """An entry with its artifact, as stored."""

    entry: bytes
    artifact: bytes | None
    entry_digest: Digest


class SystemRows(Protocol):
    """What is stored of a system stream."""

    async def load_tail(self, stream: str, *, after: int, limit: int) -> Sequence[SystemRow]:
        """Its entries after this sequence number, in order; nothing of them is verified."""
        ...


class SystemLog:
    """The system streams, a state in memory for each tenant's; several gateways append to them.

    What is read is verified before it counts. What is appended is durable when `append` returns, once, also when the
    answer to its commit was lost.
    """

    def __init__(self, rows: SystemRows, ledger: Ledger, clock: Clock, executor_id: Callable[[], str]) -> None:
        # Set here for good.
        self._rows = rows
        self._clock = clock
        self._ports = StreamPorts(
            SYSTEM, ledger, NoOwner(executor_id), clock, self._load_position, waits_for_store=False
        )
        # By tenant; replaced by `refresh`, which only ever goes forward.
        self._states: dict[str, SystemState] = {}

    def state_of(self, tenant: str) -> SystemState:
        """As last read; `refresh` reads on."""
        return self._states.get(tenant) or SystemState(tenant)

    async def refresh(self, tenant: str) -> SystemState:
        """Read and verify what was appended since; nothing that does not verify is taken over."""
        state = self.state_of(tenant)
        while rows := await self._rows.load_tail(
            state.stream, after=state.head.sequence_number, limit=LIST_ENTRIES_MAX
        ):
            for row in rows:
                state = fold_system(state, row.entry, row.artifact, entry_digest=row.entry_digest)
        # Two refreshes may run at once: the one that came further stays.
        if state.head.sequence_number >= self.state_of(tenant).head.sequence_number:
            self._states[tenant] = state
        return self.state_of(tenant)

    async def load(self, tenant: str, sequence_number: int) -> SystemDocument:
        """The document of that entry, verified against the entry."""
        stream = self.state_of(tenant).stream
        for row in await self._rows.load_tail(stream, after=sequence_number - 1, limit=1):
            entry, document = SYSTEM_DOCUMENTS.read(row.entry, row.artifact, entry_digest=row.entry_digest)
            if document is not None and entry.sequence_number == sequence_number:
                return document
        raise SequenceGap("an entry or its artifact is missing", stream=stream, sequence_number=sequence_number)

    async def refresh_all(self) -> None:
        for tenant in list(self._states):
            await self.refresh(tenant)

    async def append(self, tenant: str, decide: Callable[[SystemState], list[SystemDocument]]) -> SystemState:
        """Append what `decide` says in view of the newest state; asked again when another gateway was faster.

        RunBlobMissing when a document names a blob that is not stored: then nothing is appended."""
        for _ in range(SYSTEM_APPEND_TRIES_MAX):
            state = await self.refresh(tenant)
            documents = decide(state)
            if not documents:
                return state
            try:
                await self._commit(state, documents)
            except (ConcurrentExecution, ChecksumMismatch, OutcomeUnknown):
                continue  # another gateway has appended since the state was read: decide again
            return await self.refresh(tenant)
        raise ConcurrentExecution(
            "others append to the system stream all the time", stream=self.state_of(tenant).stream
        )

    async def _commit(self, state: SystemState, documents: list[SystemDocument]) -> None:
        executor_id, now = self._ports.owner.executor_id(), self._clock.now()
        owned = OwnedStream(self._ports, state.system_id, executor_id=executor_id, head=state.head)
        uses: list[BlobUse] = []
        for document in documents:
            planned, head, _ = SYSTEM_DOCUMENTS.plan(
                owned.head, document, identity=state.system_id, executor_id=executor_id, recorded_at=now
            )
            owned.append(planned, head)
            uses += blobs_of(document, head.sequence_number)
        await owned.commit(Plan(owned.stream, executor_id, owner_after=None, entries=owned.pending, blobs=uses))

    async def _load_position(self, stream: str) -> Position:
        return Position((await self.refresh(SYSTEM.identity_of(stream))).head.entry_digest)
