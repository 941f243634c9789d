"""A reader of the ledger that passes on all that another one reads; tests change a part of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from app.domain.ledger.stored import ClaimedKey, LedgerReader, Referred, StoredEntry


@dataclass
class PassedOn:
    reader: LedgerReader

    def count_streams(self) -> int:
        return self.reader.count_streams()

    def is_asked_for(self, stream: str) -> bool:
        return self.reader.is_asked_for(stream)

    async def leaf_index(self, stream: str, sequence_number: int) -> int | None:
        return await self.reader.leaf_index(stream, sequence_number)

    def entries_of(self, stream: str, *, up_to: int) -> AsyncIterator[StoredEntry]:
        return self.reader.entries_of(stream, up_to=up_to)

    async def referred(self, stream: str) -> Referred | None:
        return await self.reader.referred(stream)

    def claimed_keys(self) -> AsyncIterator[ClaimedKey]:
        return self.reader.claimed_keys()
