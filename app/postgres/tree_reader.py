"""The stored tree, leaf by leaf, from one snapshot and in flat memory: the TreeReader of PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from app.core.limits import EXPORT_PAGE_ENTRIES
from app.core.merkle import Hash, Node
from app.domain.log.forensics import EntryWithoutLeaf, StoredHead, StoredLeaf
from app.postgres.sessions import Connection, Sessions
from app.postgres.unlogged import entries_without_leaf

_LEAVES: Final = """
SELECT s.first_index + i AS leaf_index, coalesce(h.stream, s.stream, n.stream, '') AS stream,
       s.sequence_number + i AS sequence_number, e.entry
  FROM tga.leaf_spans s
 CROSS JOIN LATERAL generate_series(0, s.leaves - 1) AS i
  LEFT JOIN tga.heads h ON h.stream_no = s.stream_no
  LEFT JOIN tga.leaf_spans n ON n.stream_no = s.stream_no AND n.sequence_number = 1 AND h.stream IS NULL
  LEFT JOIN tga.entries e ON e.stream_no = s.stream_no AND e.sequence_number = s.sequence_number + i
 ORDER BY s.first_index, i
"""
# Few rows: one for 256 leaves. Sorted by the leaf that completes them.
_NODES: Final = """
SELECT level, node_index, hash FROM tga.tree_nodes ORDER BY (node_index + 1)::numeric * (2::numeric ^ level), level
"""
_HEADS: Final = "SELECT size, root, note FROM tga.tree_heads ORDER BY size"
_HAS_ENTRIES: Final = "SELECT EXISTS (SELECT FROM tga.entries WHERE stream = $1)"
_SETTINGS: Final = "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"


class PostgresTreeReader:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def leaves(self) -> AsyncIterator[Sequence[StoredLeaf]]:
        cursor = await self._connection.cursor(_LEAVES)
        while rows := await cursor.fetch(EXPORT_PAGE_ENTRIES):
            yield [StoredLeaf(*row) for row in rows]

    async def nodes(self) -> AsyncIterator[tuple[Node, Hash]]:
        async for row in self._connection.cursor(_NODES, prefetch=EXPORT_PAGE_ENTRIES):
            yield Node(row["level"], row["node_index"]), Hash(row["hash"])

    async def heads(self) -> AsyncIterator[StoredHead]:
        async for row in self._connection.cursor(_HEADS, prefetch=EXPORT_PAGE_ENTRIES):
            yield StoredHead(row["size"], Hash(row["root"]), row["note"])

    async def has_entries(self, stream: str) -> bool:
        return bool(await self._connection.fetchval(_HAS_ENTRIES, stream))

    def entries_without_leaf(self, stream: str | None = None) -> AsyncIterator[EntryWithoutLeaf]:
        return entries_without_leaf(self._connection, stream)


@asynccontextmanager
async def open_tree_reader(sessions: Sessions) -> AsyncIterator[PostgresTreeReader]:
    async with sessions.reading() as connection:
        await connection.execute(_SETTINGS)
        yield PostgresTreeReader(connection)
