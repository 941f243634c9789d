"""One suite that every TgaStateStore passes: the real one on every PostgreSQL at hand, and the reference in memory."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from app.core.canonical import JsonValue
from app.core.digest import digest_of
from app.core.errors import (
    ChecksumMismatch,
    ConcurrentExecution,
    InvalidTransition,
    KeyClaimed,
    SequenceGap,
    TgaError,
    TraceNotFound,
)
from app.domain.tga.documents import ExecutionLogEntry
from app.domain.tga.execution_state import ExecutionCheckpoint
from app.domain.tga.replay import LogRecord, fold
from app.domain.tga.state_store import TgaStateStore
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.ownership import Executor
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from tests.conformance.memory_store import MemoryLedger, MemoryStateStore
from tests.traces import (
    authorized_trace,
    completed_trace,
    denied_trace,
    executing_trace,
    failed_trace,
    pending_trace,
    time_at,
    trace_id,
    uuid7,
)

SPECIFIED_METHODS = {
    "load_state": ["trace_id"],
    "append_log_entry": ["entry"],
    "list_log_entries": ["trace_id", "after_seq"],
    "write_checkpoint": ["checkpoint"],
    "load_latest_checkpoint": ["trace_id"],
    "acquire_trace_lock": ["trace_id"],
    "release_trace_lock": ["trace_id"],
}


@dataclass
class Stores:
    """Executors on one ledger: `open` gives a new one, `kill` ends one as a crash would."""

    open: Callable[[], Awaitable[TgaStateStore]]
    kill: Callable[[TgaStateStore], Awaitable[None]]


@pytest.fixture
async def postgres_stores(database: Database, sessions: Sessions) -> AsyncIterator[Stores]:
    executors: dict[int, Executor] = {}

    async def open_store() -> TgaStateStore:
        executor = await Executor.open(database.gateway_url)
        store = PostgresStateStore(sessions, PostgresLedger(sessions), executor)
        executors[id(store)] = executor
        return store

    async def kill(store: TgaStateStore) -> None:
        await executors[id(store)].close()

    yield Stores(open_store, kill)
    for executor in executors.values():
        executor.terminate()


@pytest.fixture
def memory_stores() -> Stores:
    ledger = MemoryLedger()
    numbers = iter(range(100, 10_000))

    async def open_store() -> TgaStateStore:
        return MemoryStateStore(ledger, uuid7(next(numbers), role="executor"))

    async def kill(store: TgaStateStore) -> None:
        assert isinstance(store, MemoryStateStore)
        store.die()

    return Stores(open_store, kill)


Scenario = Callable[[Stores], Awaitable[None]]
SCENARIOS: list[Scenario] = []


def scenario(function: Scenario) -> Scenario:
    SCENARIOS.append(function)
    return function


@pytest.mark.parametrize("implementation", [TgaStateStore, PostgresStateStore, MemoryStateStore])
def test_a_store_has_exactly_the_seven_methods_of_the_specification(implementation: type) -> None:
    public = {name: method for name, method in vars(implementation).items() if not name.startswith("_")}
    public.pop("die", None)  # how the reference store crashes
    assert {
        name: list(inspect.signature(method).parameters)[1:] for name, method in public.items()
    } == SPECIFIED_METHODS
    assert all(inspect.iscoroutinefunction(method) for method in public.values())


async def append_all(store: TgaStateStore, records: list[LogRecord]) -> None:
    for record in records:
        await store.append_log_entry(record)


async def expect(error: type[TgaError], work: Awaitable[object]) -> TgaError:
    with pytest.raises(error) as caught:
        await work
    assert type(caught.value) is error
    return caught.value


@scenario
async def every_path_is_loaded_as_it_was_folded(stores: Stores) -> None:
    store = await stores.open()
    paths = [pending_trace, authorized_trace, denied_trace, executing_trace, completed_trace, failed_trace]
    for number, path in enumerate(paths, 1):
        records = path(number)
        await append_all(store, records)
        assert await store.load_state(trace_id(number)) == fold(records)


@scenario
async def entries_are_listed_in_order_with_their_artifacts(stores: Stores) -> None:
    store = await stores.open()
    records = completed_trace(1)
    await append_all(store, records)
    for after in range(6):
        assert await store.list_log_entries(trace_id(1), after) == records[after:]
    assert await store.list_log_entries(trace_id(2), 0) == []


@scenario
async def a_trace_without_entries_is_not_found(stores: Stores) -> None:
    store = await stores.open()
    await expect(TraceNotFound, store.load_state(trace_id(1)))
    assert await store.load_latest_checkpoint(trace_id(1)) is None
    await store.acquire_trace_lock(trace_id(1))
    await expect(TraceNotFound, store.load_state(trace_id(1)))
    await store.release_trace_lock(trace_id(1))
    await expect(TraceNotFound, store.load_state(trace_id(1)))


@scenario
async def a_gap_a_repeat_and_a_late_start_are_refused_and_change_nothing(stores: Stores) -> None:
    store = await stores.open()
    records = completed_trace(1)
    await expect(SequenceGap, store.append_log_entry(records[1]))
    await store.append_log_entry(records[0])
    error = await expect(SequenceGap, store.append_log_entry(records[0]))
    assert (error.stream, error.sequence_number, error.expected, error.found) == (records[0].stream, 2, "2", "1")
    await expect(SequenceGap, store.append_log_entry(records[2]))
    assert await store.list_log_entries(trace_id(1), 0) == records[:1]


@scenario
async def an_entry_that_does_not_link_is_refused(stores: Stores) -> None:
    store = await stores.open()
    ours, theirs = completed_trace(1), completed_trace(1, intent="another request")
    await store.append_log_entry(ours[0])
    error = await expect(ChecksumMismatch, store.append_log_entry(theirs[1]))
    assert error.expected == ours[0].entry.entry_digest
    assert await store.list_log_entries(trace_id(1), 0) == ours[:1]


@scenario
async def a_wrong_digest_is_refused(stores: Stores) -> None:
    store = await stores.open()
    (record,) = pending_trace(1)
    wrong = record.entry.model_copy(update={"entry_digest": "f" * 64})
    await expect(ChecksumMismatch, store.append_log_entry(record._replace(entry=wrong)))
    await expect(TraceNotFound, store.load_state(trace_id(1)))


@scenario
async def an_artifact_that_the_entry_does_not_commit_to_is_refused(stores: Stores) -> None:
    store = await stores.open()
    (record,), (other,) = pending_trace(1), pending_trace(1, intent="another")
    await expect(ChecksumMismatch, store.append_log_entry(record._replace(artifact=other.artifact)))
    await expect(ChecksumMismatch, store.append_log_entry(record._replace(artifact=None)))
    await expect(TraceNotFound, store.load_state(trace_id(1)))


@scenario
async def a_transition_outside_the_table_is_refused(stores: Stores) -> None:
    store = await stores.open()
    records = denied_trace(1)
    await store.append_log_entry(records[0])
    body = {**records[1].entry.to_json(), "to_state": "AUTHORIZED"}
    del body["entry_digest"]
    await expect(InvalidTransition, store.append_log_entry(records[1]._replace(entry=relinked(body))))
    assert await store.list_log_entries(trace_id(1), 0) == records[:1]


@scenario
async def a_key_is_claimed_once_and_its_loser_stores_nothing(stores: Stores) -> None:
    store = await stores.open()
    first, second = pending_trace(1, idempotency_key="k"), pending_trace(2, idempotency_key="k")
    await append_all(store, first)
    error = await expect(KeyClaimed, store.append_log_entry(second[0]))
    state = await store.load_state(trace_id(1))
    assert isinstance(error, KeyClaimed)
    assert (error.owner_stream, error.owner_payload_digest) == (first[0].stream, state.payload_digest)
    await expect(TraceNotFound, store.load_state(trace_id(2)))
    elsewhere = pending_trace(3, idempotency_key="k", tool_name="another_tool")
    await append_all(store, elsewhere)
    assert await store.load_state(trace_id(3)) == fold(elsewhere)


@scenario
async def a_checkpoint_is_kept_and_a_state_is_loaded_from_it(stores: Stores) -> None:
    store = await stores.open()
    records = completed_trace(1)
    await append_all(store, records[:2])
    state = fold(records[:2])
    assert state is not None
    checkpoint = ExecutionCheckpoint.of(state, created_at=time_at(9))
    await store.write_checkpoint(checkpoint)
    await store.write_checkpoint(checkpoint)
    assert await store.load_latest_checkpoint(trace_id(1)) == checkpoint
    assert await store.load_state(trace_id(1)) == state
    await append_all(store, records[2:])
    assert await store.load_state(trace_id(1)) == fold(records)


@scenario
async def a_trace_has_no_checkpoint_but_the_one_that_was_asked_for(stores: Stores) -> None:
    store = await stores.open()
    records = completed_trace(1)
    await append_all(store, records)
    assert await store.load_latest_checkpoint(trace_id(1)) is None
    assert await store.load_state(trace_id(1)) == fold(records)


@scenario
async def a_checkpoint_that_does_not_stand_on_the_log_is_refused(stores: Stores) -> None:
    store = await stores.open()
    records = completed_trace(1)
    state = fold(records[:2])
    assert state is not None
    checkpoint = ExecutionCheckpoint.of(state, created_at=time_at(9))
    await expect(TraceNotFound, store.write_checkpoint(checkpoint))
    await store.append_log_entry(records[0])
    await expect(ChecksumMismatch, store.write_checkpoint(checkpoint))
    await store.append_log_entry(records[1])
    await expect(
        ChecksumMismatch, store.write_checkpoint(checkpoint.model_copy(update={"checkpoint_digest": "0" * 64}))
    )
    other = state.model_copy(update={"server_id": "another"})
    await expect(ChecksumMismatch, store.write_checkpoint(ExecutionCheckpoint.of(other, created_at=time_at(9))))
    assert await store.load_latest_checkpoint(trace_id(1)) is None
    await store.write_checkpoint(checkpoint)
    await expect(ChecksumMismatch, store.write_checkpoint(ExecutionCheckpoint.of(other, created_at=time_at(9))))
    assert await store.load_latest_checkpoint(trace_id(1)) == checkpoint


@scenario
async def one_executor_at_a_time_drives_a_trace(stores: Stores) -> None:
    first, second = await stores.open(), await stores.open()
    records = completed_trace(1)
    await first.acquire_trace_lock(trace_id(1))
    await expect(ConcurrentExecution, first.acquire_trace_lock(trace_id(1)))
    await expect(ConcurrentExecution, second.acquire_trace_lock(trace_id(1)))
    await expect(ConcurrentExecution, second.append_log_entry(records[0]))
    await expect(ConcurrentExecution, second.release_trace_lock(trace_id(1)))
    await append_all(first, records[:2])
    await expect(ConcurrentExecution, second.append_log_entry(records[2]))
    await second.acquire_trace_lock(trace_id(2))
    await first.release_trace_lock(trace_id(1))
    await second.acquire_trace_lock(trace_id(1))
    await append_all(second, records[2:])
    assert await first.load_state(trace_id(1)) == fold(records)


@scenario
async def a_dead_executors_trace_is_free_at_once_and_its_late_append_is_fenced(stores: Stores) -> None:
    first, second = await stores.open(), await stores.open()
    records = completed_trace(1)
    await first.acquire_trace_lock(trace_id(1))
    await append_all(first, records[:3])
    await stores.kill(first)
    await second.acquire_trace_lock(trace_id(1))
    await expect(ConcurrentExecution, first.append_log_entry(records[3]))
    await second.append_log_entry(records[3])
    await first.release_trace_lock(trace_id(1))
    assert await second.load_state(trace_id(1)) == fold(records)


def relinked(body: dict[str, JsonValue]) -> ExecutionLogEntry:
    return ExecutionLogEntry.from_json({**body, "entry_digest": digest_of(body)})


async def exercise_state_store(run: Scenario, stores: Stores) -> None:
    """A scenario asserts on its own; it is the same for every implementation."""
    await run(stores)


@pytest.mark.parametrize("run", SCENARIOS, ids=lambda run: run.__name__)
async def test_postgres_keeps_it(run: Scenario, postgres_stores: Stores) -> None:
    await exercise_state_store(run, postgres_stores)


@pytest.mark.parametrize("run", SCENARIOS, ids=lambda run: run.__name__)
async def test_memory_keeps_it(run: Scenario, memory_stores: Stores) -> None:
    await exercise_state_store(run, memory_stores)
