"""The append function on the lean tables answers as the one before it did, and leaves the same ledger.

Random batches of sound and broken plans go to the old function on the old tables (tests/postgres/old_schema) and to
today's on today's, in two databases that grow side by side. Answers must be equal, and so must all that the tables
hold, read through today's views; what a clock, a sequence or a transaction's number decides is left out.

Differences that are meant:
- Plans that are refused for their stream or their owner are refused unread: their bytes cannot fail the batch.
- A time that cannot be read fails the batch only when it would be stored.
- A claim is of what its stream is about (one pair of columns holds both).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeAlias

import asyncpg
import pytest

from app.core.canonical import canonical_bytes
from app.core.digest import GENESIS, digest_of_bytes
from app.core.errors import TgaError
from app.domain.ledger.plans import Claim, Plan, PlannedCheckpoint, PlannedEntry, Sealed
from app.domain.tga.replay import LogRecord, fold
from app.postgres.ledger import _APPEND, _columns
from app.postgres.migrate import migrate
from bench.streams import GrowingStream, register_kind
from tests.conftest import Server
from tests.invariants.plans import plan_of, planned
from tests.postgres.old_schema import old_migrations
from tests.traces import (
    EXECUTOR,
    OTHER_EXECUTOR,
    action_request,
    completed_trace,
    records_of,
    supervisor_decision,
    time_at,
    tool_call,
    tool_effect,
    trace_id,
)

Session: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Columns: TypeAlias = list[list[Any]]

BATCHES = 90
USUAL_BATCHES = 150
_numbers = itertools.count(1)
PAST, FUTURE = "2020-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z"
_TABLES = {
    "entries": "stream, sequence_number, entry, entry_digest, xid = pg_current_xact_id() AS is_new",
    "artifacts": "stream, sequence_number, artifact",
    "execution_checkpoints": "*",
    "claims": "server_id, tool_name, idempotency_key, stream, payload_digest",
    "claim_effects": "*",
    "dispatch_attempts": "stream, attempt, executor_id, resolution",
    "heads": "stream, sequence_number, entry_digest, state, artifact_digest, owner, waiting, is_open, tenant,"
    " principal_id, {subject}, {name}, expires_at, updated_at >= transaction_timestamp() AS is_touched",
    "sealed": "*",
    "outbox": "webhook, stream",
}
OUT_OF_ORDER = "22023 the entries do not stand in the order of their plans"
# Columns of p, e, c, k in what the ledger sends.
P_EXECUTOR, E_PLAN, E_ENTRY, E_ARTIFACT, K_PLAN, F_PLAN = 1, 4, 5, 6, 12, 21


@pytest.fixture
async def old(server: Server) -> AsyncIterator[Session]:
    """A database with the old tables and the old function, beside the one of `admin`."""
    name = f"tga_old_{os.getpid()}_{next(_numbers)}"
    await server.execute_as_root(f"CREATE DATABASE {name}")
    await migrate(server.url("postgres", name), old_migrations())
    session = await asyncpg.connect(server.url("postgres", name))
    try:
        yield session
    finally:
        await session.close()
        await server.execute_as_root(f"DROP DATABASE {name} WITH (FORCE)")


@dataclass
class Trace:
    """One trace that the batches drive: its whole log, and how much of it stands in the ledger."""

    n: int
    records: list[LogRecord]
    claim: Claim | None
    stored: int = 0
    attempts: int = 1


@dataclass
class Driver:
    """Makes the plans of a batch, sound ones and broken ones, from a seed alone."""

    seed: int
    random: random.Random = field(init=False)
    traces: list[Trace] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def new_trace(self) -> Trace:
        n = self.seed * 100_000 + len(self.traces)
        expires_at = self.random.choice((None, None, PAST, FUTURE))
        request = action_request(n, expires_at=expires_at)
        by_expiry = self.random.random() < 0.3
        overrides = {"decided_by": {"type": "expiry", "id": "expiry"}} if by_expiry else {}
        verdict = "DENY" if by_expiry else self.random.choice(("APPROVE", "APPROVE", "APPROVE", "DENY"))
        decision = supervisor_decision(request, decision=verdict, **overrides)
        artifacts: list[Any] = [request, decision]
        if verdict == "APPROVE":
            call = tool_call(n, request, decision)
            artifacts += [call, tool_effect(call, outcome=self.random.choice(("SUCCESS", "FAILURE")))]
        records = records_of(*artifacts)
        made = Trace(n, records, plan_of(records[:1]).claim)
        self.traces.append(made)
        return made

    def next_plan(self, trace: Trace) -> Plan:
        """A sound plan: some of the next entries, or none."""
        stream = trace.records[0].stream
        left = len(trace.records) - trace.stored
        if trace.stored and (not left or self.random.random() < 0.15):
            return self._without_entries(trace, stream)
        count = self.random.randint(1, left) if left else 0
        records = trace.records[trace.stored : trace.stored + count]
        is_birth = trace.stored == 0
        waits = is_birth and count == 1
        is_over = count == left
        with_checkpoint = self.random.random() < 0.4
        return Plan(
            stream=stream,
            executor_id=EXECUTOR,
            owner_after=None if waits or is_over else EXECUTOR,
            waiting_after="supervisor" if waits else None,
            entries=[planned(record) for record in records],
            claim=trace.claim if is_birth and self.random.random() < 0.8 else None,
            checkpoint=self.checkpoint(trace, trace.stored + count) if with_checkpoint else None,
            sealed=Sealed(b"salt", b"values") if is_birth and self.random.random() < 0.3 else None,
            forgets_secrets=is_over and self.random.random() < 0.5,
            announce_to=["people", "pager"] if waits else [],
        )

    def _without_entries(self, trace: Trace, stream: str) -> Plan:
        plan = Plan(stream, EXECUTOR, self.random.choice((None, EXECUTOR, OTHER_EXECUTOR)))
        match self.random.randrange(4):
            case 0:
                attempt = trace.attempts + self.random.choice((1, 1, 2))
                return plan._replace(dispatch_attempt=attempt, resolution=b"{}", owner_after=EXECUTOR)
            case 1:
                return plan._replace(checkpoint=self.checkpoint(trace, self.random.randint(1, trace.stored)))
            case 2:
                return plan._replace(waiting_after="operator")
        return plan

    def checkpoint(self, trace: Trace, sequence_number: int) -> PlannedCheckpoint:
        state = fold(trace.records[:sequence_number])
        assert state is not None
        return PlannedCheckpoint(state.to_bytes(), time_at(self.random.randint(1, 9)))

    def batch(self) -> list[tuple[Trace | None, Plan]]:
        found: list[tuple[Trace | None, Plan]] = []
        for _ in range(self.random.choice((1, 1, 2, 3, 5, 8))):
            open_traces = [trace for trace in self.traces[-40:] if trace not in [t for t, _ in found]]
            is_old = bool(open_traces) and self.random.random() < 0.65
            trace = self.random.choice(open_traces) if is_old else self.new_trace()
            plan = self.next_plan(trace)
            if self.random.random() < 0.4:
                plan = self._broken(trace, plan)
            found.append((trace, plan))
        if self.random.random() < 0.1:
            found.append((None, self.random.choice(found)[1]))  # a stream twice
        return found

    def _broken(self, trace: Trace, plan: Plan) -> Plan:
        ways: list[Callable[[Driver, Trace, Plan], Plan]] = [_break_plan, _break_checkpoint]
        if plan.entries:
            ways += [_break_entry] * 5
        return self.random.choice(ways)(self, trace, plan)

    def disturb(self, columns: Columns) -> str:
        """Now and then something that no Plan can say; returns what."""
        what = self.random.choice(("", "", "", "", "", "mixed", "no executor", "checkpoint twice", "bad bytes", "null"))
        if what == "mixed":  # entries of several plans among each other, each plan's in their order
            order = sorted(range(len(columns[E_PLAN])), key=lambda _: self.random.random())
            places: dict[int, Iterator[int]] = {
                plan: iter([i for i, p in enumerate(columns[E_PLAN]) if p == plan]) for plan in columns[E_PLAN]
            }
            order = [next(places[columns[E_PLAN][i]]) for i in order]
            for column in (E_PLAN, E_ENTRY, E_ARTIFACT):
                columns[column] = [columns[column][i] for i in order]
        elif what == "no executor":
            columns[P_EXECUTOR][self.random.randrange(len(columns[P_EXECUTOR]))] = None
        elif what == "checkpoint twice" and len(columns[K_PLAN]) > 1:
            columns[K_PLAN][1] = columns[K_PLAN][0]
        elif what == "bad bytes" and columns[E_PLAN] and self.random.random() < 0.5:
            column = self.random.choice((E_ENTRY, E_ARTIFACT))
            bad = self.random.choice((b"{", b"\xff{}", b'{"a":"\\u0000"}', b"", b"[]", b"null", b"7"))
            columns[column][self.random.randrange(len(columns[E_PLAN]))] = bad
        elif what == "null" and columns[E_PLAN] and self.random.random() < 0.5:
            columns[self.random.choice((E_ENTRY, E_ARTIFACT))][0] = None
        return what


def _break_plan(driver: Driver, trace: Trace, plan: Plan) -> Plan:
    other = driver.random.choice(driver.traces)
    match driver.random.randrange(9):
        case 0:
            return plan._replace(executor_id=OTHER_EXECUTOR)
        case 1:
            return plan._replace(stream=driver.random.choice(("nothing:1", "", "trace", ":", "trace:none")))
        case 2:
            return plan._replace(claim=other.claim)
        case 3:
            assert trace.claim is not None
            return plan._replace(claim=Claim("crm", "create_ticket", f"other-{trace.n}", trace.claim.payload_digest))
        case 4:
            return plan._replace(dispatch_attempt=driver.random.choice((2, 3, trace.attempts + 1)))
        case 5:
            return plan._replace(entries=list(plan.entries)[::-1])
        case 6:
            return plan._replace(entries=list(plan.entries)[1:])
        case 7:
            return plan._replace(entries=[*plan.entries, *list(plan.entries)[-1:]])
    return plan._replace(entries=[planned(record) for record in driver.random.choice(driver.traces).records])


def _break_checkpoint(driver: Driver, trace: Trace, plan: Plan) -> Plan:
    checkpoint = plan.checkpoint or driver.checkpoint(trace, driver.random.randint(1, len(trace.records)))
    document = json.loads(checkpoint.state)
    match driver.random.randrange(5):
        case 0:
            values = (0, -1, 1, 2, 2**63 - 1, -(2**63), 2**70, None, "2", "x", 1.5)
            document["sequence_number"] = driver.random.choice(values)
        case 1:
            document["entry_digest"] = driver.random.choice((None, "", "0" * 64, 7))
        case 2:
            document.pop(driver.random.choice(("entry_digest", "sequence_number")))
        case 3:
            document["state"] = "ELSEWHERE"  # another content at the same place
        case _:
            return plan._replace(checkpoint=PlannedCheckpoint(b"{", checkpoint.created_at))
    return plan._replace(checkpoint=PlannedCheckpoint(json.dumps(document).encode(), checkpoint.created_at))


_BINDINGS = ("trace_id", "action_request_digest", "supervisor_decision_digest", "tool_call_digest")
_FIELDS = ("sequence_number", "prev_entry_digest", "from_state", "to_state", "schema_id", "trace_id", "artifact_type")
_ARTIFACT_FIELDS = (
    "trace_id",
    "schema_id",
    "decision",
    "outcome",
    "action_request_digest",
    "supervisor_decision_digest",
    "tool_call_digest",
    "decided_by",
    "expires_at",
    "principal",
)


def _break_entry(driver: Driver, trace: Trace, plan: Plan) -> Plan:
    """Change one field of one entry or of its artifact; with the digests made to fit again, or not."""
    entries = list(plan.entries)
    place = driver.random.randrange(len(entries))
    entry, artifact = json.loads(entries[place].entry), json.loads(entries[place].artifact)
    other = driver.random.choice(driver.traces)
    values: dict[str, tuple[Any, ...]] = {
        "sequence_number": (0, 2, 3, "1", 1.5, -1, 2**63, None, [1], 10**30),
        "prev_entry_digest": ("0" * 64, "f" * 64, None),
        "from_state": ("PENDING", "AUTHORIZED", "EXECUTING", "COMPLETED", "", None),
        "to_state": ("PENDING", "AUTHORIZED", "EXECUTING", "COMPLETED", "FAILED", "", None),
        "schema_id": ("tga/v1/execution_log_entry", "tga/v1/action_request", "tga/v1/tool_effect", None, 1),
        "trace_id": (trace_id(other.n), "", None, {}),
        "artifact_type": ("action_request", "supervisor_decision", "tool_call", "tool_effect", "other", None),
        "decision": ("APPROVE", "DENY", "", None),
        "outcome": ("SUCCESS", "FAILURE", "OTHER"),
        "decided_by": ({"type": "expiry", "id": "expiry"}, {"type": "policy", "id": "p"}, None),
        "expires_at": (PAST, FUTURE, "no time", None),
        "principal": ({"tenant": "other", "principal_id": "else"}, {}, None),
    }
    if driver.random.random() < 0.06:
        entry["padding"] = "x" * 70_000
    elif driver.random.random() < 0.5:
        name = driver.random.choice(_FIELDS)
        if driver.random.random() < 0.1:
            entry.pop(name)
        else:
            entry[name] = driver.random.choice(values[name])
    else:
        name = driver.random.choice(_ARTIFACT_FIELDS)
        artifact[name] = driver.random.choice(values.get(name, ("f" * 64, None)))
        if driver.random.random() < 0.8:
            entry["artifact_digest"] = digest_of_bytes(json.dumps(artifact).encode())
    entries[place] = PlannedEntry(json.dumps(entry).encode(), json.dumps(artifact).encode())
    if driver.random.random() < 0.7:  # what follows links to the changed one
        for after in range(place + 1, len(entries)):
            linked = json.loads(entries[after].entry)
            linked["prev_entry_digest"] = digest_of_bytes(entries[after - 1].entry)
            entries[after] = PlannedEntry(canonical_bytes(linked), entries[after].artifact)
    return plan._replace(entries=entries)


async def _rows(session: Session, *, is_old: bool) -> dict[str, list[str]]:
    names = {"subject": "server_id", "name": "tool_name"} if is_old else {"subject": "subject", "name": "name"}
    return {
        table: [
            row["row"]
            for row in await session.fetch(
                f"SELECT t::text AS row FROM (SELECT {columns.format(**names)} FROM tga.{table}) t ORDER BY 1"
            )
        ]
        for table, columns in _TABLES.items()
    }


@dataclass(frozen=True)
class Outcome:
    """What a function answered, or how it failed, and what the ledger holds after it."""

    answer: list[tuple[Any, ...]] | str
    rows: dict[str, list[str]]


async def _put(
    session: Session, columns: Sequence[list[Any] | None], *, is_old: bool, statement: str = _APPEND
) -> Outcome:
    """In a transaction that is left open when there is an answer."""
    await session.execute("BEGIN")
    try:
        found = await session.fetch(statement, 5_000, *columns)
    except asyncpg.PostgresError as error:
        await session.execute("ROLLBACK")
        return Outcome(f"{error.sqlstate} {error}", {})
    return Outcome([_told(row) for row in found], await _rows(session, is_old=is_old))


def _told(row: asyncpg.Record) -> tuple[Any, ...]:
    values = dict(row)
    if str(values["code"]).startswith("APPROVAL_"):
        values["found"] = re.sub(r"\d", "0", values["found"])  # the time of the clock
    return tuple(values.values())


# What is said to one plan alone. Failures of a whole batch are counted apart.
SAID = {
    "no such kind of stream",
    "the append names no executor",
    "the stream stands twice in one batch",
    "the stream has no entries",
    "another executor owns the stream",
    "the stream is finished: nothing is sent for it",
    "the entry is too large",
    "the entry has another schema",
    "the sequence number is no number",
    "the entry names another stream",
    "the artifact has another schema",
    "the entry is not the next of its stream",
    "the entry does not link to the one before it",
    "the artifact is not the one that the entry commits to",
    "the artifact names another stream",
    "the artifact does not bind to the one before it",
    "the state does not admit this artifact",
    "the request has expired",
    "the request has not expired yet",
    "the checkpoint does not stand on its entry",
    "the attempt is not the next one",
    "a claim is made with the first entry of its stream, once",
    "another claim stands in the way",
}


async def test_random_batches_meet_the_same_answer_and_leave_the_same_rows(admin: Session, old: Session) -> None:
    said: set[str] = set()
    appended = failed = out_of_order = unread = 0
    for seed in range(1, 6):
        driver = Driver(seed)
        for number in range(BATCHES):
            batch = driver.batch()
            columns = [list(column) for column in _columns([plan for _, plan in batch])]
            disturbed = driver.disturb(columns)
            before = await _put(old, columns, is_old=True)
            # What a batch does not bring is null, as the gateway sends it, or an empty list.
            sent = [column or None for column in columns[E_ARTIFACT + 1 :]] if number % 2 else columns[E_ARTIFACT + 1 :]
            after = await _put(admin, [*columns[: E_ARTIFACT + 1], *sent], is_old=False)
            about = f"seed {seed}, batch {number} {disturbed}: {[plan for _, plan in batch]}"
            if isinstance(before.answer, str) and not isinstance(after.answer, str):
                # Meant: the old function reads also what belongs to plans that it refuses, and fails the whole batch.
                unread += 1
                assert any(row[1] for row in after.answer), about
                assert disturbed == "bad bytes" or "no time" in before.answer, about
                await admin.execute("ROLLBACK")
                continue
            assert after == before, about
            if isinstance(after.answer, str):
                failed += after.answer != OUT_OF_ORDER
                out_of_order += after.answer == OUT_OF_ORDER
                continue
            await admin.execute("COMMIT")
            await old.execute("COMMIT")
            for (trace, plan), (place, code, _, what, *_) in zip(batch, after.answer, strict=True):
                assert plan is batch[place - 1][1]
                if code is not None:
                    said.add(what)
                elif trace is not None and plan.stream == trace.records[0].stream:
                    appended += 1
                    trace.attempts = plan.dispatch_attempt or trace.attempts
                    trace.stored = int(
                        await admin.fetchval("SELECT sequence_number FROM tga.heads WHERE stream = $1", plan.stream)
                    )
    # The comparison is worth something only if everything was said, and enough was sound.
    assert said >= SAID
    assert appended > 3 * BATCHES
    assert failed > 10
    assert out_of_order > 10
    assert unread < 20
    # And only if both ways to store an entry were gone: by its fields, and as it is.
    assert await admin.fetchval("SELECT count(*) FROM tga.links WHERE verbatim = ''") > BATCHES
    assert await admin.fetchval("SELECT count(*) FROM tga.links WHERE verbatim <> ''") > 0
    assert await admin.fetchval("SELECT count(*) FROM tga.entries WHERE sha256(entry) <> entry_digest") == 0
    assert await _misplaced(admin) == []


async def _misplaced(admin: Session) -> list[asyncpg.Record]:
    """Streams that recovery, expiry or a list would not find where they are, or find where they are not."""
    return await admin.fetch(
        """
        SELECT h.stream, h.is_open, h.waiting, h.state, w.stream_no IS NOT NULL AS in_work, r.state AS rests
          FROM tga.heads h
          JOIN tga.stream_kinds k ON k.kind = split_part(h.stream, ':', 1)
          LEFT JOIN tga.in_work w ON w.stream_no = h.stream_no
          LEFT JOIN tga.at_rest r ON r.stream_no = h.stream_no
         WHERE h.is_open AND h.waiting IS NULL AND w.stream_no IS NULL
            OR h.is_open AND h.waiting IS NOT NULL AND w.stream_no IS NOT NULL
            OR (h.waiting IS NOT NULL OR NOT h.is_open AND h.state <> k.usual_end AND h.sequence_number > 0)
               <> (r.stream_no IS NOT NULL)
            OR (r.state, r.waiting, r.tenant, r.expires_at)
               IS DISTINCT FROM (h.state, h.waiting, h.tenant, h.expires_at) AND r.stream_no IS NOT NULL
        """
    )


def _canonical(broken: PlannedEntry) -> PlannedEntry:
    """With the same fields in the bytes that sound documents have; as it is where there are none such."""
    try:
        entry, artifact = json.loads(broken.entry), canonical_bytes(json.loads(broken.artifact))
        if entry.get("artifact_digest") == digest_of_bytes(broken.artifact):
            entry["artifact_digest"] = digest_of_bytes(artifact)
        return PlannedEntry(canonical_bytes(entry), artifact)
    except TgaError:
        return broken


def _unbound(driver: Driver, sound: PlannedEntry) -> PlannedEntry:
    """Every byte and digest is right, but the artifact names another stream, or another artifact before it."""
    entry, artifact = json.loads(sound.entry), json.loads(sound.artifact)
    artifact[driver.random.choice([name for name in _BINDINGS if name in artifact])] = "f" * 64
    entry["artifact_digest"] = digest_of_bytes(canonical_bytes(artifact))
    return PlannedEntry(canonical_bytes(entry), canonical_bytes(artifact))


def _usual_batch(driver: Driver, traces: list[Trace]) -> list[tuple[Trace | None, Plan]]:
    """Plans of one entry, as most batches have them; and some of them broken, or beside one that brings more."""
    batch: list[tuple[Trace | None, Plan]] = []
    for trace in traces:
        record = trace.records[trace.stored]
        is_over = trace.stored + 1 == len(trace.records)
        plan = Plan(record.stream, EXECUTOR, None if is_over else EXECUTOR, [planned(record)])
        chance = driver.random.random()
        if chance < 0.1:
            plan = plan._replace(entries=[_unbound(driver, plan.entries[0])])
        elif chance < 0.35:
            plan = plan._replace(entries=[_canonical(entry) for entry in _break_entry(driver, trace, plan).entries])
        elif chance < 0.42:
            plan = _break_plan(driver, trace, plan)
        elif chance < 0.48:  # all that it says is right, but for who says it
            entry = json.loads(plan.entries[0].entry) | {"executor_id": OTHER_EXECUTOR}
            entries = [PlannedEntry(canonical_bytes(entry), plan.entries[0].artifact)]
            plan = plan._replace(executor_id=OTHER_EXECUTOR, entries=entries)
        elif chance < 0.55:
            plan = plan._replace(checkpoint=driver.checkpoint(trace, trace.stored + 1))
        elif chance < 0.6:
            plan = plan._replace(waiting_after="operator")
        batch.append((trace, plan))
    if driver.random.random() < 0.15:
        batch.append((None, driver.random.choice(batch)[1]))
    return batch


async def test_usual_plans_meet_the_same_answer_all_at_once_as_one_by_one(admin: Session) -> None:
    """What the function judges in one statement, its loop judges alike: a batch that says which plans it needs, even if
    it needs none, takes the loop."""
    needing = _APPEND.replace("$25::text[])", "$25::text[], $26::int[])")
    driver = Driver(seed=77)
    said: set[str] = set()
    appended = 0
    for number in range(USUAL_BATCHES):
        while len(open_traces := [t for t in driver.traces if t.stored < len(t.records)]) < 8:
            trace = driver.new_trace()
            trace.stored = driver.random.choice((1, len(trace.records) - 1))
            born = plan_of(trace.records[: trace.stored], owner_after=EXECUTOR)
            claim = trace.claim if driver.random.random() < 0.5 else None
            (answer,) = await admin.fetch(_APPEND, 5_000, *_columns([born._replace(claim=claim)]))
            trace.stored = trace.stored if answer["code"] is None else len(trace.records)
        batch = _usual_batch(driver, driver.random.sample(open_traces, driver.random.choice((1, 1, 2, 3, 5))))
        columns = [list(column) for column in _columns([plan for _, plan in batch])]
        if driver.random.random() < 0.2:
            driver.disturb(columns)
        sent = [*columns[: E_ARTIFACT + 1], *(column or None for column in columns[E_ARTIFACT + 1 :])]
        one_by_one = await _put(admin, [*sent, [None] * len(batch)], is_old=False, statement=needing)
        if not isinstance(one_by_one.answer, str):
            await admin.execute("ROLLBACK")
        at_once = await _put(admin, sent, is_old=False)
        assert at_once == one_by_one, f"batch {number}: {[plan for _, plan in batch]}"
        if isinstance(at_once.answer, str):
            continue
        await admin.execute("COMMIT")
        for (of_trace, plan), row in zip(batch, at_once.answer, strict=True):
            said.add(row[3])
            if of_trace is None:
                continue
            stored, of_trace.stored = of_trace.stored, len(of_trace.records)
            if row[1] is None and list(plan.entries) == [planned(of_trace.records[stored])]:
                appended += 1
                if plan.waiting_after is None:
                    of_trace.stored = stored + 1  # its next entry is usual, too
    assert appended > USUAL_BATCHES / 2
    assert await _misplaced(admin) == []
    assert said >= {
        "another executor owns the stream",
        "the entry does not link to the one before it",
        "the artifact is not the one that the entry commits to",
        "the artifact names another stream",
        "the artifact does not bind to the one before it",
        "the state does not admit this artifact",
        "the stream stands twice in one batch",
    }


def _born(driver: Driver, trace: Trace, others: Sequence[Trace]) -> Plan:
    """What a call begins with, or something that is not quite that."""
    count = min(3, len(trace.records))
    owner = EXECUTOR if count < len(trace.records) else None
    plan = Plan(trace.records[0].stream, EXECUTOR, owner, [planned(r) for r in trace.records[:count]], trace.claim)
    chance = driver.random.random()
    if chance < 0.15:
        return plan._replace(entries=[_canonical(entry) for entry in _break_entry(driver, trace, plan).entries])
    if chance < 0.2:
        place = driver.random.randrange(count)
        entries = [*plan.entries[:place], _unbound(driver, plan.entries[place]), *plan.entries[place + 1 :]]
        return plan._replace(entries=entries)
    ways: list[Callable[[], Plan]] = [
        *[lambda: plan._replace(claim=driver.random.choice(others[-20:]).claim)] * 5,
        lambda: plan._replace(claim=None),
        lambda: plan._replace(claim=trace.claim._replace(server_id="bank") if trace.claim else None),
        lambda: plan._replace(executor_id=OTHER_EXECUTOR),
        lambda: plan._replace(entries=list(plan.entries)[:-1]),
        lambda: plan._replace(entries=list(plan.entries)[1:]),
        lambda: plan._replace(entries=[*plan.entries, plan.entries[-1]]),
        lambda: plan._replace(waiting_after="operator", owner_after=None),
        lambda: plan._replace(checkpoint=driver.checkpoint(trace, driver.random.randint(1, count))),
        lambda: _break_checkpoint(driver, trace, plan),
        lambda: plan._replace(sealed=Sealed(b"salt", b"values"), announce_to=["people"]),
        lambda: plan._replace(dispatch_attempt=2, resolution=b"{}"),
        lambda: plan._replace(stream="nothing:1"),
    ]
    return driver.random.choice(ways)() if chance < 0.5 else plan


async def _each_alone(admin: Session, plans: Sequence[Plan]) -> Outcome:
    """One append after the other, in a transaction that is left open; the first that fails is the answer."""
    answer: list[tuple[Any, ...]] = []
    await admin.execute("BEGIN")
    for number, plan in enumerate(plans, 1):
        columns = _columns([plan])
        sent = [*columns[: E_ARTIFACT + 1], *(column or None for column in columns[E_ARTIFACT + 1 :])]
        try:
            (row,) = await admin.fetch(_APPEND, 5_000, *sent)
        except asyncpg.PostgresError as error:
            await admin.execute("ROLLBACK")
            return Outcome(f"{error.sqlstate} {error}", {})
        answer.append((number, *_told(row)[1:]))
    return Outcome(answer, await _rows(admin, is_old=False))


async def test_births_and_effects_meet_the_same_answer_in_one_batch_as_each_alone(admin: Session) -> None:
    """Also beside streams of another kind. A birth's stream may exist, or may have had an owner before it began; its
    claim may stand, or be made by another plan of the batch."""
    await register_kind(admin)
    driver = Driver(seed=78)
    beside = [GrowingStream(f"beside-{n}") for n in range(2)]
    said: set[str] = set()
    unborn: set[str] = set()
    appended = mixed = lost = owned = 0
    for number in range(USUAL_BATCHES):
        fresh = [driver.new_trace() for _ in range(driver.random.choice((0, 1, 2, 3)))]
        begun = [t for t in driver.traces if 0 < t.stored < len(t.records)]
        batch: list[tuple[Trace | None, Plan]] = []
        for trace in driver.random.sample(begun, min(len(begun), driver.random.choice((0, 1, 2)))):
            plan = _usual_batch(driver, [trace])[0][1]
            late = Claim("crm", "create_ticket", f"late-{number}", GENESIS)
            batch.append((trace, plan._replace(claim=late if driver.random.random() < 0.1 else None)))
        for trace in fresh:
            if driver.random.random() < 0.1:
                owner = driver.random.choice((EXECUTOR, OTHER_EXECUTOR))
                await admin.execute("SELECT tga.own_unborn($1, $2)", trace.records[0].stream, owner)
                unborn.add(trace.records[0].stream)
            batch.append((trace, _born(driver, trace, driver.traces)))
        if begun and driver.random.random() < 0.1:
            again = driver.random.choice(begun)
            batch.append((None, _born(driver, again, driver.traces)))  # its stream exists
        grown = [stream for stream in beside if driver.random.random() < 0.3]
        batch += [(None, stream.next_plan()) for stream in grown]
        batch = list({plan.stream: (trace, plan) for trace, plan in batch}.values())
        driver.random.shuffle(batch)
        plans = [plan for _, plan in batch]
        if not plans:
            continue
        alone = await _each_alone(admin, plans)
        if not isinstance(alone.answer, str):
            await admin.execute("ROLLBACK")
        columns = _columns(plans)
        sent = [*columns[: E_ARTIFACT + 1], *(column or None for column in columns[E_ARTIFACT + 1 :])]
        together = await _put(admin, sent, is_old=False)
        assert together == alone, f"batch {number}: {plans}"
        if isinstance(together.answer, str):
            beside = [GrowingStream(f"{number}-{n}") for n in range(2)]  # nothing of it was stored
            continue
        await admin.execute("COMMIT")
        mixed += len({len(plan.entries) for plan in plans}) > 1
        for (of_trace, plan), row in zip(batch, together.answer, strict=True):
            said.add(row[3])
            lost += row[1] == "IDEMPOTENCY_KEY_CLAIMED"
            if of_trace is None or row[1] is not None:
                continue
            owned += plan.stream in unborn and of_trace.stored == 0
            stored = of_trace.stored + len(plan.entries)
            is_sound = plan.waiting_after is None and plan.executor_id == EXECUTOR
            is_sound &= list(plan.entries) == [planned(r) for r in of_trace.records[of_trace.stored : stored]]
            of_trace.stored = stored if is_sound else len(of_trace.records)
            appended += is_sound
    assert appended > USUAL_BATCHES
    assert mixed > USUAL_BATCHES / 5
    assert lost > 5
    assert owned > 5
    assert await _misplaced(admin) == []
    assert said >= {
        "another executor owns the stream",
        "the entry is not the next of its stream",
        "the entry does not link to the one before it",
        "the artifact is not the one that the entry commits to",
        "the artifact names another stream",
        "the artifact does not bind to the one before it",
        "the state does not admit this artifact",
        "the claim is not of what the stream is about",
        "a claim is made with the first entry of its stream, once",
        "another claim stands in the way",
        "the checkpoint does not stand on its entry",
        "no such kind of stream",
    }


async def test_a_claim_without_a_birth_is_refused_beside_a_birth_without_a_claim(admin: Session) -> None:
    """As many births as claims, and every birth is stored: the claim is looked at all the same."""
    trace = completed_trace(1)
    await admin.fetch(_APPEND, 5_000, *_columns([plan_of(trace[:3], owner_after=EXECUTOR)]))
    unclaimed = plan_of(records_of(action_request(2)))._replace(claim=None)
    claiming = plan_of(trace[3:])._replace(claim=Claim("crm", "create_ticket", "late", GENESIS))
    rows = await admin.fetch(_APPEND, 5_000, *_columns([unclaimed, claiming]))
    late = "a claim is made with the first entry of its stream, once"
    assert [row["what"] for row in rows] == [None, late]
    assert await admin.fetchval("SELECT count(*) FROM tga.claims") == 1


async def test_a_lost_claim_is_refused_beside_births_and_effects_that_are_stored(admin: Session) -> None:
    first, second, third = (completed_trace(n) for n in (1, 2, 3))
    await admin.fetch(_APPEND, 5_000, *_columns([plan_of(first[:3], owner_after=EXECUTOR)]))
    claim = plan_of(first[:3]).claim
    loses = plan_of(second[:3], owner_after=EXECUTOR)._replace(claim=claim)
    rows = await admin.fetch(
        _APPEND, 5_000, *_columns([plan_of(first[3:]), loses, plan_of(third[:3], owner_after=EXECUTOR)])
    )
    assert [row["code"] for row in rows] == [None, "IDEMPOTENCY_KEY_CLAIMED", None]
    assert rows[1]["claimed_by"] == first[0].stream
    stored = await admin.fetch("SELECT stream, sequence_number FROM tga.heads ORDER BY stream")
    assert [(row["stream"], row["sequence_number"]) for row in stored] == sorted(
        [(first[0].stream, 4), (third[0].stream, 3)]
    )
    assert await admin.fetchval("SELECT count(*) FROM tga.entries WHERE stream IS NULL") == 0


async def test_claims_may_stand_in_any_order_but_each_plan_once(admin: Session) -> None:
    plans = [plan_of(records_of(action_request(n))) for n in (1, 2)]
    columns = [list(column) for column in _columns(plans)]
    for place in range(7, 12):
        columns[place] = [columns[place][0]] * 2
    with pytest.raises(asyncpg.InvalidParameterValueError, match="stands twice among claims"):
        await admin.fetch(_APPEND, 5_000, *columns)
    columns = [list(column) for column in _columns(plans)]
    for place in range(7, 12):
        columns[place].reverse()
    assert [row["code"] for row in await admin.fetch(_APPEND, 5_000, *columns)] == [None, None]
    claims = await admin.fetch("SELECT stream, idempotency_key FROM tga.claims ORDER BY stream")
    assert [(row["stream"], row["idempotency_key"]) for row in claims] == [
        (plan.stream, plan.claim.idempotency_key) for plan in plans if plan.claim
    ]


async def test_claims_that_begin_at_another_place_fail_the_batch_also_if_all_of_them_do(admin: Session) -> None:
    columns = [list(column) for column in _columns([plan_of(records_of(action_request(1)))])]
    statement = _APPEND
    for place, kind in zip(range(7, 12), ("int", "text", "text", "text", "bytea"), strict=True):
        sent = f"${place + 2}::{kind}[]"
        statement = statement.replace(sent, f"('[0:0]=' || {sent}::text)::{kind}[]")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="differ in shape"):
        await admin.fetch(statement, 5_000, *columns)


async def test_kinds_that_take_turns_in_a_batch_are_each_judged_by_their_own_rules(admin: Session) -> None:
    await register_kind(admin)
    growing = [GrowingStream(f"g{n}") for n in range(3)]
    nothing = Plan("nothing:1", EXECUTOR, None, growing[0].next_plan().entries)
    growing[0] = GrowingStream("g0")
    births = [plan_of(completed_trace(n)[:3], owner_after=EXECUTOR) for n in range(1, 4)]
    batch = [births[0], growing[0].next_plan(), births[1], nothing, births[2], growing[1].next_plan()]
    batch += [Plan("system:none", EXECUTOR, None, births[0].entries), growing[2].next_plan()]
    rows = await admin.fetch(_APPEND, 5_000, *_columns(batch))
    what = [row["what"] for row in rows]
    assert what == [None, None, None, "no such kind of stream", None, None, "the entry has another schema", None]
    assert await admin.fetchval("SELECT count(*) FROM tga.entries WHERE sha256(entry) <> entry_digest") == 0
    assert await admin.fetchval("SELECT count(*) FROM tga.links WHERE verbatim <> ''") == 0


def test_everything_that_the_append_can_say_is_expected_above() -> None:
    migrations = resources.files("app.postgres").joinpath("migrations")
    judging = migrations.joinpath("0003_append.sql").read_text("utf-8").partition("CREATE FUNCTION tga.judge_entry(")[2]
    appending = migrations.joinpath("0038_append.sql").read_text("utf-8")
    appending = appending.partition("CREATE OR REPLACE FUNCTION tga.append(")[2]
    source = judging.partition("CREATE FUNCTION tga.append(")[0] + appending
    texts = set(re.findall(r"'((?:the|a|an|another|no) [^']+)'", source))
    of_batches = {
        "arrays that belong together differ in shape",
        "a plan needs another one that makes no claim",
        "a claim has a key and a digest",
        OUT_OF_ORDER.partition(" ")[2],
    }
    new = {"the claim is not of what the stream is about", "the run that it goes on from was erased"}
    assert texts - of_batches == SAID | new


async def test_a_claim_is_of_what_its_stream_is_about(admin: Session) -> None:
    plan = plan_of(records_of(action_request(1)))
    assert plan.claim is not None
    for claim in (plan.claim._replace(server_id="bank"), plan.claim._replace(tool_name="charge")):
        (row,) = await admin.fetch(_APPEND, 5_000, *_columns([plan._replace(claim=claim)]))
        assert (row["code"], row["what"]) == ("STATE_RECOVERY_FAILED", "the claim is not of what the stream is about")
    assert await admin.fetchval("SELECT count(*) FROM tga.heads") == 0


@pytest.mark.parametrize(
    ("c_key", "c_payload"), [(None, bytes(32)), ("key", None), ("key", bytes(31))], ids=["key", "digest", "length"]
)
async def test_a_claim_has_a_key_and_a_digest(admin: Session, c_key: str | None, c_payload: bytes | None) -> None:
    columns = list(_columns([plan_of(records_of(action_request(1)))]))
    columns[10], columns[11] = [c_key], [c_payload]
    with pytest.raises(asyncpg.IntegrityConstraintViolationError, match="a claim has a key and a digest"):
        await admin.fetch(_APPEND, 5_000, *columns)


async def test_an_id_or_a_time_that_says_more_than_itself_is_judged_by_what_it_says(admin: Session) -> None:
    """Both are written into the form of an entry as they are: a quotation mark in one would be another document."""
    for stream, recorded_at in (
        ('trace:a","to_state":"COMPLETED', time_at(1)),
        ("trace:a", 'x","to_state":"COMPLETED'),
        ("trace:a\\", time_at(1)),
    ):
        identity = stream.partition(":")[2]
        request = json.loads(action_request(1).to_bytes())
        artifact = canonical_bytes({**request, "trace_id": identity})
        text = (
            f'{{"artifact_digest":"{digest_of_bytes(artifact)}","artifact_type":"action_request","executor_id":"{EXECUTOR}",'
            f'"from_state":"PENDING","prev_entry_digest":"{"0" * 64}","recorded_at":"{recorded_at}",'
            '"schema_id":"tga/v1/execution_log_entry","schema_version":"1.0","sequence_number":1,"to_state":"PENDING",'
            f'"trace_id":"{identity}"}}'
        )
        plan = Plan(stream, EXECUTOR, None, [PlannedEntry(text.encode(), artifact)])
        try:
            (row,) = await admin.fetch(_APPEND, 5_000, *_columns([plan]))
        except asyncpg.DataError:
            continue  # not even JSON
        stored = await admin.fetchval("SELECT convert_from(entry, 'UTF8') FROM tga.entries")
        if row["code"] is None:
            assert stored == text, "as it is"
            assert await admin.fetchval("SELECT count(*) FROM tga.links WHERE verbatim = ''") == 0
        assert recorded_at == time_at(1) or row["code"] is None


async def test_a_time_that_says_more_than_itself_is_stored_as_it_is_in_later_entries_too(admin: Session) -> None:
    records = records_of(request := action_request(1), supervisor_decision(request))
    await admin.fetch(_APPEND, 5_000, *_columns([plan_of(records[:1], owner_after=EXECUTOR)]))
    plan = plan_of(records[1:], owner_after=EXECUTOR)
    text = plan.entries[0].entry.replace(records[1].entry.recorded_at.encode(), b'x","to_state":"COMPLETED')
    plan = plan._replace(entries=[PlannedEntry(text, plan.entries[0].artifact)])
    (row,) = await admin.fetch(_APPEND, 5_000, *_columns([plan]))
    assert row["code"] is None, "its last to_state is the right one"
    assert await admin.fetchval("SELECT verbatim FROM tga.links WHERE sequence_number = 2") == text


async def test_a_usual_plan_that_needs_a_refused_one_is_refused(admin: Session) -> None:
    needing = _APPEND.replace("$25::text[])", "$25::text[], $26::int[])")
    trace = completed_trace(1)
    await admin.fetch(_APPEND, 5_000, *_columns([plan_of(trace[:3], owner_after=EXECUTOR)]))
    fenced = plan_of(records_of(action_request(2)))._replace(claim=None)
    fenced = fenced._replace(entries=list(fenced.entries) * 2)  # the second is no birth
    rows = await admin.fetch(needing, 5_000, *_columns([fenced, plan_of(trace[3:])]), [None, 1])
    assert rows[0]["code"] is not None
    assert [row["what"] for row in rows] == [rows[0]["what"]] * 2
    (row,) = await admin.fetch(_APPEND, 5_000, *_columns([plan_of(trace[3:])]))
    assert row["code"] is None, "it was sound, and was not stored before"


async def test_a_plan_that_needs_a_refused_one_is_refused_in_its_words(admin: Session) -> None:
    needing = _APPEND.replace("$25::text[])", "$25::text[], $26::int[])")
    born = [plan_of(records_of(action_request(n))) for n in range(1, 5)]
    fenced = born[0]._replace(entries=list(born[0].entries) * 2, claim=None)  # the second is no birth
    columns = _columns([fenced, born[1]._replace(claim=None), *born[2:]])
    rows = await admin.fetch(needing, 5_000, *columns, [None, 1, None, 2])
    first = (rows[0]["code"], rows[0]["what"], rows[0]["found"])
    assert first[0] is not None
    assert [(row["code"], row["what"], row["found"]) for row in rows] == [first, first, (None, None, None), first]
    stored = await admin.fetch("SELECT stream FROM tga.heads")
    assert [row["stream"] for row in stored] == [born[2].stream]
    assert await admin.fetchval("SELECT count(*) FROM tga.claims") == 1, "what is refused claims nothing"
    sound = [plan._replace(claim=None) for plan in (born[0], born[3])]
    rows = await admin.fetch(needing, 5_000, *_columns(sound), [None, 1])
    assert [row["code"] for row in rows] == [None, None]
    with pytest.raises(asyncpg.InvalidParameterValueError, match="needs another one that makes no claim"):
        await admin.fetch(needing, 5_000, *_columns(born[:2]), [None, 1])


@pytest.mark.parametrize(
    "name", ["append", "prepare_transaction", "refusal", "judge_entry", "verify_lists", "own_unborn"]
)
async def test_the_function_is_as_guarded_as_before(admin: Session, name: str) -> None:
    row = await admin.fetchrow(
        "SELECT prosecdef, proconfig, proacl::text, pg_get_userbyid(proowner) AS owner FROM pg_proc"
        " WHERE pronamespace = 'tga'::regnamespace AND proname = $1",
        name,
    )
    assert row is not None
    assert row["owner"] == "tga_owner"
    granted = "{tga_owner=X/tga_owner,tga_gateway=X/tga_owner}" if name == "append" else "{tga_owner=X/tga_owner}"
    assert row["proacl"] == granted
    if name == "append":
        assert row["prosecdef"]
        assert "search_path=pg_catalog, tga, pg_temp" in row["proconfig"]


async def test_what_belongs_to_no_plan_fails_the_batch(admin: Session) -> None:
    """A NULL among plan numbers once made every comparison NULL: nothing was stored, and success was answered."""
    beside: dict[int, list[Any]] = {
        5: [b"{}", b"{}"],
        8: ["crm", "create_ticket", "key", bytes(32)],
        13: [b"{}", time_at(1)],
        16: [2, None],
        19: [b"", b""],
        22: [],
        23: ["people"],
    }
    trace = records_of(request := action_request(1), supervisor_decision(request))
    for column, plan in itertools.product(beside, [None, 0, -1, 2, 99]):
        columns = [list(column) for column in _columns([plan_of(trace)])]
        place = column - 1  # the first argument is the lock's time-out, which is not among the columns
        columns[place].append(plan)
        for offset, value in enumerate(beside[column], 1):
            columns[place + offset].append(value)
        with pytest.raises(asyncpg.InvalidParameterValueError, match="belongs to no plan"):
            await admin.fetch(_APPEND, 5_000, *columns)
        assert await admin.fetchval("SELECT count(*) FROM tga.entries") == 0, (column, plan)


@pytest.mark.parametrize("shape", ["begins at 0", "is longer", "is shorter", "is null", "has two dimensions"])
async def test_arrays_of_another_shape_fail_the_batch(admin: Session, shape: str) -> None:
    """What is judged by its place must be what is stored by its place: an array that begins at 0 once had one entry
    judged and another stored."""
    for column in range(24):
        if column != F_PLAN or shape not in ("is shorter", "is null"):  # nothing else belongs to it
            await verify_array_refused(admin, column, shape)


async def test_a_batch_without_its_list_of_entries_fails(admin: Session) -> None:
    """Other lists may be null, which says that they are empty; without this one no plan's number of entries is known,
    and a stream without any would not be refused as such."""
    columns: list[Any] = [*_columns([Plan("trace:none", EXECUTOR, EXECUTOR)])]
    (row,) = await admin.fetch(_APPEND, 5_000, *columns)
    assert row["what"] == "the stream has no entries"
    columns[E_PLAN] = columns[E_ENTRY] = columns[E_ARTIFACT] = None
    with pytest.raises(asyncpg.InvalidParameterValueError, match="differ in shape"):
        await admin.fetch(_APPEND, 5_000, *columns)
    assert await admin.fetchval("SELECT count(*) FROM tga.heads") == 0


async def verify_array_refused(admin: Session, column: int, shape: str) -> None:
    trace = records_of(request := action_request(1), supervisor_decision(request))
    plan = plan_of(trace, with_checkpoint=True)
    plan = plan._replace(dispatch_attempt=2, sealed=Sealed(b"", b""), forgets_secrets=True, announce_to=["people"])
    columns = _columns([plan])
    assert all(columns), "every array has something to be moved"
    cast = re.findall(r"\$\d+::(\w+)\[\]", _APPEND)[column]
    moved = {
        "begins at 0": f"$1::{cast}[]",
        "is longer": f"$1::{cast}[] || NULL::{cast}",
        "is shorter": f"($1::{cast}[])[2:]",
        "is null": f"nullif($1::{cast}[], $1)",
        "has two dimensions": f"ARRAY[$1::{cast}[]]",
    }[shape]
    count = len(columns[column])
    if shape == "begins at 0":
        moved = f"('[0:{count - 1}]=' || ({moved})::text)::{cast}[]"
    sent = await admin.fetchval(f"SELECT ({moved})::text", columns[column])
    statement = _APPEND.replace(f"${column + 2}::{cast}[]", f"${column + 2}::text::{cast}[]")
    values: list[Any] = [*columns]
    values[column] = sent
    with pytest.raises(asyncpg.InvalidParameterValueError, match=r"differ in shape|belongs to no plan"):
        await admin.fetch(statement, 5_000, *values)
    assert await admin.fetchval("SELECT count(*) FROM tga.entries") == 0, f"{column} {shape}"
