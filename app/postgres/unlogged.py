"""Entries that can never get a leaf: what stands on the wrong side of the tree's cursor.

The sequencer gives leaves in the order of transaction numbers, and only to what follows its cursor. A superuser who
inserts an entry with a number from before the cursor (or with one that was never given) has an entry that is served
and answers repeats, but is in no tree and in no export. Nothing else can leave such a row: what has a number before the
cursor had ended when the cursor came by, and its leaf was committed together with the cursor.

After dump and restore the numbers of two clusters stand side by side. Until the sequencer has walked through the
restored ledger once, it cannot be told, so nothing is judged.
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
_IS_SKIPPED: Final = """
((l.xid, l.stream_no, l.sequence_number - l.place + 1) <= (p.xid, p.stream_no, p.sequence_number)
 OR l.xid >= p.next_xid AND p.is_cluster_known)
"""
# A scalar subquery for the leaf: a join, or EXISTS, might be planned as a scan of all leaves.
_HAS_NO_LEAF: Final = """
(SELECT s.first_index FROM tga.leaf_spans s
  WHERE s.stream_no = l.stream_no AND s.sequence_number = l.sequence_number - l.place + 1 AND s.leaves >= l.place)
 IS NULL
"""
_NAME: Final = "coalesce((SELECT h.stream FROM tga.heads h WHERE h.stream_no = l.stream_no), 'unknown:' || l.stream_no)"
_WITHOUT_LEAF: Final = f"""
SELECT {_NAME} AS stream, l.sequence_number, {_IS_SKIPPED} AS is_skipped
  FROM tga.links l LEFT JOIN tga.tree_place p ON true
 WHERE ($1::text IS NULL OR l.stream_no = (SELECT h.stream_no FROM tga.heads h WHERE h.stream = $1)) AND {_HAS_NO_LEAF}
 ORDER BY l.stream_no, l.sequence_number
"""  # noqa: S608 - parts of this file
# Along the primary key, which has every entry: the order of commits has one row a plan.
_LOOK: Final = f"""
WITH place AS MATERIALIZED (
    SELECT * FROM tga.tree_place
), looked AS MATERIALIZED (
    SELECT l.xid, l.stream_no, l.sequence_number, l.place FROM tga.links l
     WHERE (l.stream_no, l.sequence_number) > ($1::bigint, $2::bigint) AND EXISTS (SELECT FROM place)
     ORDER BY l.stream_no, l.sequence_number LIMIT $3
), skipped AS (
    SELECT DISTINCT {_NAME} AS stream FROM looked l, place p
     WHERE {_IS_SKIPPED} AND {_HAS_NO_LEAF}
     ORDER BY 1 LIMIT $4
)
SELECT EXISTS (SELECT FROM place) AS is_judged, (SELECT count(*) FROM looked) AS looked_at,
       ARRAY(SELECT s.stream FROM skipped s) AS streams, t.stream_no, t.sequence_number
  FROM (SELECT) AS one
  LEFT JOIN (SELECT * FROM looked ORDER BY stream_no DESC, sequence_number DESC LIMIT 1) AS t ON true
"""  # noqa: S608 - parts of this file
_ANYWHERE: Final = """
SELECT s.stream_no, s.sequence_number FROM tga.leaf_spans s
 WHERE s.first_index <= $1 ORDER BY s.first_index DESC LIMIT 1
"""
_BEGINNING: Final = (0, 0)


async def entries_without_leaf(connection: Connection, stream: str | None) -> AsyncIterator[EntryWithoutLeaf]:
    """Of one stream, or of all of them, in the order of streams."""
    async for row in connection.cursor(_WITHOUT_LEAF, stream, prefetch=EXPORT_PAGE_ENTRIES):
        yield EntryWithoutLeaf(row["stream"], row["sequence_number"], row["is_skipped"])


class UnloggedSearch:
    """Goes through all entries again and again, a few at a time, in the order of streams.

    Guarantees: after as many looks without a break as the ledger has entries, divided by LOG_LOOK_ROWS_MAX, plus one,
    every entry that stood at the first of them was looked at. It begins anywhere, each place as likely as any other, so
    that also gateways that never live that long look at all of it in time. A look is two index scans of that many rows,
    whatever the size of the ledger. It does not guarantee that anyone looks while no gateway sequences.
    """

    def __init__(self, *, rows_max: int = LOG_LOOK_ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._place: tuple[int, int] | None = None
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
            self._place = (row["stream_no"], row["sequence_number"])
            return
        self._place, self.passes = _BEGINNING, self.passes + 1
        self.streams, self._in_this_pass = self._in_this_pass, []


def _few(some: list[str], more: list[str]) -> list[str]:
    return list(dict.fromkeys([*some, *more]))[:STREAMS_NAMED_MAX]


async def _anywhere(source: Fetches, tree_size: int) -> tuple[int, int]:
    rows = await source.fetch(_ANYWHERE, secrets.randbelow(tree_size)) if tree_size else []
    return (rows[0]["stream_no"], rows[0]["sequence_number"]) if rows else _BEGINNING
