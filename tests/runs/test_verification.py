"""`tga verify` of runs in a database: what is sound is found sound, and each defect is found at its entry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from app.core.digest import digest_of_bytes
from app.domain.ledger.checks import Report
from app.domain.ledger.stored import StoredStream
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.checkpoints import checkpoint_of
from app.domain.runs.documents import RunDocument
from app.domain.runs.replay import RUN_DOCUMENTS
from app.domain.runs.verification import stream_checks
from app.postgres.ledger import PostgresLedger
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from tests.conftest import Admin
from tests.ledger.passing_on import PassedOn
from tests.runs import samples
from tests.runs.samples import SampleRun, store
from tests.traces import EXECUTOR, completed_trace, time_at

Finding = tuple[str, str | None, int | None]


async def fill(ledger: PostgresLedger, state_store: PostgresStateStore) -> list[SampleRun]:
    trace, runs = samples.samples()
    for record in trace:
        await state_store.append_log_entry(record)
    for run in runs:
        await store(ledger, run)
    return runs


async def findings(sessions: Sessions, stream: str | None = None, report: Report | None = None) -> list[Finding]:
    async with open_reader(sessions, stream=stream) as reader:
        return [_place(e) async for e in verify_ledger(reader, stream_checks(), report or Report())]


def _place(error: Any) -> Finding:
    return (error.code, error.stream, error.sequence_number)


async def test_runs_of_every_sort_are_sound_together_and_alone(
    ledger: PostgresLedger, store: PostgresStateStore, sessions: Sessions
) -> None:
    runs = await fill(ledger, store)
    report = Report()
    assert await findings(sessions, report=report) == []
    assert (report.streams, report.runs_unfolded, report.references_unknown) == (len(runs) + 1, 0, 0)
    for run in runs:
        alone = Report()
        assert await findings(sessions, f"run:{run.run_id}", alone) == []
        assert (alone.streams, alone.entries, alone.runs_unfolded) == (1, len(run.records), 0)


def unchecked(run: SampleRun, *artifacts: RunDocument) -> list[Any]:
    """Entries that the table admits and the fold does not: what a store without a fold would take."""
    head, made = run.run.head, []
    for artifact in artifacts:
        entry, head, is_admitted = RUN_DOCUMENTS.plan(
            head, artifact, identity=run.run_id, executor_id=EXECUTOR, recorded_at=time_at(99)
        )
        assert is_admitted
        made.append(entry)
    return made


def _running(run_id: str = "r") -> SampleRun:
    run = SampleRun(run_id)
    run.add("attempt", 1)
    run.add("checkpoint", "1")
    return run


def _with_intent(kind: str = "tool", **changed: Any) -> SampleRun:
    run = _running()
    run.add("intent", "2", kind, **changed)
    return run


def _waiting() -> SampleRun:
    run = _with_intent("sleep", name="nap")
    run.add("suspension", "2")
    return run


DEFECTS: dict[str, tuple[Callable[[], SampleRun], Callable[[SampleRun], RunDocument], str]] = {
    "gap": (_running, lambda r: r.made("checkpoint", "3"), "RUN_POSITION_GAP"),
    "taken": (_running, lambda r: r.made("checkpoint", "1"), "RUN_POSITION_TAKEN"),
    "taken_by_an_intent": (_with_intent, lambda r: r.made("intent", "2"), "RUN_POSITION_TAKEN"),
    "another_operation_has_begun": (_with_intent, lambda r: r.made("checkpoint", "2"), "RUN_POSITION_TAKEN"),
    "unasked": (_running, lambda r: r.made("answer", "2", "0" * 64), "RUN_ANSWER_UNASKED"),
    "answer_of_another_intent": (_with_intent, lambda r: r.made("answer", "2", "0" * 64), "RUN_ANSWER_UNASKED"),
    "answered_by_the_wrong": (
        _with_intent,
        lambda r: r.made("answer", "2", r.last_digest, "person"),
        "RUN_ANSWER_UNASKED",
    ),
    "answer_that_nobody_signed": (
        lambda: _with_intent("ask", name="pay"),
        lambda r: r.made("answer", "2", r.last_digest, "person"),
        "SIGNATURE_INVALID",
    ),
    "wrong_attempt": (_running, lambda r: r.made("checkpoint", "2", attempt=2), "STATE_CONCURRENT_EXECUTION"),
    "wrong_wakes": (
        _waiting,
        lambda r: r.made("answer", "2", r.records[-2].entry.artifact_digest, "timer", wakes="NO"),
        "STATE_CHECKSUM_MISMATCH",
    ),
    "wrong_positions": (_running, lambda r: r.made("end", positions=2), "STATE_CHECKSUM_MISMATCH"),
    "wrong_inner": (_running, lambda r: r.made("checkpoint", "2", inner=1), "STATE_CHECKSUM_MISMATCH"),
    "wrong_program": (
        lambda: SampleRun("r"),
        lambda r: r.made("attempt", 1, program_digest="b" * 64),
        "STATE_CHECKSUM_MISMATCH",
    ),
    "skipped_attempt": (lambda: SampleRun("r"), lambda r: r.made("attempt", 2), "STATE_CHECKSUM_MISMATCH"),
    "effect_of_another_trace": (
        _with_intent,
        lambda r: r.made(
            "answer",
            "2",
            r.last_digest,
            value={"tier": "effect", "trace_id": samples.sample_trace_id(), "tool_effect_digest": "0" * 64},
        ),
        "STATE_CHECKSUM_MISMATCH",
    ),
    "state_that_is_not_there": (
        _running,
        lambda r: r.made("checkpoint", "2", state_change=[{"op": "remove", "at": "/nothing"}]),
        "SCHEMA_VIOLATION",
    ),
}


@pytest.mark.parametrize("name", sorted(DEFECTS))
async def test_what_the_table_admits_and_the_fold_does_not_is_found_at_its_entry(
    name: str, ledger: PostgresLedger, sessions: Sessions
) -> None:
    make, wrong, code = DEFECTS[name]
    run = make()
    await store(ledger, run)
    await samples.commit(ledger, run.run, unchecked(run, wrong(run)))
    found = await findings(sessions)
    assert (code, "run:r", len(run.records) + 1) in found
    assert {stream for _, stream, _ in found} == {"run:r"}


@pytest.mark.parametrize("what", ["trace", "child", "effect", "result", "begun_by"])
async def test_what_an_answer_says_of_another_stream_is_compared_with_it(
    what: str, ledger: PostgresLedger, store: PostgresStateStore, sessions: Sessions
) -> None:
    trace = list(completed_trace(samples.TRACE))
    parent, _ = samples.parent_and_child()
    if what == "trace":  # which is missing
        await samples.store(ledger, samples.with_tool(trace))
        assert await findings(sessions) == [("STATE_RECOVERY_FAILED", "run:with-tool", 4)]
    elif what == "child":
        await samples.store(ledger, parent)
        missing = [("STATE_RECOVERY_FAILED", "run:parent", number) for number in (3, 5)]
        assert await findings(sessions) == missing
    elif what == "effect":
        for record in completed_trace(samples.TRACE, arguments={"title": "another"}):
            await store.append_log_entry(record)
        await samples.store(ledger, samples.with_tool(trace))
        assert await findings(sessions) == [("STATE_CHECKSUM_MISMATCH", "run:with-tool", 4)]
    else:
        other = SampleRun("child", procedure="pay")
        if what == "result":  # begun as it should be, ended otherwise
            other = samples.begun_child(parent.records[2].entry.artifact_digest)
        await samples.store(ledger, other)
        await samples.store(ledger, parent)
        expected = [("STATE_CHECKSUM_MISMATCH", "run:parent", 5)]
        if what == "begun_by":
            expected.insert(0, ("STATE_CHECKSUM_MISMATCH", "run:parent", 3))
        assert await findings(sessions) == expected


async def test_a_fork_without_its_source_or_with_another_one_is_found_at_its_birth(
    ledger: PostgresLedger, sessions: Sessions
) -> None:
    source = samples.small()
    fork = samples.fork_of(source, 3)
    await store(ledger, fork)
    assert await findings(sessions) == [("STATE_RECOVERY_FAILED", "run:fork", 1)]
    other = SampleRun("small")
    other.add("attempt", 1)
    other.add("checkpoint", "1", name="another")
    await store(ledger, other)
    assert await findings(sessions) == [("STATE_CHECKSUM_MISMATCH", "run:fork", 1)]


@dataclass
class Changed(PassedOn):
    """What a reader reads of runs, changed on its way: as if somebody had changed the tables."""

    change: Callable[[StoredStream], StoredStream]

    async def streams(self) -> AsyncIterator[StoredStream]:
        async for stored in self.reader.streams():
            yield self.change(stored)


async def found_with(sessions: Sessions, change: Callable[[StoredStream], StoredStream]) -> list[Finding]:
    async with open_reader(sessions) as reader:
        return [_place(e) async for e in verify_ledger(Changed(reader, change), stream_checks(), Report())]


async def test_checkpoints_of_a_long_run_stand_where_they_are_due_and_are_what_it_folds_to(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    run = samples.long()
    await store(ledger, run)
    assert await admin.fetchval("SELECT array_agg(sequence_number) FROM tga.execution_checkpoints") == [100, 200]
    assert await findings(sessions) == []
    assert await found_with(sessions, lambda stored: replace(stored, checkpoints=[])) == [
        ("CHECKPOINT_MISSING", "run:long", 200)
    ]

    def with_another_state(stored: StoredStream) -> StoredStream:
        folded = samples.at_entry(run, 100)
        folded.state["last"] = 7
        state = checkpoint_of(folded, created_at=time_at(0)).state
        other = replace(stored.checkpoints[0], state=state, checkpoint_digest=digest_of_bytes(state))
        return replace(stored, checkpoints=[other, *stored.checkpoints[1:]])

    assert await found_with(sessions, with_another_state) == [("STATE_CHECKSUM_MISMATCH", "run:long", 100)]

    def without_a_run(stored: StoredStream) -> StoredStream:
        state = b'{"sequence_number":100}'
        other = replace(stored.checkpoints[0], state=state, checkpoint_digest=digest_of_bytes(state))
        return replace(stored, checkpoints=[other, *stored.checkpoints[1:]])

    assert await found_with(sessions, without_a_run) == [("STATE_RECOVERY_FAILED", "run:long", 100)]


async def test_what_the_head_says_of_a_run_is_compared_with_it(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    await store(ledger, samples.interrupted())
    await admin.execute("ALTER TABLE tga.heads DISABLE TRIGGER birth_guard")
    await admin.execute("UPDATE tga.heads SET subject = 'another'")
    assert await findings(sessions) == [("STATE_RECOVERY_FAILED", "run:interrupted", 8)]
    await admin.execute("UPDATE tga.heads SET subject = 'onboard', waiting = 'supervisor'")
    assert await findings(sessions) == [("STATE_INVALID_TRANSITION", "run:interrupted", 8)]
    await admin.execute("UPDATE tga.heads SET waiting = NULL")
    assert await findings(sessions) == [("STATE_RECOVERY_FAILED", "run:interrupted", 8)], "nobody would find it"
