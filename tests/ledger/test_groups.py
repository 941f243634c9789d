"""Plans that are committed together: one suite for the ledger on PostgreSQL, the writer before it, and the reference
in memory; and what only the real ones can show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from app.core.chain import Head
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import ConcurrentExecution, RunBlobMissing, SchemaViolation, TgaError
from app.core.limits import BATCH_PLANS_MAX
from app.domain.ledger.plans import BlobUse, Ledger, Plan, PlanGroup, PlannedEntry, ScheduleRow
from app.domain.tga.replay import TRACE_DOCUMENTS
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.writer import Writer
from tests.conftest import Admin
from tests.invariants.plans import plan_of
from tests.ledger.counter import COUNTER, COUNTER_DOCUMENTS, Number, make_kind
from tests.ledger.memory_ledger import MemoryLedger
from tests.traces import EXECUTOR, OTHER_EXECUTOR, executing_trace, time_at

DUE = ScheduleRow("onboard", "1.0.0@ab", time_at(1), attempt=1, worker="w", due_at=time_at(5), parent="counter:p")
BLOB = digest_of_bytes(b"large")


@dataclass
class Chain:
    """A counter's next plans; a plan that was refused is taken back by `restore`."""

    identity: str
    tenant: str = "default"
    head: Head = field(default_factory=lambda: Head.unborn(COUNTER))

    @property
    def stream(self) -> str:
        return COUNTER.stream(self.identity)

    def next(self, change: str = "more", *, executor: str = EXECUTOR, owner: str | None = None) -> Plan:
        number = Number.made(
            counter_id=self.identity, tenant=self.tenant, change=change, value=self.head.sequence_number + 1
        )
        planned, self.head, _ = COUNTER_DOCUMENTS.plan(
            self.head, number, identity=self.identity, executor_id=executor, recorded_at=time_at(1)
        )
        return Plan(self.stream, executor, owner, [planned])


@dataclass
class Store:
    """A ledger, and how a test looks into it."""

    ledger: Ledger
    stored: Callable[[], Awaitable[dict[str, int]]]  # sequence numbers by stream
    claims: Callable[[], Awaitable[int]]
    schedules: Callable[[], Awaitable[dict[str, tuple[str, ScheduleRow]]]]  # state and row by stream
    refs: Callable[[], Awaitable[set[tuple[str, int, Digest]]]]
    put_blob: Callable[[str, Digest, int], Awaitable[None]]


def memory_store() -> Store:
    memory = MemoryLedger({"counter": COUNTER_DOCUMENTS, "trace": TRACE_DOCUMENTS})

    async def stored() -> dict[str, int]:
        return {name: found.head.sequence_number for name, found in memory.streams.items()}

    async def claims() -> int:
        return sum(found.claim is not None for found in memory.streams.values())

    async def schedules() -> dict[str, tuple[str, ScheduleRow]]:
        return {n: (found.head.state, found.schedule) for n, found in memory.streams.items() if found.schedule}

    async def refs() -> set[tuple[str, int, Digest]]:
        return memory.refs

    async def put_blob(tenant: str, sha256: Digest, size_bytes: int) -> None:
        memory.blobs[tenant, sha256] = size_bytes

    return Store(memory, stored, claims, schedules, refs, put_blob)


def postgres_store(ledger: Ledger, admin: Admin) -> Store:
    async def stored() -> dict[str, int]:
        rows = await admin.fetch(
            "SELECT h.stream, max(l.sequence_number) AS number"
            " FROM tga.links l JOIN tga.heads h USING (stream_no) GROUP BY 1"
        )
        return {row["stream"]: row["number"] for row in rows}

    async def claims() -> int:
        return int(await admin.fetchval("SELECT count(*) FROM tga.claims"))

    async def schedules() -> dict[str, tuple[str, ScheduleRow]]:
        columns = ", ".join(
            f"tga.shown_time(r.{name}) AS {name}" if name.endswith("_at") else f"r.{name}"
            for name in ScheduleRow._fields
            if name not in ("asks", "due_in_ms")  # they stand in a table of their own; it is in `due_at`
        )
        rows = await admin.fetch(
            f"SELECT h.stream, r.state, {columns} FROM tga.runs r JOIN tga.heads h USING (stream_no)"
        )
        return {row["stream"]: (row["state"], ScheduleRow(**dict(list(row.items())[2:]))) for row in rows}

    async def refs() -> set[tuple[str, int, Digest]]:
        return {
            (row["stream"], row["sequence_number"], Digest(row["sha256"].hex()))
            for row in await admin.fetch(
                "SELECT h.stream, r.sequence_number, r.sha256 FROM tga.blob_refs r JOIN tga.heads h USING (stream_no)"
            )
        }

    async def put_blob(tenant: str, sha256: Digest, size_bytes: int) -> None:
        assert await admin.fetchval("SELECT tga.begin_blob($1, $2, $3)", tenant, bytes.fromhex(sha256), size_bytes)
        assert await admin.fetchval("SELECT tga.end_blob($1, $2)", tenant, bytes.fromhex(sha256))

    return Store(ledger, stored, claims, schedules, refs, put_blob)


@pytest.fixture(params=["postgres", "writer", "memory"])
async def store(request: pytest.FixtureRequest, ledger: PostgresLedger, admin: Admin) -> Store:
    if request.param == "memory":
        return memory_store()
    await make_kind(admin)
    return postgres_store(Writer(ledger) if request.param == "writer" else ledger, admin)


def codes(results: Sequence[TgaError | None]) -> list[str | None]:
    return [None if error is None else error.code for error in results]


async def test_a_group_is_stored_and_the_loser_of_one_does_not_fail_the_others(store: Store) -> None:
    chains = [Chain(f"c{n}") for n in range(3)]
    assert await store.ledger.commit_all([chain.next() for chain in chains]) == [None] * 3
    again = Chain("c1").next()
    results = await store.ledger.commit_all([chains[0].next(), again, chains[2].next()])
    assert codes(results) == [None, "STATE_SEQUENCE_GAP", None]
    assert results[1] is not None
    assert results[1].stream == again.stream
    assert await store.stored() == {"counter:c0": 2, "counter:c1": 1, "counter:c2": 2}


async def test_what_needs_a_refused_plan_is_refused_in_its_words(store: Store) -> None:
    """The fence before the effect: the intent of a zombie is refused, so its trace is not born and claims nothing."""
    run = Chain("run")
    await store.ledger.commit(run.next(owner=OTHER_EXECUTOR))
    trace = plan_of(executing_trace(1))
    bystander = Chain("bystander")
    follower = Chain("follower")
    zombie = run.next(executor=EXECUTOR)
    results = await store.ledger.commit_all([zombie, trace, bystander.next(), follower.next()], [None, 0, None, None])
    assert codes(results) == ["STATE_CONCURRENT_EXECUTION", "STATE_CONCURRENT_EXECUTION", None, None]
    assert isinstance(results[1], ConcurrentExecution)
    assert results[1].stream == trace.stream
    assert await store.stored() == {"counter:run": 1, "counter:bystander": 1, "counter:follower": 1}
    assert await store.claims() == 0
    # Through another that needs it, too.
    results = await store.ledger.commit_all([zombie, bystander.next(), follower.next()], [None, 0, 1])
    assert codes(results) == ["STATE_CONCURRENT_EXECUTION"] * 3


async def test_two_that_need_each_other_stand_or_fall_together(store: Store) -> None:
    """An intent and the child that it begins: neither without the other, whichever is refused."""
    run, child, bystander = Chain("run"), Chain("child"), Chain("bystander")
    stranger = Chain("child").next()
    await store.ledger.commit(stranger)
    results = await store.ledger.commit_all([bystander.next(), run.next(), child.next()], [None, 2, 1])
    assert codes(results) == [None, "STATE_SEQUENCE_GAP", "STATE_SEQUENCE_GAP"]
    assert await store.stored() == {"counter:child": 1, "counter:bystander": 1}
    run, other = Chain("run"), Chain("other")
    assert await store.ledger.commit_all([run.next(), other.next()], [1, 0]) == [None, None]
    stale = Chain("run").next()
    results = await store.ledger.commit_all([stale, Chain("third").next()], [1, 0])
    assert codes(results) == ["STATE_SEQUENCE_GAP"] * 2
    assert await store.stored() == {"counter:child": 1, "counter:bystander": 1, "counter:run": 1, "counter:other": 1}


async def test_what_needs_an_admitted_plan_is_judged_by_itself(store: Store) -> None:
    run, trace = Chain("run"), plan_of(executing_trace(1))
    assert await store.ledger.commit_all([run.next(), trace], [None, 0]) == [None, None]
    # The claim is taken: the trace of another id is refused, and the entry that it needs stands.
    other = plan_of(executing_trace(2, idempotency_key="key-1"))
    claim = trace.claim
    assert claim is not None
    results = await store.ledger.commit_all([run.next(), other._replace(claim=claim)], [None, 0])
    assert codes(results) == [None, "IDEMPOTENCY_KEY_CLAIMED"]
    assert await store.stored() == {"counter:run": 2, trace.stream: 3}
    assert await store.claims() == 1


async def test_a_blob_must_be_stored_for_the_tenant_and_with_its_size(store: Store) -> None:
    run, follower = Chain("run", tenant="one"), Chain("follower")
    plan = run.next()._replace(blobs=[BlobUse(1, BLOB, 5)])
    await store.put_blob("other", BLOB, 5)
    results = await store.ledger.commit_all([plan, follower.next()], [None, 0])
    assert codes(results) == ["RUN_BLOB_MISSING"] * 2
    assert isinstance(results[0], RunBlobMissing)
    assert await store.stored() == {}
    await store.put_blob("one", BLOB, 4)
    assert codes(await store.ledger.commit_all([plan])) == ["RUN_BLOB_MISSING"]
    assert await store.refs() == set()


async def test_a_reference_stands_with_its_entry(store: Store) -> None:
    await store.put_blob("one", BLOB, 5)
    other = digest_of_bytes(b"other")
    await store.put_blob("one", other, 0)
    run = Chain("run", tenant="one")
    uses = [BlobUse(1, BLOB, 5), BlobUse(1, BLOB, 5), BlobUse(1, other, 0)]
    await store.ledger.commit(run.next()._replace(blobs=uses))
    await store.ledger.commit(run.next()._replace(blobs=[BlobUse(2, BLOB, 5)]))
    stale = run.next()._replace(blobs=[BlobUse(3, BLOB, 5)], executor_id=EXECUTOR)
    broken = stale._replace(entries=[PlannedEntry(stale.entries[0].entry, b'{"schema_id":"test/number"}')])
    assert codes(await store.ledger.commit_all([broken])) != [None]
    assert await store.refs() == {
        (run.stream, 1, BLOB),
        (run.stream, 1, other),
        (run.stream, 2, BLOB),
    }


async def test_a_schedule_is_the_whole_row_and_its_state_the_heads(store: Store) -> None:
    run, other = Chain("run"), Chain("other")
    await store.ledger.commit(run.next()._replace(schedule=DUE))
    assert await store.schedules() == {run.stream: ("COUNTING", DUE)}
    await store.ledger.commit(run.next())
    assert await store.schedules() == {run.stream: ("COUNTING", DUE)}, "a plan without a row leaves it"
    stale = Chain("run").next()._replace(schedule=DUE._replace(worker="zombie"))
    rest = ScheduleRow("onboard", "1.0.1@ab", time_at(1), failures=2, deadline_at=time_at(9))
    results = await store.ledger.commit_all([stale, other.next()._replace(schedule=rest)])
    assert codes(results) == ["STATE_SEQUENCE_GAP", None]
    assert await store.schedules() == {run.stream: ("COUNTING", DUE), other.stream: ("COUNTING", rest)}
    await store.ledger.commit(run.next("end")._replace(schedule=rest))
    assert await store.schedules() == {run.stream: ("DONE", rest), other.stream: ("COUNTING", rest)}


@pytest.mark.parametrize(
    ("count", "needs", "said"),
    [
        (0, (), "1 to 64 plans"),
        (BATCH_PLANS_MAX + 1, (), "1 to 64 plans"),
        (2, (None,), "of each of its plans"),
        (2, (0, None), "must need another one"),
        (2, (None, 1), "must need another one"),
        (2, (None, -1), "must need another one"),
        (2, (None, 2), "must need another one"),
    ],
)
async def test_what_can_be_no_group_is_refused(
    store: Store, count: int, needs: tuple[int | None, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        await store.ledger.commit_all([Chain(f"c{n}").next() for n in range(count)], needs)
    assert await store.stored() == {}


async def test_a_group_names_no_stream_twice_and_needs_no_plan_with_a_claim(store: Store) -> None:
    run, trace = Chain("run"), plan_of(executing_trace(1))
    with pytest.raises(ValueError, match="one stream"):
        await store.ledger.commit_all([run.next(), run.next()])
    with pytest.raises(ValueError, match="makes no claim"):
        await store.ledger.commit_all([trace, Chain("c").next()], [None, 0])
    assert await store.stored() == {}


# What only the real ones can show


async def test_a_group_is_one_transaction(ledger: PostgresLedger, admin: Admin) -> None:
    await make_kind(admin)
    writer = Writer(ledger)
    chains = [Chain(f"c{n}") for n in range(3)]
    assert await writer.commit_all([chain.next() for chain in chains]) == [None] * 3
    assert await admin.fetchval("SELECT count(DISTINCT xid) FROM tga.links") == 1


async def test_a_batch_that_fails_as_a_whole_is_retried_group_by_group(ledger: PostgresLedger, admin: Admin) -> None:
    """Bytes that PostgreSQL cannot read fail a whole transaction: here the one of their group, and no other."""
    await make_kind(admin)
    chains = [Chain(f"c{n}") for n in range(6)]
    plans = [chain.next() for chain in chains]
    unreadable = plans[3]._replace(entries=[PlannedEntry(plans[3].entries[0].entry, b"\xff")])
    fenced = plans[1]._replace(stream="nothing:1")
    groups = [
        PlanGroup([plans[0]]),
        PlanGroup([fenced, plans[2]], [None, 0]),
        PlanGroup([unreadable, plans[4]]),
        PlanGroup([plans[5]]),
    ]
    results = await ledger.commit_groups(groups)
    assert [type(error) for error in results[3:5]] == [SchemaViolation] * 2
    assert [error and error.stream for error in results[3:5]] == [plans[3].stream, plans[4].stream]
    assert codes([results[0], results[1], results[2], results[5]]) == [
        None,
        "SCHEMA_VIOLATION",
        "SCHEMA_VIOLATION",
        None,
    ]
    stored = await admin.fetch("SELECT stream FROM tga.heads ORDER BY stream")
    assert [row["stream"] for row in stored] == ["counter:c0", "counter:c5"]
    assert await admin.fetchval("SELECT count(DISTINCT xid) FROM tga.links") == 2, "each in a transaction of its own"


class RecordingLedger(PostgresLedger):
    """Notes how batches are cut, and commits only when told."""

    def __init__(self, sessions: Sessions) -> None:
        super().__init__(sessions)
        self.gate = asyncio.Event()
        self.batches: list[list[list[str]]] = []

    async def commit_groups(self, groups: Sequence[PlanGroup]) -> list[TgaError | None]:
        self.batches.append([[plan.stream for plan in group.plans] for group in groups])
        await self.gate.wait()
        return [None for group in groups for _ in group.plans]


async def _batches(sessions: Sessions, groups: Sequence[Sequence[str]]) -> list[list[list[str]]]:
    """How a writer cuts what arrives while its first commit is in flight."""
    recording = RecordingLedger(sessions)
    writer = Writer(recording)
    first = asyncio.create_task(writer.commit(Plan("trace:first", EXECUTOR, None)))
    while not recording.batches:
        await asyncio.sleep(0)
    waiting = [
        asyncio.create_task(writer.commit_all([Plan(f"trace:{name}", EXECUTOR, None) for name in group]))
        for group in groups
    ]
    await asyncio.sleep(0)
    recording.gate.set()
    for task, group in zip(waiting, groups, strict=True):
        assert await task == [None] * len(group)
    await first
    return [[[name.removeprefix("trace:") for name in group] for group in batch] for batch in recording.batches[1:]]


async def test_a_group_whose_stream_is_in_the_batch_waits_for_the_next(sessions: Sessions) -> None:
    assert await _batches(sessions, [["a", "b"], ["c"], ["d", "b"], ["e"]]) == [
        [["a", "b"], ["c"]],
        [["d", "b"], ["e"]],
    ]


async def test_groups_stay_whole_where_a_batch_is_full(sessions: Sessions) -> None:
    groups = [[f"{n}-{m}" for m in range(7)] for n in range(30)]
    batches = await _batches(sessions, groups)
    assert [group for batch in batches for group in batch] == groups, "whole, and in their order"
    assert all(sum(len(group) for group in batch) <= BATCH_PLANS_MAX for batch in batches)


async def test_a_group_as_large_as_a_batch_goes_alone(sessions: Sessions) -> None:
    large = [f"large-{n}" for n in range(BATCH_PLANS_MAX)]
    assert await _batches(sessions, [["a"], large, ["b"]]) == [[["a"]], [large], [["b"]]]
