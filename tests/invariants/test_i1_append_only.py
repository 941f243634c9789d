"""I1: the ledger's tables only grow, for every role, in every mode of a session; and sequence numbers have no gaps."""

from __future__ import annotations

import asyncpg
import pytest

from app.domain.tga.execution_state import ExecutionCheckpoint
from app.domain.tga.replay import fold
from app.postgres.database import Database
from app.postgres.sessions import GATEWAY_ROLE
from app.postgres.state_store import PostgresStateStore
from tests.conftest import Admin, Server
from tests.traces import completed_trace, executing_trace, time_at

LEDGER_TABLES = (
    "links",
    "payloads",
    "execution_checkpoints",
    "dispatch_attempts",
    "erasures",
    "leaf_spans",
    "tree_nodes",
    "tree_heads",
    "migrations",
)
_ANY_COLUMN = {
    "tree_nodes": "hash",
    "tree_heads": "note",
    "migrations": "name",
    "links": "to_state",
    "payloads": "artifacts",
    "leaf_spans": "leaves",
}
_UPSERTS = {
    "links": "INSERT INTO tga.links SELECT * FROM tga.links "
    "ON CONFLICT (stream_no, sequence_number) DO UPDATE SET verbatim = ''",
    "payloads": "INSERT INTO tga.payloads SELECT * FROM tga.payloads "
    "ON CONFLICT (stream_no, sequence_number) DO UPDATE SET artifacts = '{}'",
    "execution_checkpoints": "INSERT INTO tga.execution_checkpoints SELECT * FROM tga.execution_checkpoints "
    "ON CONFLICT (stream, sequence_number) DO UPDATE SET created_at = ''",
    "dispatch_attempts": "INSERT INTO tga.dispatch_attempts SELECT * FROM tga.dispatch_attempts "
    "ON CONFLICT (stream, attempt) DO UPDATE SET started_at = now()",
    "erasures": "INSERT INTO tga.erasures SELECT * FROM tga.erasures "
    "ON CONFLICT (stream) DO UPDATE SET system_stream = ''",
    "leaf_spans": "INSERT INTO tga.leaf_spans SELECT * FROM tga.leaf_spans "
    "ON CONFLICT (stream_no, sequence_number) DO UPDATE SET stream = 'trace:stolen'",
    "tree_nodes": "INSERT INTO tga.tree_nodes SELECT * FROM tga.tree_nodes "
    "ON CONFLICT (level, node_index) DO UPDATE SET hash = excluded.hash",
    "tree_heads": "INSERT INTO tga.tree_heads SELECT * FROM tga.tree_heads ON CONFLICT (size) DO UPDATE SET note = ''",
    "migrations": "INSERT INTO tga.migrations SELECT * FROM tga.migrations "
    "ON CONFLICT (version) DO UPDATE SET sha256 = ''",
}
# A claim and its effect stand in the row of their stream, and are shown by views.
CLAIM_CHANGES = [
    "UPDATE tga.heads SET idempotency_key = 'another'",
    "UPDATE tga.heads SET idempotency_key = NULL, payload_digest = NULL",
    "UPDATE tga.heads SET subject = 'another'",
    "UPDATE tga.heads SET name = name",
    "UPDATE tga.heads SET payload_digest = sha256('x')",
    "UPDATE tga.heads SET effect_digest = sha256('x')",
    "UPDATE tga.heads SET effect_digest = NULL",
    "UPDATE tga.heads SET effect_digest = NULL, sequence_number = sequence_number + 1",
    "UPDATE tga.heads SET tenant = 'another'",
    "UPDATE tga.heads SET principal_id = 'another'",
    "UPDATE tga.heads SET expires_at = now()",
    "UPDATE tga.heads SET stream_no = stream_no + 1",
    "INSERT INTO tga.heads SELECT * FROM tga.heads ON CONFLICT (subject, name, idempotency_key)"
    " WHERE idempotency_key IS NOT NULL DO UPDATE SET stream = 'trace:stolen'",
    "UPDATE tga.claims SET idempotency_key = 'another'",
    "UPDATE tga.claims SET stream = 'trace:stolen'",
    "DELETE FROM tga.claims",
    "UPDATE tga.claim_effects SET artifact_digest = sha256('x')",
    "DELETE FROM tga.claim_effects",
]


def changes_of(table: str) -> dict[str, str]:
    column = _ANY_COLUMN.get(table, "stream")
    return {
        "update": f"UPDATE tga.{table} SET {column} = {column}",
        "update_of_no_row": f"UPDATE tga.{table} SET {column} = {column} WHERE false",
        "delete": f"DELETE FROM tga.{table}",
        "delete_only": f"DELETE FROM ONLY tga.{table}",
        "truncate": f"TRUNCATE tga.{table}",
        "truncate_cascade": f"TRUNCATE tga.{table} CASCADE",
        "upsert": _UPSERTS[table],
    }


CHANGES = [(table, kind, sql) for table in LEDGER_TABLES for kind, sql in changes_of(table).items()]
MERGES = [
    (table, f"MERGE INTO tga.{table} t USING tga.{table} s ON t.ctid = s.ctid WHEN MATCHED THEN {action}")
    for table in LEDGER_TABLES
    for action in ("DELETE", f"UPDATE SET {_ANY_COLUMN.get(table, 'stream')} = s.{_ANY_COLUMN.get(table, 'stream')}")
]


async def fill(store: PostgresStateStore) -> None:
    records = completed_trace(1)
    for record in records:
        await store.append_log_entry(record)
    # What may be erased is guarded row by row, so there must be one.
    state = fold(records[:3])
    assert state is not None
    await store.write_checkpoint(ExecutionCheckpoint.of(state, created_at=time_at(9)))


async def contents(admin: Admin) -> dict[str, list[asyncpg.Record]]:
    return {table: await admin.fetch(f"SELECT * FROM tga.{table}") for table in (*LEDGER_TABLES, "heads")}


async def expect_refusals(session: Admin, statements: list[str]) -> None:
    for statement in statements:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await session.execute(statement)


async def merges_known_to(session: Admin) -> list[str]:
    version = int(await session.fetchval("SELECT current_setting('server_version_num')"))
    return [sql for _, sql in MERGES] if version >= 150_000 else []


async def test_the_gateways_role_can_change_nothing(
    database: Database, store: PostgresStateStore, admin: Admin
) -> None:
    await fill(store)
    before = await contents(admin)
    session = await asyncpg.connect(database.gateway_url, server_settings={"role": GATEWAY_ROLE})
    try:
        await expect_refusals(session, [sql for _, _, sql in CHANGES] + await merges_known_to(session))
        await expect_refusals(
            session, [f"INSERT INTO tga.{table} SELECT * FROM tga.{table}" for table in LEDGER_TABLES]
        )
        await expect_refusals(
            session,
            [
                "UPDATE tga.heads SET owner = NULL",
                "DELETE FROM tga.heads",
                "TRUNCATE tga.heads",
                "INSERT INTO tga.transitions SELECT 'trace', 'DENIED', 'tool_call', '', 'EXECUTING', false",
                "UPDATE tga.transitions SET to_state = 'COMPLETED'",
                "ALTER TABLE tga.links DISABLE TRIGGER ALL",
                "SET session_replication_role = replica",
                "SET ROLE tga_owner",
            ],
        )
    finally:
        await session.close()
    assert await contents(admin) == before


async def test_the_owner_is_refused_even_in_a_replica_session(store: PostgresStateStore, admin: Admin) -> None:
    await fill(store)
    before = await contents(admin)
    await admin.execute("SET session_replication_role = replica; SET ROLE tga_owner")
    await expect_refusals(admin, [sql for _, _, sql in CHANGES] + await merges_known_to(admin))
    await expect_refusals(admin, ["TRUNCATE tga.heads", "DELETE FROM tga.heads"])
    await admin.execute("RESET ROLE; RESET session_replication_role")
    assert await contents(admin) == before


async def test_a_superuser_is_refused_while_the_triggers_stand(store: PostgresStateStore, admin: Admin) -> None:
    await fill(store)
    before = await contents(admin)
    await expect_refusals(admin, [sql for _, _, sql in CHANGES] + await merges_known_to(admin))
    assert await contents(admin) == before


async def test_a_head_only_moves_forward_or_changes_its_owner(store: PostgresStateStore, admin: Admin) -> None:
    for record in executing_trace(1):
        await store.append_log_entry(record)
    await expect_refusals(
        admin,
        [
            "UPDATE tga.heads SET sequence_number = 1",
            "UPDATE tga.heads SET state = 'COMPLETED'",
            "UPDATE tga.heads SET entry_digest = decode(repeat('00', 32), 'hex')",
            "UPDATE tga.heads SET artifact_digest = NULL",
            "UPDATE tga.heads SET stream = 'trace:another', sequence_number = 9",
            "DELETE FROM tga.heads",
        ],
    )
    owner = "01900000-0000-7000-8000-000000000000"
    assert await admin.execute("UPDATE tga.heads SET owner = $1", owner) == "UPDATE 1"


async def test_a_claim_stays_what_it_is_in_the_row_of_its_stream(
    database: Database, store: PostgresStateStore, admin: Admin
) -> None:
    await fill(store)
    before = await contents(admin)
    assert before["heads"][0]["idempotency_key"] is not None
    assert before["heads"][0]["effect_digest"] is not None
    await expect_refusals(admin, CLAIM_CHANGES)
    await admin.execute("SET session_replication_role = replica; SET ROLE tga_owner")
    await expect_refusals(admin, CLAIM_CHANGES)
    await admin.execute("RESET ROLE; RESET session_replication_role")
    session = await asyncpg.connect(database.gateway_url, server_settings={"role": GATEWAY_ROLE})
    try:
        await expect_refusals(session, CLAIM_CHANGES)
    finally:
        await session.close()
    assert await contents(admin) == before


async def test_a_claim_is_one_streams_by_an_index(store: PostgresStateStore, admin: Admin) -> None:
    await fill(store)
    with pytest.raises(asyncpg.UniqueViolationError, match="heads_claim"):
        await admin.execute(
            "INSERT INTO tga.heads (stream_no, stream, subject, name, idempotency_key, payload_digest, sequence_number,"
            " entry_digest, state, is_open) SELECT 900, 'trace:another', subject, name, idempotency_key,"
            " payload_digest, 0, entry_digest, 'PENDING', false FROM tga.heads"
        )


async def test_the_owner_cannot_log_in(server: Server, database: Database) -> None:
    with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError):
        await asyncpg.connect(database.admin_url, user="tga_owner")


async def test_sequence_numbers_have_no_gaps(store: PostgresStateStore, admin: Admin) -> None:
    await fill(store)
    numbers = await admin.fetch("SELECT sequence_number FROM tga.entries ORDER BY sequence_number")
    assert [row["sequence_number"] for row in numbers] == [1, 2, 3, 4]
