"""The ports of reading: what is asked of streams of any kind, and of the ledger as a whole, by those who show it.

A stream is asked for by its name. What a kind lists of its own (a trace's tool, what waits for a person) stands with
that kind. Nothing is verified here: the caller that shows an entry compares its digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from app.core.chain import StreamKind
from app.core.limits import LIST_ITEMS_DEFAULT, PAGE_BYTES_MAX

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Visibility:
    """How far someone sees: a tenant's streams, or of these only one principal's."""

    tenant: str
    principal_id: str | None

    @property
    def name(self) -> str:
        return "tenant" if self.principal_id is None else "own"


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """`next` is the position to go on from; None when there is nothing more. A page may be empty and not the last."""

    items: list[T]
    next: str | None


@dataclass(frozen=True, slots=True)
class ShownEntry:
    """An entry and its artifact as stored; the artifact is None when its payload is gone."""

    stream: str
    sequence_number: int
    entry_digest: str
    entry: bytes
    artifact: bytes | None


@dataclass(frozen=True, slots=True)
class EntryPage:
    """Entries of one snapshot, and where the stream's head stood in it."""

    items: list[ShownEntry]
    head: int
    state: str
    is_open: bool

    @property
    def last(self) -> int | None:
        return self.items[-1].sequence_number if self.items else None


@dataclass(frozen=True, slots=True, order=True)
class FeedPosition:
    """So many entries of this transaction, and all of the transactions before it, are behind. It names no stream: what
    was looked at last may be somebody else's."""

    xid: int = 0
    taken: int = 0


@dataclass(frozen=True, slots=True)
class FeedItem:
    """An entry, and the position right after it."""

    stored: ShownEntry
    position: FeedPosition


@dataclass(frozen=True, slots=True)
class FeedPage:
    """`next` is where to go on: never lost, even when there was nothing to see. `next == after`: nothing more yet."""

    items: list[FeedItem]
    next: FeedPosition


@dataclass(frozen=True, slots=True)
class ListedStream:
    """What a stream's head says, without any payload. `subject` and `name`: what its kind's paths find in its birth."""

    identity: str
    state: str
    waiting: str | None
    subject: str | None
    name: str | None
    principal_id: str | None
    updated_at: str
    expires_at: str | None


class StreamQueries(Protocol):
    """Streams of any kind, by their names."""

    async def streams(
        self,
        kind: StreamKind,
        scope: Visibility,
        *,
        state: str | None = None,
        subject: str | None = None,
        name: str | None = None,
        principal_id: str | None = None,
        before: str | None = None,
        limit: int = LIST_ITEMS_DEFAULT,
    ) -> Page[ListedStream]:
        """Streams of one kind, those with the greatest ids first; `before` is the `next` of the page before."""
        ...

    async def is_visible(self, stream: str, scope: Visibility) -> bool:
        """Whether there is such a stream within the scope. Another tenant's costs exactly what a missing one costs."""
        ...

    async def entries(
        self, stream: str, *, after_seq: int, limit: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> EntryPage | None:
        """Entries after `after_seq`, at least one if there is one; None when there is no such stream."""
        ...

    async def sequence_numbers(self, streams: list[str]) -> dict[str, int]:
        """How far each of these streams has come; those that do not exist are left out."""
        ...


class Feed(Protocol):
    """Every entry of every stream, in the order of the ledger."""

    async def page(
        self, scope: Visibility, *, after: FeedPosition, limit: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> FeedPage:
        """What follows `after`, as far as the scope sees; without gap or repeat, whatever is written meanwhile."""
        ...

    async def latest(self) -> int:
        """A number that rises when something new is final; 0 when there is nothing yet."""
        ...
