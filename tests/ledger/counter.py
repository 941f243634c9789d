"""A kind of stream of the tests' own: it counts to a goal, touching the world once before each number but the first.

Made from rows and documents alone: what stands in domain/ledger must serve it as it serves traces.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from app.clock import SystemClock
from app.core.chain import ArtifactRule, Head, StreamKind, Transition
from app.core.digest import Digest
from app.core.errors import RecoveryFailed
from app.domain.ledger.documents import LogEntry, Name, SequenceNumber, StreamArtifact
from app.domain.ledger.executions import Executions
from app.domain.ledger.owned_stream import UNBORN, OwnedStream, Position, StreamOwner, StreamPorts
from app.domain.ledger.plans import Ledger, Plan, PlannedEntry
from app.domain.ledger.records import StreamDocuments
from app.postgres.ledger import PostgresLedger
from app.postgres.owner import PostgresOwner
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.runtime.scripted import CountingLedger, FakeClock

COUNTER: Final = StreamKind(
    name="counter",
    id_field="counter_id",
    entry_schema_id="test/counter_entry",
    birth_state="COUNTING",
    artifacts=(ArtifactRule("number", "test/number", verdict_field="change"),),
    transitions=(
        Transition("COUNTING", "number", "more", "COUNTING", is_birth=True),
        Transition("COUNTING", "number", "more", "COUNTING"),
        Transition("COUNTING", "number", "end", "DONE"),
    ),
)
GOAL: Final = 4


class Number(StreamArtifact):
    artifact_type: ClassVar[str] = "number"
    schema_id: Literal["test/number"] = "test/number"
    counter_id: Name
    tenant: Name
    change: Literal["more", "end"]
    value: SequenceNumber


class CounterEntry(LogEntry):
    kind: ClassVar = COUNTER
    schema_id: Literal["test/counter_entry"] = "test/counter_entry"
    counter_id: Name


COUNTER_DOCUMENTS: Final = StreamDocuments(CounterEntry, {"number": Number})


def planned_on(owned: OwnedStream, number: Number, *, recorded_at: str) -> tuple[PlannedEntry, Head, bool]:
    return COUNTER_DOCUMENTS.plan(
        owned.head, number, identity=owned.identity, executor_id=owned.executor_id, recorded_at=recorded_at
    )


async def make_kind(admin: Admin) -> None:
    """The rows of the kind, as docs/how-to-add.md says."""
    rows: list[tuple[str, dict[str, Any]]] = [
        (
            "stream_kinds",
            {
                "kind": COUNTER.name,
                "id_field": COUNTER.id_field,
                "entry_schema_id": COUNTER.entry_schema_id,
                "birth_state": COUNTER.birth_state,
                "tenant_path": ["tenant"],
            },
        )
    ]
    rows += [
        (
            "artifact_rules",
            {
                "kind": COUNTER.name,
                "artifact_type": rule.artifact_type,
                "schema_id": rule.schema_id,
                "verdict_field": rule.verdict_field,
            },
        )
        for rule in COUNTER.artifacts
    ]
    rows += [
        (
            "transitions",
            {
                "kind": COUNTER.name,
                "from_state": transition.from_state,
                "artifact_type": transition.artifact_type,
                "verdict": transition.verdict,
                "to_state": transition.to_state,
                "is_birth": transition.is_birth,
            },
        )
        for transition in COUNTER.transitions
    ]
    for table, row in rows:
        columns = ", ".join(row)
        await admin.execute(
            f"INSERT INTO tga.{table} ({columns})"
            f" SELECT {columns} FROM jsonb_populate_record(NULL::tga.{table}, $1::jsonb)",
            json.dumps(row),
        )


@dataclass
class Count:
    """Where a counter stands."""

    state: str
    value: int

    @property
    def is_at_rest(self) -> bool:
        return self.state == "DONE"


@dataclass
class Counting:
    owned: OwnedStream
    committed: Count | None = None


class Counter:
    """Executes counters: the executor that a kind brings. `touch` is the world."""

    def __init__(self, sessions: Sessions, ledger: Ledger, owner: StreamOwner, clock: FakeClock) -> None:
        self.touch: Callable[[Counting], Awaitable[None]] | None = None
        self.touched: list[tuple[str, int]] = []
        self.ports = StreamPorts(COUNTER, ledger, owner, clock, self._load_position)
        self._sessions = sessions
        self._clock = clock

    def begin(self, identity: str, *, executor_id: str) -> Counting:
        return Counting(OwnedStream(self.ports, identity, executor_id=executor_id, head=Head.unborn(COUNTER)))

    async def load(self, stream: str, *, executor_id: str) -> Counting:
        head = await self._head(stream)
        if head.sequence_number == 0:
            raise RecoveryFailed("no such counter")
        owned = OwnedStream(self.ports, COUNTER.identity_of(stream), executor_id=executor_id, head=head)
        return Counting(owned, Count(head.state, head.sequence_number))

    async def load_answer(self, stream: str) -> Count:
        head = await self._head(stream)
        return Count(head.state, head.sequence_number)

    def group_of(self, execution: Counting) -> str:
        return "counters"

    async def run(self, execution: Counting) -> Count:
        owned = execution.owned
        while owned.head.state == "COUNTING":
            if owned.head.sequence_number > 0:
                if self.touch is not None:
                    await self.touch(execution)
                await owned.verify_owned()
                if await owned.is_still_ours():
                    self.touched.append((owned.stream, owned.head.sequence_number))
            await self._count(execution)
        if execution.committed is None or execution.committed.state != owned.head.state:
            raise RecoveryFailed("it rests without being durable")
        return execution.committed

    async def _count(self, execution: Counting) -> None:
        owned = execution.owned
        value = owned.head.sequence_number + 1
        change = "end" if value == GOAL else "more"
        number = Number.made(counter_id=owned.identity, tenant="default", change=change, value=value)
        planned, head, is_admitted = planned_on(owned, number, recorded_at=self._clock.now())
        if not is_admitted:
            raise RecoveryFailed("the table does not admit it")
        owned.append(planned, head)
        owner_after = None if change == "end" else owned.executor_id
        await owned.commit(Plan(owned.stream, owned.executor_id, owner_after, owned.pending))
        execution.committed = Count(owned.head.state, value)

    async def _head(self, stream: str) -> Head:
        rows = await self._sessions.fetch(
            "SELECT sequence_number, entry_digest, state, artifact_digest FROM tga.heads WHERE stream = $1", stream
        )
        if not rows or rows[0]["sequence_number"] == 0:
            return Head.unborn(COUNTER)
        (row,) = rows
        digests = [Digest(row[column].hex()) for column in ("entry_digest", "artifact_digest")]
        return Head(row["sequence_number"], digests[0], row["state"], digests[1])

    async def _load_position(self, stream: str) -> Position:
        head = await self._head(stream)
        return UNBORN if head.sequence_number == 0 else Position(head.entry_digest)


@dataclass
class Counters:
    """A process that executes counters."""

    executions: Executions[Counting, Count]
    executor: Counter
    ledger: CountingLedger
    owner: PostgresOwner
    sessions: Sessions

    async def count(self, identity: str) -> Count:
        execution = self.executor.begin(identity, executor_id=self.owner.executor_id())
        async with self.executions.patience(None) as patience:
            return await patience.wait(execution, self.executions.start(execution))


@asynccontextmanager
async def open_counters(url: str) -> AsyncIterator[Counters]:
    async with await Sessions.open(url) as sessions, await PostgresOwner.open(sessions, url) as owner:
        ledger = CountingLedger(PostgresLedger(sessions))
        executor = Counter(sessions, ledger, owner, FakeClock())
        executions = Executions(executor.ports, executor, remedy="Look at the counter.")
        try:
            yield Counters(executions, executor, ledger, owner, sessions)
        finally:
            await executions.close()


def new_identity() -> str:
    return SystemClock().new_id()
