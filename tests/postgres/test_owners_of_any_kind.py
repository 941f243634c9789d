"""A kind of stream made of rows alone: appended, owned, fenced, recovered; its owners live by a lock or by a lease."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from app.core.canonical import canonical_bytes
from app.core.digest import GENESIS, Digest, digest_of_bytes
from app.core.errors import ConcurrentExecution, InvalidTransition, RecoveryFailed, TgaError
from app.domain.ledger.plans import Claim, Plan, PlannedEntry
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.ownership import Executor, acquire_stream, release_stream
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.traces import EXECUTOR, OTHER_EXECUTOR, time_at

LEASE_MS = 600


async def make_kind(admin: Admin, owner_life: str) -> None:
    await admin.execute(
        "INSERT INTO tga.stream_kinds (kind, id_field, entry_schema_id, birth_state, usual_end, tenant_path,"
        " principal_path, subject_path, name_path, expiry_path, owner_life, lease_ms)"
        " VALUES ('counter', 'counter_id', 'test/v1/counter_entry', 'COUNTING', 'FULL', '{owner,tenant}',"
        " '{owner,who}', '{what}', '{called}', '{until}', $1, $2)",
        owner_life,
        LEASE_MS if owner_life == "lease" else None,
    )
    await admin.execute(
        """INSERT INTO tga.artifact_rules
                  (kind, artifact_type, schema_id, verdict_field, binds_field, expired_path, expired_value)
           VALUES ('counter', 'start', 'test/v1/start', NULL, NULL, NULL, NULL),
                  ('counter', 'step', 'test/v1/step', 'then', 'after', '{why}', 'late');
           INSERT INTO tga.transitions VALUES ('counter', 'COUNTING', 'start', '', 'COUNTING', true),
               ('counter', 'COUNTING', 'step', 'more', 'COUNTING', false),
               ('counter', 'COUNTING', 'step', 'stop', 'FULL', false),
               ('counter', 'COUNTING', 'step', 'drop', 'DROPPED', false)"""
    )


@dataclass
class Counter:
    """Makes the next plan of one counter; what is refused is not counted."""

    identity: str
    digest: str = GENESIS
    bound: str = ""
    number: int = 0

    @property
    def stream(self) -> str:
        return f"counter:{self.identity}"

    def next_plan(self, executor: str, *, owner_after: str | None = None, then: str = "more", **said: Any) -> Plan:
        artifact_type = "step" if self.number else "start"
        document = {"counter_id": self.identity, "schema_id": f"test/v1/{artifact_type}", **said}
        if self.number:
            document |= {"then": then, "after": self.bound}
        else:
            document |= {"owner": {"tenant": "acme", "who": "ann"}, "what": "steps", "called": "by hand"}
        artifact = canonical_bytes(document)
        entry = canonical_bytes(
            {
                "artifact_digest": digest_of_bytes(artifact),
                "artifact_type": artifact_type,
                "counter_id": self.identity,
                "executor_id": executor,
                "from_state": "COUNTING",
                "prev_entry_digest": self.digest,
                "recorded_at": time_at(self.number),
                "schema_id": "test/v1/counter_entry",
                "schema_version": "1.0",
                "sequence_number": self.number + 1,
                "to_state": {"more": "COUNTING", "stop": "FULL", "drop": "DROPPED"}[then],
            }
        )
        return Plan(self.stream, executor, owner_after, [PlannedEntry(entry, artifact)])

    async def count(self, ledger: PostgresLedger, executor: str, **how: Any) -> None:
        plan = self.next_plan(executor, **how)
        await ledger.commit(plan)
        self.number += 1
        self.digest, self.bound = digest_of_bytes(plan.entries[0].entry), digest_of_bytes(plan.entries[0].artifact)


async def recoverable(sessions: Sessions, asking: str) -> list[str]:
    rows = await sessions.commit("SELECT s FROM tga.recoverable('counter', $1::uuid, NULL, 10) AS s", asking)
    return [row["s"] for row in rows]


async def lease_over(admin: Admin, stream: str) -> None:
    async with asyncio.timeout(20):
        while not await admin.fetchval(
            "SELECT lease_until <= clock_timestamp() FROM tga.heads WHERE stream = $1", stream
        ):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("owner_life", ["session", "lease"])
async def test_what_a_birth_says_is_found_by_the_paths_of_its_kind(
    owner_life: str, admin: Admin, ledger: PostgresLedger
) -> None:
    await make_kind(admin, owner_life)
    counter = Counter("a.b-1")
    await counter.count(ledger, EXECUTOR, until="2020-01-01T00:00:00.000Z")
    head = await admin.fetchrow("SELECT * FROM tga.heads")
    assert head is not None
    said = [head[column] for column in ("tenant", "principal_id", "subject", "name")]
    assert said == ["acme", "ann", "steps", "by hand"]
    assert head["expires_at"].isoformat() == "2020-01-01T00:00:00+00:00"
    # What waits is late: only an artifact that says so at the path of its rule ends it.
    with pytest.raises(TgaError) as late:
        await counter.count(ledger, EXECUTOR)
    assert late.value.code == "APPROVAL_EXPIRED"
    await counter.count(ledger, EXECUTOR, why="late", then="drop")
    assert await admin.fetchval("SELECT count(*) FROM tga.links WHERE verbatim = ''") == 2
    assert await admin.fetchval("SELECT bool_and(sha256(entry) = entry_digest) FROM tga.entries")
    rest = await admin.fetchrow("SELECT tenant, state, waiting FROM tga.at_rest")
    assert rest is not None, "it ended otherwise than its kind usually does"
    assert tuple(rest) == ("acme", "DROPPED", None)
    claim = Counter("c-2").next_plan(EXECUTOR)
    with pytest.raises(RecoveryFailed, match="not of what the stream is about"):
        await ledger.commit(claim._replace(claim=_claim("another")))
    await ledger.commit(claim._replace(claim=_claim("steps")))
    assert await admin.fetchval("SELECT stream FROM tga.claims") == "counter:c-2"


def _claim(server_id: str) -> Claim:
    return Claim(server_id, "by hand", "key", Digest("ab" * 32))


async def test_a_lease_is_taken_renewed_and_lost_and_the_fence_holds(
    admin: Admin, sessions: Sessions, ledger: PostgresLedger
) -> None:
    await make_kind(admin, "lease")
    counter = Counter("leased")
    await acquire_stream(sessions, counter.stream, EXECUTOR)  # before it begins
    with pytest.raises(ConcurrentExecution):
        await acquire_stream(sessions, counter.stream, OTHER_EXECUTOR)
    await counter.count(ledger, EXECUTOR, owner_after=EXECUTOR)
    first = await admin.fetchval("SELECT lease_until FROM tga.heads")
    await counter.count(ledger, EXECUTOR, owner_after=EXECUTOR)
    second = await admin.fetchval("SELECT lease_until FROM tga.heads")
    assert second > first, "an append renews the lease"
    await acquire_stream(sessions, counter.stream, EXECUTOR)
    third = await admin.fetchval("SELECT lease_until FROM tga.heads")
    assert third > second, "and so does taking it again"
    await ledger.commit(Plan(counter.stream, EXECUTOR, EXECUTOR))
    assert await admin.fetchval("SELECT lease_until FROM tga.heads") > third, "and a plan of nothing"
    assert await recoverable(sessions, OTHER_EXECUTOR) == []
    assert await recoverable(sessions, EXECUTOR) == [counter.stream], "who asks knows which of its own it drives"

    await lease_over(admin, counter.stream)
    assert await recoverable(sessions, OTHER_EXECUTOR) == [counter.stream]
    assert await acquire_stream(sessions, counter.stream, OTHER_EXECUTOR) == EXECUTOR
    with pytest.raises(ConcurrentExecution, match="another executor owns"):
        await counter.count(ledger, EXECUTOR, owner_after=EXECUTOR)  # the zombie
    assert await recoverable(sessions, EXECUTOR) == []
    await counter.count(ledger, OTHER_EXECUTOR, owner_after=None, then="stop")
    assert await admin.fetchval("SELECT lease_until FROM tga.heads") is None
    assert await recoverable(sessions, EXECUTOR) == []
    assert await admin.fetchval("SELECT count(*) FROM tga.in_work") == 0, "what has ended was swept away"
    assert await admin.fetchval("SELECT count(*) FROM tga.at_rest") == 0, "and ended as usual"
    with pytest.raises(InvalidTransition):
        await counter.count(ledger, OTHER_EXECUTOR)


async def test_a_session_lock_tells_of_another_kinds_owners_too(
    admin: Admin, sessions: Sessions, ledger: PostgresLedger, executor: Executor, database: Database
) -> None:
    await make_kind(admin, "session")
    counter, living = Counter("locked"), await Executor.open(database.gateway_url)
    await counter.count(ledger, living.executor_id, owner_after=living.executor_id)
    assert await admin.fetchval("SELECT lease_until FROM tga.heads") is None
    with pytest.raises(ConcurrentExecution):
        await acquire_stream(sessions, counter.stream, executor.executor_id)
    assert await recoverable(sessions, executor.executor_id) == []
    await living.close()
    assert await recoverable(sessions, executor.executor_id) == [counter.stream]
    assert await acquire_stream(sessions, counter.stream, executor.executor_id) == living.executor_id
    assert await release_stream(sessions, counter.stream, executor.executor_id)
    waiting = Plan(counter.stream, EXECUTOR, None, waiting_after="someone")
    await ledger.commit(waiting)
    assert await recoverable(sessions, EXECUTOR) == [], "what waits is nobody's work"
    assert await admin.fetchval("SELECT waiting FROM tga.at_rest") == "someone"
    await ledger.commit(waiting._replace(waiting_after=None))
    assert await recoverable(sessions, EXECUTOR) == [counter.stream]
    assert await admin.fetchval("SELECT count(*) FROM tga.at_rest") == 0


async def test_a_recoverer_of_one_kind_asks_for_no_lock_of_another(
    admin: Admin, sessions: Sessions, ledger: PostgresLedger
) -> None:
    await make_kind(admin, "lease")
    for n in range(5):
        await Counter(f"n-{n}").count(ledger, EXECUTOR, owner_after=EXECUTOR)
    rows = await sessions.commit("SELECT s FROM tga.recoverable('trace', $1::uuid, NULL, 10) AS s", OTHER_EXECUTOR)
    assert rows == []
    async with admin.transaction():
        await admin.fetch("SELECT tga.recoverable('counter', $1::uuid, NULL, 10)", OTHER_EXECUTOR)
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert await admin.fetchval(held) == 0


async def test_pages_of_work_go_on_after_the_last_one(admin: Admin, sessions: Sessions, ledger: PostgresLedger) -> None:
    await make_kind(admin, "session")
    for n in (3, 1, 2):
        await Counter(f"n-{n}").count(ledger, EXECUTOR)
    found: list[str] = []
    while rows := await sessions.commit(
        "SELECT s FROM tga.recoverable('counter', $1::uuid, $2, 1) AS s", EXECUTOR, found[-1] if found else None
    ):
        found += [row["s"] for row in rows]
    assert found == ["counter:n-3", "counter:n-1", "counter:n-2"], "oldest first"
