"""Collection: what no entry refers to goes, after a day; what one refers to stays, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from app.core.digest import Digest, digest_of_bytes
from app.core.errors import BlobGoing, BlobNotFound, BlobStoreUnavailable, RunBlobMissing
from app.core.limits import BLOB_IDLE_MS
from app.domain.ledger.plans import BlobUse, Plan
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from tests.blobs.conftest import Shelf, pieces_of
from tests.conftest import Admin
from tests.invariants.plans import plan_of
from tests.patience import HANG_S
from tests.traces import completed_trace, pending_trace

DATA = b"a large value"
BLOB = digest_of_bytes(DATA)
GATE_KEY = 20_261_117


def referring(n: int, sha256: Digest = BLOB, size_bytes: int = len(DATA)) -> Plan:
    return plan_of(pending_trace(n))._replace(blobs=[BlobUse(1, sha256, size_bytes)])


class Killed(BaseException):
    """The process ended here."""


async def test_what_is_old_and_unreferred_goes_and_nothing_else(
    shelf: Shelf, ledger: PostgresLedger, admin: Admin
) -> None:
    old, fresh, used = [await shelf.put(data) for data in (b"old", b"fresh", b"used")]
    await ledger.commit(referring(1, used, 4))
    await admin.execute(
        "UPDATE tga.blobs SET touched_at = touched_at - $1 * interval '1 millisecond' WHERE sha256 <> $2",
        BLOB_IDLE_MS,
        bytes.fromhex(fresh),
    )
    assert await shelf.blobs.collect() == 1
    assert await shelf.states() == {fresh: "stored", used: "used"}
    assert shelf.files() == sorted([fresh, used])
    with pytest.raises(BlobNotFound):
        await shelf.blobs.open("default", old)
    with pytest.raises(RunBlobMissing):
        await ledger.commit(referring(2, old, 3))
    assert await shelf.put(b"old") == old, "it can come again"
    await ledger.commit(referring(2, old, 3))


async def test_an_upload_of_what_is_there_keeps_it_for_another_day(shelf: Shelf, admin: Admin) -> None:
    await shelf.put(DATA)
    await admin.execute("UPDATE tga.blobs SET touched_at = '2020-01-01'")
    await shelf.put(DATA)
    assert await shelf.blobs.collect() == 0
    assert await shelf.states() == {BLOB: "stored"}


async def test_erasure_of_the_last_reference_lets_it_go(shelf: Shelf, ledger: PostgresLedger, admin: Admin) -> None:
    await shelf.put(DATA)
    plans = [plan_of(completed_trace(n))._replace(blobs=[BlobUse(n, BLOB, len(DATA))]) for n in (1, 2)]
    for plan in plans:
        await ledger.commit(plan)
    collector = shelf.again(idle_ms=0)
    for plan, left in zip(plans, (1, 0), strict=True):
        await admin.execute("INSERT INTO tga.erasures VALUES ($1, 'system:default', 1)", plan.stream)
        await admin.execute(
            "DELETE FROM tga.payloads WHERE stream_no = (SELECT stream_no FROM tga.heads WHERE stream = $1)",
            plan.stream,
        )
        assert await admin.fetchval("SELECT count(*) FROM tga.blob_refs") == left
        assert await shelf.states() == {BLOB: "stored"}, "whether another refers to it, collection sees"
        assert await collector.collect() == (0 if left else 1)
        assert await shelf.states() == ({BLOB: "used"} if left else {})
    assert shelf.files() == []


# Against appends, on sessions of their own. The gate holds a statement inside its transaction.


async def _gate(admin: Admin, statement: str) -> None:
    await admin.execute(f"""
        CREATE FUNCTION public.wait_at_gate() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS
            'BEGIN PERFORM pg_catalog.pg_advisory_xact_lock({GATE_KEY}); RETURN NULL; END';
        CREATE TRIGGER gate BEFORE {statement} FOR EACH STATEMENT EXECUTE FUNCTION public.wait_at_gate()
    """)
    await admin.execute("SELECT pg_advisory_lock($1)", GATE_KEY)


async def _waits(admin: Admin, task: asyncio.Future[Any], *, sessions: int) -> None:
    """Until so many sessions wait for a lock that another holds."""
    async with asyncio.timeout(HANG_S):
        while True:
            assert not task.done(), f"it did not wait: {task!r}"
            waiting = await admin.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND cardinality(pg_blocking_pids(pid)) > 0"
            )
            if waiting == sessions:
                return
            await asyncio.sleep(0.002)


async def test_a_reference_that_meets_a_collection_waits_and_is_refused(
    shelf: Shelf, ledger: PostgresLedger, admin: Admin
) -> None:
    await shelf.put(DATA)
    await _gate(admin, "UPDATE ON tga.blobs")
    collecting = asyncio.create_task(shelf.again(idle_ms=0).collect())
    await _waits(admin, collecting, sessions=1)  # it has looked at the references, and marked nothing yet
    appending = asyncio.create_task(ledger.commit(referring(1)))
    await _waits(admin, appending, sessions=2)
    await admin.execute("SELECT pg_advisory_unlock_all()")
    with pytest.raises(RunBlobMissing) as refused:
        await appending
    assert refused.value.found in ("going", None)
    assert await collecting == 1
    assert await admin.fetchval("SELECT count(*) FROM tga.blob_refs") == 0
    assert shelf.files() == []


async def test_a_collection_that_meets_a_reference_leaves_the_blob(
    shelf: Shelf, ledger: PostgresLedger, admin: Admin
) -> None:
    await shelf.put(DATA)
    await _gate(admin, "INSERT ON tga.blob_refs")
    appending = asyncio.create_task(ledger.commit(referring(1)))
    await _waits(admin, appending, sessions=1)  # it has judged the blob, and its reference is not committed
    assert await shelf.again(idle_ms=0).collect() == 0
    await admin.execute("SELECT pg_advisory_unlock_all()")
    await appending
    assert await shelf.again(idle_ms=0).collect() == 0
    assert await shelf.states() == {BLOB: "used"}
    assert await (await shelf.blobs.open("default", BLOB)).pieces().__anext__() == DATA


async def test_a_reference_that_commits_while_a_collection_looks_around_keeps_its_blob(
    shelf: Shelf, ledger: PostgresLedger, admin: Admin, database: Database
) -> None:
    """The collection began before the reference was committed, and comes to the blob after."""
    await shelf.put(DATA)
    await admin.execute(
        "INSERT INTO tga.blobs (tenant, sha256, size_bytes, state, touched_at)"
        " SELECT 'others', sha256(n::text::bytea), 1, 'stored', '2020-01-01' FROM generate_series(1, 40000) AS n"
    )
    await admin.execute(f"""
        CREATE FUNCTION public.wait_at_gate() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS
            'BEGIN PERFORM pg_catalog.pg_advisory_xact_lock({GATE_KEY}); RETURN NULL; END';
        CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON tga.blob_refs DEFERRABLE INITIALLY DEFERRED
           FOR EACH ROW EXECUTE FUNCTION public.wait_at_gate()
    """)
    await admin.execute("SELECT pg_advisory_lock($1)", GATE_KEY)
    appending = asyncio.create_task(ledger.commit(referring(1)))
    await _waits(admin, appending, sessions=1)  # all is written, and not committed
    collector = await asyncpg.connect(database.admin_url)
    try:
        taking = asyncio.create_task(collector.fetch("SELECT * FROM tga.take_idle_blobs(0, 0, 1000000)"))
        pid = collector.get_server_pid()
        looks = "SELECT state = 'active' AND query LIKE '%take_idle%' FROM pg_stat_activity WHERE pid = $1"
        while not taking.done() and not await admin.fetchval(looks, pid):
            await asyncio.sleep(0)
        await admin.execute("SELECT pg_advisory_unlock_all()")
        await appending
        assert BLOB not in {row["sha256"].hex() for row in await taking}
    finally:
        await collector.close()
    assert (await shelf.states())[BLOB] == "used"
    await shelf.blobs.open("default", BLOB)


async def test_a_collection_of_one_statement_would_take_what_was_only_locked(database: Database, admin: Admin) -> None:
    """Why an append updates the rows of its blobs, and why collection first locks and then looks at references.

    A statement that waits for a locked row, and finds it unchanged, goes on with the references of its own snapshot:
    those that were committed meanwhile are not among them.
    """
    await admin.execute(
        "INSERT INTO tga.blobs (tenant, sha256, size_bytes, state, touched_at)"
        " VALUES ('default', $1, 1, 'stored', '2020-01-01')",
        bytes.fromhex(BLOB),
    )
    refer = "INSERT INTO tga.blob_refs VALUES (1, $2, $1, 'default')"
    take = """UPDATE tga.blobs b SET state = 'going' WHERE b.state = 'stored' AND b.touched_at < '2021-01-01'
               AND NOT EXISTS (SELECT FROM tga.blob_refs r WHERE r.sha256 = b.sha256) RETURNING 1"""
    other = await asyncpg.connect(database.admin_url)
    try:
        for number, (holds, is_taken) in enumerate(
            [
                ("UPDATE tga.blobs SET touched_at = clock_timestamp() WHERE sha256 = $1", False),
                ("SELECT FROM tga.blobs WHERE sha256 = $1 FOR UPDATE", True),
            ]
        ):
            await admin.execute("DELETE FROM tga.blob_refs")
            await admin.execute("UPDATE tga.blobs SET touched_at = '2020-01-01', state = 'stored'")
            async with other.transaction():
                await other.execute(holds, bytes.fromhex(BLOB))
                await other.execute(refer, bytes.fromhex(BLOB), number)
                taking = asyncio.create_task(admin.fetch(take))
                watcher = await asyncpg.connect(database.admin_url)
                await _waits(watcher, taking, sessions=1)
                await watcher.close()
            assert bool(await taking) == is_taken
    finally:
        await other.close()


async def test_references_and_collections_at_random_lose_nothing(
    shelf: Shelf, ledger: PostgresLedger, admin: Admin
) -> None:
    """Appends, uploads and collections that wait for nothing: whatever is referred to is there, and whole."""
    seed = int(os.environ.get("TGA_SEED") or random.randrange(2**32))
    print(f"TGA_SEED={seed}")
    chance = random.Random(seed)
    rounds = 2_000 if os.environ.get("TGA_SOAK") else 60
    data = [bytes([n]) * 10 for n in range(3)]
    referred: list[Digest] = []
    refused = 0

    async def append(n: int) -> None:
        nonlocal refused
        chosen = chance.choice(data)
        await asyncio.sleep(chance.random() / 200)
        try:
            if chance.random() < 0.7:
                await shelf.put(chosen)
            await ledger.commit(referring(n, digest_of_bytes(chosen), 10))
            referred.append(digest_of_bytes(chosen))
        except (RunBlobMissing, BlobGoing):
            refused += 1

    async def collect() -> None:
        await asyncio.sleep(chance.random() / 200)
        await shelf.again(idle_ms=0, retry_ms=60_000).collect()

    for number in range(rounds // 6):
        await asyncio.gather(*(append(6 * number + n) for n in range(6)), *(collect() for _ in range(6)))
        found = {Digest(row["sha256"].hex()) for row in await admin.fetch("SELECT DISTINCT sha256 FROM tga.blob_refs")}
        assert found == set(referred)
        for sha256 in found:
            await shelf.blobs.open("default", sha256)
        if number % 3 == 2:  # all are referred to by now: begin anew
            await admin.execute("DELETE FROM tga.blob_refs")
            await admin.execute("UPDATE tga.blobs SET state = 'stored', touched_at = '2020-01-01' WHERE state = 'used'")
            referred.clear()
    assert refused > 0, "they never met"


# Against uploads


async def test_an_upload_that_meets_a_deletion_waits_for_it(shelf: Shelf) -> None:
    await shelf.put(DATA)
    marked = asyncio.Event()

    async def while_going(_: str) -> None:
        assert await shelf.states() == {BLOB: "going"}
        with pytest.raises(BlobGoing):
            await shelf.blobs.put("default", BLOB, pieces_of(DATA))
        assert shelf.files() == [BLOB]
        marked.set()

    shelf.objects.at_delete = while_going
    assert await shelf.again(idle_ms=0).collect() == 1
    assert marked.is_set()
    assert await shelf.blobs.put("default", BLOB, pieces_of(DATA)) == (len(DATA), True)
    assert await shelf.states() == {BLOB: "stored"}
    assert shelf.files() == [BLOB]


@pytest.mark.parametrize("is_over", [False, True], ids=["deleting", "deleted"])
async def test_an_upload_on_its_way_when_the_same_blob_goes_is_never_lost(shelf: Shelf, is_over: bool) -> None:
    """Another upload of the same bytes ended, grew old and is collected, while this one still comes in."""
    started, may_end, at_delete, may_delete = (asyncio.Event() for _ in range(4))

    async def slow() -> AsyncIterator[bytes]:
        started.set()
        yield DATA
        await may_end.wait()

    async def hold(_: str) -> None:
        at_delete.set()
        await may_delete.wait()

    uploading = asyncio.create_task(shelf.blobs.put("default", BLOB, slow()))
    await started.wait()
    await shelf.put(DATA)
    shelf.objects.at_delete = hold
    collecting = asyncio.create_task(shelf.again(idle_ms=0).collect())
    await at_delete.wait()
    if is_over:
        may_delete.set()
        assert await collecting == 1
        may_end.set()
        assert await uploading == (len(DATA), True)
        assert await shelf.states() == {BLOB: "stored"}
        assert shelf.files() == [BLOB]
    else:
        may_end.set()
        with pytest.raises(BlobGoing):
            await uploading
        may_delete.set()
        assert await collecting == 1
        assert await shelf.states() == {}
        assert shelf.files() == []


async def test_an_upload_whose_row_went_before_its_end_is_told_to_come_again(shelf: Shelf, admin: Admin) -> None:
    """It was as slow as collection is patient: its object may be deleted any moment."""

    async def be_taken() -> None:
        await admin.execute("UPDATE tga.blobs SET state = 'going'")

    shelf.objects.at_written = be_taken
    with pytest.raises(BlobGoing):
        await shelf.blobs.put("default", BLOB, pieces_of(DATA))
    assert await shelf.states() == {BLOB: "going"}


# Crashes


@pytest.mark.parametrize("cut", ["before the object goes", "after the object is gone"])
async def test_a_collection_that_was_killed_is_taken_up_again(shelf: Shelf, ledger: PostgresLedger, cut: str) -> None:
    await shelf.put(DATA)

    async def die(_: str) -> None:
        raise Killed

    if cut == "before the object goes":
        shelf.objects.at_delete = die
    else:
        shelf.objects.after_delete = die
    with pytest.raises(Killed):
        await shelf.again(idle_ms=0).collect()
    shelf.objects.at_delete = shelf.objects.after_delete = None
    assert await shelf.states() == {BLOB: "going"}
    with pytest.raises(BlobGoing):
        await shelf.blobs.put("default", BLOB, pieces_of(DATA))
    with pytest.raises(BlobNotFound):
        await shelf.blobs.open("default", BLOB)
    with pytest.raises(RunBlobMissing):
        await ledger.commit(referring(1))
    assert await shelf.again(idle_ms=0).collect() == 0, "the one that began it may still be deleting"
    assert await shelf.again(idle_ms=0, retry_ms=0).collect() == 1
    assert await shelf.states() == {}
    assert shelf.files() == []
    await shelf.put(DATA)
    await ledger.commit(referring(1))


async def test_one_that_lost_its_turn_does_not_forget_for_the_next(shelf: Shelf) -> None:
    """Its row was taken up by another meanwhile: what that one is about to delete must still have a row."""
    await shelf.put(DATA)
    (late,) = await shelf.rows.take_idle(idle_ms=0, retry_ms=0, at_most=9)
    (newer,) = await shelf.rows.take_idle(idle_ms=0, retry_ms=0, at_most=9)
    await shelf.rows.forget([late])
    assert await shelf.states() == {BLOB: "going"}
    await shelf.rows.forget([newer])
    assert await shelf.states() == {}


async def test_a_deletion_that_fails_is_tried_again_and_the_others_go(shelf: Shelf) -> None:
    one, other = await shelf.put(b"one"), await shelf.put(b"other")

    async def fail(path: str) -> None:
        if path.endswith(one):
            raise BlobStoreUnavailable("away")

    shelf.objects.at_delete = fail
    with pytest.raises(BlobStoreUnavailable):
        await shelf.again(idle_ms=0).collect()
    assert await shelf.states() == {one: "going"}
    assert other not in shelf.files()
    shelf.objects.at_delete = None
    assert await shelf.again(idle_ms=0, retry_ms=0).collect() == 1
    assert shelf.files() == []


@pytest.mark.parametrize("cut", ["before it is visible", "when it is visible"])
async def test_an_upload_that_was_killed_can_be_sent_again_and_leaves_no_orphan(shelf: Shelf, cut: str) -> None:
    async def die() -> None:
        raise Killed

    begin = shelf.rows.begin

    async def begin_and_die(tenant: str, sha256: Digest, size_bytes: int) -> bool:
        await begin(tenant, sha256, size_bytes)
        raise Killed

    if cut == "when it is visible":
        shelf.objects.at_written = die
    else:
        shelf.rows.begin = begin_and_die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        await shelf.blobs.put("default", BLOB, pieces_of(DATA))
    shelf.objects.at_written, shelf.rows.begin = None, begin  # type: ignore[method-assign]
    assert await shelf.states() == {BLOB: "coming"}
    with pytest.raises(BlobNotFound):
        await shelf.blobs.open("default", BLOB)
    if cut == "when it is visible":
        assert await shelf.again(idle_ms=0).collect() == 1, "an object without an end is collected too"
        assert (shelf.files(), await shelf.states()) == ([], {})
    assert await shelf.blobs.put("default", BLOB, pieces_of(DATA)) == (len(DATA), True)
    assert await shelf.states() == {BLOB: "stored"}


async def test_gateways_take_turns(shelf: Shelf) -> None:
    """Two collections at once never take the same blob."""
    for n in range(20):
        await shelf.put(bytes([n]))
    took = await asyncio.gather(*(shelf.rows.take_idle(idle_ms=0, retry_ms=60_000, at_most=3) for _ in range(10)))
    names = [blob.sha256 for taken in took for blob in taken]
    assert len(names) == len(set(names)) > 0


async def test_collection_looks_at_nothing_that_is_used(shelf: Shelf, ledger: PostgresLedger, admin: Admin) -> None:
    await admin.execute(
        "INSERT INTO tga.blobs (tenant, sha256, size_bytes, state, touched_at)"
        " SELECT 'default', sha256(n::text::bytea), 1, 'used', '2020-01-01' FROM generate_series(1, 20000) AS n"
    )
    await admin.execute("ANALYZE tga.blobs")
    for _ in range(6):
        await admin.fetch("SELECT * FROM tga.take_idle_blobs(0, 0, 100)")
    plan = await admin.fetchval("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM tga.take_idle_blobs(0, 0, 100)")
    node = json.loads(plan)[0]["Plan"]
    assert node["Shared Hit Blocks"] + node["Shared Read Blocks"] < 50, node
