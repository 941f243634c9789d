"""The Merkle tree as PostgreSQL keeps it, for those who read it: heads, hashes, proofs.

Kept are the hashes of complete subtrees from 256 leaves on; what is smaller is hashed again from the entries. So a
proof costs some sixty rows by key and a few hundred entries, whatever the size of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

import asyncpg

from app.core.errors import ChecksumMismatch
from app.core.merkle import (
    Frontier,
    Hash,
    Node,
    Range,
    consistency_ranges,
    fold_nodes,
    inclusion_ranges,
    nodes_of,
)
from app.domain.log.heads import SignedHead

KEPT_LEVEL: Final = 8  # as in tga.tree_nodes

# Scalar subqueries throughout: a join might be planned as a scan of all entries.
_NODES: Final = """
SELECT (SELECT n.hash FROM tga.tree_nodes n WHERE n.level = u.level AND n.node_index = u.node_index) AS hash
  FROM unnest($1::smallint[], $2::bigint[]) WITH ORDINALITY AS u(level, node_index, place) ORDER BY u.place
"""
_LEAVES: Final = "SELECT range_no, first_index, hashes FROM tga.leaf_hashes($1, $2)"
_LEAVES_WITH_ENTRIES: Final = """
SELECT s.first_index + i AS leaf_index
  FROM tga.leaf_spans s
 CROSS JOIN LATERAL generate_series(0, s.leaves - 1) AS i
 WHERE s.first_index < $2 AND s.first_index + i >= $1 AND s.first_index + i < $2
   AND s.first_index >= coalesce((SELECT max(m.first_index) FROM tga.leaf_spans m WHERE m.first_index <= $1), 0)
   AND (SELECT e.entry FROM tga.entries e
         WHERE e.stream_no = s.stream_no AND e.sequence_number = s.sequence_number + i) IS NOT NULL
"""
_SIZE: Final = """
SELECT coalesce((SELECT s.first_index + s.leaves FROM tga.leaf_spans s ORDER BY s.first_index DESC LIMIT 1), 0) AS size
"""
_KEPT: Final = "SELECT coalesce(max(node_index) + 1, 0) AS count FROM tga.tree_nodes WHERE level = $1"
_LATEST: Final = "SELECT note FROM tga.tree_heads ORDER BY size DESC LIMIT 1"
_LAST_ENTRY: Final = """
SELECT max(l.sequence_number) AS sequence_number FROM tga.links l
 WHERE l.stream_no = (SELECT h.stream_no FROM tga.heads h WHERE h.stream = $1)
"""
_ENTRY: Final = "SELECT e.entry FROM tga.entries e WHERE e.stream = $1 AND e.sequence_number = $2"
_PLACE: Final = """
SELECT s.first_index + l.place - 1 AS leaf_index, t.note
  FROM tga.heads h
  JOIN tga.links l ON l.stream_no = h.stream_no
  JOIN tga.leaf_spans s ON s.stream_no = l.stream_no AND s.sequence_number = l.sequence_number - l.place + 1
 CROSS JOIN LATERAL (SELECT t.size, t.note FROM tga.tree_heads t ORDER BY t.size DESC LIMIT 1) AS t
 WHERE h.stream = $1 AND l.sequence_number = $2 AND s.first_index + l.place - 1 < t.size
"""


# Of the first entries of a stream, those that the newest signed head covers.
_LEAVES_OF: Final = """
SELECT l.sequence_number, s.first_index + l.place - 1 AS leaf_index
  FROM tga.heads h
  JOIN tga.links l ON l.stream_no = h.stream_no
  JOIN tga.leaf_spans s ON s.stream_no = l.stream_no AND s.sequence_number = l.sequence_number - l.place + 1
 WHERE h.stream = $1 AND l.sequence_number BETWEEN 1 AND $2
   AND s.first_index + l.place - 1 < (SELECT t.size FROM tga.tree_heads t ORDER BY t.size DESC LIMIT 1)
"""


class Fetches(Protocol):
    """Sessions, or one session."""

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry stands, and the newest signed head, which covers it."""

    index: int
    signed: SignedHead


class PostgresTree:
    """Reads the tree. Leaves, nodes and heads are never changed, so no snapshot holds its statements together.

    Nothing read here is believed because it stands there: proofs verify against a signed head, or they do not.
    """

    def __init__(self, source: Fetches) -> None:
        self._source = source

    async def size(self) -> int:
        """Leaves so far; not all of them need be under a head."""
        return int((await self._source.fetch(_SIZE))[0]["size"])

    async def latest_head(self) -> SignedHead | None:
        rows = await self._source.fetch(_LATEST)
        return SignedHead.from_note(rows[0]["note"]) if rows else None

    async def last_sequence_number(self, stream: str) -> int | None:
        found = (await self._source.fetch(_LAST_ENTRY, stream))[0]["sequence_number"]
        return None if found is None else int(found)

    async def place_of(self, stream: str, sequence_number: int) -> Place | None:
        """None as long as no signed head covers the entry."""
        rows = await self._source.fetch(_PLACE, stream, sequence_number)
        return Place(rows[0]["leaf_index"], SignedHead.from_note(rows[0]["note"])) if rows else None

    async def leaves_of(self, stream: str, *, entries_max: int) -> dict[int, int]:
        """By sequence number the leaf of each of the first entries that the newest signed head covers."""
        rows = await self._source.fetch(_LEAVES_OF, stream, entries_max)
        return {row["sequence_number"]: row["leaf_index"] for row in rows}

    async def entry_bytes(self, stream: str, sequence_number: int) -> bytes:
        """The entry as it is stored, and as it is hashed into its leaf; ChecksumMismatch when it is gone."""
        rows = await self._source.fetch(_ENTRY, stream, sequence_number)
        if not rows:
            raise ChecksumMismatch("the entry is missing", stream=stream, sequence_number=sequence_number)
        return bytes(rows[0]["entry"])

    async def inclusion_proof(self, index: int, size: int) -> list[Hash]:
        """ProofInvalid when there is no such leaf in a tree of this size; the size must be one that was reached."""
        return await self.hashes_of(inclusion_ranges(index, size))

    async def consistency_proof(self, old: int, new: int, *, added: Sequence[Hash] = ()) -> list[Hash]:
        """ProofInvalid when old is beyond new; both must be sizes that were reached.

        `added`: the leaves from old to new, for who has just read them. The leaves of the old tree that the proof needs
        are always read: that is how a change of one of them is seen.
        """
        if added and len(added) != new - old:
            raise ValueError(f"{new - old} leaves were added, not {len(added)}")
        return await self._hashes_of(consistency_ranges(old, new), old, added)

    async def root(self, size: int) -> Hash:
        return (await self.hashes_of([Range(0, size)]))[0]

    async def hashes_of(self, ranges: Sequence[Range]) -> list[Hash]:
        """The root of each subtree."""
        return await self._hashes_of(ranges, 0, ())

    async def _hashes_of(self, ranges: Sequence[Range], start: int, at_hand: Sequence[Hash]) -> list[Hash]:
        """As `hashes_of`, with the hashes of leaves from `start` on."""
        parts = [nodes_of(one) for one in ranges]
        found = await self._nodes({node for nodes in parts for node in nodes}, start, at_hand)
        return [fold_nodes([found[node] for node in nodes]) for nodes in parts]

    async def load_frontier(self) -> Frontier:
        """The right edge of as much of the tree as is kept in whole subtrees."""
        size = int((await self._source.fetch(_KEPT, KEPT_LEVEL))[0]["count"]) << KEPT_LEVEL
        nodes = nodes_of(Range(0, size))
        found = await self._nodes(nodes)
        return Frontier(size, [found[node] for node in nodes])

    async def leaf_hashes(self, *spans: Range) -> list[Hash]:
        """Of the leaves in these spans, one after the other; ChecksumMismatch where a leaf or its entry is missing."""
        if not spans:
            return []
        rows = await self._source.fetch(_LEAVES, [span.start for span in spans], [span.end for span in spans])
        found = {(row["range_no"], row["first_index"]): row["hashes"] for row in rows}
        leaves: list[Hash] = []
        for number, span in enumerate(spans, 1):
            at = span.start
            while at < span.end:
                hashes = found.get((number, at))
                if not hashes or None in hashes:
                    raise await self._missing_of(span)
                leaves += hashes
                at += len(hashes)
        return leaves

    async def _missing_of(self, span: Range) -> ChecksumMismatch:
        """Which leaf of a span it is that is not there."""
        rows = await self._source.fetch(_LEAVES_WITH_ENTRIES, span.start, span.end)
        there = {row["leaf_index"] for row in rows}
        return _missing(Node(0, next((i for i in range(span.start, span.end) if i not in there), span.start)))

    async def _nodes(self, nodes: Iterable[Node], start: int = 0, at_hand: Sequence[Hash] = ()) -> dict[Node, Hash]:
        """Where the leaves from `start` on are at hand, no leaf of theirs is read."""
        wanted = sorted(nodes)
        kept = [node for node in wanted if node.level >= KEPT_LEVEL]
        small = {node: node.leaves for node in wanted if node.level < KEPT_LEVEL}
        found: dict[Node, Hash] = {}
        if kept:
            rows = await self._source.fetch(_NODES, [node.level for node in kept], [node.index for node in kept])
            found = {node: _present(row["hash"], node) for node, row in zip(kept, rows, strict=True)}
        past = start + len(at_hand)
        to_read = [span for span in small.values() if not start <= span.start < span.end <= past]
        read = iter(await self.leaf_hashes(*to_read))
        for node, span in small.items():
            if start <= span.start < span.end <= past:
                leaves = at_hand[span.start - start : span.end - start]
            else:
                leaves = list(islice(read, span.end - span.start))
            subtree = Frontier()
            subtree.extend(leaves)
            found[node] = subtree.root()
        return found


def _present(found: bytes | None, node: Node) -> Hash:
    if found is None:
        raise _missing(node)
    return Hash(found)


def _missing(node: Node) -> ChecksumMismatch:
    what = "a leaf, or its entry," if node.level == 0 else "a hash of the tree"
    return ChecksumMismatch(
        f"{what} is missing",
        expected=f"level {node.level}, index {node.index}",
        remedy="The log was tampered with, or damaged: run `tga verify --all`.",
    )
