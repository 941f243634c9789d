"""A trace that a superuser slips in behind the sequencer's cursor is found: by `tga verify`, and by the sequencer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.core.errors import EntryUnlogged
from app.domain.log.forensics import Unlogged, find_unlogged
from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sequencer import TreeSession
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree
from app.postgres.tree_reader import open_tree_reader
from app.postgres.unlogged import UnloggedSearch
from tests.attacker import disarm, insert_bulk
from tests.cli.test_commands import tga
from tests.conftest import Admin, Server
from tests.export.world import World
from tests.forensics.slipping import slip_in
from tests.forensics.test_tamper_drills import diagnose
from tests.log.conftest import append, caught_up, plans, sequencing, until
from tests.log.test_restored import Dump, burn_numbers, next_number, other_server
from tests.postgres.test_feed import append_slowly
from tests.traces import completed_trace

__all__ = ["other_server"]
SLIPPED = 990_001


async def skipped(sessions: Sessions) -> list[tuple[str | None, int | None]]:
    async with open_tree_reader(sessions) as tree:
        return [(error.stream, error.sequence_number) async for error in find_unlogged(tree, Unlogged())]


async def searched(sessions: Sessions, search: UnloggedSearch) -> list[str]:
    """What a whole pass finds, from its beginning."""
    size = await PostgresTree(sessions).size()
    until_pass = search.passes + 2
    while search.passes < until_pass:
        await search.look(sessions, tree_size=size)
    return search.streams


async def test_a_back_dated_trace_is_found_and_named(
    world: World, database: Database, sessions: Sessions, admin: Admin, tmp_path: Path
) -> None:
    await world.announce()
    await world.fill(1, 12)
    held = await world.sequence()
    (tmp_path / "head").write_text(held.note)
    (tmp_path / "log.pub").write_text(held.note and world.verifier_key.to_text())
    asked = ("verify", "--all", "--head", str(tmp_path / "head"), "--key", str(tmp_path / "log.pub"))
    before = tga(*asked, url=database.admin_url, TGA_HOME=str(tmp_path))
    assert before.returncode == 0, before.stdout
    await world.fill(20, 2)  # on their way: no finding
    stream = await slip_in(admin, completed_trace(SLIPPED), xid=1)

    told = tga(*asked, url=database.admin_url, TGA_HOME=str(tmp_path))
    assert told.returncode == 1
    assert f"{stream}  entry 1  ENTRY_UNLOGGED" in told.stdout
    assert "unlogged entry: 4 entries were put into the tables behind the sequencer's back" in told.stdout
    assert "find out who has the superuser's rights" in told.stdout
    told = tga(*asked, "--json", url=database.admin_url, TGA_HOME=str(tmp_path))
    document = json.loads(told.stdout)
    assert [(found["stream"], found["code"]) for found in document["findings"]] == [(stream, EntryUnlogged.code)]
    assert (document["tree"]["kind"], document["tree"]["streams"]) == ("unlogged_entry", [stream])
    assert document["tree"]["entries_without_leaf"] > 4
    alone = tga("verify", stream, url=database.admin_url, TGA_HOME=str(tmp_path))
    assert (alone.returncode, EntryUnlogged.code in alone.stdout) == (1, True)


async def test_a_cursor_on_a_number_that_was_never_given_here_says_nothing(
    world: World, sessions: Sessions, admin: Admin
) -> None:
    """Where a provider hides which cluster it is, a restored ledger looks like that until it is walked through."""
    await world.announce()
    await world.fill(1, 3)
    await admin.execute("UPDATE tga.tree_cursor SET xid = '900000000000', stream_no = 900000000000")
    assert await skipped(sessions) == []
    found = await diagnose(world, sessions)
    assert found.is_sound
    assert any("start a gateway, and verify again" in sentence for sentence in found.evidence)


@pytest.mark.parametrize("number", ["before the cursor", "the cursor's own", "never given"])
async def test_whatever_number_the_sequencer_never_comes_to_is_found(
    number: str, world: World, sessions: Sessions, admin: Admin
) -> None:
    await world.fill(1, 12)
    held = await world.sequence()
    cursor = int(await admin.fetchval("SELECT xid::text FROM tga.tree_cursor"))
    xid = {"before the cursor": cursor - 1, "the cursor's own": cursor, "never given": 2**40}[number]
    # With the cursor's own number it is the stream's number that puts it before the cursor.
    if number == "the cursor's own":
        await admin.execute("UPDATE tga.tree_cursor SET stream_no = 900000000000")
    assert await skipped(sessions) == []
    search = UnloggedSearch(rows_max=7)
    assert await searched(sessions, search) == []
    stream = await slip_in(admin, completed_trace(SLIPPED), xid=xid)
    assert await skipped(sessions) == [(stream, 1)]
    assert (await diagnose(world, sessions, held)).kind == "unlogged_entry"
    assert await searched(sessions, search) == [stream]
    await disarm(admin)
    await admin.execute("DELETE FROM tga.entries WHERE stream = $1", stream)
    assert await searched(sessions, search) == [], "what is gone is not told of for ever"


async def test_a_single_entry_among_thousands_is_found_wherever_the_search_begins(
    ledger: PostgresLedger, database: Database, sessions: Sessions, signer: LogSigner, admin: Admin
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    await append(ledger, 250)
    async with sequencing(database, signer):
        await caught_up(sessions)
    numbers = [int(row["xid"]) for row in await admin.fetch("SELECT DISTINCT xid::text FROM tga.entries")]
    streams = {await slip_in(admin, completed_trace(SLIPPED + n), xid=chance.choice(numbers) - 1) for n in range(3)}
    search = UnloggedSearch(rows_max=chance.choice((1, 13, 100)) if chance.random() < 0.5 else 64)
    assert set(await searched(sessions, search)) == streams
    assert {stream for stream, _ in await skipped(sessions)} == streams


async def test_the_sequencer_tells_in_readiness_and_once_in_its_log(
    database: Database,
    ledger: PostgresLedger,
    sessions: Sessions,
    signer: LogSigner,
    admin: Admin,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with sequencing(database, signer, look_every_ms=10) as sequencer:
        await append(ledger, 5)
        await caught_up(sessions)
        assert sequencer.condition.state == "ok"
        held = await PostgresTree(sessions).latest_head()
        assert held is not None
        stream = await slip_in(admin, completed_trace(SLIPPED), xid=1)
        await until(lambda: sequencer.condition.state == "unlogged")
        assert "tga verify --all" in str(sequencer.condition.reason)
        await append(ledger, 5)  # it sequences on
        await until(lambda: (signer.load_remembered() or held).head.size == 40)
        assert caplog.text.count(stream) == 1
        await disarm(admin)
        await admin.execute("DELETE FROM tga.entries WHERE stream = $1", stream)
        await until(lambda: sequencer.condition.state == "ok")
        assert "has a leaf again" in caplog.text


class Explaining:
    """Sessions that note how many pages each statement touches: that does not depend on how busy the machine is."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.pages: list[int] = []

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        rows = await self._sessions.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *arguments)
        plan = json.loads(rows[0][0])[0]["Plan"]
        self.pages.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
        return await self._sessions.fetch(statement, *arguments)


async def test_a_look_reads_a_bounded_part_of_a_large_ledger(
    database: Database, sessions: Sessions, signer: LogSigner, ledger: PostgresLedger, admin: Admin
) -> None:
    await append(ledger, 1)
    pages = []
    async with sequencing(database, signer):
        for start in (0, 4_000):
            await insert_bulk(admin, start + 1, start * 10 + 4000)
            size = await caught_up(sessions, within_s=60)
            for statistics in ("SELECT", "ANALYZE tga.links, tga.leaf_spans"):
                await admin.execute(statistics)
                search, explaining = UnloggedSearch(rows_max=100), Explaining(sessions)
                for _ in range(5):
                    await search.look(explaining, tree_size=size)
                pages.append(max(explaining.pages))
    print(f"{pages} pages a look of 100 entries")
    assert max(pages) < 500, pages  # three for each: its leaf, by key


async def leap_over(one: Server, other: Server) -> None:
    """So many transactions on one server that its counter is ahead of the other's."""
    await burn_numbers(
        one.root_url, max(0, await next_number(other.root_url) - await next_number(one.root_url)) + 1_000
    )


@pytest.mark.parametrize("ahead", ["the old cluster", "the new cluster", "neither"])
async def test_after_a_restore_into_a_new_cluster_nothing_false_is_said(
    ahead: str,
    server: Server,
    other_server: Server,
    world: World,
    ledger: PostgresLedger,
    tmp_path: Path,
) -> None:
    database = world.database
    if ahead == "the old cluster":
        await leap_over(server, other_server)
    await append(ledger, 10)
    held = await world.sequence()
    if ahead != "the old cluster":
        await leap_over(other_server, server)
    if ahead == "neither":  # the new cluster's counter stands between what was sequenced and what was not
        await leap_over(server, other_server)
    await append(ledger, 5)  # in no leaf yet when the dump is made
    restored = await Dump(server, database, tmp_path).restore(other_server)
    admin = await asyncpg.connect(restored.admin_url)
    slow = await asyncpg.connect(restored.admin_url)
    try:
        async with await Sessions.open(restored.gateway_url, sessions_max=4) as sessions:
            world.database, search = restored, UnloggedSearch(rows_max=5)

            async def is_quiet() -> bool:
                found = await diagnose(world, sessions, held)
                return found.is_sound and await skipped(sessions) == [] and search.streams == []

            assert await is_quiet(), "before any gateway has started"
            transaction = slow.transaction()
            await transaction.start()
            await append_slowly(slow, plans(1)[0])
            await append(PostgresLedger(sessions), 5)
            assert await is_quiet(), "and something was appended"
            if ahead != "neither":
                await leap_over(other_server, server)
            assert await is_quiet(), "and the counter has reached numbers of the former life"
            async with await TreeSession.open(restored.gateway_url) as tree:
                await tree.integrate(3)
            assert await is_quiet(), "and the sequencer has begun to walk"
            async with sequencing(restored, world.signer, look_every_ms=1) as sequencer:
                await until(lambda: sequencer.is_working)
                await append(PostgresLedger(sessions), 3)
                assert await is_quiet(), "while the sequencer walks, and a transaction is open"
                await transaction.commit()
                await caught_up(sessions)
                assert await searched(sessions, search) == []
                assert await is_quiet(), "after it has"
                assert sequencer.condition.state == "ok"
            stream = await slip_in(admin, completed_trace(SLIPPED), xid=1)
            assert await skipped(sessions) == [(stream, 1)]
            assert await searched(sessions, search) == [stream]
    finally:
        await slow.close()
        await admin.close()
