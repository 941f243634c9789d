"""Leaves by the batch: their hashes are those of the stored entries, places have no gaps, and a change is seen."""

from __future__ import annotations

import json
import random
from typing import Final

import asyncpg
import pytest

from app.core.errors import ChecksumMismatch, LogForked
from app.core.merkle import Range, leaf_hash
from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sequencer import LeaderTerm, TreeSession
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree
from bench.streams import TraceTemplate
from tests.attacker import attacking, insert_bulk
from tests.conftest import Admin
from tests.log.auditor import published_notes
from tests.log.conftest import append, caught_up, sequencing, until

_ENTRIES: Final = """
SELECT e.entry FROM tga.leaves l LEFT JOIN tga.entries e USING (stream_no, sequence_number) ORDER BY l.leaf_index
"""
_SPANS: Final = """
SELECT l.stream_no, l.sequence_number, l.places FROM tga.links l
 WHERE l.place = 1 AND NOT EXISTS (SELECT FROM tga.leaf_spans s WHERE s.stream_no = l.stream_no)
 ORDER BY l.xid, l.stream_no
"""
_ADD: Final = """
INSERT INTO tga.leaf_spans (first_index, stream_no, sequence_number, leaves)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::smallint[])
"""


async def give_places(sessions: Sessions, *, rows_max: int = 2_000) -> int:
    rows = await sessions.commit("SELECT * FROM tga.integrate($1)", rows_max)
    return int(rows[0]["leaves_added"])


async def test_hashes_of_leaves_are_those_of_the_entries_as_the_view_gives_them(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    """Of plans of four entries and of one, of entries that are stored as they are, and of kinds that nobody knows."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    await append(ledger, 40)
    for n in range(1, 21):
        for plan in TraceTemplate().plans(1_000_000 + n):
            await ledger.commit(plan)
    async with attacking(admin):
        await insert_bulk(admin, 1, 30)
        await admin.execute(
            "UPDATE tga.entries SET entry = entry || ' ' WHERE stream_no % 5 = 0 AND sequence_number = 2"
        )
    assert await give_places(sessions) == 40 * 4 + 20 * 4 + 30
    expected = [leaf_hash(row["entry"]) for row in await admin.fetch(_ENTRIES)]
    assert len(set(expected)) > 200

    tree = PostgresTree(sessions)
    assert await tree.leaf_hashes(Range(0, len(expected))) == expected
    for _ in range(20):  # of parts of plans, of ranges that lie in one another, of one twice
        bounds = [sorted(chance.choices(range(len(expected) + 1), k=2)) for _ in range(chance.randrange(1, 6))]
        spans = [Range(start, end) for start, end in bounds]
        spans += spans[:1]
        assert await tree.leaf_hashes(*spans) == [one for span in spans for one in expected[span.start : span.end]]


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ("DELETE FROM tga.links WHERE (stream_no, sequence_number) = ($1, 1)", 0),
        ("DELETE FROM tga.links WHERE (stream_no, sequence_number) = ($1, 3)", 2),
        ("DELETE FROM tga.links WHERE (stream_no, sequence_number) = ($1, 4)", 3),
        ("DELETE FROM tga.links WHERE stream_no = $1", 0),
        ("DELETE FROM tga.heads WHERE stream_no = $1", 0),
        ("UPDATE tga.heads SET stream = 'nothing:known' WHERE stream_no = $1", 0),
        ("DELETE FROM tga.leaf_spans WHERE stream_no = $1", 0),
        ("UPDATE tga.leaf_spans SET leaves = 2 WHERE stream_no = $1", 2),
    ],
)
async def test_a_leaf_whose_entry_is_not_there_is_named(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin, change: str, missing: int
) -> None:
    await append(ledger, 5)
    await give_places(sessions)
    spoiled = await admin.fetchrow("SELECT stream_no, first_index FROM tga.leaf_spans WHERE first_index = 8")
    assert spoiled is not None
    async with attacking(admin):
        await admin.execute(change, spoiled["stream_no"])
    tree = PostgresTree(sessions)
    for span in (Range(0, 20), Range(8, 12), Range(8 + missing, 9 + missing), Range(3, 9 + missing)):
        with pytest.raises(ChecksumMismatch) as found:
            await tree.leaf_hashes(span)
        assert f"level 0, index {8 + missing}" in str(found.value), span
    assert len(await tree.leaf_hashes(Range(0, 8), Range(12, 20))) == 16


@pytest.mark.parametrize("place", [0, 3], ids=["a leaf", "the last leaf"])
async def test_a_leaf_that_was_changed_is_seen_by_the_round_that_follows(
    database: Database, ledger: PostgresLedger, sessions: Sessions, signer: LogSigner, admin: Admin, place: int
) -> None:
    """The leaves that follow are at hand; those that were signed are read again."""
    await append(ledger, 90)  # beyond the first subtree that is kept
    async with sequencing(database, signer) as sequencer:
        assert await caught_up(sessions) == 360
        notes = await published_notes(admin)
        async with attacking(admin):
            await admin.execute(
                "UPDATE tga.entries e SET entry = entry || ' ' FROM tga.leaves l"
                " WHERE l.leaf_index = $1 AND (e.stream_no, e.sequence_number) = (l.stream_no, l.sequence_number)",
                356 + place,
            )
        assert sequencer.fault is None
        await append(ledger, 40)
        await until(lambda: isinstance(sequencer.fault, LogForked))
        assert await published_notes(admin) == notes, "and nothing more is signed"


async def test_a_round_proves_with_the_leaves_at_hand_what_is_proven_by_reading_them(
    database: Database, ledger: PostgresLedger, sessions: Sessions, signer: LogSigner
) -> None:
    session, tree = await TreeSession.open(database.gateway_url), PostgresTree(sessions)
    try:
        term = LeaderTerm(session, signer, stall_ms=5_000)
        await term.settle()
        size = 0
        for count in (1, 60, 2, 200, 1, 140):
            await append(ledger, count)
            await term.make_round()
            old, size = size, size + 4 * count
            latest = await tree.latest_head()
            assert latest is not None
            assert (latest.head.size, latest.head.root) == (size, await tree.root(size))
            added = await tree.leaf_hashes(Range(old, size))
            assert await tree.consistency_proof(old, size, added=added) == await tree.consistency_proof(old, size)
        with pytest.raises(ValueError, match="leaves were added"):
            await tree.consistency_proof(old, size, added=added[1:])
    finally:
        await session.close()


@pytest.mark.parametrize(
    ("wrong", "firsts", "leaves"),
    [
        ("a gap before them", (9, 13, 17), (4, 4, 4)),
        ("a gap among them", (8, 12, 17), (4, 4, 4)),
        ("two that overlap", (8, 11, 15), (4, 4, 4)),
        ("over what is there", (7, 11, 15), (4, 4, 4)),
        ("the last begins too early", (8, 12, 15), (4, 4, 4)),
        ("a plan without its end", (8, 12, 15), (4, 3, 4)),
        ("the last plan without its end", (8, 12, 16), (4, 4, 3)),
    ],
)
async def test_places_that_are_given_together_are_whole_plans_without_gaps(
    ledger: PostgresLedger,
    sessions: Sessions,
    admin: Admin,
    wrong: str,
    firsts: tuple[int, ...],
    leaves: tuple[int, ...],
) -> None:
    await append(ledger, 5)
    assert await give_places(sessions, rows_max=2) == 8
    rows = await admin.fetch(_SPANS)
    streams, numbers = [row["stream_no"] for row in rows], [row["sequence_number"] for row in rows]
    for given in ((firsts, leaves), (firsts[::-1], leaves[::-1])):
        with pytest.raises(asyncpg.CheckViolationError, match="without gaps"):
            await admin.execute(_ADD, list(given[0]), streams, numbers, list(given[1]))
    with pytest.raises(asyncpg.CheckViolationError, match="whole plans"):  # no plan begins there
        await admin.execute(_ADD, [8, 12, 16], streams, [1, 2, 1], [4, 4, 4])
    with pytest.raises(asyncpg.CheckViolationError, match="whole plans"):  # no such stream
        await admin.execute(_ADD, [8, 12, 16], [*streams[:2], 10**9], numbers, [4, 4, 4])
    await admin.execute(_ADD, [8, 12, 16], streams, numbers, [4, 4, 4])
    assert await give_places(sessions) == 0


async def test_a_plan_that_has_leaves_gets_no_others_wherever_the_cursor_stands(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    """As after a walk, which also gives leaves to what comes after the number that it goes on from."""
    for count in (7, 1, 12):
        await append(ledger, count)
        await give_places(sessions)
        await append(ledger, 5)
        await admin.execute("UPDATE tga.tree_cursor SET xid = '0', stream_no = 0, sequence_number = 0")
        steps = [await give_places(sessions, rows_max=6) for _ in range(12)]
        assert sum(steps) == 5 * 4
    entries = await admin.fetchval("SELECT count(*) FROM tga.entries")
    assert await PostgresTree(sessions).size() == entries == 35 * 4


async def test_a_leaf_costs_the_same_however_long_the_ledger_is_before_there_are_statistics(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    """The session's plan is made while there is nothing, and kept."""

    async def work(first: int, past: int) -> int:
        read = (
            "SELECT sum(seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_xact_user_tables"
            " WHERE relname IN ('links', 'heads', 'leaf_spans')"
        )
        async with admin.transaction():
            before = await admin.fetchval(read)
            explain = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM tga.leaf_hashes($1, $2)"
            top = json.loads(await admin.fetchval(explain, [first], [past]))[0]["Plan"]
            rows = await admin.fetchval(read) - before
        return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"] + rows)

    await work(0, 10)
    await insert_bulk(admin, 1, 500)
    await give_places(sessions)
    early = await work(0, 400)
    await insert_bulk(admin, 501, 8_000)
    await give_places(sessions, rows_max=10_000)
    late = await work(7_000, 7_400)
    assert early >= 3 * 400, "head, span and entry of each were read"
    assert late < 1.25 * early
