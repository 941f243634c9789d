"""Which blobs there are, on PostgreSQL. References come and go with entries, by the append function and by erasure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

from app.core.digest import Digest
from app.domain.runs.blobs import FoundBlob, TakenBlob
from app.postgres.sessions import Sessions

_REFERENCES: Final = """
SELECT r.stream_no, h.stream, r.sequence_number, r.sha256, b.size_bytes
  FROM tga.blob_refs r JOIN tga.heads h ON h.stream_no = r.stream_no
  LEFT JOIN tga.blobs b ON b.tenant = r.tenant AND b.sha256 = r.sha256
 WHERE (r.stream_no, r.sequence_number, r.sha256) > ($2::bigint, $3::bigint, $4::bytea)
   AND ($1::text IS NULL OR r.stream_no = (SELECT o.stream_no FROM tga.heads o WHERE o.stream = $1))
 ORDER BY r.stream_no, r.sequence_number, r.sha256 LIMIT $5
"""
_PAGE: Final = 1_000


async def load_references(sessions: Sessions, stream: str | None) -> AsyncIterator[tuple[str, int, str, int]]:
    """What entries and execution checkpoints refer to, as the store keeps it for collection: stream, entry, digest and
    size. A reference whose blob has no row is left out: its artifact says the size."""
    after: tuple[int, int, bytes] = (0, 0, b"")
    while rows := await sessions.fetch(_REFERENCES, stream, *after, _PAGE):
        for row in rows:
            if row["size_bytes"] is not None:
                yield row["stream"], row["sequence_number"], row["sha256"].hex(), row["size_bytes"]
        after = rows[-1]["stream_no"], rows[-1]["sequence_number"], rows[-1]["sha256"]


class PostgresBlobRows:
    """The BlobRows port."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def touch(self, tenant: str, sha256: Digest) -> FoundBlob | None:
        (row,) = await self._sessions.commit("SELECT * FROM tga.touch_blob($1, $2)", tenant, bytes.fromhex(sha256))
        return None if row["found_state"] is None else FoundBlob(row["found_state"], row["found_size_bytes"])

    async def begin(self, tenant: str, sha256: Digest, size_bytes: int) -> bool:
        return await self._is_done("SELECT tga.begin_blob($1, $2, $3)", tenant, bytes.fromhex(sha256), size_bytes)

    async def end(self, tenant: str, sha256: Digest) -> bool:
        return await self._is_done("SELECT tga.end_blob($1, $2)", tenant, bytes.fromhex(sha256))

    async def find(self, tenant: str, sha256: Digest) -> int | None:
        rows = await self._sessions.fetch(
            "SELECT size_bytes FROM tga.blobs WHERE tenant = $1 AND sha256 = $2 AND state IN ('stored', 'used')",
            tenant,
            bytes.fromhex(sha256),
        )
        return rows[0]["size_bytes"] if rows else None

    async def take_idle(self, *, idle_ms: int, retry_ms: int, at_most: int) -> Sequence[TakenBlob]:
        rows = await self._sessions.commit("SELECT * FROM tga.take_idle_blobs($1, $2, $3)", idle_ms, retry_ms, at_most)
        return [TakenBlob(row["tenant"], Digest(row["sha256"].hex()), row["taken_at"]) for row in rows]

    async def forget(self, taken: Sequence[TakenBlob]) -> None:
        await self._sessions.commit(
            "SELECT tga.forget_blobs($1::text[], $2::bytea[], $3::timestamptz[])",
            [blob.tenant for blob in taken],
            [bytes.fromhex(blob.sha256) for blob in taken],
            [blob.taken_at for blob in taken],
        )

    async def _is_done(self, statement: str, *arguments: object) -> bool:
        ((is_done,),) = await self._sessions.commit(statement, *arguments)
        return bool(is_done)
