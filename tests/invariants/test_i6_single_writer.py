"""I6: a trace has one writer at a time. Real sessions, real processes, real kills."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.core.digest import Digest
from app.core.errors import ConcurrentExecution, KeyClaimed, LockAcquireFailed, SequenceGap, TgaError
from app.domain.ledger.plans import Plan
from app.domain.tga.documents import TraceId
from app.domain.tga.idempotency import decide_claim
from app.domain.tga.replay import LogRecord
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.ownership import Executor, acquire_stream
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from tests.invariants.appender import Outcome, contend
from tests.invariants.plans import Admin, contents, plan_of, tables_naming, verify_all
from tests.patience import HANG_S
from tests.traces import EXECUTOR, OTHER_EXECUTOR, completed_trace, executing_trace, failed_trace, pending_trace, uuid7

REPOSITORY = Path(__file__).resolve().parents[2]
# What a loser is told: the owner fence or the sequence speaks, nothing else.
LOSSES = {"STATE_SEQUENCE_GAP", "STATE_CONCURRENT_EXECUTION"}

OpenStore = Callable[[], Awaitable[tuple[PostgresStateStore, Executor]]]


@pytest.fixture
async def open_store(database: Database, sessions: Sessions) -> AsyncIterator[OpenStore]:
    """More executors, as if each were a process of its own."""
    async with AsyncExitStack() as opened:

        async def open_one() -> tuple[PostgresStateStore, Executor]:
            executor = await opened.enter_async_context(await Executor.open(database.gateway_url))
            return PostgresStateStore(sessions, PostgresLedger(sessions), executor, lock_timeout_ms=2000), executor

        yield open_one


class RecordingSessions(Sessions):
    """Sessions that note every commit that failed as a whole, which a ledger would otherwise retry in silence."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        super().__init__(pool)
        self.failures: list[TgaError] = []

    async def commit(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        try:
            return await super().commit(statement, *arguments)
        except TgaError as error:
            self.failures.append(error)
            raise


@pytest.fixture
async def recorded(database: Database) -> AsyncIterator[RecordingSessions]:
    async with await RecordingSessions.open(database.gateway_url, sessions_max=6) as opened:
        yield opened


@asynccontextmanager
async def another_process(database: Database, *arguments: object) -> AsyncIterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.invariants.appender", database.gateway_url, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)},
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


async def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return (await asyncio.to_thread(child.stdout.readline)).strip()


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def id_of(record: LogRecord) -> TraceId:
    return TraceId(record.entry.trace_id)


async def end_session(admin: Admin, executor: Executor) -> None:
    """The executor's own session dies, and its process does not know."""
    pid = await admin.fetchval(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'"
        " AND (classid::bigint << 32 | objid::bigint) = tga.executor_lock_key($1)",
        executor.executor_id,
    )
    assert await admin.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)


async def append_all(store: PostgresStateStore, records: Sequence[LogRecord]) -> None:
    for record in records:
        await store.append_log_entry(record)


async def owner_of(admin: Admin, stream: str) -> str | None:
    owner = await admin.fetchval("SELECT owner FROM tga.heads WHERE stream = $1", stream)
    return None if owner is None else str(owner)


async def code_of(attempt: Awaitable[object]) -> str | None:
    """The stable code that it fails with; None if it does not. Whatever else it raises fails the test."""
    try:
        await attempt
    except TgaError as error:
        return error.code
    return None


def refusals(results: Sequence[TgaError | None]) -> list[str | None]:
    return [None if error is None else error.code for error in results]


async def waiting_for_locks(admin: Admin) -> int:
    count: int = await admin.fetchval(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return count


async def pids_with_locks(admin: Admin) -> set[int]:
    """Of the sessions by whose advisory locks owners are seen to live."""
    rows = await admin.fetch(
        "SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return {row["pid"] for row in rows}


async def until(condition: Callable[[], Awaitable[bool]], *, timeout_s: float = HANG_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.005)


# Appending at the same time


@pytest.mark.parametrize("what", ["race", "drive"])
async def test_two_processes_with_fifty_tasks_make_one_chain(
    what: str, database: Database, recorded: RecordingSessions, store: PostgresStateStore
) -> None:
    """`race`: all append at once, owning nothing. `drive`: each acquires first, and then loses no append."""
    traces, tasks = 3, 25
    async with another_process(database, what, 1000, 0, traces, tasks) as child:
        assert await line_of(child) == "ready"
        async with await Executor.open(database.gateway_url) as executor:
            ours = PostgresStateStore(recorded, PostgresLedger(recorded), executor)
            tell(child)
            here = await contend(ours, what, 0, 0, traces, tasks)
        there = Outcome.from_line(await line_of(child))
        assert await asyncio.to_thread(child.wait, 10) == 0

    winners = Counter((n, sequence) for n, sequence, _ in here.won + there.won)
    assert winners == {(n, sequence): 1 for n in range(traces) for sequence in (1, 2, 3, 4)}
    digests = {(n, sequence): digest for n, sequence, digest in here.won + there.won}
    for n in range(traces):
        records = await store.list_log_entries(id_of(completed_trace(n)[0]), 0)
        assert [record.entry.entry_digest for record in records] == [digests[n, sequence] for sequence in (1, 2, 3, 4)]
        state = await store.load_state(id_of(records[0]))
        assert (state.state, state.sequence_number) == ("COMPLETED", 4)
    assert (await verify_all(recorded)).entries == 4 * traces

    assert set(here.lost) | set(there.lost) <= LOSSES
    assert here.lost.total() > 0, "they never met: the test would prove nothing"
    assert there.lost.total() > 0
    assert recorded.failures == []


async def test_of_many_births_of_one_trace_exactly_one_is_stored(
    recorded: RecordingSessions, admin: Admin, open_store: OpenStore
) -> None:
    ledger = PostgresLedger(recorded)
    births = [pending_trace(1, executor_id=uuid7(n, role="executor")) for n in range(24)]
    plans = [plan_of(birth, executor_id=birth[0].entry.executor_id) for birth in births]
    codes = await asyncio.gather(*(code_of(ledger.commit(plan)) for plan in plans))
    assert Counter(codes) == {None: 1, "STATE_SEQUENCE_GAP": 23}
    stored = await admin.fetchval("SELECT entry FROM tga.entries")
    assert stored == plans[codes.index(None)].entries[0].entry
    assert await tables_naming(admin, plans[0].stream) == {"links": 1, "payloads": 1, "heads": 1, "in_work": 1}


# Holders in other processes


async def test_while_another_process_holds_a_trace_it_cannot_be_acquired_or_appended_to(
    database: Database, admin: Admin, store: PostgresStateStore
) -> None:
    (birth,) = pending_trace(1)
    async with another_process(database, "hold", 0, 1, 1, 1) as child:
        assert await line_of(child) == "held"
        before = await contents(admin)
        # Refused, not waited for: what waits in vain is LockAcquireFailed.
        with pytest.raises(ConcurrentExecution):
            await store.acquire_trace_lock(id_of(birth))
        with pytest.raises(ConcurrentExecution):
            await store.append_log_entry(birth)
        assert await contents(admin) == before

        tell(child)
        assert await asyncio.to_thread(child.wait, 10) == 0
    await store.acquire_trace_lock(id_of(birth))


async def test_a_holder_killed_with_kill_9_frees_its_trace_at_once(
    database: Database, store: PostgresStateStore, admin: Admin
) -> None:
    (birth,) = pending_trace(1)
    others = await pids_with_locks(admin)
    async with another_process(database, "hold", 0, 1, 1, 1) as child:
        assert await line_of(child) == "held"
        assert await code_of(store.acquire_trace_lock(id_of(birth))) == "STATE_CONCURRENT_EXECUTION"
        assert (await pids_with_locks(admin)) - others, "a living owner holds a lock"
        child.send_signal(signal.SIGKILL)

        async def is_gone() -> bool:
            return await pids_with_locks(admin) <= others

        await until(is_gone)  # PostgreSQL has seen that the connection broke
        await store.acquire_trace_lock(id_of(birth))  # there is no lease to wait for
    await store.append_log_entry(birth)


async def test_a_frozen_holder_still_owns_its_trace(
    database: Database, store: PostgresStateStore, admin: Admin
) -> None:
    """Alive is what has its session: there is no lease that runs out."""
    (birth,) = pending_trace(1)
    async with another_process(database, "hold", 0, 1, 1, 1) as child:
        assert await line_of(child) == "held"
        child.send_signal(signal.SIGSTOP)
        owner = await owner_of(admin, birth.stream)
        for _ in range(5):
            assert await code_of(store.acquire_trace_lock(id_of(birth))) == "STATE_CONCURRENT_EXECUTION"
            assert await code_of(store.append_log_entry(birth)) == "STATE_CONCURRENT_EXECUTION"
            await asyncio.sleep(0.1)
        assert await owner_of(admin, birth.stream) == owner
        child.send_signal(signal.SIGCONT)
        tell(child)
        assert await asyncio.to_thread(child.wait, 10) == 0


# The fence


@pytest.mark.parametrize("b_appends", [True, False], ids=["b_has_appended", "b_has_not_appended_yet"])
async def test_the_late_append_of_a_fenced_holder_is_refused(
    b_appends: bool, admin: Admin, sessions: Sessions, open_store: OpenStore
) -> None:
    (a, executor_a), (b, executor_b) = await open_store(), await open_store()
    first, second, third = executing_trace(1, executor_id=executor_a.executor_id)
    trace_id = id_of(first)
    await a.acquire_trace_lock(trace_id)
    await a.append_log_entry(first)
    assert await code_of(b.acquire_trace_lock(trace_id)) == "STATE_CONCURRENT_EXECUTION"

    await end_session(admin, executor_a)
    await b.acquire_trace_lock(trace_id)
    if b_appends:
        await b.append_log_entry(second)
    before = await contents(admin)
    assert await code_of(a.append_log_entry(third if b_appends else second)) == "STATE_CONCURRENT_EXECUTION"
    assert await contents(admin) == before
    assert await owner_of(admin, first.stream) == executor_b.executor_id

    await append_all(b, [third] if b_appends else [second, third])
    await verify_all(sessions)


async def test_a_zombies_late_effect_does_not_replace_the_recovered_one(
    admin: Admin, sessions: Sessions, open_store: OpenStore
) -> None:
    (a, executor_a), (b, _) = await open_store(), await open_store()
    *executing, effect_of_a = completed_trace(1)
    effect_of_b = failed_trace(1)[-1]
    trace_id = id_of(effect_of_a)
    await a.acquire_trace_lock(trace_id)
    await append_all(a, executing)
    await end_session(admin, executor_a)
    await b.acquire_trace_lock(trace_id)
    await b.append_log_entry(effect_of_b)
    before = await contents(admin)
    # The trace has ended and nobody owns it any more; now it is the sequence that refuses.
    assert await code_of(a.append_log_entry(effect_of_a)) in LOSSES
    assert await contents(admin) == before
    assert (await b.load_state(trace_id)).state == "FAILED"
    await verify_all(sessions)


async def test_a_lost_executor_acquires_nothing_more(admin: Admin, open_store: OpenStore) -> None:
    a, executor_a = await open_store()
    await end_session(admin, executor_a)
    before = await contents(admin)
    assert await code_of(a.acquire_trace_lock(id_of(pending_trace(1)[0]))) == "STORE_UNAVAILABLE"
    assert await contents(admin) == before
    assert executor_a.is_lost()


async def test_an_operator_of_someone_else_does_not_make_a_living_owner_look_dead(
    admin: Admin, open_store: OpenStore
) -> None:
    """Before PostgreSQL 15 everyone may create in `public`, which is on the search path of our sessions."""
    await admin.execute("""
        CREATE FUNCTION public.joined(text, uuid) RETURNS text LANGUAGE sql IMMUTABLE AS
            $$ SELECT pg_catalog.concat($1, $2, ' elsewhere') $$;
        CREATE OPERATOR public.|| (LEFTARG = text, RIGHTARG = uuid, FUNCTION = public.joined)
    """)
    (a, _), (b, _) = await open_store(), await open_store()
    (birth,) = pending_trace(1)
    await a.acquire_trace_lock(id_of(birth))
    assert await code_of(b.acquire_trace_lock(id_of(birth))) == "STATE_CONCURRENT_EXECUTION"


# Never for ever


async def test_nothing_waits_longer_than_its_lock_timeout(
    admin: Admin, sessions: Sessions, executor: Executor, database: Database
) -> None:
    store = PostgresStateStore(sessions, PostgresLedger(sessions, lock_timeout_ms=200), executor, lock_timeout_ms=200)
    first, second = executing_trace(1)[:2]
    trace_id = id_of(first)
    await store.acquire_trace_lock(trace_id)
    await store.append_log_entry(first)
    unheld = PostgresStateStore(sessions, PostgresLedger(sessions, lock_timeout_ms=200), executor, lock_timeout_ms=200)
    before = await contents(admin)
    async with admin.transaction():
        await admin.execute("SELECT pg_advisory_xact_lock(tga.stream_lock_key($1))", first.stream)
        patient = asyncio.create_task(
            acquire_stream(sessions, first.stream, uuid7(9, role="executor"), lock_timeout_ms=600_000)
        )
        for attempt in (
            unheld.acquire_trace_lock(trace_id),
            store.append_log_entry(second),
            PostgresLedger(sessions, lock_timeout_ms=200).commit(
                Plan(first.stream, executor.executor_id, None, dispatch_attempt=2)
            ),
        ):
            began = time.monotonic()
            with pytest.raises(LockAcquireFailed):
                await attempt
            assert time.monotonic() - began > 0.15
            assert not patient.done(), "who waits for 200 ms waited as long as who waits for ten minutes"
        patient.cancel()
        assert await contents(admin) == before
    await unheld.acquire_trace_lock(trace_id)
    await store.append_log_entry(second)
    await store.release_trace_lock(trace_id)


async def test_a_claim_that_is_being_made_elsewhere_is_not_waited_for_longer_than_the_lock_timeout(
    admin: Admin, sessions: Sessions
) -> None:
    plan = plan_of(pending_trace(1))
    assert plan.claim is not None
    transaction = admin.transaction()
    await transaction.start()
    await admin.execute(
        "INSERT INTO tga.heads (stream, subject, name, idempotency_key, payload_digest, sequence_number, entry_digest,"
        " state, is_open) VALUES ('trace:other', $1, $2, $3, sha256('x'), 0, sha256('x'), 'PENDING', false)",
        plan.claim.server_id,
        plan.claim.tool_name,
        plan.claim.idempotency_key,
    )
    ledger = PostgresLedger(sessions, lock_timeout_ms=200)
    began = time.monotonic()
    assert await code_of(ledger.commit(plan)) == "STATE_LOCK_ACQUIRE_FAILED"
    assert time.monotonic() - began > 0.15
    await transaction.rollback()
    assert await code_of(ledger.commit(plan)) is None


async def test_the_locked_stream_of_a_batch_does_not_fail_the_others(admin: Admin, sessions: Sessions) -> None:
    plans = [plan_of(pending_trace(n)) for n in range(4)]
    async with admin.transaction():
        await admin.execute("SELECT pg_advisory_xact_lock(tga.stream_lock_key($1))", plans[2].stream)
        results = await PostgresLedger(sessions, lock_timeout_ms=200).commit_batch(plans)
    assert refusals(results) == [None, None, "STATE_LOCK_ACQUIRE_FAILED", None]
    assert await tables_naming(admin, plans[2].stream) == {}
    assert (await verify_all(sessions)).entries == 3


# One process


async def test_two_tasks_of_one_process_are_two_executors_too(store: PostgresStateStore) -> None:
    trace_id = id_of(pending_trace(1)[0])
    codes = await asyncio.gather(*(code_of(store.acquire_trace_lock(trace_id)) for _ in range(10)))
    assert Counter(codes) == {None: 1, "STATE_CONCURRENT_EXECUTION": 9}
    await store.release_trace_lock(trace_id)
    await store.acquire_trace_lock(trace_id)
    assert await code_of(store.acquire_trace_lock(trace_id)) == "STATE_CONCURRENT_EXECUTION"


async def test_tasks_of_one_process_acquire_different_traces_at_the_same_time(store: PostgresStateStore) -> None:
    ids = [id_of(pending_trace(n)[0]) for n in range(20)]
    assert set(await asyncio.gather(*(code_of(store.acquire_trace_lock(n)) for n in ids))) == {None}


async def test_only_the_holder_releases_and_only_once(admin: Admin, open_store: OpenStore) -> None:
    (a, executor_a), (b, _) = await open_store(), await open_store()
    (birth,) = pending_trace(1)
    trace_id = id_of(birth)
    await a.acquire_trace_lock(trace_id)
    await a.append_log_entry(birth)
    before = await contents(admin)
    assert await code_of(b.release_trace_lock(trace_id)) == "STATE_CONCURRENT_EXECUTION"
    assert await contents(admin) == before
    await a.release_trace_lock(trace_id)
    assert await owner_of(admin, birth.stream) is None
    assert await code_of(a.release_trace_lock(trace_id)) == "STATE_CONCURRENT_EXECUTION"
    await b.acquire_trace_lock(trace_id)
    assert await code_of(a.acquire_trace_lock(trace_id)) == "STATE_CONCURRENT_EXECUTION"
    assert executor_a.is_lost() is False


async def test_a_release_that_failed_can_be_repeated(
    admin: Admin, sessions: Sessions, executor: Executor, open_store: OpenStore
) -> None:
    """Otherwise a living process would own the trace for as long as it lives, and nobody could go on with it."""
    a = PostgresStateStore(sessions, PostgresLedger(sessions), executor, lock_timeout_ms=100)
    b, _ = await open_store()
    (birth,) = pending_trace(1)
    await a.acquire_trace_lock(id_of(birth))
    await a.append_log_entry(birth)
    async with admin.transaction():
        await admin.execute("SELECT pg_advisory_xact_lock(tga.stream_lock_key($1))", birth.stream)
        assert await code_of(a.release_trace_lock(id_of(birth))) == "STATE_LOCK_ACQUIRE_FAILED"
    await a.release_trace_lock(id_of(birth))
    await b.acquire_trace_lock(id_of(birth))


@pytest.mark.parametrize("has_entries", [True, False])
async def test_releasing_after_having_been_fenced_does_not_free_the_new_owners_hold(
    has_entries: bool, admin: Admin, open_store: OpenStore
) -> None:
    (a, executor_a), (b, executor_b), (c, _) = await open_store(), await open_store(), await open_store()
    (birth,) = pending_trace(1)
    trace_id = id_of(birth)
    await a.acquire_trace_lock(trace_id)
    if has_entries:
        await a.append_log_entry(birth)
    await end_session(admin, executor_a)
    await b.acquire_trace_lock(trace_id)
    before = await contents(admin)
    await a.release_trace_lock(trace_id)
    assert await contents(admin) == before
    assert await owner_of(admin, birth.stream) == executor_b.executor_id
    assert await code_of(c.acquire_trace_lock(trace_id)) == "STATE_CONCURRENT_EXECUTION"


async def test_a_trace_acquired_without_entries_is_its_holders_and_leaves_nothing_behind(
    admin: Admin, sessions: Sessions, open_store: OpenStore
) -> None:
    (a, executor_a), (b, _) = await open_store(), await open_store()
    (birth,) = pending_trace(1)
    trace_id = id_of(birth)
    empty = await contents(admin)
    await a.acquire_trace_lock(trace_id)
    assert await owner_of(admin, birth.stream) == executor_a.executor_id
    assert await code_of(b.append_log_entry(birth)) == "STATE_CONCURRENT_EXECUTION"
    assert await code_of(b.load_state(trace_id)) == "TRACE_NOT_FOUND"
    await verify_all(sessions)
    await a.release_trace_lock(trace_id)
    assert await contents(admin) == empty
    await b.append_log_entry(birth)


async def test_a_process_that_ends_frees_its_traces_at_once(admin: Admin, open_store: OpenStore) -> None:
    (a, executor_a), (b, executor_b) = await open_store(), await open_store()
    births = [pending_trace(n)[0] for n in range(5)]
    for birth in births:
        await a.acquire_trace_lock(id_of(birth))
        await a.append_log_entry(birth)
    before = await pids_with_locks(admin)
    await executor_a.close()

    async def is_gone() -> bool:
        return len(await pids_with_locks(admin)) < len(before)

    await until(is_gone)
    for birth in births:
        await b.acquire_trace_lock(id_of(birth))
    assert {await owner_of(admin, birth.stream) for birth in births} == {executor_b.executor_id}


# Recovery


async def test_of_twenty_that_recover_a_dead_owners_traces_one_gets_each(
    database: Database, admin: Admin, recorded: RecordingSessions, open_store: OpenStore
) -> None:
    recoverers = [(await open_store())[1].executor_id for _ in range(20)]
    for round_number in range(4):
        births = [pending_trace(10 * round_number + n)[0] for n in range(3)]
        async with await Executor.open(database.gateway_url) as dead:
            owner = PostgresStateStore(recorded, PostgresLedger(recorded), dead)
            for birth in births:
                await owner.acquire_trace_lock(id_of(birth))
                await owner.append_log_entry(birth)
            assert await code_of(acquire_stream(recorded, births[0].stream, recoverers[0])) is not None
            await end_session(admin, dead)

        wanted = [(birth.stream, recoverer) for birth in births for recoverer in recoverers]
        random.Random(round_number).shuffle(wanted)
        taken_from = await asyncio.gather(
            *(acquire_stream(recorded, stream, recoverer) for stream, recoverer in wanted), return_exceptions=True
        )
        refused = [result for result in taken_from if isinstance(result, BaseException)]
        assert {type(error) for error in refused} == {ConcurrentExecution}
        won = {
            stream: recoverer
            for (stream, recoverer), result in zip(wanted, taken_from, strict=True)
            if result == dead.executor_id
        }
        assert len(won) == 3
        assert len(refused) == len(wanted) - 3
        for stream, recoverer in won.items():
            assert await owner_of(admin, stream) == recoverer
    assert recorded.failures == []


async def test_two_that_look_at_one_dead_owner_do_not_take_each_other_for_it(
    admin: Admin, open_store: OpenStore
) -> None:
    (a, executor_a), (b, _) = await open_store(), await open_store()
    (birth,) = pending_trace(1)
    await a.acquire_trace_lock(id_of(birth))
    await end_session(admin, executor_a)
    async with admin.transaction():  # someone recovers another trace of the same owner, and is not done yet
        assert await admin.fetchval(
            "SELECT pg_try_advisory_xact_lock_shared(tga.executor_lock_key($1))", executor_a.executor_id
        )
        await b.acquire_trace_lock(id_of(birth))


async def test_a_recoverer_reads_what_was_committed_while_it_waited_for_the_lock(
    admin: Admin, sessions: Sessions, executor: Executor
) -> None:
    """Lock and read in one statement would judge a head from before the lock."""
    (birth,) = pending_trace(1)
    transaction = admin.transaction()
    await transaction.start()
    await admin.execute("SELECT pg_advisory_xact_lock(tga.stream_lock_key($1))", birth.stream)
    waiting = [
        asyncio.create_task(code_of(acquire_stream(sessions, birth.stream, executor.executor_id))),
        asyncio.create_task(code_of(PostgresLedger(sessions).commit(plan_of([birth])))),
    ]

    async def both_wait() -> bool:
        return await waiting_for_locks(admin) == 2

    await until(both_wait)
    # A living executor takes it in the meantime: this session itself.
    await admin.execute("SELECT pg_advisory_lock(tga.executor_lock_key($1))", OTHER_EXECUTOR)
    await admin.fetch("SELECT * FROM tga.acquire(1000, $1, $2::uuid)", birth.stream, OTHER_EXECUTOR)
    await transaction.commit()
    assert await asyncio.gather(*waiting) == ["STATE_CONCURRENT_EXECUTION", "STATE_CONCURRENT_EXECUTION"]
    assert await owner_of(admin, birth.stream) == OTHER_EXECUTOR


# Batches


async def test_batches_over_the_same_streams_in_any_order_do_not_deadlock(
    admin: Admin, recorded: RecordingSessions
) -> None:
    """All wait, then all are let go at the same instant: without an order they would wait for each other."""
    ledger = PostgresLedger(recorded)
    for round_number in range(6):
        shuffled = random.Random(round_number)
        numbers = [100 * round_number + n for n in range(8)]
        batches = []
        for contestant in range(4):
            executor_id = uuid7(contestant, role="executor")
            batch = [plan_of(pending_trace(n, executor_id=executor_id), executor_id=executor_id) for n in numbers]
            # The first two in exactly opposite orders, the others in any.
            batches.append([batch, batch[::-1], *(shuffled.sample(batch, 8) for _ in range(2))][contestant])
        streams = [plan.stream for plan in batches[0]]
        transaction = admin.transaction()
        await transaction.start()
        await admin.execute("SELECT pg_advisory_xact_lock(tga.stream_lock_key(s)) FROM unnest($1::text[]) s", streams)
        tasks = [asyncio.create_task(ledger.commit_batch(batch)) for batch in batches]

        async def all_wait() -> bool:
            return await waiting_for_locks(admin) == 4

        await until(all_wait)
        await transaction.commit()
        results = await asyncio.gather(*tasks)
        assert sorted(str(set(refusals(result))) for result in results) == sorted(
            ["{None}"] + ["{'STATE_SEQUENCE_GAP'}"] * 3
        )
        winner = batches[[refusals(result)[0] for result in results].index(None)]
        for plan in winner:
            assert await admin.fetchval("SELECT entry FROM tga.entries WHERE stream = $1", plan.stream) == (
                plan.entries[0].entry
            )
    assert recorded.failures == []
    assert (await verify_all(recorded)).entries == 6 * 8


async def test_batches_over_the_same_claims_in_opposite_orders_do_not_deadlock_and_losers_store_nothing(
    admin: Admin, recorded: RecordingSessions
) -> None:
    # Each claim takes a moment, so that batches certainly meet in the middle.
    await admin.execute("""
        CREATE FUNCTION public.take_a_moment() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_catalog.pg_sleep(0.002); RETURN NEW; END';
        CREATE TRIGGER slowly BEFORE INSERT ON tga.heads FOR EACH ROW EXECUTE FUNCTION public.take_a_moment()
    """)
    ledger = PostgresLedger(recorded)
    for round_number in range(4):
        keys = [f"round {round_number} key {n}" for n in range(8)]
        batches = [
            [
                plan_of(pending_trace(1000 * round_number + 100 * contestant + n, idempotency_key=key))
                for n, key in enumerate(keys)
            ]
            for contestant in range(4)
        ]
        batches[1].reverse()
        batches[3].reverse()
        results = await asyncio.gather(*(ledger.commit_batch(batch) for batch in batches))
        outcomes = [
            (plan, error)
            for batch, result in zip(batches, results, strict=True)
            for plan, error in zip(batch, result, strict=True)
        ]
        owner_of_key = {plan.claim.idempotency_key: plan for plan, error in outcomes if error is None and plan.claim}
        assert sorted(owner_of_key) == keys
        assert sum(error is None for _, error in outcomes) == len(keys)
        for plan, error in outcomes:
            if error is None:
                continue
            assert isinstance(error, KeyClaimed)
            assert plan.claim is not None
            winner = owner_of_key[plan.claim.idempotency_key]
            assert winner.claim is not None
            assert (error.stream, error.owner_stream) == (plan.stream, winner.stream)
            assert error.owner_payload_digest == winner.claim.payload_digest != plan.claim.payload_digest
            assert await tables_naming(admin, plan.stream) == {}
    assert recorded.failures == []
    assert (await verify_all(recorded)).entries == 4 * 8


async def test_batches_of_usual_plans_beside_claims_do_not_deadlock(admin: Admin, recorded: RecordingSessions) -> None:
    """Plans that move a stream are written before the claims of the same batch: whoever waits for a claim has moved its
    streams already, and nobody with a claim may wait for those."""
    await admin.execute("""
        CREATE FUNCTION public.take_a_moment() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_catalog.pg_sleep(0.002); RETURN NEW; END';
        CREATE TRIGGER slowly BEFORE INSERT OR UPDATE ON tga.heads FOR EACH ROW
            EXECUTE FUNCTION public.take_a_moment()
    """)
    ledger, stored = PostgresLedger(recorded), 0
    for round_number in range(6):
        keys = [f"round {round_number} key {n}" for n in range(4)]
        batches, streams_shared_by = [], 1 + round_number % 2
        for contestant in range(4):
            first = 1000 * round_number + 100 * contestant
            of = 1000 * round_number + 100 * (contestant - contestant % streams_shared_by)
            begun = [executing_trace(of + 50 + n) for n in range(4)]
            if of == first:
                born = await ledger.commit_batch([plan_of(records[:2]) for records in begun])
                assert refusals(born) == [None] * 4
            moves = [plan_of(records[2:]) for records in begun]
            claims = [plan_of(pending_trace(first + n, idempotency_key=key)) for n, key in enumerate(keys)]
            batch = [plan for both in zip(moves, claims, strict=True) for plan in both]
            batches.append(batch[:: -1 if contestant % 2 else 1])
        results = await asyncio.gather(*(ledger.commit_batch(batch) for batch in batches))
        told = Counter(code for result in results for code in refusals(result))
        moved = 16 // streams_shared_by
        expected = {None: moved + 4, "STATE_SEQUENCE_GAP": 16 - moved, "IDEMPOTENCY_KEY_CLAIMED": 12}
        assert told == Counter({code: count for code, count in expected.items() if count})
        stored += moved * 3 + 4
    assert recorded.failures == []
    assert (await verify_all(recorded)).entries == stored


async def test_a_plan_that_fails_does_not_fail_the_others_of_its_batch(
    admin: Admin, sessions: Sessions, ledger: PostgresLedger, executor: Executor
) -> None:
    owned = pending_trace(5)
    await acquire_stream(sessions, owned[0].stream, executor.executor_id)
    await ledger.commit(plan_of(pending_trace(6, idempotency_key="taken")))
    plans = [
        plan_of(pending_trace(1)),
        plan_of(executing_trace(2)[1:]),
        plan_of(executing_trace(3)),
        plan_of(owned),
        plan_of(pending_trace(4, idempotency_key="taken")),
        Plan("trace:unheard-of", EXECUTOR, None, dispatch_attempt=2),
        plan_of(pending_trace(7)),
    ]
    assert refusals(await ledger.commit_batch(plans)) == [
        None,
        "STATE_SEQUENCE_GAP",
        None,
        "STATE_CONCURRENT_EXECUTION",
        "IDEMPOTENCY_KEY_CLAIMED",
        "TRACE_NOT_FOUND",
        None,
    ]
    for refused in (plans[1], plans[4], plans[5]):
        assert await tables_naming(admin, refused.stream) == {}
    assert await tables_naming(admin, owned[0].stream) == {"heads": 1}
    assert (await verify_all(sessions)).entries == 1 + 1 + 3 + 1


async def test_a_stream_that_stands_twice_in_one_batch_is_appended_to_once(
    admin: Admin, sessions: Sessions, ledger: PostgresLedger
) -> None:
    first, second = executing_trace(1)[:2]
    # Even a second plan that would follow the first: which of them is stored must not depend on their order.
    for later in (second, first):
        n = await admin.fetchval("SELECT count(*) FROM tga.entries")
        results = await ledger.commit_batch([plan_of([first]), plan_of([later])])
        assert refusals(results)[1] == "STATE_CONCURRENT_EXECUTION"
        assert await admin.fetchval("SELECT count(*) FROM tga.entries") == max(n, 1)
    assert (await verify_all(sessions)).entries == 1


async def test_of_two_plans_of_one_batch_with_the_same_claim_one_wins(
    admin: Admin, sessions: Sessions, ledger: PostgresLedger
) -> None:
    plans = [plan_of(pending_trace(n, idempotency_key="one key")) for n in range(5)]
    results = await ledger.commit_batch(plans)
    assert Counter(refusals(results)) == {None: 1, "IDEMPOTENCY_KEY_CLAIMED": 4}
    winner = plans[results.index(None)]
    assert winner.claim is not None
    for plan, error in zip(plans, results, strict=True):
        if error is not None:
            assert isinstance(error, KeyClaimed)
            assert (error.owner_stream, error.owner_payload_digest) == (winner.stream, winner.claim.payload_digest)
            assert await tables_naming(admin, plan.stream) == {}
    assert (await verify_all(sessions)).streams == 1


@pytest.mark.parametrize("reason", ["sequence", "owner", "chain"])
async def test_a_claim_is_not_left_behind_when_its_plan_is_refused(
    reason: str, admin: Admin, sessions: Sessions, ledger: PostgresLedger, executor: Executor
) -> None:
    birth, decision = executing_trace(1)[:2]
    claim = decide_claim([birth])
    stream = birth.stream
    if reason == "sequence":
        plan = Plan(stream, EXECUTOR, None, entries=plan_of([decision]).entries, claim=claim)
    elif reason == "owner":
        await acquire_stream(sessions, stream, executor.executor_id)
        plan = plan_of([birth])
    else:
        stranger = plan_of(pending_trace(1, intent="another")).entries[0]
        mixed = [type(stranger)(plan_of([birth]).entries[0].entry, stranger.artifact)]
        plan = Plan(stream, EXECUTOR, None, entries=mixed, claim=claim)
    assert plan.claim is not None
    before = await contents(admin)
    # Alone, and in a batch with the one that has a right to the key.
    assert await code_of(ledger.commit(plan)) is not None
    assert await contents(admin) == before
    rightful = plan_of(pending_trace(2, idempotency_key=plan.claim.idempotency_key))
    refused, stored = await ledger.commit_batch([plan, rightful])
    assert refused is not None
    assert stored is None
    assert [row["stream"] for row in await admin.fetch("SELECT stream FROM tga.claims")] == [rightful.stream]
    await verify_all(sessions)


# Sends after the first


def attempt_plan(stream: str, executor_id: str, attempt: int) -> Plan:
    return Plan(stream, executor_id, executor_id, dispatch_attempt=attempt)


@pytest.fixture
async def driven(ledger: PostgresLedger, executor: Executor, sessions: Sessions) -> str:
    """The stream of a trace that `executor` owns and that is EXECUTING."""
    records = executing_trace(1)
    await ledger.commit(plan_of(records, executor_id=executor.executor_id, owner_after=executor.executor_id))
    return records[0].stream


async def test_attempts_are_counted_without_gap_or_repeat(
    driven: str, admin: Admin, ledger: PostgresLedger, executor: Executor, sessions: Sessions
) -> None:
    me = executor.executor_id
    assert await code_of(ledger.commit(attempt_plan(driven, me, 3))) == "STATE_CONCURRENT_EXECUTION"
    for attempt in (2, 3):
        await ledger.commit(attempt_plan(driven, me, attempt))
        assert await code_of(ledger.commit(attempt_plan(driven, me, attempt))) == "STATE_CONCURRENT_EXECUTION"
    assert await code_of(ledger.commit(attempt_plan(driven, me, 2))) == "STATE_CONCURRENT_EXECUTION"
    rows = await admin.fetch("SELECT attempt, executor_id::text FROM tga.dispatch_attempts ORDER BY attempt")
    assert [tuple(row) for row in rows] == [(2, me), (3, me)]
    assert await owner_of(admin, driven) == me
    await verify_all(sessions)


async def test_of_many_that_want_the_same_attempt_one_gets_it(
    driven: str, admin: Admin, ledger: PostgresLedger, executor: Executor
) -> None:
    plan = attempt_plan(driven, executor.executor_id, 2)
    codes = await asyncio.gather(*(code_of(ledger.commit(plan)) for _ in range(12)))
    assert Counter(codes) == {None: 1, "STATE_CONCURRENT_EXECUTION": 11}
    assert await admin.fetchval("SELECT count(*) FROM tga.dispatch_attempts") == 1


async def test_an_attempt_of_one_that_does_not_own_the_trace_is_refused(
    driven: str, admin: Admin, ledger: PostgresLedger
) -> None:
    assert await code_of(ledger.commit(attempt_plan(driven, OTHER_EXECUTOR, 2))) == "STATE_CONCURRENT_EXECUTION"
    assert await admin.fetchval("SELECT count(*) FROM tga.dispatch_attempts") == 0


async def test_a_dead_owner_and_its_recoverer_do_not_both_get_the_same_attempt(
    driven: str, admin: Admin, ledger: PostgresLedger, executor: Executor, open_store: OpenStore, sessions: Sessions
) -> None:
    _, recoverer = await open_store()
    await end_session(admin, executor)

    async def recover() -> None:
        await acquire_stream(sessions, driven, recoverer.executor_id)
        await ledger.commit(attempt_plan(driven, recoverer.executor_id, 2))

    codes = await asyncio.gather(
        code_of(recover()), code_of(ledger.commit(attempt_plan(driven, executor.executor_id, 2)))
    )
    assert Counter(codes) == {None: 1, "STATE_CONCURRENT_EXECUTION": 1}
    assert await owner_of(admin, driven) == recoverer.executor_id


async def test_a_zombie_gets_no_attempt_once_the_effect_is_recorded(
    driven: str, admin: Admin, ledger: PostgresLedger, executor: Executor, open_store: OpenStore, sessions: Sessions
) -> None:
    """The zombie read EXECUTING and stalled. The attempt's row is the last thing before it sends again."""
    _, recoverer = await open_store()
    await end_session(admin, executor)
    await acquire_stream(sessions, driven, recoverer.executor_id)
    effect = completed_trace(1)[3:]
    await ledger.commit(plan_of(effect, executor_id=recoverer.executor_id, owner_after=None))
    code = await code_of(ledger.commit(attempt_plan(driven, executor.executor_id, 2)))
    assert code == "STATE_CONCURRENT_EXECUTION"
    assert await admin.fetchval("SELECT count(*) FROM tga.dispatch_attempts") == 0


# Errors keep their meaning


async def test_the_same_entry_again_is_a_repeated_number_and_changes_nothing(
    admin: Admin, store: PostgresStateStore
) -> None:
    """What a client that never got its answer sees when it simply sends again."""
    (birth,) = pending_trace(1)
    await store.append_log_entry(birth)
    before = await contents(admin)
    with pytest.raises(SequenceGap) as refused:
        await store.append_log_entry(birth)
    assert (refused.value.stream, refused.value.expected, refused.value.found) == (birth.stream, "2", "1")
    assert await contents(admin) == before


async def test_the_loser_of_a_key_is_told_whose_it_is(store: PostgresStateStore, admin: Admin) -> None:
    (winner,), (loser,) = pending_trace(1, idempotency_key="k"), pending_trace(2, idempotency_key="k")
    await store.append_log_entry(winner)
    before = await contents(admin)
    with pytest.raises(KeyClaimed) as refused:
        await store.append_log_entry(loser)
    claim = decide_claim([winner])
    assert claim is not None
    assert (refused.value.owner_stream, Digest(refused.value.owner_payload_digest)) == (
        winner.stream,
        claim.payload_digest,
    )
    assert await contents(admin) == before
