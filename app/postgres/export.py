"""What a bundle is made of, read from one snapshot in flat memory, in the order of the tree.

An export that is one tenant's (one trace's, one run's) shows nothing of other tenants but what its proofs need: of the
default tenant's system stream, where the gateways' own keys and the log's epochs are announced, the entries up to the
last of these, and of their artifacts these alone.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import asyncpg

from app.core.errors import ChecksumMismatch, RunNotFound, StoreUnfit, TgaError, TraceNotFound
from app.core.limits import (
    BUNDLE_PARTIAL_HEADS_MAX,
    EXPORT_COVER_POLL_MS,
    EXPORT_COVER_WAIT_MS,
    EXPORT_PAGE_ENTRIES,
)
from app.core.merkle import Frontier, Hash, Node, Range, fold_nodes, inclusion_ranges, nodes_of
from app.core.note import VerifierKey, read_note
from app.domain.identity import DEFAULT_TENANT
from app.domain.log.bundle import EntryLine, Filter, HeadLine
from app.domain.log.heads import SignedHead
from app.domain.runs.naming import named_streams
from app.domain.runs.transitions import RUN
from app.domain.system.documents import SYSTEM, SigningKey
from app.domain.tga.transitions import TRACE
from app.postgres.sessions import Connection, Sessions
from app.postgres.tree import KEPT_LEVEL, PostgresTree

_DEFAULT_SYSTEM: Final = SYSTEM.stream(DEFAULT_TENANT)  # has the gateways' own keys

_ROWS: Final = """
SELECT s.first_index + i AS leaf_index, coalesce(l.stream, s.stream, n.stream, '') AS stream,
       s.sequence_number + i AS sequence_number,
       e.entry, e.artifact
  FROM tga.leaf_spans s
 CROSS JOIN LATERAL generate_series(0, s.leaves - 1) AS i
  LEFT JOIN tga.heads l ON l.stream_no = s.stream_no
  LEFT JOIN tga.leaf_spans n ON n.stream_no = s.stream_no AND n.sequence_number = 1 AND l.stream IS NULL
  LEFT JOIN tga.records e ON e.stream_no = s.stream_no AND e.sequence_number = s.sequence_number + i
 WHERE s.first_index < $2 AND s.first_index + i >= $1 AND s.first_index + i < $2
   AND s.first_index >= coalesce((SELECT max(m.first_index) FROM tga.leaf_spans m WHERE m.first_index <= $1), 0)
   {filter}
 ORDER BY s.first_index, i
"""
# A stream is wanted whole, of whatever kind: by its birth, which says when it began, and its head, which says whose.
_WANTED: Final = """
   AND (l.stream = ANY ($3) OR l.stream = $7 AND s.sequence_number + i <= $8
        OR $4::text IS NULL AND $6::text[] IS NULL AND l.stream >= 'system:' AND l.stream < 'system;'
        OR NOT (l.stream >= 'system:' AND l.stream < 'system;') AND ($6::text[] IS NULL OR l.stream = ANY ($6))
           AND ($4::text IS NULL OR l.tenant = $4)
           AND ($5::text[] IS NULL OR EXISTS (
               SELECT FROM tga.links f
                WHERE f.stream_no = l.stream_no AND f.sequence_number = 1
                  AND f.recorded_at COLLATE "C" >= coalesce(($5::text[])[1], '')
                  AND (($5::text[])[2] IS NULL OR f.recorded_at COLLATE "C" < ($5::text[])[2]))))
"""
_AFTER_HEAD: Final = """
SELECT e.stream, e.sequence_number, e.entry, e.artifact
  FROM tga.records e
  LEFT JOIN tga.leaf_spans s ON s.stream_no = e.stream_no AND s.sequence_number = e.sequence_number - e.place + 1
 WHERE e.stream >= 'system:' AND e.stream < 'system;'
   AND (s.first_index IS NULL OR s.first_index + e.place - 1 >= $1) AND ($2::text[] IS NULL OR e.stream = ANY ($2))
 ORDER BY e.stream, e.sequence_number
"""
_HEADS: Final = "SELECT size, note FROM tga.tree_heads WHERE size <= $1 ORDER BY size"
# Evenly spread, the last one among them.
_SOME_HEADS: Final = """
SELECT size, note FROM (
    SELECT size, note, row_number() OVER (ORDER BY size DESC) - 1 AS place, count(*) OVER () AS heads
      FROM tga.tree_heads WHERE size <= $1) AS h
 WHERE place % greatest(1, (heads + $2 - 1) / $2) = 0 ORDER BY size
"""
_KEYS: Final = """
SELECT e.sequence_number, e.artifact, coalesce(s.first_index + e.place - 1 < $2, false) AS is_covered
  FROM tga.records e
  LEFT JOIN tga.leaf_spans s ON s.stream_no = e.stream_no AND s.sequence_number = e.sequence_number - e.place + 1
 WHERE e.stream_no = (SELECT h.stream_no FROM tga.heads h WHERE h.stream = $1)
   AND e.artifact_type IN ('signing_key', 'log_epoch') AND e.artifact IS NOT NULL
 ORDER BY e.sequence_number
"""
# Whose payloads are gone although no leaf below this size says so.
_ERASED_AFTER: Final = """
SELECT r.stream FROM tga.erasures r
 WHERE NOT EXISTS (
       SELECT FROM tga.heads h
         JOIN tga.links l ON l.stream_no = h.stream_no AND l.sequence_number = r.sequence_number
         JOIN tga.leaf_spans s ON s.stream_no = l.stream_no AND s.sequence_number = l.sequence_number - l.place + 1
        WHERE h.stream = r.system_stream AND s.first_index + l.place - 1 < {size})
"""
_ARE_ERASURES_COVERED: Final = f"""
SELECT NOT EXISTS ({_ERASED_AFTER.format(size="(SELECT max(t.size) FROM tga.tree_heads t)")}) AS are_covered
"""  # noqa: S608 - only our own words
# Of a run: its birth, and the intents. They name other streams.
_NAMING: Final = """
SELECT e.artifact FROM tga.records e
 WHERE e.stream_no = (SELECT h.stream_no FROM tga.heads h WHERE h.stream = $1)
   AND e.artifact_type IN ('run_start', 'run_intent') AND e.artifact IS NOT NULL
 ORDER BY e.sequence_number
"""
_TENANT: Final = "SELECT tenant FROM tga.heads WHERE stream = $1 AND sequence_number > 0"


class PostgresExport:
    """One export: the tree up to one signed head, as far as `wanted` goes. Everything is read in one snapshot.

    `wanted` names the tenant, too, when a trace or a run is asked for. `unexplained`: streams whose payloads are
    missing while no entry that the head covers says that they were erased.
    """

    def __init__(
        self,
        connection: Connection,
        wanted: Filter,
        signed: SignedHead,
        gateway_keys: frozenset[int],
        erased: set[str],
        streams: Sequence[str] | None = None,
    ) -> None:
        self._connection = connection
        self._proofs = None if wanted.is_everything else Proofs(PostgresTree(connection), signed.head.size)
        self._gateway_keys = gateway_keys  # where the default tenant's system stream has them
        self._erased_after_head = erased
        self._streams = streams  # those alone, and the system streams that they rest on
        self.wanted = wanted
        self.signed = signed
        self.unexplained: set[str] = set()

    @property
    def _systems(self) -> list[str] | None:
        """Whose system streams go along whole; None: all."""
        return None if self.wanted.tenant is None else [SYSTEM.stream(self.wanted.tenant)]

    @property
    def _shows_keys_alone(self) -> bool:
        """Whether of the default tenant's system stream nothing but the gateways' keys is shown."""
        return self.wanted.tenant not in (None, DEFAULT_TENANT)

    def note(self, line: EntryLine) -> None:
        """Look at a line of the bundle, also one that an export before this one has written."""
        if line.artifact is None and line.stream in self._erased_after_head:
            self.unexplained.add(line.stream)

    async def entries(self, *, from_index: int = 0) -> AsyncIterator[EntryLine]:
        """Every wanted leaf from `from_index` on; then the system entries that no leaf of this tree covers."""
        wanted, arguments = self.wanted, [from_index, self.signed.head.size]
        conditions: list[Any] = []
        if not wanted.is_everything:
            times = None if wanted.since is None and wanted.until is None else [wanted.since, wanted.until]
            shown_until = max(self._gateway_keys, default=0) if self._shows_keys_alone else 0
            conditions = [self._systems or [], wanted.tenant, times, self._streams, _DEFAULT_SYSTEM, shown_until]
        statement = _ROWS.format(filter=_WANTED if conditions else "")
        async for row in self._rows(statement, *arguments, *conditions):
            if row["entry"] is None:
                raise ChecksumMismatch(
                    "an entry of the tree is missing",
                    expected=f"leaf {row['leaf_index']}",
                    remedy="Nothing was exported as if it were whole: run `tga verify --all --head FILE`.",
                    stream=row["stream"],
                    sequence_number=row["sequence_number"],
                )
            proof = None if self._proofs is None else await self._proofs.of(row["leaf_index"])
            yield EntryLine(
                row["leaf_index"], row["stream"], row["sequence_number"], row["entry"], self._shown(row), proof
            )
        async for row in self._rows(_AFTER_HEAD, self.signed.head.size, self._systems):
            yield EntryLine(None, row["stream"], row["sequence_number"], row["entry"], row["artifact"])

    def _shown(self, row: asyncpg.Record) -> bytes | None:
        is_shared = self._shows_keys_alone and row["stream"] == _DEFAULT_SYSTEM
        return None if is_shared and row["sequence_number"] not in self._gateway_keys else row["artifact"]

    async def heads(self) -> AsyncIterator[HeadLine]:
        """All of them; for a partial bundle some, each with proof that it continues the one before."""
        size, last = self.signed.head.size, 0
        if self._proofs is None:
            async for row in self._rows(_HEADS, size):
                yield HeadLine(row["size"], row["note"])
            return
        tree = PostgresTree(self._connection)
        for row in await self._connection.fetch(_SOME_HEADS, size, BUNDLE_PARTIAL_HEADS_MAX):
            proof = None if last == 0 else await tree.consistency_proof(last, row["size"])
            last = row["size"]
            yield HeadLine(row["size"], row["note"], proof)

    async def log_keys(self) -> list[VerifierKey]:
        """The keys that were announced and have signed this head, for convenience."""
        _, signers = read_note(self.signed.note)
        found: list[VerifierKey] = []
        for row in await self._connection.fetch(_KEYS, _DEFAULT_SYSTEM, self.signed.head.size):
            key = _signing_key(row)
            verifier = key and VerifierKey(self.signed.head.origin, b64decode(key.public_key))
            if verifier and (verifier.name, verifier.key_id) in signers and verifier not in found:
                found.append(verifier)
        return found

    async def _rows(self, statement: str, *arguments: Any) -> AsyncIterator[asyncpg.Record]:
        async for row in self._connection.cursor(statement, *arguments, prefetch=EXPORT_PAGE_ENTRIES):
            yield row


class Proofs:
    """Inclusion proofs of many leaves of one tree, asked for in their order: what two of them share is read once."""

    def __init__(self, tree: PostgresTree, size: int) -> None:
        self._tree = tree
        self._size = size
        self._small: dict[int, dict[Node, Hash]] = {}  # by subtree of 256 leaves; the last one asked for, and the edge
        self._kept: dict[Node, Hash] = {}

    async def of(self, index: int) -> Sequence[Hash]:
        ranges = [nodes_of(one) for one in inclusion_ranges(index, self._size)]
        missing = {n for nodes in ranges for n in nodes if n.level >= KEPT_LEVEL and n not in self._kept}
        if missing:
            wanted = sorted(missing)
            spans = [Range(node.index << node.level, (node.index + 1) << node.level) for node in wanted]
            self._kept.update(zip(wanted, await self._tree.hashes_of(spans), strict=True))
        return [fold_nodes([await self._node(node) for node in nodes]) for nodes in ranges]

    async def _node(self, node: Node) -> Hash:
        if node.level >= KEPT_LEVEL:
            return self._kept[node]
        block = (node.index << node.level) >> KEPT_LEVEL
        if block not in self._small:
            last = (self._size - 1) >> KEPT_LEVEL
            self._small = {at: found for at, found in self._small.items() if at == last}
            self._small[block] = await self._subtree(block)
        return self._small[block][node]

    async def _subtree(self, block: int) -> dict[Node, Hash]:
        start = block << KEPT_LEVEL
        leaves = await self._tree.leaf_hashes(Range(start, min(start + (1 << KEPT_LEVEL), self._size)))
        frontier, found = Frontier(), {}
        for place, leaf in enumerate(leaves):
            found[Node(0, start + place)] = leaf
            for node, made in frontier.append(leaf):
                found[Node(node.level, node.index + (start >> node.level))] = made
        return found


@asynccontextmanager
async def open_export(sessions: Sessions, wanted: Filter, *, size: int | None = None) -> AsyncIterator[PostgresExport]:
    """An export up to the newest signed head, or to the one of this size."""
    async with sessions.reading() as connection:
        await connection.execute(
            "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_sort = off"
        )
        note = await connection.fetchval(
            "SELECT note FROM tga.tree_heads WHERE $1::bigint IS NULL OR size = $1 ORDER BY size DESC LIMIT 1", size
        )
        if note is None:
            raise StoreUnfit(
                "there is no signed tree head to export up to",
                expected=None if size is None else f"one of size {size}",
                remedy="Run `tga serve`: a head follows the first entry within a second.",
            )
        streams = await _asked_for(connection, wanted)
        if streams is not None:
            wanted = replace(wanted, tenant=await _tenant_of(connection, wanted.tenant, streams[0]))
        signed = SignedHead.from_note(note)
        keys = await connection.fetch(_KEYS, _DEFAULT_SYSTEM, signed.head.size)
        gateway_keys = frozenset(row["sequence_number"] for row in keys if row["is_covered"] and _is_everyones(row))
        erased = {row["stream"] for row in await connection.fetch(_ERASED_AFTER.format(size="$1"), signed.head.size)}
        yield PostgresExport(connection, wanted, signed, gateway_keys, erased, streams)


async def _tenant_of(connection: Connection, tenant: str | None, stream: str) -> str:
    row = await connection.fetchrow(_TENANT, stream)
    if row is None or tenant not in (None, row["tenant"]):
        raise (RunNotFound if RUN.has(stream) else TraceNotFound)("nothing is stored about it", stream=stream)
    return str(row["tenant"])


async def _asked_for(connection: Connection, wanted: Filter) -> list[str] | None:
    """The trace; or the run, and after it all that its verification rests on. None: neither is asked for."""
    if wanted.run_id is not None:
        return await _with_named(connection, RUN.stream(wanted.run_id))
    return None if wanted.trace_id is None else [TRACE.stream(wanted.trace_id)]


async def _with_named(connection: Connection, first: str) -> list[str]:
    """A run; the traces and children that its intents name, and the run that it was forked from; and so on for these.
    What an erased run named is gone with its payloads."""
    found = dict.fromkeys([first])
    ahead = [first]
    while ahead:
        async for row in connection.cursor(_NAMING, ahead.pop(), prefetch=EXPORT_PAGE_ENTRIES):
            for stream in named_streams(row["artifact"]):
                if stream not in found:
                    found[stream] = None
                    ahead += [stream] if RUN.has(stream) else []
    return list(found)


def _signing_key(row: asyncpg.Record) -> SigningKey | None:
    """What is wrong with it is for verification to say."""
    try:
        return SigningKey.from_bytes(row["artifact"])
    except TgaError:
        return None


def _is_everyones(row: asyncpg.Record) -> bool:
    """Whether every tenant's bundle shows it: a gateway's own key, or that the log began anew."""
    key = _signing_key(row)
    return b'"tga/v1/log_epoch"' in row["artifact"] if key is None else key.principal_id is None


async def wait_until_erasures_are_covered(sessions: Sessions, *, wait_ms: int = EXPORT_COVER_WAIT_MS) -> None:
    """Return when a signed head covers every erasure, or when that takes too long: who exports is then told.

    What was erased can be exported as erased only then: a verifier rests nothing on what is newer than the head.
    """
    deadline = time.monotonic() + wait_ms / 1000
    while True:
        (row,) = await sessions.fetch(_ARE_ERASURES_COVERED)
        if row["are_covered"] or time.monotonic() >= deadline:
            return
        await asyncio.sleep(EXPORT_COVER_POLL_MS / 1000)
