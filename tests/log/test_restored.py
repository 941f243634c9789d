"""The log after a dump was restored, here or into a new cluster; after an old backup; after the server crashed."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from app.core.errors import LogForked
from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.embedded.binaries import ENVIRONMENT, find_binaries
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.guards import find_problems
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import migrate
from app.postgres.sequencer import TreeSession
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from tests.conftest import Admin, Server, make_home, system_binaries
from tests.log.auditor import published_notes, stored_leaves, verify_log
from tests.log.conftest import append, caught_up, plans, sequencing, until
from tests.postgres.test_feed import append_slowly

_numbers = itertools.count(1)


def binaries_of(server: Server) -> Path:
    found = system_binaries() if server.name == "system" else find_binaries()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def other_server(server: Server) -> Iterator[Server]:
    """Another cluster of the same version, with the roles and nothing else."""
    if server.embedded is None:
        pytest.skip("a second server like this one cannot be started here")
    home = make_home()
    launcher = EmbeddedPostgres(home, bin_dir=binaries_of(server))
    launcher.start()
    try:
        asyncio.run(migrate(launcher.url()))
        yield Server(f"other {server.name}", launcher.url(), launcher)
    finally:
        launcher.stop()
        shutil.rmtree(home)


class Dump:
    """A database as pg_dump writes it down, to be restored anywhere."""

    def __init__(self, server: Server, database: Database, folder: Path) -> None:
        self._bin = binaries_of(server)
        self._file = folder / f"dump-{next(_numbers)}"
        self._run("pg_dump", "--format=custom", f"--file={self._file}", f"--dbname={database.admin_url}")

    async def restore(self, server: Server) -> Database:
        name = f"restored_{os.getpid()}_{next(_numbers)}"
        await server.execute_as_root(f"CREATE DATABASE {name}")
        database = server.database(name)
        await asyncio.to_thread(
            self._run, "pg_restore", "--exit-on-error", f"--dbname={database.admin_url}", str(self._file)
        )
        return database

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run([self._bin / program, *arguments], check=True, timeout=60, env=ENVIRONMENT, capture_output=True)


async def burn_numbers(url: str, count: int) -> None:
    """Let so many transactions come and go."""
    session = await asyncpg.connect(url)
    await session.execute(
        f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
    )
    await session.close()


async def next_number(url: str) -> int:
    session = await asyncpg.connect(url)
    try:
        return int(await session.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())::text"))
    finally:
        await session.close()


@pytest.mark.parametrize("ahead", ["the old cluster", "the new cluster"])
async def test_sequencing_goes_on_in_a_new_cluster(
    ahead: str,
    server: Server,
    other_server: Server,
    database: Database,
    ledger: PostgresLedger,
    sessions: Sessions,
    signer: LogSigner,
    admin: Admin,
    tmp_path: Path,
) -> None:
    gap = await next_number(other_server.root_url) - await next_number(server.root_url)
    lagging, leap = (database.admin_url, gap) if ahead == "the old cluster" else (other_server.root_url, -gap)
    await burn_numbers(lagging, max(leap, 0) + 2_000)
    await append(ledger, 20)
    async with sequencing(database, signer):
        await caught_up(sessions)
    await append(ledger, 5)  # in no leaf yet when the dump is made
    seen = await published_notes(admin)
    restored = await Dump(server, database, tmp_path).restore(other_server)
    assert await find_problems(restored.admin_url) == []

    new_admin = await asyncpg.connect(restored.admin_url)
    slow = await asyncpg.connect(restored.admin_url)
    try:
        async with await Sessions.open(restored.gateway_url, sessions_max=4) as new_sessions:
            new_ledger = PostgresLedger(new_sessions)
            transaction = slow.transaction()  # open before the first round, committed long after
            await transaction.start()
            await append_slowly(slow, plans(1)[0])
            await append(new_ledger, 5)  # committed before the first round, behind an open transaction
            async with sequencing(restored, signer) as sequencer:
                await until(lambda: sequencer.is_working)
                await asyncio.sleep(0.6)
                placed = len(await stored_leaves(new_admin))
                assert 80 < placed < 124, "what came with the dump waits for nobody"
                await append(new_ledger, 3)
                await transaction.commit()
                assert await caught_up(new_sessions) == 136
                await burn_numbers(restored.admin_url, 1_000)  # through numbers of the former life
                await append(new_ledger, 2)
                assert await caught_up(new_sessions) == 144
            await verify_log(new_admin, new_sessions, [signer.verifier_key], seen=seen)
    finally:
        await slow.close()
        await new_admin.close()


async def test_the_walk_after_a_restore_takes_many_batches_and_misses_nothing(
    server: Server,
    other_server: Server,
    database: Database,
    ledger: PostgresLedger,
    signer: LogSigner,
    sessions: Sessions,
    tmp_path: Path,
) -> None:
    await burn_numbers(database.admin_url, max(0, await next_number(other_server.root_url)) + 5_000)
    await append(ledger, 12)
    async with sequencing(database, signer):
        await caught_up(sessions)
    await append(ledger, 12)
    restored = await Dump(server, database, tmp_path).restore(other_server)
    async with await Sessions.open(restored.gateway_url, sessions_max=4) as new_sessions:
        new_ledger, tree = PostgresLedger(new_sessions), await TreeSession.open(restored.gateway_url)
        try:
            for _ in range(40):  # each batch a transaction of its own, something new between any two
                await tree.integrate(7)
                await append(new_ledger, 1)
        finally:
            await tree.close()
        async with sequencing(restored, signer):
            assert await caught_up(new_sessions) == (24 + 40) * 4
        new_admin = await asyncpg.connect(restored.admin_url)
        try:
            await verify_log(new_admin, new_sessions, [signer.verifier_key])
        finally:
            await new_admin.close()


async def test_what_came_with_a_dump_does_not_wait_for_the_counter_to_reach_its_numbers(
    server: Server,
    other_server: Server,
    database: Database,
    ledger: PostgresLedger,
    signer: LogSigner,
    sessions: Sessions,
    tmp_path: Path,
) -> None:
    """The new cluster's counter stands between what was sequenced and what was not: it alone tells of nothing."""
    await append(ledger, 2)
    async with sequencing(database, signer):
        await caught_up(sessions)
    gap = await next_number(server.root_url) - await next_number(other_server.root_url)
    await burn_numbers(other_server.root_url, max(gap, 0) + 1_000)
    gap = await next_number(other_server.root_url) - await next_number(server.root_url)
    await burn_numbers(database.admin_url, gap + 3_000)
    await append(ledger, 2)
    restored = await Dump(server, database, tmp_path).restore(other_server)
    async with await Sessions.open(restored.gateway_url, sessions_max=4) as new_sessions:
        async with sequencing(restored, signer):
            assert await caught_up(new_sessions) == 16
        new_admin = await asyncpg.connect(restored.admin_url)
        try:
            await verify_log(new_admin, new_sessions, [signer.verifier_key])
        finally:
            await new_admin.close()


async def test_a_counter_that_went_back_is_noticed_without_the_clusters_name(
    database: Database, ledger: PostgresLedger, sessions: Sessions, signer: LogSigner, admin: Admin
) -> None:
    """Where a provider hides the system identifier: the cursor stands on a number that was never given here."""
    await append(ledger, 3)
    await admin.execute("UPDATE tga.tree_cursor SET xid = '900000000000', stream_no = 900000000000")
    async with sequencing(database, signer):
        assert await caught_up(sessions) == 12
    await verify_log(admin, sessions, [signer.verifier_key])


async def test_the_signer_refuses_an_old_backup(
    server: Server,
    database: Database,
    ledger: PostgresLedger,
    sessions: Sessions,
    signer: LogSigner,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if server.embedded is None:
        pytest.skip("pg_dump of this server's version is not known")
    await append(ledger, 10)
    async with sequencing(database, signer):
        await caught_up(sessions)
    dump = Dump(server, database, tmp_path)
    await append(ledger, 10)
    async with sequencing(database, signer):
        await caught_up(sessions)
    remembered = signer.load_remembered()
    restored = await dump.restore(server)
    admin = await asyncpg.connect(restored.admin_url)
    try:
        async with await Sessions.open(restored.gateway_url, sessions_max=4) as old_sessions:
            notes = await published_notes(admin)
            await append(PostgresLedger(old_sessions), 40)  # more than was ever signed
            async with sequencing(restored, signer) as sequencer:
                await until(lambda: isinstance(sequencer.fault, LogForked))
                await asyncio.sleep(0.5)
                assert isinstance(sequencer.fault, LogForked)
                assert not sequencer.is_working
            assert await published_notes(admin) == notes
            assert len(await stored_leaves(admin)) == 40, (
                "and no place was given in a history that is not the signed one"
            )
            assert signer.load_remembered() == remembered
            assert "forked" in caplog.text
            # Somebody gives places all the same, more than were ever signed, and publishes nothing.
            tree = await TreeSession.open(restored.gateway_url)
            while (await tree.integrate(50)).has_more:
                pass
            await tree.close()
            async with sequencing(restored, signer) as sequencer:
                await until(lambda: isinstance(sequencer.fault, LogForked))
            assert await published_notes(admin) == notes, "what was signed elsewhere is no head of this tree"
            # A signer without that memory carries on, and makes the tree larger than it ever was: still a fork.
            stranger = LogSigner.open(tmp_path / "stranger", environment={})
            async with sequencing(restored, stranger):
                await caught_up(old_sessions)
            assert len(await stored_leaves(admin)) == 200
            async with sequencing(restored, signer) as sequencer:
                await until(lambda: isinstance(sequencer.fault, LogForked))
            assert signer.load_remembered() == remembered
    finally:
        await admin.close()


async def test_one_who_stands_by_remembers_what_another_signs(
    server: Server, database: Database, ledger: PostgresLedger, sessions: Sessions, signer: LogSigner, tmp_path: Path
) -> None:
    """Two hosts, two folders: whichever is left refuses an old backup."""
    if server.embedded is None:
        pytest.skip("pg_dump of this server's version is not known")
    shutil.copytree(tmp_path / "keys", tmp_path / "standby")
    standby = LogSigner.open(tmp_path / "standby", environment={})
    async with sequencing(database, signer) as first:
        await until(lambda: first.is_working)
        async with sequencing(database, standby) as second:
            await append(ledger, 3)
            await caught_up(sessions)
            dump = Dump(server, database, tmp_path)
            await append(ledger, 3)
            await caught_up(sessions)
            await until(lambda: standby.load_remembered() == signer.load_remembered())
            assert not second.is_working
    restored = await dump.restore(server)
    async with sequencing(restored, standby) as second:
        await until(lambda: isinstance(second.fault, LogForked))


async def test_the_server_crashes_and_comes_back(signer: LogSigner) -> None:
    home = make_home()
    launcher = EmbeddedPostgres(home)
    launcher.start()
    try:
        await migrate(launcher.url())
        database = Database(launcher.url(), launcher.url(GATEWAY_ROLE), is_embedded=True)
        async with sequencing(database, signer):
            for _ in range(2):
                async with await Sessions.open(database.gateway_url, sessions_max=4) as sessions:
                    await append(PostgresLedger(sessions), 70)
                    await asyncio.sleep(0.1)  # somewhere in a round
                    admin = await asyncpg.connect(database.admin_url)
                    seen = await published_notes(admin)
                    pid = launcher.postmaster_pid()
                    assert pid is not None
                    os.kill(pid, signal.SIGQUIT)  # at once, without writing anything more
                    with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
                        await admin.fetch("SELECT pg_sleep(30)")
                    admin.terminate()
                await asyncio.to_thread(launcher.start)
            async with await Sessions.open(database.gateway_url, sessions_max=4) as sessions:
                await append(PostgresLedger(sessions), 1)
                await caught_up(sessions)
        admin = await asyncpg.connect(database.admin_url)
        async with await Sessions.open(database.gateway_url, sessions_max=4) as sessions:
            await verify_log(admin, sessions, [signer.verifier_key], seen=seen)
        await admin.close()
    finally:
        launcher.stop()
        shutil.rmtree(home)
