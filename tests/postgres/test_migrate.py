"""Migrations: each applied once, never edited, in one transaction, and two at once wait for each other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace

import asyncpg
import pytest

from app.core.canonical import canonical_bytes
from app.core.chain import StreamKind
from app.core.digest import GENESIS, digest_of_bytes
from app.core.errors import InvalidTransition, MigrationRefused, StoreUnavailable
from app.domain.ledger.plans import Plan, PlannedEntry
from app.domain.runs.transitions import RUN
from app.domain.system.documents import SYSTEM
from app.domain.tga.transitions import TRACE
from app.postgres.database import Database
from app.postgres.guards import find_problems
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import Migration, load_status, migrate, packaged_migrations
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from tests.conftest import Admin, Server
from tests.postgres.old_schema import old_migrations
from tests.traces import EXECUTOR


@pytest.fixture
async def empty(server: Server) -> AsyncIterator[Database]:
    name = f"tga_empty_{os.getpid()}"
    await server.execute_as_root(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    await server.execute_as_root(f"CREATE DATABASE {name}")
    yield server.database(name)
    await server.execute_as_root(f"DROP DATABASE {name} WITH (FORCE)")


async def test_all_are_applied_once_and_running_again_changes_nothing(empty: Database) -> None:
    packaged = packaged_migrations()
    before = await load_status(empty.admin_url)
    assert (before.applied, before.pending) == ((), packaged)
    assert await migrate(empty.admin_url) == packaged
    assert await migrate(empty.admin_url) == ()
    after = await load_status(empty.admin_url)
    assert [(a.version, a.sha256) for a in after.applied] == [(m.version, m.sha256) for m in packaged]
    assert after.pending == ()


async def test_many_at_once_apply_each_migration_once(empty: Database) -> None:
    applied = await asyncio.gather(*(migrate(empty.admin_url) for _ in range(6)))
    assert sorted(len(one) for one in applied) == [0, 0, 0, 0, 0, len(packaged_migrations())]


async def test_an_edited_file_is_refused(database: Database) -> None:
    first, *others = packaged_migrations()
    edited = (replace(first, sql=first.sql + "\n-- edited"), *others)
    with pytest.raises(MigrationRefused, match="0001_rules is not the file that was applied"):
        await migrate(database.admin_url, edited)
    with pytest.raises(MigrationRefused):
        await load_status(database.admin_url, edited)


async def test_a_database_of_a_newer_version_is_refused(database: Database) -> None:
    with pytest.raises(MigrationRefused, match="newer version"):
        await migrate(database.admin_url, packaged_migrations()[:-1])


async def test_a_failing_migration_leaves_nothing_and_those_before_it_whole(empty: Database, server: Server) -> None:
    packaged = packaged_migrations()
    broken = Migration(len(packaged) + 1, "broken", "CREATE TABLE tga.half (x int); SELECT 1/0;")
    with pytest.raises(MigrationRefused, match="division by zero"):
        await migrate(empty.admin_url, (*packaged, broken))
    status = await load_status(empty.admin_url, (*packaged, broken))
    assert (len(status.applied), status.pending) == (len(packaged), (broken,))
    session = await asyncpg.connect(empty.admin_url)
    assert await session.fetchval("SELECT to_regclass('tga.half')") is None
    await session.close()
    mended = replace(broken, sql="CREATE TABLE tga.half (x int)")
    assert await migrate(empty.admin_url, (*packaged, mended)) == (mended,)


async def test_a_user_who_may_not_migrate_is_told_what_to_do(empty: Database) -> None:
    with pytest.raises(MigrationRefused, match="tga db migrate"):
        await migrate(empty.gateway_url)


async def test_a_user_with_createrole_who_is_no_superuser_can_migrate(empty: Database, server: Server) -> None:
    name = "tga_test_dba"
    await server.execute_as_root(f"DROP ROLE IF EXISTS {name}")
    await server.execute_as_root(f"CREATE ROLE {name} LOGIN CREATEROLE")
    session = await asyncpg.connect(empty.admin_url)
    try:
        await session.execute(f"GRANT CREATE ON DATABASE {empty.admin_url.split('/')[-1].split('?')[0]} TO {name}")
        await session.execute(f"GRANT tga_owner, {GATEWAY_ROLE} TO {name}")
        url = server.url(name, empty.admin_url.split("/")[-1].split("?")[0])
        assert await migrate(url) == packaged_migrations()
        assert [p.what for p in await find_problems(empty.admin_url)] == [f"{name} may act as tga_owner"]
        assert await find_problems(url) == []
        await session.execute(f"REVOKE tga_owner, {GATEWAY_ROLE} FROM {name}; DROP OWNED BY {name}")
    finally:
        await session.close()
        await server.execute_as_root(f"DROP ROLE {name}")


async def test_an_unreachable_server_is_said_to_be_unreachable() -> None:
    with pytest.raises(StoreUnavailable):
        await migrate("postgresql://nobody@127.0.0.1:1/none")


@pytest.mark.parametrize("kind", [TRACE, SYSTEM, RUN], ids=lambda kind: str(kind.name))
async def test_the_rules_in_the_database_are_the_table_in_the_code(kind: StreamKind, admin: Admin) -> None:
    kinds = await admin.fetch(
        "SELECT kind, id_field, entry_schema_id, birth_state, usual_end FROM tga.stream_kinds WHERE kind = $1",
        kind.name,
    )
    expected = (kind.name, kind.id_field, kind.entry_schema_id, kind.birth_state, kind.usual_end)
    assert [tuple(row) for row in kinds] == [expected]
    rules = await admin.fetch(
        "SELECT artifact_type, schema_id, verdict_field, binds_field, settles_claim FROM tga.artifact_rules"
        " WHERE kind = $1",
        kind.name,
    )
    assert sorted(tuple(row) for row in rules) == sorted(
        (r.artifact_type, r.schema_id, r.verdict_field, r.binds_field, r.settles_claim) for r in kind.artifacts
    )
    transitions = await admin.fetch(
        "SELECT from_state, artifact_type, verdict, to_state, is_birth FROM tga.transitions WHERE kind = $1", kind.name
    )
    assert sorted(tuple(row) for row in transitions) == sorted(
        (t.from_state, t.artifact_type, t.verdict, t.to_state, t.is_birth) for t in kind.transitions
    )


async def test_the_database_knows_no_other_kind_and_whose_each_stream_is(admin: Admin) -> None:
    kinds = await admin.fetch("SELECT kind, tenant_path FROM tga.stream_kinds ORDER BY kind")
    of_principal = ["principal", "tenant"]
    assert [tuple(row) for row in kinds] == [("run", of_principal), ("system", ["system_id"]), ("trace", of_principal)]
    decides = await admin.fetch("SELECT kind, artifact_type FROM tga.artifact_rules WHERE expired_path IS NOT NULL")
    assert [tuple(row) for row in decides] == [("trace", "supervisor_decision")]


async def test_the_gateway_reads_every_table_and_writes_none(admin: Admin) -> None:
    tables = await admin.fetch(
        "SELECT relname, has_table_privilege($1, oid, 'SELECT') AS reads,"
        "       has_table_privilege($1, oid, 'INSERT, UPDATE, DELETE, TRUNCATE') AS writes"
        "  FROM pg_class WHERE relnamespace = 'tga'::regnamespace AND relkind = 'r'",
        GATEWAY_ROLE,
    )
    assert {"sealed", "erasures", "outbox"} <= {row["relname"] for row in tables}
    assert [row["relname"] for row in tables if row["writes"]] == []
    unread = {row["relname"] for row in tables if not row["reads"]}
    assert unread & {"sealed", "erasures", "outbox", "links", "payloads", "heads"} == set()


async def test_a_store_of_the_first_migrations_is_refused_and_says_what_to_do(empty: Database) -> None:
    """Nothing was released with them; whoever has such a store exports it with the version that made it."""
    await migrate(empty.admin_url, old_migrations())
    for refused in (migrate(empty.admin_url), load_status(empty.admin_url)):
        with pytest.raises(MigrationRefused, match="made by migrations that are no more") as caught:
            await refused
        assert "tga export" in caught.value.next_step
        assert "empty database" in caught.value.next_step
    session = await asyncpg.connect(empty.admin_url)
    assert await session.fetchval("SELECT to_regclass('tga.links')") is None, "nothing of the new was begun"
    await session.close()


async def test_a_new_kind_of_stream_needs_rows_and_no_code(database: Database, admin: Admin) -> None:
    """Journals of runs will come this way: their rules are inserted, and the append function judges by them."""
    await admin.execute(
        """INSERT INTO tga.stream_kinds VALUES ('journal', 'journal_id', 'test/journal_entry', 'RUNNING');
           INSERT INTO tga.artifact_rules VALUES ('journal', 'step', 'test/step', 'result', NULL, false);
           INSERT INTO tga.transitions VALUES ('journal', 'RUNNING', 'step', 'more', 'RUNNING', true),
               ('journal', 'RUNNING', 'step', 'more', 'RUNNING', false),
               ('journal', 'RUNNING', 'step', 'end', 'DONE', false)"""
    )

    def step(number: int, prev: str, result: str, to_state: str) -> PlannedEntry:
        artifact = canonical_bytes({"schema_id": "test/step", "journal_id": "j 1", "result": result})
        return PlannedEntry(
            canonical_bytes(
                {
                    "schema_id": "test/journal_entry",
                    "journal_id": "j 1",
                    "sequence_number": number,
                    "prev_entry_digest": prev,
                    "from_state": "RUNNING",
                    "to_state": to_state,
                    "artifact_type": "step",
                    "artifact_digest": digest_of_bytes(artifact),
                }
            ),
            artifact,
        )

    async with await Sessions.open(database.gateway_url) as sessions:
        ledger = PostgresLedger(sessions)
        first = step(1, GENESIS, "more", "RUNNING")
        second = step(2, digest_of_bytes(first.entry), "more", "RUNNING")
        await ledger.commit(Plan("journal:j 1", EXECUTOR, None, [first, second]))
        wrong, right = (step(3, digest_of_bytes(second.entry), "end", to_state) for to_state in ("RUNNING", "DONE"))
        with pytest.raises(InvalidTransition):
            await ledger.commit(Plan("journal:j 1", EXECUTOR, None, [wrong]))
        await ledger.commit(Plan("journal:j 1", EXECUTOR, None, [right]))
    assert await admin.fetchval("SELECT state FROM tga.heads WHERE stream = 'journal:j 1'") == "DONE"


def test_a_person_can_read_the_migrations_line_by_line() -> None:
    wide = [
        f"{migration.name}, line {number}"
        for migration in packaged_migrations()
        for number, line in enumerate(migration.sql.splitlines(), 1)
        if len(line) > 120
    ]
    assert wide == []
