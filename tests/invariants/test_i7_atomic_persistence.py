"""I7: a plan is stored whole or not at all, and what was acknowledged stays.

A backend is stopped exactly between two statements of tga.append by a trigger that this test installs and that waits
for a lock which the test holds; then it is killed. Every fault comes as a pair: and not persisted, but persisted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import asyncpg
import pytest

from app.core.digest import digest_of_bytes
from app.core.errors import OutcomeUnknown, StoreUnavailable, TgaError
from app.domain.ledger.plans import BlobUse, OpenAsk, Plan, ScheduleRow, Sealed
from app.domain.tga.documents import TraceId
from app.domain.tga.transitions import TRACE
from app.postgres.database import Database
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import migrate
from app.postgres.ownership import Executor, acquire_stream, release_stream
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from app.postgres.state_store import PostgresStateStore
from tests.conftest import TEMPLATE, copy_template
from tests.invariants.plans import Admin, contents, plan_of, tables_naming, verify_all
from tests.patience import HANG_S
from tests.runtime.relay import Between
from tests.traces import EXECUTOR, completed_trace, executing_trace, pending_trace, time_at, trace_id

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds a server's processes in /proc")

GATE_KEY = 20_261_116
BLOB = digest_of_bytes(b"large")
_numbers = itertools.count(1)
Timing = Literal["BEFORE", "AFTER", "AT COMMIT"]
Cut = Literal["before the request", "after the commit"]


# What is appended, and the statements that append it


@dataclass(frozen=True)
class Step:
    """A plan, what must be there before it, the tables it is written to in order, and the rows it leaves in each."""

    name: str
    before: Callable[[int], list[Plan]]
    plan: Callable[[int], Plan]
    statements: tuple[str, ...]
    rows: dict[str, int]

    def cuts(self) -> list[tuple[str, Timing]]:
        around: list[tuple[str, Timing]] = []
        for table in self.statements:
            around += [(table, "BEFORE"), (table, "AFTER")]
        written = [table for table in self.statements if self.rows.get(table)]
        return [*around, (written[-1], "AT COMMIT")]


def birth(n: int) -> Plan:
    return plan_of(executing_trace(n), owner_after=EXECUTOR, with_checkpoint=True)


def effect(n: int) -> Plan:
    return plan_of(completed_trace(n)[3:])


def wait(n: int) -> Plan:
    """A request that waits for a person, with its secrets, and a webhook to be told."""
    born = plan_of(pending_trace(n, arguments={"card": {"$redacted": {"commitment": "ab" * 32}}}))
    return born._replace(waiting_after="supervisor", sealed=Sealed(b"salt", b"values"), announce_to=["people"])


def attempt(n: int) -> Plan:
    return Plan(TRACE.stream(trace_id(n)), EXECUTOR, EXECUTOR, dispatch_attempt=2, waiting_after="operator")


def large(n: int) -> Plan:
    """An entry that refers to a blob, of a stream that stands in a schedule."""
    born = plan_of(pending_trace(n))
    asks = [OpenAsk("1", 1, None, time_at(1), 0)]
    schedule = ScheduleRow("onboard", "1.0.0@ab", time_at(1), due_at=time_at(2), asks=asks)
    return born._replace(blobs=[BlobUse(1, BLOB, 5)], schedule=schedule)


async def put_blob(admin: Admin) -> None:
    await admin.execute(
        "INSERT INTO tga.blobs (tenant, sha256, size_bytes, state) VALUES ('default', $1, 5, 'stored')",
        bytes.fromhex(BLOB),
    )


# Artifacts stand in one row a plan; the claim and its effect in the row of the head.
_BORN = {"links": 3, "payloads": 1, "heads": 1, "in_work": 1, "execution_checkpoints": 1}
STEPS = (
    Step(
        "birth",
        lambda n: [],
        birth,
        ("heads", "links", "payloads", "in_work", "execution_checkpoints"),
        _BORN,
    ),
    Step(
        "effect",
        lambda n: [birth(n)],
        effect,
        ("links", "payloads", "heads"),
        {**_BORN, "links": 4, "payloads": 2},
    ),
    Step(
        "wait",
        lambda n: [],
        wait,
        ("heads", "links", "payloads", "at_rest", "sealed", "outbox"),
        {"links": 1, "payloads": 1, "heads": 1, "at_rest": 1, "sealed": 1, "outbox": 1},
    ),
    Step(
        "attempt",
        lambda n: [birth(n)],
        attempt,
        ("heads", "at_rest", "dispatch_attempts"),
        {**{table: rows for table, rows in _BORN.items() if table != "in_work"}, "at_rest": 1, "dispatch_attempts": 1},
    ),
    Step(
        "large",
        lambda n: [],
        large,
        ("heads", "links", "payloads", "in_work", "blobs", "blob_refs", "runs", "run_requests"),
        {"links": 1, "payloads": 1, "heads": 1, "in_work": 1, "blob_refs": 1, "runs": 1, "run_requests": 1},
    ),
)
CUTS = [(n, step, *cut) for n, (step, cut) in enumerate((step, cut) for step in STEPS for cut in step.cuts())]


# Servers and sessions


@pytest.fixture(scope="module")
def own_server() -> Iterator[EmbeddedPostgres]:
    """A server to be killed, which nobody else uses.

    Without fsync, because these tests kill processes and not machines: what was written is in the kernel's hands.
    Recovery then does not first sync every file, which takes seconds on a slow disk.
    """
    place = Path(tempfile.mkdtemp(prefix="tga-test-"))
    place.chmod(0o711)  # as root the server runs as another account, which must be able to enter
    server = EmbeddedPostgres(place / "home")
    server.start()
    try:
        asyncio.run(_prepare(server))
        yield server
    finally:
        server.stop()
        shutil.rmtree(place)


async def _prepare(server: EmbeddedPostgres) -> None:
    root = await asyncpg.connect(server.url())
    await root.execute("ALTER SYSTEM SET fsync = off")
    await root.execute("SELECT pg_reload_conf()")
    await root.execute(f"CREATE DATABASE {TEMPLATE}")
    await root.close()
    await migrate(server.url("postgres", TEMPLATE))


@pytest.fixture
async def own_database(own_server: EmbeddedPostgres) -> Database:
    name = f"tga_test_{next(_numbers)}"
    root = await asyncpg.connect(own_server.url())
    await copy_template(root, name)
    await root.close()
    return Database(own_server.url("postgres", name), own_server.url(GATEWAY_ROLE, name), is_embedded=True)


async def connect_again(url: str, *, timeout_s: float = HANG_S) -> Admin:
    """A session as soon as the server gives one: after a crash it first recovers."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await asyncpg.connect(url)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await asyncio.sleep(0.02)


@asynccontextmanager
async def gate(admin: Admin, table: str, timing: Timing) -> AsyncIterator[None]:
    """Whoever writes to the table waits, before or after the statement, or when all that is left is the commit."""
    await admin.execute(f"""
        CREATE OR REPLACE FUNCTION public.wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_catalog.pg_advisory_xact_lock({GATE_KEY}); RETURN NULL; END'
    """)
    if timing == "AT COMMIT":
        await admin.execute(f"""
            CREATE CONSTRAINT TRIGGER gate AFTER INSERT OR UPDATE ON tga.{table} DEFERRABLE INITIALLY DEFERRED
               FOR EACH ROW EXECUTE FUNCTION public.wait_at_gate()""")
    else:
        await admin.execute(f"""
            CREATE TRIGGER gate {timing} INSERT OR UPDATE ON tga.{table}
               FOR EACH STATEMENT EXECUTE FUNCTION public.wait_at_gate()""")
    await admin.execute("SELECT pg_advisory_lock($1)", GATE_KEY)
    yield


async def open_gate(admin: Admin, table: str) -> None:
    await admin.execute(f"DROP TRIGGER gate ON tga.{table}")
    await admin.execute("SELECT pg_advisory_unlock_all()")


async def pid_at_gate(admin: Admin, commit: asyncio.Task[None]) -> int:
    async with asyncio.timeout(HANG_S):
        while True:
            assert not commit.done(), f"the append never came to the gate: {commit!r}"
            pid: int | None = await admin.fetchval(
                "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = $1"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
                GATE_KEY,
            )
            if pid is not None:
                return pid
            await asyncio.sleep(0.002)


async def test_every_statement_of_the_append_is_cut_around(admin: Admin) -> None:
    """A new INSERT in tga.append must get its cut in STEPS. Entries are written in two places: usual ones in the
    statement that judges them, as in `effect`, others after the loop, as in `birth`."""
    source = await admin.fetchval(
        "SELECT string_agg(prosrc, ' ') FROM pg_proc WHERE pronamespace = 'tga'::regnamespace"
        " AND proname IN ('append', 'refer_to_blobs', 'write_run_rows')"
    )
    inserts = re.findall(r"\b(?:INSERT INTO|UPDATE|DELETE FROM)\s+(\w+)\s*(?:\(|AS|b SET)", source)
    assert set(inserts) == {table for step in STEPS for table in step.statements}
    twice = [table for table in set(inserts) if inserts.count(table) > 1]
    assert sorted(twice) == ["links", "payloads"]
    assert len(inserts) == len(set(inserts)) + len(twice)


# Killed between two statements


async def test_a_backend_terminated_between_any_two_statements_and_not_persisted(
    admin: Admin, sessions: Sessions, ledger: PostgresLedger
) -> None:
    await put_blob(admin)
    for n, step, table, timing in CUTS:
        for plan in step.before(n):
            await ledger.commit(plan)
        before = await contents(admin)
        async with gate(admin, table, timing):
            commit = asyncio.create_task(ledger.commit(step.plan(n)))
            pid = await pid_at_gate(admin, commit)
            assert await contents(admin) == before, "something is visible before the commit"
            assert await admin.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
            with pytest.raises(OutcomeUnknown) as lost:
                await commit
            assert lost.value.stream == step.plan(n).stream
        await open_gate(admin, table)
        assert await contents(admin) == before, f"a part of the plan is left, cut {timing} {table}"
        await verify_all(sessions)
        await ledger.commit(step.plan(n))
        assert await tables_naming(admin, step.plan(n).stream) == step.rows
    await verify_all(sessions)


@needs_proc
async def test_a_backend_killed_with_kill_9_between_any_two_statements_and_not_persisted(
    own_database: Database,
) -> None:
    """The server then ends every session and recovers from its log."""
    async with AsyncExitStack() as closing, await Sessions.open(own_database.gateway_url, sessions_max=2) as sessions:
        admin = await connect_again(own_database.admin_url)
        closing.callback(lambda: admin.terminate())
        ledger = PostgresLedger(sessions)
        await put_blob(admin)
        for n, step, table, timing in CUTS:
            if timing == "BEFORE":
                continue  # the same as after the statement before it, and each of these takes a restart
            for plan in step.before(n):
                await ledger.commit(plan)
            before = await contents(admin)
            async with gate(admin, table, timing):
                commit = asyncio.create_task(ledger.commit(step.plan(n)))
                os.kill(await pid_at_gate(admin, commit), signal.SIGKILL)
                with pytest.raises(OutcomeUnknown):
                    await commit
            async with asyncio.timeout(HANG_S):
                while not admin.is_closed():  # until then the server has not noticed, and still gives sessions
                    await asyncio.sleep(0.005)
            admin = await connect_again(own_database.admin_url)
            await open_gate(admin, table)
            assert await contents(admin) == before, f"a part of the plan is left, cut {timing} {table}"
            await ledger.commit(step.plan(n))
            assert await tables_naming(admin, step.plan(n).stream) == step.rows
        await verify_all(sessions)


async def test_a_backend_terminated_after_the_commit_but_persisted(own_database: Database) -> None:
    """It waits for a standby that does not exist: committed, and not yet acknowledged."""
    async with AsyncExitStack() as closing, await Sessions.open(own_database.gateway_url) as sessions:
        admin = await connect_again(own_database.admin_url)
        closing.callback(admin.terminate)
        ledger = PostgresLedger(sessions)
        await put_blob(admin)
        for n, step in enumerate(STEPS):
            for plan in step.before(n):
                await ledger.commit(plan)
            async with waiting_for_a_standby(admin, own_database.admin_url):
                commit = asyncio.create_task(ledger.commit(step.plan(n)))
                pid = await pid_waiting_for_a_standby(admin, commit)
                assert await admin.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
                with pytest.raises(OutcomeUnknown):
                    await commit
            assert await tables_naming(admin, step.plan(n).stream) == step.rows
            with pytest.raises(TgaError) as refused:  # sent again it is a repeat, and refused as one
                await ledger.commit(step.plan(n))
            assert refused.value.code in ("STATE_SEQUENCE_GAP", "STATE_CONCURRENT_EXECUTION")
        await verify_all(sessions)


@asynccontextmanager
async def waiting_for_a_standby(admin: Admin, url: str) -> AsyncIterator[None]:
    await admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    await admin.execute("SELECT pg_reload_conf()")
    try:
        await _until_commits_wait(admin, url)
        yield
    finally:
        await admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
        await admin.execute("SELECT pg_reload_conf()")


async def _until_commits_wait(admin: Admin, url: str) -> None:
    """A reload reaches every process in its own time."""
    probe = await asyncpg.connect(url)
    try:
        while True:
            commit = asyncio.create_task(probe.execute("SELECT pg_logical_emit_message(true, 'probe', '')"))
            with contextlib.suppress(AssertionError):
                await admin.execute("SELECT pg_cancel_backend($1)", await pid_waiting_for_a_standby(admin, commit))
                await commit
                return
            await commit
    finally:
        await probe.close()


async def pid_waiting_for_a_standby(admin: Admin, commit: asyncio.Task[Any]) -> int:
    async with asyncio.timeout(HANG_S):
        while True:
            assert not commit.done(), f"it did not wait: {commit!r}"
            pid: int | None = await admin.fetchval("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
            if pid is not None:
                return pid
            await asyncio.sleep(0.005)


# The connection breaks


@dataclass
class Wire(Between):
    """A proxy that cuts the connection around the next call of tga.append or tga.acquire, once, when `cut` says so."""

    upstream: str
    cut: Cut | None = None
    was_cut: bool = False
    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tga-test-")))
    clients: list[asyncio.StreamWriter] = field(default_factory=list)

    def cut_next(self, when: Cut) -> None:
        self.cut, self.was_cut = when, False

    def say_goodbye(self) -> None:
        """What a server says before it ends a session; the end itself comes later."""
        said = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
        for client in self.clients:
            client.write(b"E" + struct.pack("!I", len(said) + 4) + said)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_unix_server(self._serve, self.directory / ".s.PGSQL.5432")
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()
            shutil.rmtree(self.directory)

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_server, to_server = await self.connect()
        self.clients.append(to_client)
        executing = asyncio.Event()

        async def forward_requests() -> None:
            length = await from_client.readexactly(4)  # the first message has no type
            to_server.write(length + await from_client.readexactly(struct.unpack("!I", length)[0] - 4))
            calls: set[bytes] = set()  # names of prepared statements; asyncpg has some of its own
            is_call = False
            while True:
                message = await _message(from_client)
                if message[:1] == b"P" and (b"FROM tga.append(" in message or b"FROM tga.acquire(" in message):
                    calls.add(message[5:].split(b"\0")[0])
                elif message[:1] == b"B":
                    is_call = message[5:].split(b"\0")[1] in calls
                elif message[:1] == b"E" and is_call and self.cut is not None:
                    if self.cut == "before the request":
                        self.cut, self.was_cut = None, True
                        return
                    executing.set()
                to_server.write(message)

        async def forward_answers() -> None:
            while True:
                message = await _message(from_server)
                if not executing.is_set():
                    to_client.write(message)
                elif message[:1] == b"Z":  # ready for the next query: the transaction is over
                    self.cut, self.was_cut = None, True
                    return

        ways = [asyncio.create_task(forward_requests()), asyncio.create_task(forward_answers())]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for result in await asyncio.gather(*ways, return_exceptions=True):
            assert result is None or isinstance(
                result, (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError)
            )
        for writer in (to_client, to_server):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(5)
    return head + await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)


@pytest.fixture
async def wire(database: Database) -> AsyncIterator[Wire]:
    async with Wire(database.gateway_url).opened() as opened:
        yield opened


async def test_a_connection_lost_before_the_request_and_not_persisted(
    wire: Wire, admin: Admin, sessions: Sessions
) -> None:
    async with await Sessions.open(wire.url, sessions_max=2) as remote:
        ledger = PostgresLedger(remote)
        await put_blob(admin)
        for n, step in enumerate(STEPS):
            for plan in step.before(n):
                await ledger.commit(plan)
            before = await contents(admin)
            wire.cut_next("before the request")
            with pytest.raises(OutcomeUnknown):
                await ledger.commit(step.plan(n))
            assert wire.was_cut
            assert await contents(admin) == before
            await ledger.commit(step.plan(n))
            assert await tables_naming(admin, step.plan(n).stream) == step.rows
    await verify_all(sessions)


async def test_a_connection_lost_before_the_answer_but_persisted(wire: Wire, admin: Admin, sessions: Sessions) -> None:
    async with await Sessions.open(wire.url, sessions_max=2) as remote:
        ledger = PostgresLedger(remote)
        await put_blob(admin)
        for n, step in enumerate(STEPS):
            for plan in step.before(n):
                await ledger.commit(plan)
            wire.cut_next("after the commit")
            with pytest.raises(OutcomeUnknown):
                await ledger.commit(step.plan(n))
            assert wire.was_cut
            assert await tables_naming(admin, step.plan(n).stream) == step.rows
            before = await contents(admin)
            with pytest.raises(TgaError) as refused:
                await ledger.commit(step.plan(n))
            assert refused.value.code in ("STATE_SEQUENCE_GAP", "STATE_CONCURRENT_EXECUTION")
            assert await contents(admin) == before
    await verify_all(sessions)


async def test_a_session_that_was_just_ended_by_the_server_fails_with_a_stable_code(
    wire: Wire, admin: Admin, sessions: Sessions
) -> None:
    """Between the server's last words and the end of the connection the pool still holds it for alive."""
    async with await Sessions.open(wire.url, sessions_max=1) as remote:
        wire.say_goodbye()
        await asyncio.sleep(0.05)
        with pytest.raises(StoreUnavailable):
            async with remote.reading():
                pass
        ledger = PostgresLedger(remote)
        await ledger.commit(birth(1))
        before = await contents(admin)
        wire.say_goodbye()
        await asyncio.sleep(0.05)
        with pytest.raises((OutcomeUnknown, StoreUnavailable)):
            await ledger.commit(birth(2))
        assert await contents(admin) == before
        await ledger.commit(birth(2))
    await verify_all(sessions)


async def test_an_executor_whose_session_was_just_ended_by_the_server_knows_that_it_is_lost(wire: Wire) -> None:
    async with await Executor.open(wire.url) as executor:
        wire.say_goodbye()
        await asyncio.sleep(0.05)
        with pytest.raises(StoreUnavailable):
            await executor.verify()


@pytest.mark.parametrize("cut", ["before the request", "after the commit"])
async def test_every_plan_of_a_batch_whose_answer_is_lost_is_unknown(cut: Cut, wire: Wire, admin: Admin) -> None:
    async with await Sessions.open(wire.url, sessions_max=1) as remote:
        wire.cut_next(cut)
        plans = [birth(n) for n in range(3)]
        results = await PostgresLedger(remote).commit_batch(plans)
        assert [(type(error), error and error.stream) for error in results] == [
            (OutcomeUnknown, plan.stream) for plan in plans
        ]
    stored = [await tables_naming(admin, plan.stream) for plan in plans]
    assert stored == [_BORN if cut == "after the commit" else {}] * 3


@pytest.mark.parametrize("cut", ["before the request", "after the commit"])
async def test_an_acquire_whose_answer_is_lost_can_be_repeated(
    cut: Cut,
    wire: Wire,
    sessions: Sessions,
    executor: Executor,
) -> None:
    async with await Sessions.open(wire.url, sessions_max=1) as remote, await Executor.open(wire.url) as another:
        store = PostgresStateStore(remote, PostgresLedger(remote), another)
        wire.cut_next(cut)
        with pytest.raises(OutcomeUnknown):
            await store.acquire_trace_lock(trace_id(1))
        assert wire.was_cut
        await store.acquire_trace_lock(trace_id(1))
        with pytest.raises(TgaError) as refused:
            await acquire_stream(sessions, TRACE.stream(trace_id(1)), executor.executor_id)
        assert refused.value.code == "STATE_CONCURRENT_EXECUTION"
        await store.release_trace_lock(trace_id(1))


# What the caller's session brings along


class InTransaction(Sessions):
    """Sessions that keep the transaction open after the statement, to look at it."""

    isolation: Literal["read_committed", "repeatable_read", "serializable"] = "read_committed"
    seen: str | None = None

    async def commit(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        async with self._session() as connection, connection.transaction(isolation=self.isolation):
            assert await connection.fetchval("SHOW synchronous_commit") == "off"
            rows = await connection.fetch(statement, *arguments)
            self.seen = await connection.fetchval("SHOW synchronous_commit")
            return rows


@pytest.fixture
async def careless(database: Database, admin: Admin) -> AsyncIterator[InTransaction]:
    """Sessions of a database whose owner prefers speed."""
    name = await admin.fetchval("SELECT current_database()")
    await admin.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    await admin.execute(f"ALTER ROLE {GATEWAY_ROLE} IN DATABASE {name} SET synchronous_commit = off")
    async with await InTransaction.open(database.gateway_url, sessions_max=2) as opened:
        yield opened


async def test_synchronous_commit_is_on_when_the_transaction_commits(
    careless: InTransaction, executor: Executor
) -> None:
    await PostgresLedger(careless).commit(birth(1))
    assert careless.seen == "on"
    careless.seen = None
    stream = TRACE.stream(trace_id(2))
    await acquire_stream(careless, stream, executor.executor_id)
    assert careless.seen == "on"
    careless.seen = None
    await release_stream(careless, stream, executor.executor_id)
    assert careless.seen == "on"


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_snapshot_older_than_the_locks_is_refused(
    isolation: Literal["repeatable_read", "serializable"], careless: InTransaction, admin: Admin
) -> None:
    careless.isolation = isolation
    before = await contents(admin)
    stream = TRACE.stream(trace_id(1))
    attempts: list[Awaitable[object]] = [
        PostgresLedger(careless).commit(birth(1)),
        acquire_stream(careless, stream, EXECUTOR),
        release_stream(careless, stream, EXECUTOR),
    ]
    for attempted in attempts:
        with pytest.raises(asyncpg.InvalidTransactionStateError, match="READ COMMITTED"):
            await attempted
    assert await contents(admin) == before


@pytest.mark.parametrize("is_warm", [True, False], ids=["plans_cached", "first_call"])
async def test_temporary_tables_named_like_ours_do_not_shadow_them(
    is_warm: bool, database: Database, admin: Admin
) -> None:
    async with await Sessions.open(database.gateway_url, sessions_max=1) as sessions:
        ledger = PostgresLedger(sessions)
        if is_warm:
            for plan in (birth(1), effect(1), birth(4), attempt(4)):
                await ledger.commit(plan)
        tables = [table for table in await contents(admin) if table != "migrations"]
        for table in tables:
            await sessions.commit(f"CREATE TEMPORARY TABLE {table} (LIKE tga.{table} INCLUDING ALL)")
        stream = TRACE.stream(trace_id(2))
        await acquire_stream(sessions, stream, EXECUTOR)
        for plan in (birth(2), effect(2), birth(3), attempt(3)):
            await ledger.commit(plan)
        await acquire_stream(sessions, stream, EXECUTOR)
        assert await release_stream(sessions, stream, EXECUTOR)
        for table in tables:
            assert await sessions.commit(f"SELECT * FROM pg_temp.{table}") == []
        assert await tables_naming(admin, stream) == {
            **_BORN,
            "links": 4,
            "payloads": 2,
        }
        assert (await tables_naming(admin, TRACE.stream(trace_id(3))))["dispatch_attempts"] == 1
        await verify_all(sessions)


async def test_a_forged_temporary_head_does_not_let_a_stranger_in(
    database: Database, admin: Admin, executor: Executor
) -> None:
    async with await Sessions.open(database.gateway_url, sessions_max=1) as sessions:
        stream = TRACE.stream(trace_id(1))
        await acquire_stream(sessions, stream, executor.executor_id)
        await sessions.commit("CREATE TEMPORARY TABLE heads (LIKE tga.heads)")
        with pytest.raises(TgaError) as refused:
            await PostgresLedger(sessions).commit(birth(1))
        assert refused.value.code == "STATE_CONCURRENT_EXECUTION"
        assert await tables_naming(admin, stream) == {"heads": 1}


# The whole server


def processes_of(postmaster: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
            if parent == postmaster:
                children.append(int(stat.parent.name))
    return [postmaster, *children]


async def write_until_it_breaks(
    ledger: PostgresLedger, numbers: Iterator[int], acknowledged: dict[TraceId, int], attempted: set[TraceId]
) -> str:
    """Whole traces, one after the other; returns the code that ended it."""
    try:
        for n in numbers:
            attempted.add(trace_id(n))
            await ledger.commit(birth(n))
            acknowledged[trace_id(n)] = 3
            await ledger.commit(effect(n))
            acknowledged[trace_id(n)] = 4
    except TgaError as error:
        return error.code
    raise AssertionError("it never broke")


@needs_proc
async def test_a_server_killed_with_kill_9_under_writers_loses_nothing_that_was_acknowledged(
    own_server: EmbeddedPostgres, own_database: Database
) -> None:
    """Its settings ask for asynchronous commits, which would lose up to the last half second."""
    admin = await connect_again(own_database.admin_url)
    await admin.execute(
        f"ALTER DATABASE {own_database.admin_url.split('/')[-1].split('?')[0]} SET synchronous_commit = off"
    )
    await admin.close()
    acknowledged: dict[TraceId, int] = {}
    attempted: set[TraceId] = set()
    async with await Sessions.open(own_database.gateway_url, sessions_max=8) as sessions:
        ledger = PostgresLedger(sessions)
        for round_number in range(2):
            goal = len(acknowledged) + 150
            first = 100_000 * round_number
            writers = [
                asyncio.create_task(
                    write_until_it_breaks(
                        ledger, iter(range(first + 1000 * w, first + 1000 * w + 1000)), acknowledged, attempted
                    )
                )
                for w in range(8)
            ]
            async with asyncio.timeout(HANG_S):
                while len(acknowledged) < goal:
                    await asyncio.sleep(0.01)
            postmaster = own_server.postmaster_pid()
            assert postmaster is not None
            for pid in processes_of(postmaster):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            codes = await asyncio.gather(*writers)
            assert set(codes) <= {"STORE_OUTCOME_UNKNOWN", "STORE_UNAVAILABLE"}
            assert "STORE_OUTCOME_UNKNOWN" in codes

            await asyncio.to_thread(own_server.start)
            rows = await sessions.commit("SELECT stream, max(sequence_number) AS last FROM tga.entries GROUP BY stream")
            stored = {row["stream"]: row["last"] for row in rows}
            lost = {t: n for t, n in acknowledged.items() if stored.get(TRACE.stream(t), 0) < n}
            assert lost == {}
            assert set(stored) <= {TRACE.stream(t) for t in attempted}
            assert set(stored.values()) <= {3, 4}, "a plan was stored in part"
            await verify_all(sessions)


async def test_the_outcome_can_be_read_once_the_lock_is_had(
    admin: Admin, sessions: Sessions, executor: Executor, ledger: PostgresLedger
) -> None:
    """The client gave up, the server did not: whoever then takes the trace's lock reads the final outcome."""
    async with gate(admin, "links", "AFTER"):
        late = asyncio.create_task(ledger.commit(birth(1)))
        await pid_at_gate(admin, late)
        taking = asyncio.create_task(acquire_stream(sessions, TRACE.stream(trace_id(1)), executor.executor_id))
        await asyncio.sleep(0.1)
        assert not taking.done(), "the stream was taken while its append was still under way"
    await admin.execute("SELECT pg_advisory_unlock_all()")
    await late
    async with asyncio.timeout(HANG_S):
        await taking  # EXECUTOR, whom the append made the owner, has no session: it is dead
    store = PostgresStateStore(sessions, ledger, executor)
    assert (await store.load_state(trace_id(1))).sequence_number == 3
    with pytest.raises(TgaError) as fenced:
        await ledger.commit(effect(1))
    assert fenced.value.code == "STATE_CONCURRENT_EXECUTION"
