"""A kind that the walk has never heard of is verified by it, from a database and from a bundle, with its own checks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from app.cli.bundle_files import DiskMemory, FolderFiles, own_schemas
from app.core.canonical import JsonValue
from app.core.chain import Head
from app.core.digest import digest_of_bytes
from app.core.errors import (
    ChecksumMismatch,
    InvalidTransition,
    RecoveryFailed,
    SchemaViolation,
    SequenceGap,
    TgaError,
)
from app.domain.ledger.checks import AnyRecord, KindChecks, Kinds, Report, Standing, StreamChecks, Walking
from app.domain.ledger.plans import Claim, Plan
from app.domain.ledger.stored import LedgerReader, StoredCheckpoint, StoredEntry, StoredStream
from app.domain.ledger.verification import verify_ledger
from app.domain.log.bundle_report import BundleReport
from app.domain.log.bundle_verification import verify_bundle
from app.domain.log.heads import fits
from app.domain.runs.verification import stream_checks
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from tests.conftest import Admin
from tests.export.world import World
from tests.ledger.counter import COUNTER, COUNTER_DOCUMENTS, GOAL, Number, make_kind, new_identity, open_counters
from tests.ledger.passing_on import PassedOn
from tests.traces import EXECUTOR, completed_trace, time_at

Finding = tuple[str, str | None, int | None]


@dataclass
class CounterChecks(StreamChecks):
    """A counter counts by one, and claims nothing."""

    value: int = 0

    def fold(self, record: AnyRecord) -> None:
        assert isinstance(record.artifact, Number)
        found = record.artifact.value
        if found != self.value + 1:
            raise RecoveryFailed("the counter does not count by one", expected=self.value + 1, found=found)
        self.value = found

    def verify(self, record: AnyRecord, row: StoredEntry, walk: Walking) -> None:
        assert isinstance(record.artifact, Number)
        if walk.tenant not in (None, record.artifact.tenant):
            raise RecoveryFailed("a counter of another tenant", expected=walk.tenant, found=record.artifact.tenant)

    def end(self, stored: StoredStream, at: Standing, walk: Walking) -> Iterator[TgaError]:
        if stored.claim is not None:
            yield at.at_last(RecoveryFailed("a counter claims nothing", expected="no claim", found=stored.claim))

    def to_json(self) -> JsonValue:
        return self.value


class CounterKind(KindChecks):
    documents = COUNTER_DOCUMENTS

    def begin(self, stored: StoredStream | None = None) -> StreamChecks:
        return CounterChecks()

    def restore(self, kept: JsonValue) -> StreamChecks:
        assert isinstance(kept, int)
        return CounterChecks(kept)


def all_kinds() -> Kinds:
    return {**stream_checks(), COUNTER.name: CounterKind()}


def place(error: TgaError) -> Finding:
    return (error.code, error.stream, error.sequence_number)


async def found_in(reader: LedgerReader, kinds: Kinds | None = None) -> list[Finding]:
    report = Report()
    found = [place(error) async for error in verify_ledger(reader, kinds or all_kinds(), report)]
    assert report.findings == len(found)
    return found


Change = Callable[[StoredStream, list[StoredEntry]], tuple[StoredStream, list[StoredEntry]]]


@dataclass
class Changed(PassedOn):
    """What a reader reads of counters, changed on its way: as if somebody had changed the tables."""

    change: Change

    async def streams(self) -> AsyncIterator[StoredStream]:
        async for stored in self.reader.streams():
            if not COUNTER.has(stored.stream):
                yield stored
                continue
            changed, rows = self.change(stored, [row async for row in stored.entries])
            yield replace(changed, entries=_each(rows))


async def _each(rows: list[StoredEntry]) -> AsyncIterator[StoredEntry]:
    for row in rows:
        yield row


async def count_by_hand(ledger: PostgresLedger, values: list[int], *, counters: int = 1) -> list[str]:
    """Counters with these numbers, through one another; each entry is one that the table admits. Their streams."""
    heads = {new_identity(): Head.unborn(COUNTER) for _ in range(counters)}
    for number, value in enumerate(values, start=1):
        for identity, head in heads.items():
            change = "end" if number == len(values) else "more"
            artifact = Number.made(counter_id=identity, tenant="default", change=change, value=value)
            planned, heads[identity], is_admitted = COUNTER_DOCUMENTS.plan(
                head, artifact, identity=identity, executor_id=EXECUTOR, recorded_at=time_at(number)
            )
            assert is_admitted
            await ledger.commit(Plan(COUNTER.stream(identity), EXECUTOR, None, [planned]))
    return [COUNTER.stream(identity) for identity in heads]


@asynccontextmanager
async def counted(
    database: Database, sessions: Sessions, store: PostgresStateStore
) -> AsyncIterator[tuple[LedgerReader, str]]:
    """A ledger with a trace and a counter that was executed to its end; and the counter's stream."""
    await store.append_log_entry(completed_trace(1)[0])  # waits, owned by nobody
    async with open_counters(database.gateway_url) as counters:
        identity = new_identity()
        await counters.count(identity)
    async with open_reader(sessions) as reader:
        yield reader, COUNTER.stream(identity)


async def test_it_is_verified_online_once_it_is_registered(
    database: Database, sessions: Sessions, store: PostgresStateStore, admin: Admin
) -> None:
    await make_kind(admin)
    async with counted(database, sessions, store) as (reader, stream):
        report = Report()
        assert [error async for error in verify_ledger(reader, all_kinds(), report)] == []
        assert (report.streams, report.entries) == (2, 1 + GOAL)
        assert await found_in(reader, stream_checks()) == [(SchemaViolation.code, stream, None)]


def _flipped(raw: bytes | None) -> bytes:
    assert raw is not None
    return raw[:20] + bytes([raw[20] ^ 1]) + raw[21:]


CHECKPOINT = StoredCheckpoint(2, b"{}", digest_of_bytes(b"{}"))
CLAIM = Claim("server", "tool", "key", digest_of_bytes(b""))
CHANGES: dict[str, tuple[Change, Finding]] = {
    "a flipped byte of an artifact": (
        lambda stored, rows: (stored, [rows[0], rows[1]._replace(artifact=_flipped(rows[1].artifact)), *rows[2:]]),
        (ChecksumMismatch.code, "", 2),
    ),
    "a dropped entry": (lambda stored, rows: (stored, [rows[0], *rows[2:]]), (SequenceGap.code, "", 2)),
    "a dropped payload": (
        lambda stored, rows: (stored, [*rows[:-1], rows[-1]._replace(artifact=None)]),
        (RecoveryFailed.code, "", GOAL),
    ),
    "a cut tail": (lambda stored, rows: (stored, rows[:-1]), (SequenceGap.code, "", GOAL)),
    "a head that says it goes on": (
        lambda stored, rows: (replace(stored, is_open=True), rows),
        (InvalidTransition.code, "", GOAL),
    ),
    "a checkpoint, which the kind does not have": (
        lambda stored, rows: (replace(stored, checkpoints=[CHECKPOINT]), rows),
        (RecoveryFailed.code, "", 2),
    ),
    "a claim, which the kind itself refuses": (
        lambda stored, rows: (replace(stored, claim=CLAIM), rows),
        (RecoveryFailed.code, "", GOAL),
    ),
}


async def test_what_is_changed_is_found_at_its_entry(
    database: Database, sessions: Sessions, store: PostgresStateStore, admin: Admin
) -> None:
    await make_kind(admin)
    async with counted(database, sessions, store) as (reader, stream):
        found = {name: await found_in(Changed(reader, change)) for name, (change, _) in CHANGES.items()}
    assert found == {name: [(code, stream, number)] for name, (_, (code, _, number)) in CHANGES.items()}


async def test_its_own_check_finds_what_no_table_forbids(
    sessions: Sessions, store: PostgresStateStore, admin: Admin
) -> None:
    await make_kind(admin)
    (stream,) = await count_by_hand(PostgresLedger(sessions), [1, 2, 4])
    async with open_reader(sessions) as reader:
        assert await found_in(reader) == [(RecoveryFailed.code, stream, 3)]


@pytest.mark.parametrize("values", [[1, 2, 3], [1, 3, 4]])
async def test_a_bundle_of_it_is_verified_by_the_same_checks(
    values: list[int], database: Database, sessions: Sessions, store: PostgresStateStore, admin: Admin, tmp_path: Path
) -> None:
    """All streams through one another, and no more than one of them in memory."""
    await make_kind(admin)
    world = World(database, sessions, store, tmp_path / "keys")
    await world.announce()
    streams = await count_by_hand(PostgresLedger(sessions), values, counters=3)
    await world.append(completed_trace(1))
    await world.sequence()
    await world.export(tmp_path / "bundle")
    kinds, report = all_kinds(), BundleReport()
    with DiskMemory(kinds, streams_max=1) as memory:
        verified = verify_bundle(
            FolderFiles(tmp_path / "bundle"),
            [world.verifier_key],
            verify=fits,
            memory=memory,
            report=report,
            schemas=own_schemas(),
            kinds=kinds,
        )
        found = {place(error) for error in verified}
    is_right = values == [1, 2, 3]
    assert found == (set() if is_right else {(RecoveryFailed.code, stream, 2) for stream in streams})
    assert report.streams.of_kind == {"system": 1, "trace": 1, "counter": 3}
    assert report.streams.unfinished["counter"] == (0 if is_right else 3)
