"""A system stream, read and continued: every link verified, and what it says folded into what counts now."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass, field, replace
from typing import Final

from app.core.chain import Head
from app.core.digest import Digest, digest_of_bytes
from app.core.ed25519 import key_id_of
from app.core.errors import ChecksumMismatch, SchemaViolation, TgaError
from app.domain.ledger.plans import Plan
from app.domain.ledger.records import Record, StreamDocuments
from app.domain.system.documents import (
    SYSTEM,
    SYSTEM_MODELS,
    PolicySet,
    SigningKey,
    SystemDocument,
    SystemLogEntry,
    ToolPin,
)

SystemRecord = Record[SystemLogEntry, SystemDocument]
SYSTEM_DOCUMENTS: Final = StreamDocuments(SystemLogEntry, SYSTEM_MODELS)

ToolKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Pin:
    """What is pinned for a tool, and every definition that was refused in its place since."""

    definition_digest: str
    since: str
    quarantined_digests: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KnownKey:
    public_key: bytes
    principal_id: str | None
    is_retired: bool = False


@dataclass(frozen=True, slots=True)
class SystemState:
    """A system stream up to its head, folded."""

    system_id: str
    head: Head = field(default_factory=lambda: Head.unborn(SYSTEM))
    pins: dict[ToolKey, Pin] = field(default_factory=dict)
    keys: dict[str, KnownKey] = field(default_factory=dict)
    policy_digest: str | None = None

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


def fold_withheld(state: SystemState, raw_entry: bytes) -> SystemState:
    """As `fold_system` for an entry whose artifact is kept from the reader: its digest stands, and it says nothing."""
    try:
        entry = SystemLogEntry.from_body_bytes(raw_entry)
        if entry.system_id != state.system_id:
            raise SchemaViolation("the entry is of another stream", expected=state.system_id, found=entry.system_id)
        head = SYSTEM_DOCUMENTS.verify_next(state.head, Record(entry, None))
    except TgaError as error:
        raise error.at(stream=state.stream, sequence_number=state.head.sequence_number + 1) from None
    return replace(state, head=head)


def fold_next(state: SystemState, record: SystemRecord) -> SystemState:
    """The state after one more entry with its artifact, or the error of the first check that fails."""
    entry, document = record
    try:
        if document is None:
            raise ChecksumMismatch("the artifact is missing", expected=entry.artifact_digest, found="nothing")
        if entry.system_id != state.system_id:
            raise SchemaViolation("the entry is of another stream", expected=state.system_id, found=entry.system_id)
        head = SYSTEM_DOCUMENTS.verify_next(state.head, record)
        _verify_names(document)
    except TgaError as error:
        raise error.at(stream=state.stream, sequence_number=state.head.sequence_number + 1) from None
    return _after(replace(state, head=head), document)


def _verify_names(document: SystemDocument) -> None:
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


def _after(state: SystemState, document: SystemDocument) -> SystemState:
    match document:
        case ToolPin():
            key = (document.server_id, document.tool_name)
            return replace(state, pins={**state.pins, key: _pin_after(state.pins.get(key), document)})
        case SigningKey():
            known = KnownKey(b64decode(document.public_key), document.principal_id, document.change == "retired")
            return replace(state, keys={**state.keys, document.key_id: known})
        case PolicySet():
            return replace(state, policy_digest=document.policy_digest)
        case _:
            return state


def _pin_after(pin: Pin | None, document: ToolPin) -> Pin:
    if document.change == "quarantined" and pin is not None:
        return replace(pin, quarantined_digests=pin.quarantined_digests | {document.definition_digest})
    return Pin(document.definition_digest, document.recorded_at)


def plan_system(state: SystemState, documents: list[SystemDocument], *, executor_id: str, recorded_at: str) -> Plan:
    """One plan that appends these documents where the stream stands now; owned by nobody, before and after."""
    planned, head = [], state.head
    for document in documents:
        entry, head, _ = SYSTEM_DOCUMENTS.plan(
            head, document, identity=state.system_id, executor_id=executor_id, recorded_at=recorded_at
        )
        planned.append(entry)
    return Plan(stream=state.stream, executor_id=executor_id, owner_after=None, entries=planned)
