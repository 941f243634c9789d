"""The log after its server died and a streaming replica of it was promoted: nothing lost, or refused."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import asyncpg
import pytest

from app.core.errors import LogForked
from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.embedded.binaries import find_binaries, reachable_binaries, run_as, unprivileged_account
from app.postgres.embedded.server import SHARED_STATE, EmbeddedPostgres
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import migrate
from app.postgres.sequencer import Sequencer
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from tests.conftest import Admin, make_home, system_binaries
from tests.invariants.plans import verify_all
from tests.log.auditor import published_notes, stored_leaves, verify_log
from tests.log.conftest import append, caught_up, plans, sequencing, until
from tests.patience import HANG_S

ENTRIES = "SELECT stream, count(*) AS entries FROM tga.entries GROUP BY stream"


class Node:
    """One server of a pair, in a home of its own."""

    def __init__(self, bin_dir: Path) -> None:
        self._bin_dir = bin_dir
        self._home = make_home()
        self._launcher = EmbeddedPostgres(self._home, bin_dir=bin_dir)
        self.database = Database(self._launcher.url(), self._launcher.url(GATEWAY_ROLE), is_embedded=True)

    def start(self) -> None:
        self._launcher.start()

    def stop(self) -> None:
        self._launcher.stop()

    def copy_from(self, primary: Node) -> None:
        """A base backup that follows the primary from where it was made."""
        account = unprivileged_account()
        programs, _ = reachable_binaries(self._bin_dir, account, copies=SHARED_STATE)
        cluster = self._home / "postgres"
        data = cluster / "data"
        for folder, mode in ((cluster, 0o711), (data, 0o700)):
            folder.mkdir()
            folder.chmod(mode)
        if account is not None:
            os.chown(data, account.uid, account.gid)
        source: list[str | Path] = ["-h", primary._launcher.socket_dir, "-p", "5432", "-U", "postgres"]
        options = ["--write-recovery-conf", "--checkpoint=fast", "--wal-method=stream", "--no-sync"]
        result = run_as(account, [programs / "pg_basebackup", *source, "-D", data, *options])
        assert result.returncode == 0, result.stdout.decode(errors="replace")

    def kill(self) -> None:
        """kill -9, and wait until no process of it is left: whatever it still had to say is said."""
        pid = self._launcher.postmaster_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self._launcher.stop()

    async def promote(self) -> None:
        async with self.admin() as admin:
            assert await admin.fetchval("SELECT pg_is_in_recovery()")
            assert await admin.fetchval("SELECT pg_promote(true, 20)")
            assert not await admin.fetchval("SELECT pg_is_in_recovery()")

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[Admin]:
        session = await asyncpg.connect(self.database.admin_url)
        try:
            yield session
        finally:
            await session.close()

    async def open(self) -> Sessions:
        return await Sessions.open(self.database.gateway_url, sessions_max=6)

    def remove(self) -> None:
        try:
            self._launcher.stop()
        finally:
            shutil.rmtree(self._home)


@pytest.fixture(params=["embedded", "system"])
def bin_dir(request: pytest.FixtureRequest) -> Path:
    found = find_binaries() if request.param == "embedded" else system_binaries()
    if found is None:
        pytest.skip("no PostgreSQL under /usr/lib/postgresql: apt-get install postgresql to test on it too")
    if not (found / "pg_basebackup").is_file():
        pytest.skip(f"no replica can be made of the {request.param} PostgreSQL: it comes without pg_basebackup")
    return found


@pytest.fixture
def primary(bin_dir: Path) -> Iterator[Node]:
    node = Node(bin_dir)
    try:
        node.start()
        asyncio.run(migrate(node.database.admin_url))
        yield node
    finally:
        node.remove()


@pytest.fixture
def standby(bin_dir: Path, primary: Node) -> Iterator[Node]:
    """A replica of the primary, made and not started."""
    node = Node(bin_dir)
    try:
        node.copy_from(primary)
        yield node
    finally:
        node.remove()


async def wait_streaming(primary: Node, sync_state: str) -> None:
    """Until the replica has everything there is, and is of this kind."""
    query = (
        "SELECT count(*) FROM pg_stat_replication"
        " WHERE state = 'streaming' AND sync_state = $1 AND replay_lsn >= pg_current_wal_flush_lsn()"
    )
    async with primary.admin() as admin, asyncio.timeout(HANG_S):
        while await admin.fetchval(query, sync_state) != 1:
            await asyncio.sleep(0.02)


async def replicate_synchronously(primary: Node, standby: Node) -> None:
    async with primary.admin() as admin:
        await admin.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    # Not by a reload, which reaches each process when it does: after a start there is no doubt.
    for step in (primary.stop, primary.start, standby.start):
        await asyncio.to_thread(step)
    await wait_streaming(primary, "sync")


async def cursor_of(node: Node) -> tuple[str, bool, str]:
    """The cluster's name as the sequencer knows it, whether it walks, and where its last walk ended ('0': never)."""
    async with node.admin() as admin:
        row = await admin.fetchrow("SELECT system_identifier, is_walking, resume_xid::text FROM tga.tree_cursor")
        assert row is not None
        return row["system_identifier"], row["is_walking"], row["resume_xid"]


async def append_until_refused(ledger: PostgresLedger, acknowledged: list[str]) -> None:
    """One trace after another, keeping the names of those that the server said are durable."""
    while True:
        batch = plans(2)
        answers = await ledger.commit_batch(batch)
        acknowledged += [plan.stream for plan, error in zip(batch, answers, strict=True) if error is None]
        if any(answers):
            return


async def work_until_killed(primary: Node, signer: LogSigner) -> tuple[list[str], list[str]]:
    """Kill the server in the midst of appending and signing. Which streams it acknowledged, which heads it showed."""
    acknowledged: list[str] = []
    seen: list[str] = []
    async with sequencing(primary.database, signer), await primary.open() as sessions, asyncio.TaskGroup() as writers:
        for _ in range(3):
            writers.create_task(append_until_refused(PostgresLedger(sessions), acknowledged))
        async with primary.admin() as admin, asyncio.timeout(HANG_S):
            while len(acknowledged) < 200 or len(seen) < 5:
                await asyncio.sleep(0.02)
                seen = await published_notes(admin)
        async with asyncio.timeout(HANG_S):
            await asyncio.to_thread(primary.kill)
    return acknowledged, seen


async def test_a_synchronous_replica_goes_on_where_the_dead_primary_was(
    primary: Node, standby: Node, signer: LogSigner
) -> None:
    await replicate_synchronously(primary, standby)
    cursor = await cursor_of(primary)
    acknowledged, seen = await work_until_killed(primary, signer)
    remembered = signer.load_remembered()
    assert remembered is not None

    await standby.promote()
    async with await standby.open() as sessions, standby.admin() as admin:
        counts = {row["stream"]: row["entries"] for row in await admin.fetch(ENTRIES)}
        assert {stream: counts.get(stream) for stream in acknowledged} == dict.fromkeys(acknowledged, 4)
        async with sequencing(standby.database, signer) as sequencer:
            assert await caught_up(sessions) == sum(counts.values())
            await append(PostgresLedger(sessions), 10)
            assert await caught_up(sessions) == sum(counts.values()) + 40
            assert sequencer.is_working
            assert sequencer.fault is None
        assert await cursor_of(standby) == cursor, "it is the same cluster: nothing has to be walked through"
        heads = await verify_log(admin, sessions, [signer.verifier_key], seen=[*seen, remembered.note])
        newest = signer.load_remembered()
        assert newest is not None
        assert newest.head == heads[-1]
        assert (await verify_all(sessions)).entries == sum(counts.values()) + 40


async def test_the_signer_refuses_a_replica_that_missed_what_was_signed(
    primary: Node, standby: Node, signer: LogSigner, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(standby.start)
    await wait_streaming(primary, "async")
    async with await primary.open() as sessions, sequencing(primary.database, signer):
        await append(PostgresLedger(sessions), 10)
        assert await caught_up(sessions) == 40
        await wait_streaming(primary, "async")
        await asyncio.to_thread(standby.stop)  # cut off
        await append(PostgresLedger(sessions), 10)
        assert await caught_up(sessions) == 80
        await asyncio.to_thread(primary.kill)
    remembered = signer.load_remembered()
    assert remembered is not None
    assert remembered.head.size == 80

    await asyncio.to_thread(standby.start)
    await standby.promote()
    async with await standby.open() as sessions, standby.admin() as admin:
        notes = await published_notes(admin)
        assert len(await stored_leaves(admin)) == 40
        await append(PostgresLedger(sessions), 40)  # more than was ever signed
        async with sequencing(standby.database, signer) as sequencer:
            await until(lambda: isinstance(sequencer.fault, LogForked))
            await asyncio.sleep(0.5)
            assert isinstance(sequencer.fault, LogForked)
            assert not sequencer.is_working
        assert "forked" in caplog.text
        assert await published_notes(admin) == notes
        assert len(await stored_leaves(admin)) == 40, "no place was given in a history that is not the signed one"
        assert signer.load_remembered() == remembered
        await verify_log(admin, sessions, [signer.verifier_key], seen=notes, is_whole=False)


async def crash(primary: Node) -> None:
    await asyncio.to_thread(primary.kill)
    await asyncio.to_thread(primary.start)


async def end_waits(primary: Node, function: str) -> None:
    """End what waits for the standby: each is then committed here, whatever its session is told."""
    query = f"SELECT {function}(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    async with primary.admin() as admin, asyncio.timeout(HANG_S):
        while not await admin.fetch(query):
            await asyncio.sleep(0.02)


async def cancel_waits(primary: Node) -> None:
    await end_waits(primary, "pg_cancel_backend")


async def terminate_waits(primary: Node) -> None:
    await end_waits(primary, "pg_terminate_backend")


BreakOff: TypeAlias = Callable[[Node], Awaitable[None]]


@asynccontextmanager
async def leaves_without_standby(
    primary: Node, standby: Node, signer: LogSigner, break_off: BreakOff
) -> AsyncIterator[Sequencer]:
    """A sequencer that sees 80 leaves of which the standby, which is away, has 40; so many are signed."""
    await replicate_synchronously(primary, standby)
    async with sequencing(primary.database, signer, stall_ms=200) as sequencer:
        async with await primary.open() as sessions, primary.admin() as admin:
            await append(PostgresLedger(sessions), 10)
            assert await caught_up(sessions) == 40
            older = admin.transaction()
            await older.start()
            await admin.execute("SELECT pg_current_xact_id()")  # what is appended now has to wait for it
            await append(PostgresLedger(sessions), 10)
            await asyncio.to_thread(standby.stop)
            await older.rollback()
            async with asyncio.timeout(HANG_S):
                while not await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"):
                    await asyncio.sleep(0.02)
            assert len(await stored_leaves(admin)) == 40
        await break_off(primary)
        async with primary.admin() as admin, asyncio.timeout(HANG_S):
            while len(await stored_leaves(admin)) != 80:
                await asyncio.sleep(0.02)
        yield sequencer


@pytest.mark.parametrize("break_off", [crash, cancel_waits, terminate_waits])
async def test_leaves_that_no_standby_has_are_not_signed_until_it_is_back(
    primary: Node, standby: Node, signer: LogSigner, break_off: BreakOff, caplog: pytest.LogCaptureFixture
) -> None:
    async with leaves_without_standby(primary, standby, signer, break_off) as sequencer:
        signed = signer.load_remembered()
        for _ in range(3):  # also a wait of the new leader term may be broken off
            await asyncio.sleep(0.5)
            assert signer.load_remembered() == signed
            assert not sequencer.is_working
            if break_off is not crash:
                await break_off(primary)
        await until(lambda: "nothing is signed: PostgreSQL does not confirm" in caplog.text)

        await asyncio.to_thread(standby.start)
        async with await primary.open() as sessions, primary.admin() as admin:
            assert await caught_up(sessions) == 80
            assert "the log goes on" in caplog.text
            said = caplog.text.count("nothing is signed")
            assert said == caplog.text.count("first commit is confirmed"), "it is said once for each time it waits"
            await verify_log(admin, sessions, [signer.verifier_key])


async def test_a_standby_that_was_away_at_the_crash_goes_on_when_it_is_promoted(
    primary: Node, standby: Node, signer: LogSigner
) -> None:
    """Nothing acknowledged is missing there, so nothing is refused."""
    async with leaves_without_standby(primary, standby, signer, crash):
        await asyncio.sleep(1.0)
        stopping = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - stopping < 3.0, "a wait does not keep the gateway from stopping"
    await asyncio.to_thread(primary.kill)

    await asyncio.to_thread(standby.start)
    await standby.promote()
    async with await standby.open() as sessions, standby.admin() as admin:
        assert len(await stored_leaves(admin)) == 40
        async with sequencing(standby.database, signer) as sequencer:
            assert await caught_up(sessions) == 80
            assert sequencer.fault is None
        await verify_log(admin, sessions, [signer.verifier_key])
