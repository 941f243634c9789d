"""Entries that can never get a leaf: what stands on the wrong side of the tree's cursor.

The sequencer gives leaves in the order of transaction numbers, and only to what follows its cursor. A superuser who
inserts an entry with a number from before the cursor (or with one that was never given) has an entry that is served
and answers repeats, but is in no tree and in no export. Nothing else can leave such a row: what has a number before the
cursor had ended when the cursor came by, and its leaf was committed together with the cursor.

After dump and restore the numbers of two clusters stand side by side. Until the sequencer has walked through the
restored ledger once, nobody can tell, so nothing is judged.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Final

from app.core.limits import EXPORT_PAGE_ENTRIES, LOG_LOOK_ROWS_MAX
from app.domain.log.forensics import STREAMS_NAMED_MAX, EntryWithoutLeaf
from app.postgres.sessions import Connection
from app.postgres.tree import Fetches

# tga.tree_place has no row while numbers cannot be compared. One statement, one snapshot: of the cursor, and of the
# leaves that were committed with it.
_WITHOUT_LEAF: Final = """
SELECT e.stream, e.sequence_number,
       (e.xid, e.stream, e.sequence_number) <= (p.xid, p.stream, p.sequence_number)
       OR e.xid >= p.next_xid AND p.is_cluster_known AS is_skipped
  FROM tga.entries e LEFT JOIN tga.tree_place p ON true
 WHERE ($1::text IS NULL OR e.stream = $1)
   AND NOT EXISTS (SELECT FROM tga.leaves l WHERE l.stream = e.stream AND l.sequence_number = e.sequence_number)
 ORDER BY e.stream, e.sequence_number
"""
# A scalar subquery for the leaf: a join, or EXISTS, might be planned as a scan of all leaves.
_LOOK: Final = """
WITH place AS MATERIALIZED (
    SELECT * FROM tga.tree_place
), looked AS MATERIALIZED (
    SELECT e.xid, e.stream, e.sequence_number FROM tga.entries e
     WHERE (e.xid, e.stream, e.sequence_number) > ($1::text::xid8, $2::text, $3::bigint)
       AND EXISTS (SELECT FROM place)
     ORDER BY e.xid, e.stream, e.sequence_number LIMIT $4
), skipped AS (
    SELECT DISTINCT e.stream FROM looked e, place p
     WHERE ((e.xid, e.stream, e.sequence_number) <= (p.xid, p.stream, p.sequence_number)
            OR e.xid >= p.next_xid AND p.is_cluster_known)
       AND (SELECT l.leaf_index FROM tga.leaves l
             WHERE l.stream = e.stream AND l.sequence_number = e.sequence_number) IS NULL
     ORDER BY e.stream LIMIT $5
)
SELECT EXISTS (SELECT FROM place) AS is_judged, (SELECT count(*) FROM looked) AS looked_at,
       ARRAY(SELECT s.stream FROM skipped s) AS streams, t.xid::text, t.stream, t.sequence_number
  FROM (SELECT) AS one
  LEFT JOIN (SELECT * FROM looked ORDER BY xid DESC, stream DESC, sequence_number DESC LIMIT 1) AS t ON true
"""
_ANYWHERE: Final = """
SELECT e.xid::text, e.stream, e.sequence_number
  FROM tga.leaves l JOIN tga.entries e ON e.stream = l.stream AND e.sequence_number = l.sequence_number
 WHERE l.leaf_index = $1
"""
_BEGINNING: Final = ("0", "", 0)


async def entries_without_leaf(connection: Connection, stream: str | None) -> AsyncIterator[EntryWithoutLeaf]:
    """Of one stream, or of all of them, in the order of streams."""
    async for row in connection.cursor(_WITHOUT_LEAF, stream, prefetch=EXPORT_PAGE_ENTRIES):
        yield EntryWithoutLeaf(row["stream"], row["sequence_number"], row["is_skipped"])


class UnloggedSearch:
    """Goes through all entries again and again, a few at a time, in the order of transaction numbers.

    Guarantees: after as many looks without a break as the ledger has entries, divided by LOG_LOOK_ROWS_MAX, plus one,
    every entry that stood at the first of them was looked at. It begins anywhere, each place as likely as any other, so
    that also gateways that never live that long look at all of it in time. A look is two index scans of that many rows,
    whatever the size of the ledger. It does not guarantee that anyone looks while no gateway sequences.
    """

    def __init__(self, *, rows_max: int = LOG_LOOK_ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._place: tuple[str, str, int] | None = None
        self._in_this_pass: list[str] = []
        self.passes = 0
        self.streams: list[str] = []  # a few of those that have such entries, by the last pass and this one

    async def look(self, source: Fetches, *, tree_size: int) -> None:
        if self._place is None:
            self._place = await _anywhere(source, tree_size)
        (row,) = await source.fetch(_LOOK, *self._place, self._rows_max, STREAMS_NAMED_MAX)
        if not row["is_judged"]:
            return
        self._in_this_pass = _few(self._in_this_pass, row["streams"])
        self.streams = _few(self._in_this_pass, self.streams)
        if row["looked_at"] == self._rows_max:
            self._place = (row["xid"], row["stream"], row["sequence_number"])
            return
        self._place, self.passes = _BEGINNING, self.passes + 1
        self.streams, self._in_this_pass = self._in_this_pass, []


def _few(some: list[str], more: list[str]) -> list[str]:
    return list(dict.fromkeys([*some, *more]))[:STREAMS_NAMED_MAX]


async def _anywhere(source: Fetches, tree_size: int) -> tuple[str, str, int]:
    rows = await source.fetch(_ANYWHERE, secrets.randbelow(tree_size)) if tree_size else []
    return (rows[0]["xid"], rows[0]["stream"], rows[0]["sequence_number"]) if rows else _BEGINNING
