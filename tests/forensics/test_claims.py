"""I2 when its indexes are gone: two traces with one claim, and a stream with two rows where it has one, are found."""

from __future__ import annotations

import resource

import pytest

from app.core.errors import RecoveryFailed, TgaError
from app.domain.ledger.checks import Report
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.verification import stream_checks
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from tests.attacker import attacking
from tests.cli.test_commands import tga
from tests.conftest import Admin
from tests.invariants.plans import plan_of
from tests.traces import completed_trace, trace_id

FIRST, SECOND, OTHER = (f"trace:{trace_id(n)}" for n in (1, 2, 3))


async def find(sessions: Sessions, stream: str | None = None) -> list[TgaError]:
    async with open_reader(sessions, stream=stream) as reader:
        return [error async for error in verify_ledger(reader, stream_checks(), Report())]


@pytest.fixture
async def twice(ledger: PostgresLedger, admin: Admin) -> None:
    """A superuser drops the index of claims, and the gateway's own function takes a key a second time."""
    await admin.execute("DROP INDEX tga.heads_claim")
    for n in (1, 2):
        await ledger.commit(plan_of(completed_trace(n, idempotency_key="the one key")))
    await ledger.commit(plan_of(completed_trace(3)))


async def test_two_traces_with_one_claim_are_found(
    twice: None, database: Database, sessions: Sessions, admin: Admin
) -> None:
    (found,) = await find(sessions)
    assert (found.code, found.what) == (RecoveryFailed.code, "two traces hold the claim of one key")
    assert {found.stream, found.expected} == {FIRST, SECOND}
    assert "the one key" in str(found.found)
    for stream in (FIRST, SECOND):
        assert [one.what for one in await find(sessions, stream)] == ["two traces hold the claim of one key"]
    assert await find(sessions, OTHER) == []
    told = tga("verify", "--all", url=database.admin_url)
    assert (told.returncode, "two traces hold the claim of one key" in told.stdout) == (1, True)
    async with attacking(admin):
        await admin.execute("DELETE FROM tga.claims WHERE stream = $1", SECOND)
    assert "the claim of the trace's key is missing" in [one.what for one in await find(sessions)]


@pytest.mark.parametrize("number", ["stream_no", "stream_no + 1000"], ids=["its number", "another number"])
async def test_a_stream_with_two_rows_is_found_whatever_the_second_one_says(
    number: str, ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    """The row of a stream holds its head, its claim and the claim's effect: a second one would be a second of each."""
    await ledger.commit(plan_of(completed_trace(1)))
    await admin.execute("DROP INDEX tga.heads_claim; ALTER TABLE tga.heads DROP CONSTRAINT heads_stream_key")
    await admin.execute("ALTER TABLE tga.heads DROP CONSTRAINT heads_pkey")
    columns = "stream, subject, name, sequence_number, entry_digest, artifact_digest, state, is_open"
    await admin.execute(f"INSERT INTO tga.heads (stream_no, {columns}) SELECT {number}, {columns} FROM tga.heads")
    found = [one for one in await find(sessions) if one.what == "the stream has more than one row"]
    assert {(one.stream, one.found) for one in found} == {(FIRST, "heads")}


async def test_the_search_for_one_key_twice_takes_no_memory(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    """Sorted by the server when the index is gone; only neighbours are compared here. Rows made by the database."""
    await admin.execute("DROP INDEX tga.heads_claim")
    peaks = []
    for start in (0, 30_000):
        await admin.execute(
            "INSERT INTO tga.heads (subject, name, idempotency_key, stream, payload_digest, sequence_number,"
            " entry_digest, state, is_open)"
            " SELECT 'server', 'tool', md5(n::text) || repeat('x', 100), 'bulk:' || n, sha256(''), 0, '', '', false"
            f"  FROM generate_series({start} + 1, {start} * 4 + 30000) AS n"
        )
        async with open_reader(sessions) as reader:
            assert sum([1 async for _ in reader.claimed_keys()]) == start * 4 + 30_000
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 10_000, "KiB"
