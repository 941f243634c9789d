"""What is stored of a stream, row by row, for those who verify it: nothing here is believed because it stands there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from app.core.chain import Head
from app.core.digest import Digest
from app.domain.ledger.plans import Claim


class StoredEntry(NamedTuple):
    """One place of a stream, as stored. An artifact without an entry, or an entry without artifact, are possible.

    `leaf_index`: its place among all entries, where it was looked up; None: not looked up, or it has none yet.
    """

    sequence_number: int
    entry: bytes | None
    entry_digest: Digest | None
    artifact: bytes | None
    leaf_index: int | None = None


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    sequence_number: int
    state: bytes
    checkpoint_digest: Digest


@dataclass(frozen=True, slots=True)
class StoredErasure:
    """Where the system stream says that a stream's payloads were erased, and what stands there."""

    system_stream: str
    sequence_number: int
    erasure: bytes | None
    claim_salt: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoredSeal:
    """What is sealed beside a stream; the values go when it is finished."""

    salt: bytes
    values: bytes | None


class Summary(NamedTuple):
    """What a head says of its stream's birth, for lists and for expiry."""

    tenant: str | None
    principal_id: str | None
    server_id: str | None
    tool_name: str | None
    expires_at: str | None


@dataclass(slots=True)  # not frozen: there are many, and that costs three times as much
class StoredStream:
    """All that is stored about one stream beside its entries, which `entries` gives one after the other."""

    stream: str
    head: Head | None
    is_open: bool
    waiting: str | None
    checkpoints: Sequence[StoredCheckpoint]
    claim: Claim | None
    claim_effect: Digest | None
    dispatch_attempts: Sequence[int]
    entries: AsyncIterator[StoredEntry]
    erasure: StoredErasure | None = None
    summary: Summary | None = None
    sealed: StoredSeal | None = None
    rows_repeated: Sequence[str] = ()  # tables with more than one row where one stream has at most one
    misplaced_in: str | None = None  # the table that holds a copy of the head, for those who look for it, and differs
    scheduled_attempt: int | None = None  # of a run, as its row says by which it is scheduled
    # All of `entries`, where few of them are at hand, each with its artifact, and none is missing or repeated; they
    # come in `entries` too, whether or not these were looked at.
    rows: Sequence[StoredEntry] | None = None


class Referred(NamedTuple):
    """Where a stream stands that another one names: its last entry, and its first."""

    head: Head
    first: StoredEntry | None
    is_erased: bool


class ClaimedKey(NamedTuple):
    """Whose a key is, as stored."""

    server_id: str
    tool_name: str
    idempotency_key: str
    stream: str


class LedgerReader(Protocol):
    """Everything stored, stream by stream, from one snapshot."""

    def count_streams(self) -> int: ...

    def is_asked_for(self, stream: str) -> bool:
        """System streams are read along, for their keys, even when only one trace is asked for."""
        ...

    def streams(self) -> AsyncIterator[StoredStream]: ...

    async def leaf_index(self, stream: str, sequence_number: int) -> int | None:
        """The entry's place in the tree; None as long as it has none."""
        ...

    def entries_of(self, stream: str, *, up_to: int) -> AsyncIterator[StoredEntry]:
        """The entries of a stream up to this one, whether or not it is asked for."""
        ...

    async def referred(self, stream: str) -> Referred | None:
        """Where a stream stands by its entries; None when it has none."""
        ...

    def claimed_keys(self) -> AsyncIterator[ClaimedKey]:
        """In the order of keys; when only one stream is asked for, all claims of its key."""
        ...
