"""Erasure of runs: when they have ended, and no open run refers to them; what is left verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.core.errors import ChecksumMismatch, RunErased, RunNotFound, RunUnfinished, StreamInUse
from app.core.limits import ERASURE_DIGESTS_MAX
from app.domain.ledger.checks import Report
from app.domain.ledger.plans import Sealed
from app.domain.log.bundle import Filter
from app.domain.runs.documents import RunStart
from app.domain.runs.erasing import ERASABLE_RUNS
from app.domain.runs.schedule import schedule_of
from app.domain.system.documents import Erasure
from app.domain.tga.erasing import ERASABLE_TRACES
from app.postgres.database import Database
from app.postgres.erasing import erase_stream
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from tests.conftest import Admin
from tests.export.world import World, judge, judge_alone
from tests.runs import samples
from tests.runs.samples import SampleRun
from tests.runs.test_verification import findings, unchecked
from tests.traces import EXECUTOR, completed_trace, time_at


@pytest.fixture
def world(database: Database, sessions: Sessions, store: PostgresStateStore, tmp_path: Path) -> World:
    return World(database, sessions, store, tmp_path / "keys")


async def erase(world: World, run_id: str, **changes: Any) -> None:
    stream = changes.pop("stream", f"run:{run_id}")
    kind = ERASABLE_RUNS if stream.startswith("run:") else ERASABLE_TRACES
    said = {"tenant": "default", "erased_by": "olga", "rationale": "asked for", **changes}
    await erase_stream(world.sessions, world.system, world.clock, EXECUTOR, stream, kind, **said)


async def store_scheduled(world: World, run: SampleRun) -> None:
    """With the row that the scheduler keeps, as the engine writes it."""
    start = run.records[0].artifact
    assert isinstance(start, RunStart)
    row = schedule_of(run.run, start, worker=None, now=time_at(0))
    await samples.store(PostgresLedger(world.sessions), run, schedule=row)


async def test_an_ended_run_is_erased_with_its_salt_and_checkpoints_and_what_is_left_verifies(
    world: World, admin: Admin, tmp_path: Path
) -> None:
    await world.announce()
    ledger, run = PostgresLedger(world.sessions), samples.long()
    await samples.store(ledger, run, sealed=Sealed(b"salt", b""))
    await samples.store(ledger, samples.small("kept"))
    await erase(world, "long")
    left = {
        table: await admin.fetchval(f"SELECT count(*) FROM tga.{table} WHERE {where}")
        for table, where in (
            ("artifacts", "stream = 'run:long'"),
            ("entries", "stream = 'run:long'"),
            ("execution_checkpoints", "stream = 'run:long'"),
            ("sealed", "stream = 'run:long'"),
            ("erasures", "stream = 'run:long'"),
        )
    }
    assert left == {
        "artifacts": 0,
        "entries": len(run.records),
        "execution_checkpoints": 0,
        "sealed": 0,
        "erasures": 1,
    }
    report = Report()
    assert await findings(world.sessions, report=report) == []
    assert report.erased_streams == 1
    await world.sequence()
    await world.export(tmp_path / "bundle")
    await world.export(tmp_path / "alone", Filter(run_id="long"))
    for bundle in (tmp_path / "bundle", tmp_path / "alone"):
        assert judge(bundle, world.verifier_key).is_sound
        assert judge_alone(bundle, world.verifier_key).is_sound
    for again, error in (("long", RunErased), ("none", RunNotFound)):
        with pytest.raises(error):
            await erase(world, again)
    with pytest.raises(RunNotFound):
        await erase(world, "kept", tenant="acme")


async def test_of_a_long_run_the_erasure_states_what_the_digests_fold_to(
    world: World, admin: Admin, tmp_path: Path
) -> None:
    await world.announce()
    run = samples.long(ERASURE_DIGESTS_MAX + 3)
    await samples.store(PostgresLedger(world.sessions), run, entries_a_plan=60)
    await erase(world, "long")
    (row,) = await admin.fetch("SELECT artifact FROM tga.records WHERE artifact_type = 'erasure'")
    erasure = Erasure.from_bytes(row["artifact"])
    assert erasure.artifact_digests == []
    assert erasure.payloads_digest is not None
    assert await findings(world.sessions) == []
    await world.sequence()
    await world.export(tmp_path / "bundle")
    assert judge(tmp_path / "bundle", world.verifier_key).is_sound
    assert judge_alone(tmp_path / "bundle", world.verifier_key).is_sound


async def test_a_run_that_is_open_or_does_not_verify_is_not_erased(world: World) -> None:
    await world.announce()
    ledger = PostgresLedger(world.sessions)
    await samples.store(ledger, samples.interrupted())
    with pytest.raises(RunUnfinished, match="cancel"):
        await erase(world, "interrupted")
    broken = SampleRun("r")
    broken.add("attempt", 1)
    await samples.store(ledger, broken)
    await samples.commit(ledger, broken.run, unchecked(broken, broken.made("end", positions=7)))
    with pytest.raises(ChecksumMismatch):
        await erase(world, "r")


async def test_what_an_open_run_refers_to_is_not_erased(world: World, admin: Admin) -> None:
    """Its source, its children and its tool calls; once it has ended they are."""
    await world.announce()
    source = samples.small()
    fork = samples.fork_of(source, 3)
    parent, child = samples.parent_and_child()
    for run in (source, fork, parent, child):
        await store_scheduled(world, run)
    calling = SampleRun("with-tool")
    calling.add("attempt", 1)
    await store_scheduled(world, calling)
    trace = list(completed_trace(samples.TRACE, idempotency_key="run:with-tool/1:2.1/r1"))
    await world.append(trace)
    named = f"trace:{samples.sample_trace_id()}"
    refused = {"small": "run:small", "child": "run:child", named: named}
    for stream in refused.values():
        with pytest.raises(StreamInUse):
            await erase(world, "", stream=stream)
    assert await admin.fetchval("SELECT count(*) FROM tga.erasures") == 0
    for run in (fork, parent, calling):
        run.add("end", "CANCELLED", attempt=run.run.attempt)
        start = run.records[0].artifact
        assert isinstance(start, RunStart)
        row = schedule_of(run.run, start, worker=None, now=time_at(0))
        ledger, last = PostgresLedger(world.sessions), samples.planned(run.records[-1:])
        await samples.commit(ledger, run.run, last, schedule=row)
    for stream in refused.values():
        await erase(world, "", stream=stream)
    assert await findings(world.sessions) == []
    for run_id in ("fork", "parent"):
        await erase(world, run_id)
    assert await findings(world.sessions) == []


async def test_execution_checkpoints_are_deleted_with_an_erasure_and_otherwise_never(
    world: World, admin: Admin
) -> None:
    await samples.store(PostgresLedger(world.sessions), samples.long())
    for statement in ("DELETE FROM tga.execution_checkpoints", "UPDATE tga.execution_checkpoints SET created_at = ''"):
        with pytest.raises(Exception, match="append-only"):
            await admin.execute(statement)
