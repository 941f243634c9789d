"""The engine on PostgreSQL, without the edge: what each request leaves on the record, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import (
    ArgumentsInvalid,
    InvalidTransition,
    ProcedureNotFound,
    RunAnswerInvalid,
    RunAnswerUnasked,
    RunBlobMissing,
    RunCountMismatch,
    RunEnded,
    RunIdTaken,
    RunNotFound,
    RunPositionGap,
    RunPositionTaken,
    RunTierInvalid,
    RunValueTooLarge,
    SchemaViolation,
    SecretMissing,
    SignalIdReused,
)
from app.core.limits import RUN_CHILD_LEVELS_MAX
from app.domain.identity import Principal
from app.domain.runs import replay
from app.domain.runs.checkpoints import SinceCheckpoint
from app.domain.runs.documents import Accepted, Resolved, RunAnswer, RunCheckpoint, RunIntent, RunPolicy
from app.domain.runs.engine import descent
from app.domain.runs.engine.engine import RunEngine
from app.domain.runs.engine.leasing import Gone
from app.domain.runs.engine.messages import BeatRequest, LeasedRun, LeaseRequest, PutRequest
from app.domain.runs.engine.viewing import view
from app.domain.runs.procedures import ProcedureSaid
from app.domain.runs.replay import RunRecord
from app.domain.runs.requests import ChildRequest
from app.domain.runs.state import Change, SetAt
from app.domain.runs.values import InlineValue, SecretValue
from app.postgres.database import Database
from app.postgres.runs import PostgresRuns
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.invariants.plans import verify_all
from tests.runs.engines import AGENT, NOW, PROGRAM, WORKER, Engine, open_engine, step
from tests.runs.test_verification import findings

PERSON = Principal(principal_id="ada", tenant="default", roles=["supervisor"])
DONE: dict[str, Any] = {"type": "complete", "output": {"tier": "inline", "value": "done"}}
OPERATION = {"input_digest": PROGRAM, "name": "it"}


@pytest.fixture
async def engine(database: Database, tmp_path: Path) -> AsyncIterator[Engine]:
    async with open_engine(database.gateway_url, lease_ms=500, folder=tmp_path / "blobs") as opened:
        yield opened


def inline(value: Any) -> InlineValue:
    return InlineValue(tier="inline", value=value)


def policy(**changed: Any) -> RunPolicy:
    usual: dict[str, Any] = {
        "timeout_ms": None,
        "checkpoint_timeout_ms": None,
        "retry": {"retries": 0, "first_ms": 1, "max_ms": 1},
        "park_after": 5,
        "on_parent_end": "cancel",
        "retention": "keep",
    }
    return RunPolicy.made_of({**usual, **changed})


def sleep(path: str, wakes_at: str = NOW) -> dict[str, Any]:
    return {"type": "sleep", "path": path, "wakes_at": wakes_at, **OPERATION}


def ask(path: str, **request: Any) -> dict[str, Any]:
    asked = {"form": "approve", "message": "Pay?", "answer_schema": {"type": "boolean"}, **request}
    return {"type": "ask", "path": path, "request": asked, **OPERATION}


def suspend(*awaits: str, **more: Any) -> dict[str, Any]:
    return {"type": "suspend", "awaits": list(awaits), **more}


async def leased(engine: Engine, run_id: str = "r", **more: Any) -> LeasedRun:
    await engine.start(run_id, **more)
    (run,) = await engine.lease()
    return run


async def again(engine: Engine) -> LeasedRun:
    (run,) = await engine.lease(wait_ms=30_000)
    return run


def said(record: RunRecord) -> dict[str, Any]:
    assert record.artifact is not None
    return record.artifact.to_json()


async def state_of(engine: Engine, run_id: str = "r") -> str:
    return (await engine.engine.ports.runs.load(run_id)).run.head.state


async def types_of(engine: Engine, run_id: str = "r") -> list[str]:
    records = await engine.engine.ports.runs.load_records(run_id, after=0, limit=1_000)
    return [record.entry.artifact_type.removeprefix("run_") for record in records]


async def sweep_until(engine: Engine, run_id: str, *states: str) -> None:
    """Look for what is due until the run is there. Workers are judged as a gateway would that hears them."""
    async with asyncio.timeout(120):
        while await state_of(engine, run_id) not in states:
            await engine.engine.sweeping.sweep(judges_workers=True)
            await asyncio.sleep(0.02)


async def test_a_run_is_started_once_for_its_id_and_input(engine: Engine) -> None:
    assert not (await engine.start("r", {"n": 1})).replayed
    assert (await engine.start("r", {"n": 1})).replayed
    with pytest.raises(RunIdTaken):
        await engine.start("r", {"n": 2})
    results = await asyncio.gather(*(engine.start("many", 7) for _ in range(20)))
    assert [result.replayed for result in results].count(False) == 1
    assert await types_of(engine, "many") == ["start"]


async def test_nobody_starts_what_nobody_has_registered(engine: Engine) -> None:
    with pytest.raises(ProcedureNotFound):
        await engine.start("r", version="9")
    with pytest.raises(RunNotFound):
        await engine.engine.ports.runs.load("r")


async def test_the_input_fits_what_was_registered(engine: Engine) -> None:
    schema = {"type": "object", "required": ["email"]}
    said = ProcedureSaid(name="onboard", version="2", program_digest="b" * 64, input_schema=schema)
    await engine.procedures.register(said, WORKER)
    with pytest.raises(ArgumentsInvalid, match="email"):
        await engine.start("r", {"mail": 1}, version="2")
    assert (await engine.start("r", {"email": "a"}, version="2")).state == "SCHEDULED"


async def test_a_step_is_put_once_however_often_it_is_sent(engine: Engine) -> None:
    run = await leased(engine)
    puts = (step("1"), step("2", state_change=[{"op": "set", "at": "/n", "to": 7}]))
    for _ in range(3):
        answer = await engine.put(run, 2, *puts, then={**DONE, "positions": 2})
        assert (answer.directive, answer.result) == ("DONE", {"state": "COMPLETED"})
    assert await types_of(engine) == ["start", "attempt", "checkpoint", "checkpoint", "end"]
    assert (await engine.engine.ports.runs.load("r")).run.state == {"n": 7}


async def test_another_operation_at_a_taken_address_is_refused_and_so_is_a_gap(engine: Engine) -> None:
    run = await leased(engine)
    await engine.put(run, 2, step("1"))
    with pytest.raises(RunPositionTaken):
        await engine.put(run, 2, step("1", value=2))
    with pytest.raises(RunPositionGap):
        await engine.put(run, 3, step("3"))
    assert await types_of(engine) == ["start", "attempt", "checkpoint"]


async def test_a_worker_that_miscounts_is_told_so_and_nothing_is_stored(engine: Engine) -> None:
    """It is the worker's mistake, not a broken record: another code, and other words."""
    run = await leased(engine)
    await engine.put(run, 2, step("1"))
    for wrong in (step("2", try_number=2), step("2", inner=1), {**ask("2"), "try_number": 3}):
        with pytest.raises(RunCountMismatch, match="does not agree with the journal") as told:
            await engine.put(run, 3, wrong)
        assert "tampered" not in str(told.value)
    with pytest.raises(RunCountMismatch, match="number of operations"):
        await engine.put(run, 3, then={**DONE, "positions": 7})
    assert await types_of(engine) == ["start", "attempt", "checkpoint"]
    await engine.put(run, 3, step("2"), then={**DONE, "positions": 2})
    assert await state_of(engine) == "COMPLETED"


async def test_a_large_state_is_written_as_seldom_as_the_journal_grows(
    engine: Engine, admin: Admin, sessions: Sessions
) -> None:
    """And is read again from its checkpoint, which is larger than any document."""
    run = await leased(engine)
    seen = run.sequence_number
    for number in range(1, 4):
        change = [{"op": "set", "at": f"/k{number}", "to": "x" * 150_000}]
        await engine.put(run, seen, step(str(number), state_change=change))
        seen += 1
    for first in range(4, 1_204, 60):
        puts = [
            step(str(number), "y" * 600, state_change=[{"op": "set", "at": "/n", "to": number}])
            for number in range(first, first + 60)
        ]
        await engine.put(run, seen, *puts)
        seen += 60
    rows = await admin.fetch(
        "SELECT sequence_number, octet_length(checkpoint_state) AS size FROM tga.execution_checkpoints ORDER BY 1"
    )
    journal = await admin.fetchval("SELECT sum(octet_length(artifact)) FROM tga.artifacts WHERE stream = 'run:r'")
    places = [row["sequence_number"] for row in rows]
    assert places[0] == 100
    assert len(places) in (2, 3), places  # and not twelve
    assert all(row["size"] > 450_000 for row in rows)
    assert sum(row["size"] for row in rows) <= journal
    engine.engine.table.forget("r")
    found = await engine.engine.ports.runs.load("r")
    assert (found.run.state["n"], len(found.run.state["k1"])) == (1_203, 150_000)
    assert await findings(sessions) == []


def test_a_checkpoint_that_was_due_and_is_not_there_is_missed() -> None:
    since = SinceCheckpoint()
    assert [number for number in range(1, 201) if since.add(number, 10)] == [100, 200]
    assert (since.is_missing(199), since.is_missing(200)) == (False, True)
    since.write(200, 5_000)
    assert [number for number in range(201, 1_301) if since.add(number, 10)] == list(range(700, 1_301, 100))
    assert (since.is_missing(799), since.is_missing(800)) == (False, True)
    since.write(1_300, 10**6)
    assert [number for number in range(1_301, 2_401) if since.add(number, 10)] == [2_300, 2_400]


async def test_a_question_of_a_run_that_no_worker_has_expires_all_the_same(engine: Engine) -> None:
    run = await leased(engine)
    clock = engine.engine.ports.clock
    await engine.put(run, 2, ask("1:1.1", expires_at=clock.after(50)), then={"type": "release"})
    assert await state_of(engine) == "SCHEDULED"
    async with asyncio.timeout(120):
        while (await types_of(engine))[-1] != "answer":
            await engine.engine.sweeping.sweep(judges_workers=False)
            await asyncio.sleep(0.02)
    assert await state_of(engine) == "SCHEDULED"
    assert (await again(engine)).attempt == 2


async def test_transient_snapshot_is_refused(engine: Engine) -> None:
    run = await leased(engine)
    with pytest.raises(RunTierInvalid):
        await engine.put(run, 2, step("1") | {"value": {"tier": "transient"}})
    with pytest.raises(RunValueTooLarge):
        await engine.put(run, 2, step("1", value="x" * 40_000))
    await engine.put(run, 2, step("1", resume="recompute") | {"value": {"tier": "transient"}})


async def test_old_attempt_is_stopped_and_that_it_came_is_told_once(engine: Engine) -> None:
    old = await leased(engine)
    await engine.put(old, 2, then={"type": "release"})
    new = await again(engine)
    for _ in range(3):
        answer = await engine.put(old, 2, step("1"))
        assert (answer.directive, answer.reason) == ("STOP", "LEASE_LOST")
    stranger = replace(new, lease="x" * 32)
    assert (await engine.put(stranger, 4, step("1"))).directive == "STOP"
    assert await types_of(engine) == ["start", "attempt", "attempt", "attempt", "attempt"]
    records = await engine.engine.ports.runs.load_records("r", after=4, limit=10)
    assert said(records[0])["change"] == "FENCED"
    assert (await engine.put(new, 5, step("1"))).directive == "CONTINUE"


async def test_ask_first_wins_wrong_type_leaves_it_open_and_the_run_goes_on(engine: Engine) -> None:
    run = await leased(engine)
    answer = await engine.put(run, 2, ask("1"), then=suspend("1"))
    assert answer.directive == "SUSPENDED"
    answering = engine.engine.answering
    with pytest.raises(RunAnswerInvalid, match="boolean"):
        await answering.answer("r", "1", "yes", inline("yes"), PERSON, intent_digest=None)
    with pytest.raises(RunAnswerUnasked):
        await answering.answer("r", "1", True, inline(True), PERSON, intent_digest="f" * 64)
    results = await asyncio.gather(
        *(answering.answer("r", "1", value, inline(value), PERSON, intent_digest=None) for value in (True, False)),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == ["RunAnswerUnasked", "str"]
    assert (await again(engine)).attempt == 2
    assert (await types_of(engine)).count("answer") == 1


async def test_ask_default(engine: Engine) -> None:
    run = await leased(engine)
    puts = (ask("1:1.1", expires_at=NOW, default={"tier": "inline", "value": False}), ask("1:2.1", expires_at=NOW))
    await engine.put(run, 2, *puts, then=suspend("1:1.1", "1:2.1", wake="ALL"))
    await sweep_until(engine, "r", "SCHEDULED")
    records = await engine.engine.ports.runs.load_records("r", after=5, limit=10)
    assert [(said(one)["outcome"], said(one)["wakes"]) for one in records] == [("OK", "NO"), ("TIMEOUT", "YES")]
    assert said(records[0])["value"] == {"tier": "inline", "value": False}


async def test_a_sleep_is_over_while_the_suspension_is_held(engine: Engine) -> None:
    run = await leased(engine)
    answer = await engine.put(
        run, 2, sleep("1", engine.engine.ports.clock.after(50)), then=suspend("1", wait_ms=60_000)
    )
    assert answer.directive == "CONTINUE"
    assert [record.entry.artifact_type for record in answer.news] == ["run_answer"]
    assert await types_of(engine) == ["start", "attempt", "intent", "answer"]


async def test_signals_are_received_in_their_order_each_once(engine: Engine) -> None:
    run = await leased(engine)
    answering = engine.engine.answering
    for signal_id in ("a", "a", "b"):
        await answering.signal("r", "go", signal_id, inline(signal_id), AGENT)
    wanted = {"type": "signal", "path": "1", **OPERATION, "name": "go"}
    answer = await engine.put(run, 4, wanted)
    assert [said(record)["value"]["value"] for record in answer.news] == ["a"]
    await answering.signal("r", "go", "a", inline("a"), AGENT)  # a repeat, after it was received
    await engine.put(run, answer.sequence_number, wanted | {"path": "2"})
    await engine.put(run, answer.sequence_number + 2, wanted | {"path": "3"}, then=suspend("3"))
    assert await state_of(engine) == "WAITING"
    await answering.signal("r", "go", "c", inline("c"), AGENT)
    assert (await again(engine)).attempt == 2


async def test_a_repeated_signal_is_the_same_signal_after_the_end_too(engine: Engine) -> None:
    """Whoever lost the answer to a signal that ended its run is told that it was received; a new one is refused."""
    run = await leased(engine)
    answering = engine.engine.answering
    await answering.signal("r", "go", "a", inline("a"), AGENT)
    wanted = {"type": "signal", "path": "1", **OPERATION, "name": "go"}
    done = {"type": "complete", "output": {"tier": "inline", "value": 1}, "positions": 1}
    await engine.put(run, 3, wanted, then=done)
    assert await answering.signal("r", "go", "a", inline("a"), AGENT) == "COMPLETED"
    with pytest.raises(RunEnded):
        await answering.signal("r", "go", "b", inline("b"), AGENT)


async def test_an_id_of_a_signal_is_refused_for_another_name_or_value(engine: Engine) -> None:
    """While the signal waits, after it was received, and after the run has ended. A repeat changes nothing."""
    run = await leased(engine)
    answering = engine.engine.answering
    for number in range(3):
        await answering.signal("r", "go", f"s-{number}", inline(number), AGENT)

    async def refused() -> None:
        before = await types_of(engine)
        for name, value in (("went", 1), ("go", 2), ("go", True), ("go", None), ("go", [1])):
            with pytest.raises(SignalIdReused):
                await answering.signal("r", name, "s-1", inline(value), AGENT)
        for number in range(3):
            await answering.signal("r", "go", f"s-{number}", inline(number), AGENT)
        assert await types_of(engine) == before

    await refused()
    wanted = {"type": "signal", **OPERATION, "name": "go"}
    await engine.put(run, 5, wanted | {"path": "1"}, wanted | {"path": "2"})
    await refused()
    done = {"type": "complete", "output": {"tier": "inline", "value": 1}, "positions": 2}
    await engine.put(run, 9, then=done)
    await refused()
    assert await answering.signal("r", "go", "s-1", inline(1.0), AGENT) == "COMPLETED", "the same number"


async def test_an_id_that_is_forgotten_and_used_again_stands_for_its_newest_signal(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "RUN_SIGNAL_IDS_KEPT", 2)
    await leased(engine)
    answering = engine.engine.answering
    for signal_id, value in (("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 1)):
        await answering.signal("r", "go", signal_id, inline(value), AGENT)
    await answering.signal("r", "go", "a", inline(2), AGENT)
    with pytest.raises(SignalIdReused):
        await answering.signal("r", "go", "a", inline(1), AGENT)


@pytest.mark.parametrize("path", ["1", "4", "1:2.7"])
@pytest.mark.parametrize("wake", ["ANY", "ALL"])
async def test_waiting_for_what_has_not_begun_is_refused(engine: Engine, path: str, wake: str) -> None:
    """It would be answered at once, and a worker with that defect would ask for ever."""
    run = await leased(engine)
    answer = await engine.put(run, 2, sleep("1:1.1"), sleep("1:2.1"))
    with pytest.raises(InvalidTransition, match="waits only for what others can end"):
        await engine.put(run, answer.sequence_number, then=suspend(path, wake=wake, wait_ms=1))
    assert await state_of(engine) == "RUNNING"


async def test_a_lost_worker_loses_its_runs_and_a_beat_keeps_them(engine: Engine) -> None:
    run = await leased(engine)
    beat = {"worker": "worker-one", "name": "here", "runs": [{"run_id": "r", "lease": run.lease, "after_seq": 2}]}
    for _ in range(3):
        (told,) = await engine.engine.leasing.beat(BeatRequest.made_of(beat), WORKER)
        assert told.directive == "CONTINUE"
        await engine.engine.sweeping.sweep(judges_workers=True)
    await sweep_until(engine, "r", "SCHEDULED")
    (told,) = await engine.engine.leasing.beat(BeatRequest.made_of(beat), WORKER)
    assert (told.directive, told.reason) == ("STOP", "LEASE_LOST")
    assert (await again(engine)).attempt == 2


async def test_a_lease_whose_answer_was_lost_comes_back_after_two_beats(engine: Engine) -> None:
    await leased(engine)
    beat = BeatRequest.made_of({"worker": "worker-one", "name": "here", "runs": []})
    async with asyncio.timeout(120):
        while await state_of(engine) == "RUNNING":
            await engine.engine.leasing.beat(beat, WORKER)
            await asyncio.sleep(0.02)
    assert (await again(engine)).attempt == 2


async def test_attempts_without_a_checkpoint_park_the_run_and_a_retry_takes_it_up(engine: Engine) -> None:
    await engine.start("r", policy=policy(park_after=2))
    await engine.lease()
    await sweep_until(engine, "r", "SCHEDULED")
    await again(engine)
    await sweep_until(engine, "r", "PARKED")
    seen = await view(engine.engine.ports, "r")
    assert seen.notice is not None
    assert seen.end is not None
    assert seen.end.error is not None
    assert seen.end.error.type == "RUN_PARKED"
    assert await engine.engine.answering.resume("r", PERSON, rationale="mended") == "SCHEDULED"
    assert (await again(engine)).attempt == 3


async def test_silence_ends_the_attempt_and_a_deadline_the_run(engine: Engine) -> None:
    await engine.start("quiet", policy=policy(checkpoint_timeout_ms=20))
    await engine.lease(worker="worker-two")
    await sweep_until(engine, "quiet", "SCHEDULED")
    await engine.start("late", policy=policy(timeout_ms=20))
    await sweep_until(engine, "late", "FAILED")
    seen = await view(engine.engine.ports, "late")
    assert seen.end is not None
    assert seen.end.error is not None
    assert seen.end.error.type == "RUN_TIMED_OUT"


async def test_a_failed_run_is_tried_again_by_its_policy_then_by_a_person(engine: Engine) -> None:
    error = {"type": "ValueError", "message": "no", "retryable": True}
    await engine.start("r", policy=policy(retry={"retries": 1, "first_ms": 1, "max_ms": 1}))
    (run,) = await engine.lease()
    assert (await engine.put(run, 2, then={"type": "fail", "error": error})).result == {"state": "SCHEDULED"}
    run = await again(engine)
    failed = step("1", outcome="ERROR") | {"value": None, "error": error}
    answer = await engine.put(run, run.sequence_number, failed, then={"type": "fail", "error": error})
    assert answer.result == {"state": "SCHEDULED"}  # a checkpoint came: the count begins anew
    run = await again(engine)
    final = {"type": "fail", "error": {**error, "retryable": False}}
    assert (await engine.put(run, run.sequence_number, then=final)).result == {"state": "FAILED"}
    await engine.engine.answering.resume("r", AGENT, rationale="again")
    run = await again(engine)
    # What failed is open again, as its second try.
    await engine.put(run, run.sequence_number, step("1", try_number=2), then={**DONE, "positions": 1})
    assert await state_of(engine) == "COMPLETED"
    with pytest.raises(RunEnded):
        await engine.engine.answering.resume("r", AGENT, rationale="again")


async def test_a_person_resolves_a_step_that_was_interrupted(engine: Engine) -> None:
    run = await leased(engine)
    await engine.put(run, 2, {"type": "step", "path": "1", **OPERATION})
    await engine.put(run, 3, then={"type": "release"})
    run = await again(engine)
    error = {"type": "Interrupted", "message": "?", "retryable": False}
    interrupted = step("1", outcome="INTERRUPTED", name="it") | {"value": None, "error": error}
    await engine.put(run, run.sequence_number, interrupted, then={"type": "fail", "error": error})
    resolved = Resolved.made_of({"path": "1", "outcome": "OK", "value": inline("paid"), "error": None})
    await engine.engine.answering.resume("r", PERSON, rationale="I looked", resolves=[resolved])
    run = await again(engine)
    await engine.put(run, run.sequence_number, then={**DONE, "positions": 1})
    assert await state_of(engine) == "COMPLETED"


async def test_a_diverged_run_rests_until_a_program_is_accepted(engine: Engine) -> None:
    run = await leased(engine)
    divergence = {"path": "1", "recorded": "step plan", "performed": "step pay", "source": "onboard.py:3"}
    assert (await engine.put(run, 2, then={"type": "diverge", "divergence": divergence})).directive == "DONE"
    seen = await view(engine.engine.ports, "r")
    assert (seen.status, seen.end and seen.end.divergence and seen.end.divergence.source) == (
        "diverged",
        "onboard.py:3",
    )
    await engine.procedures.register(ProcedureSaid(name="onboard", version="2", program_digest="b" * 64), WORKER)
    accepted = Accepted(version="2", program_digest="b" * 64)
    await engine.engine.answering.resume("r", PERSON, rationale="it is fine", accepts=accepted)
    assert await engine.lease() == []  # the old program does not get it any more


async def test_child_is_started_with_its_intent_and_its_end_answers_it(engine: Engine) -> None:
    run = await leased(engine)
    child = {"type": "child", "path": "1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    for _ in range(2):
        answer = await engine.put(run, 2, then=child)
        assert (answer.directive, (answer.result or {})["status"]) == ("CONTINUE", "pending")
    child_id = (answer.result or {})["run_id"]
    await engine.put(run, 3, then=suspend("1"))
    (young,) = await engine.lease(wait_ms=30_000)
    assert young.run_id == child_id
    await engine.put(young, young.sequence_number, then={**DONE, "positions": 0})
    resumed = await again(engine)
    assert resumed.run_id == "r"
    records = await engine.engine.ports.runs.load_records("r", after=4, limit=1)
    assert said(records[0])["value"]["run_id"] == child_id


async def test_a_child_where_another_operation_has_begun_is_refused_and_nothing_is_started(engine: Engine) -> None:
    run = await leased(engine)
    await engine.put(run, 2, sleep("1", "2030-01-01T00:00:00.000Z"))
    child = {"type": "child", "path": "1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    for after_seq in (2, 3):
        with pytest.raises(RunPositionTaken):
            await engine.put(run, after_seq, then={**child, "run_id": "young"})
    with pytest.raises(RunNotFound):
        await engine.engine.ports.runs.load("young")


async def test_a_child_that_runs_is_waited_for_although_it_could_not_be_started_any_more(engine: Engine) -> None:
    """A new version of the child's program takes other inputs; the parent is executed anew, and says the same again."""
    run = await leased(engine)
    child = {"type": "child", "path": "1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    started = await engine.put(run, 2, then=child)
    await engine.put(run, 3, then={"type": "release"})
    newer = ProcedureSaid(name="onboard", version="2", program_digest="b" * 64, input_schema={"type": "string"})
    await engine.procedures.register(newer, WORKER)
    taken = {one.run_id: one for one in await engine.lease(slots=2, wait_ms=30_000)}
    if len(taken) < 2:
        taken |= {one.run_id: one for one in await engine.lease(wait_ms=30_000)}
    run, young = taken["r"], taken[(started.result or {})["run_id"]]
    answer = await engine.put(run, run.sequence_number, then=child)
    assert (answer.result, answer.news) == (started.result, [])
    await engine.put(run, run.sequence_number, then=suspend("1"))
    await engine.put(young, young.sequence_number, then={**DONE, "positions": 0})
    resumed = await again(engine)
    records = await engine.engine.ports.runs.load_records("r", after=0, limit=50)
    answers = [said(one) for one in records if one.entry.artifact_type == "run_answer"]
    assert (resumed.run_id, [one["outcome"] for one in answers]) == ("r", ["OK"])


async def test_a_child_that_has_ended_while_its_parent_was_taken_up_again_answers_the_repeated_start(
    engine: Engine,
) -> None:
    """The next worker has read a journal in which the child is at work. Before it says the start again, the child ends
    and its answer is recorded."""
    run = await leased(engine)
    child = {"type": "child", "path": "1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    started = await engine.put(run, 2, then=child)
    await engine.put(run, 3, then={"type": "release"})
    taken = {one.run_id: one for one in await engine.lease(slots=2, wait_ms=30_000)}
    if len(taken) < 2:
        taken |= {one.run_id: one for one in await engine.lease(wait_ms=30_000)}
    run, young = taken["r"], taken[(started.result or {})["run_id"]]
    await engine.put(young, young.sequence_number, then={**DONE, "positions": 0})
    number = run.sequence_number
    async with asyncio.timeout(120):
        while len(await types_of(engine)) == number:
            await asyncio.sleep(0.02)
    answer = await engine.put(run, number, then=child)
    assert (answer.directive, answer.result) == ("CONTINUE", started.result)
    assert [(said(one)["path"], said(one)["outcome"]) for one in answer.news] == [("1", "OK")]
    assert answer.sequence_number == number + 1, "nothing more is recorded"
    with pytest.raises(RunPositionTaken):  # another child than the one that has answered
        await engine.put(run, number, then={**child, "input": inline(2).to_json(), "input_digest": "c" * 64})
    with pytest.raises(RunPositionTaken):  # a worker that has seen the answer has no reason to ask
        await engine.put(run, number + 1, then=child)


async def test_a_program_that_starts_itself_for_ever_is_refused_at_a_depth(engine: Engine, sessions: Sessions) -> None:
    """It would outlive every limit of a single run; the program is told, on the record, and a repeat is the same."""
    run = await leased(engine)
    child = {"type": "child", "path": "1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    for _ in range(RUN_CHILD_LEVELS_MAX):
        await engine.put(run, 2, then=child)
        (run,) = await engine.lease(wait_ms=30_000)
    for _ in range(2):
        answer = await engine.put(run, 2, then=child)
        assert [said(record)["error"]["type"] for record in answer.news] == ["RUN_TOO_DEEP"]
    assert await engine.lease() == []
    assert await types_of(engine, run.run_id) == ["start", "attempt", "intent", "answer"]
    assert await findings(sessions) == []


async def test_no_more_runs_than_a_bound_are_open_below_one_run(
    engine: Engine, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children and their children count together, those that failed until they are cancelled; ended ones do not."""
    monkeypatch.setattr(descent, "RUN_OPEN_BELOW_MAX", 4)
    monkeypatch.setattr(descent, "_FULL_BELIEVED_MS", 0)
    top = await leased(engine)
    child = {"type": "child", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}

    async def started(run: LeasedRun, path: str, after_seq: int) -> list[str]:
        """What the program is told; nothing where the child was started."""
        answer = await engine.put(run, after_seq, then={**child, "path": path})
        return [said(record)["error"]["type"] for record in answer.news]

    assert [await started(top, f"1:{number}.1", number + 1) for number in (1, 2)] == [[], []]
    first, second = await engine.lease(slots=2, wait_ms=30_000)
    assert [await started(first, f"1:{number}.1", number + 1) for number in (1, 2)] == [[], []]
    refused = ["RUN_TOO_MANY_CHILDREN"]
    assert await started(second, "1", 2) == refused  # two below the top, two below one of them
    assert await started(second, "1", 2) == refused  # a repeat is the same
    assert await started(top, "1:3.1", 4) == refused
    failed = {"type": "fail", "error": {"type": "Error", "message": "no", "retryable": False}}
    grandchildren = await engine.lease(slots=2, wait_ms=30_000)
    await engine.put(grandchildren[0], 2, then=failed)
    assert await started(second, "2", 4) == refused  # it may be tried again
    await engine.engine.answering.cancel(grandchildren[0].run_id, "olga", rationale="given up")
    assert await started(second, "3", 6) == []
    assert await started(top, "1:4.1", 6) == refused
    await engine.put(grandchildren[1], 2, then={**DONE, "positions": 0})
    assert await started(top, "1:5.1", 8) == []
    assert await findings(sessions) == []


async def test_open_runs_are_counted_seldom(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for many children that are started, and once for many that are refused."""
    counted: list[str] = []
    count = PostgresRuns.count_open_below

    async def counting(runs: PostgresRuns, run_id: str, *, at_most: int) -> int:
        counted.append(run_id)
        return await count(runs, run_id, at_most=at_most)

    monkeypatch.setattr(PostgresRuns, "count_open_below", counting)
    top = await leased(engine)
    child = {"type": "child", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    for number in range(1, 6):
        await engine.put(top, number + 1, then={**child, "path": f"1:{number}.1"})
    assert counted == ["r"]
    monkeypatch.setattr(descent, "RUN_OPEN_BELOW_MAX", 5)
    monkeypatch.setattr(descent, "_FULL_BELIEVED_MS", 3_600_000)
    (young,) = await engine.lease(wait_ms=30_000)
    other = RunEngine(engine.engine.ports, engine.engine.sweeping._traces)  # another gateway
    for number in range(1, 6):
        request = {
            "lease": young.lease,
            "attempt": 1,
            "after_seq": 2 * number,
            "puts": [],
            "then": {**child, "path": str(number)},
        }
        answer = await other.put(young.run_id, PutRequest.made_of(request), WORKER)
        assert [said(record)["error"]["type"] for record in answer.news] == ["RUN_TOO_MANY_CHILDREN"]
    await other.close()
    assert counted == ["r", "r"]


async def test_a_child_whose_id_another_run_has_is_refused_on_the_record_and_all_verifies(
    engine: Engine, sessions: Sessions
) -> None:
    """No intent stands that names a run which it did not begin, nor one that is not there."""
    await engine.start("taken")
    await engine.lease()
    run = await leased(engine)
    child = {"type": "child", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    await engine.put(run, 2, then={**child, "path": "1", "run_id": "taken"})
    await engine.put(run, 4, then={**child, "path": "2", "procedure": "nobody-has-it"})
    records = [said(one) for one in await engine.engine.ports.runs.load_records("r", after=2, limit=10)]
    assert [one["request"]["child_run_id"] for one in records[::2]] == [None, None]
    assert [one["error"]["type"] for one in records[1::2]] == ["RUN_ID_TAKEN", "PROCEDURE_NOT_FOUND"]
    again = await engine.put(run, 2, then={**child, "path": "1", "run_id": "taken"})
    assert again.directive == "CONTINUE"
    assert len(await types_of(engine)) == 6, "a repeat is the same start"
    gone = {"sha256": "0" * 64, "size_bytes": 5, "media_type": "text/plain", "serializer": "text"}
    with pytest.raises(RunBlobMissing):
        await engine.put(run, 6, then={**child, "path": "3", "input": {"tier": "artifact", "ref": gone}})
    assert len(await types_of(engine)) == 6, "neither intent nor child"
    await verify_all(sessions)


async def test_a_child_that_is_refused_is_an_answer_and_a_cancelled_parent_takes_its_children_along(
    engine: Engine,
) -> None:
    run = await leased(engine)
    child = {"type": "child", "path": "1", **OPERATION, "procedure": "nobody-has-it", "input": inline(1).to_json()}
    answer = await engine.put(run, 2, then=child)
    assert [said(record)["error"]["type"] for record in answer.news] == ["PROCEDURE_NOT_FOUND"]
    answer = await engine.put(run, 4, then=child | {"path": "2", "procedure": "onboard"})
    child_id = (answer.result or {})["run_id"]
    await engine.engine.answering.cancel("r", "ada")
    await sweep_until(engine, child_id, "CANCELLED")
    assert (await engine.put(run, 5, step("3"))).reason == "CANCELLED"


async def test_a_parent_that_ends_leaves_a_failed_child_failed_beside_one_that_it_takes_along(engine: Engine) -> None:
    """What has failed has ended: its error stays to be read, and it can be retried."""
    run = await leased(engine)
    child = {"type": "child", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    await engine.put(run, 2, then={**child, "path": "1", "run_id": "failing"})
    (young,) = await engine.lease(wait_ms=30_000)
    error = {"type": "ValueError", "message": "no", "retryable": False}
    await engine.put(young, young.sequence_number, then={"type": "fail", "error": error})
    async with asyncio.timeout(120):
        while "answer" not in await types_of(engine):
            await engine.engine.sweeping.sweep(judges_workers=False)
    await engine.put(run, 4, then={**child, "path": "2", "run_id": "going"})
    await engine.engine.answering.cancel("r", "ada")
    await sweep_until(engine, "going", "CANCELLED")
    seen = await view(engine.engine.ports, "failing")
    assert (seen.status, seen.end and seen.end.error and seen.end.error.type) == ("failed", "ValueError")


async def leave_child_behind(engine: Engine, run: LeasedRun, after_seq: int = 2, path: str = "1") -> str:
    """A child begins inside an operation, which times out while the child is at work."""
    child = {"type": "child", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    answer = await engine.put(run, after_seq, then={**child, "path": f"{path}.1"})
    (young,) = await engine.lease(wait_ms=30_000)
    error = {"type": "TimeoutError", "message": "it took longer than 1 s", "retryable": False}
    await engine.put(run, answer.sequence_number, step(path, outcome="ERROR") | {"value": None, "error": error})
    assert young.run_id == (answer.result or {})["run_id"]
    return young.run_id


@pytest.mark.parametrize("end", ["completed", "cancelled"])
async def test_a_child_whose_operation_was_closed_around_it_goes_on_and_is_cancelled_when_its_parent_ends(
    engine: Engine, end: str
) -> None:
    """Nobody waits for it any more; while its parent is at work a retry of that operation could."""
    run = await leased(engine)
    child_id = await leave_child_behind(engine, run)
    for _ in range(3):
        await engine.engine.sweeping.sweep(judges_workers=False)
    assert await state_of(engine, child_id) == "RUNNING"
    if end == "completed":
        await engine.put(run, 4, then={**DONE, "positions": 1})
    else:
        await engine.engine.answering.cancel("r", "ada")
    await sweep_until(engine, child_id, "CANCELLED")
    seen = await view(engine.engine.ports, child_id)
    assert seen.end is not None
    assert (seen.end.ended_by.type, seen.end.ended_by.id) == ("parent", "r")


@pytest.mark.parametrize("is_at_checkpoint", [False, True], ids=["from_the_start", "from_a_checkpoint"])
async def test_a_gateway_that_dies_when_a_parent_has_ended_leaves_its_children_to_the_sweep_of_another(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_at_checkpoint: bool
) -> None:
    """The other one knows the parent from the store alone: from its start on, or from an execution checkpoint that was
    written after the child was left behind."""

    async def dies(self: Any, work: Any) -> None:
        return

    async with open_engine(database.gateway_url, folder=tmp_path / "blobs") as here:
        run = await leased(here)
        child_id = await leave_child_behind(here, run)
        seen, positions = 4, 1
        while is_at_checkpoint and seen < 110:
            count = min(50, 110 - seen)
            puts = [step(str(number)) for number in range(positions + 1, positions + 1 + count)]
            seen, positions = (await here.put(run, seen, *puts)).sequence_number, positions + count
    async with open_engine(database.gateway_url, folder=tmp_path / "blobs") as there:
        with monkeypatch.context() as patched:
            patched.setattr(RunEngine, "_tell_relatives", dies)
            await there.put(run, seen, then={**DONE, "positions": positions})
        assert await state_of(there, child_id) == "RUNNING"
    async with open_engine(database.gateway_url, folder=tmp_path / "blobs") as other:
        await sweep_until(other, child_id, "CANCELLED")


async def test_a_parent_that_ends_after_all_its_children_asks_for_none(engine: Engine) -> None:
    run = await leased(engine)
    child = {"type": "child", "path": "1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    await engine.put(run, 2, then=child)
    (young,) = await engine.lease(wait_ms=30_000)
    await engine.put(young, young.sequence_number, then={**DONE, "positions": 0})
    async with asyncio.timeout(120):
        while "answer" not in await types_of(engine):
            await engine.engine.sweeping.sweep(judges_workers=False)
    await engine.put(run, 4, then={**DONE, "positions": 1})
    assert not (await engine.engine.ports.runs.load("r")).run.has_left_children
    due = await engine.engine.ports.runs.hold_due(limit=10, worker_silent_ms=None)
    assert "r" not in [one.run_id for one in due.runs]


@pytest.mark.parametrize("tries", ["again", "after_a_failure"])
async def test_an_operation_that_is_tried_again_takes_up_the_child_that_it_left_behind(
    engine: Engine, sessions: Sessions, tries: str
) -> None:
    """In another attempt, under another intent: the child is the same one, and its end is the answer."""
    run = await leased(engine)
    child = {"type": "child", "path": "1.1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    first = await engine.put(run, 2, then=child)
    (young,) = await engine.lease(wait_ms=30_000)
    error = {"type": "TimeoutError", "message": "it took longer than 1 s", "retryable": True}
    if tries == "again":
        await engine.put(run, 3, step("1", outcome="RETRY") | {"value": None, "error": error}, then={"type": "release"})
    else:
        failed = step("1", outcome="ERROR") | {"value": None, "error": error}
        await engine.put(run, 3, failed, then={"type": "fail", "error": {**error, "retryable": False}})
        await engine.engine.answering.resume("r", PERSON, rationale="again")
    run = await again(engine)
    assert run.run_id == "r"
    taken_up = await engine.put(run, run.sequence_number, then=child)
    assert (taken_up.result or {})["run_id"] == (first.result or {})["run_id"] == young.run_id
    await engine.put(young, young.sequence_number, then={**DONE, "positions": 0})
    async with asyncio.timeout(120):
        while "answer" not in await types_of(engine):
            await engine.engine.sweeping.sweep(judges_workers=False)
            await asyncio.sleep(0.02)
    records = await engine.engine.ports.runs.load_records("r", after=0, limit=100)
    assert said(records[-1])["value"]["run_id"] == young.run_id
    seen = records[-1].entry.sequence_number
    await engine.put(run, seen, step("1", inner=1, try_number=2), then={**DONE, "positions": 1})
    await verify_all(sessions)


async def test_an_operation_takes_up_the_child_of_an_earlier_try_also_when_the_last_one_began_another(
    engine: Engine, sessions: Sessions
) -> None:
    run = await leased(engine)
    child = {"type": "child", "path": "1.1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    error = {"type": "TimeoutError", "message": "it took longer than 1 s", "retryable": True}
    for number, child_id in enumerate(["first", "second", "first"], 1):
        while number > 1 and (run := await again(engine)).run_id != "r":
            pass
        begun = await engine.put(run, run.sequence_number, then={**child, "run_id": child_id})
        if number < 3:
            failed = step("1", outcome="RETRY", try_number=number) | {"value": None, "error": error}
            await engine.put(run, begun.sequence_number, failed, then={"type": "release"})
    assert (begun.result or {})["run_id"] == "first"
    await verify_all(sessions)


async def test_a_child_that_ends_while_it_is_taken_up_is_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after it was found, and before the new intent stands, at another gateway: what tells its parent there,
    and the sweep, find nobody who waits for it, and neither comes again."""
    run = await leased(engine)
    child = {"type": "child", "path": "1.1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    begun = await engine.put(run, 2, then=child)
    (young,) = await engine.lease(wait_ms=30_000)
    error = {"type": "TimeoutError", "message": "it took longer than 1 s", "retryable": True}
    failed = step("1", outcome="RETRY") | {"value": None, "error": error}
    await engine.put(run, begun.sequence_number, failed, then={"type": "release"})
    run, find = await again(engine), RunEngine._find_child

    async def find_nobody(*_: Any) -> None:
        return None

    async def find_and_end(self: RunEngine, *asked: Any) -> Any:
        found = await find(self, *asked)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(engine.engine.sweeping, "tell_parent", find_nobody)
            await engine.put(young, young.sequence_number, then={**DONE, "positions": 0})
            for _ in range(3):
                await engine.engine.sweeping.sweep(judges_workers=False)
        return found

    monkeypatch.setattr(RunEngine, "_find_child", find_and_end)
    await engine.put(run, run.sequence_number, then=child)
    assert (await types_of(engine))[-2:] == ["intent", "answer"]


async def test_a_run_that_takes_the_childs_id_while_it_is_started_leaves_no_intent_that_names_it(
    engine: Engine, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id is free when it is looked for, and taken when it is stored: a verifier would ask the other run for the
    intent that began it."""
    run, find = await leased(engine), RunEngine._find_child
    child = {"type": "child", "path": "1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}

    async def find_and_take(self: RunEngine, asked: Any, *more: Any) -> Any:
        found = await find(self, asked, *more)
        if found is None:
            await engine.start("wanted")
        return found

    monkeypatch.setattr(RunEngine, "_find_child", find_and_take)
    await engine.put(run, 2, then={**child, "run_id": "wanted"})
    assert (await types_of(engine))[-2:] == ["intent", "answer"]
    intent, answer = (one.artifact for one in await engine.engine.ports.runs.load_records("r", after=2, limit=10))
    assert isinstance(intent, RunIntent)
    assert isinstance(intent.request, ChildRequest)
    assert intent.request.child_run_id is None
    assert isinstance(answer, RunAnswer)
    assert answer.error is not None
    assert answer.error.type == "RUN_ID_TAKEN"
    before = await types_of(engine)
    await engine.put(run, 2, then={**child, "run_id": "wanted"})
    assert await types_of(engine) == before, "a repeat adds nothing"
    await verify_all(sessions)


async def test_fork_proves_origin_source_unchanged(engine: Engine) -> None:
    run = await leased(engine)
    for number in range(1, 4):
        change = [{"op": "set", "at": f"/n{number}", "to": number}]
        await engine.put(run, number + 1, step(str(number), number, state_change=change))
    await engine.put(run, 5, then={**DONE, "positions": 3})
    before = await types_of(engine)
    edit = SetAt(op="set", at="/n9", to=9)
    forked = await engine.engine.starting.fork("r", at=4, principal=AGENT, run_id="f", state_change=[edit])
    assert forked.state == "SCHEDULED"
    copy = await again(engine)
    assert (copy.run_id, copy.first_seq, copy.salt, copy.draw_salt) == ("f", -4, run.salt, run.draw_salt)
    loaded = await engine.engine.ports.runs.load("f")
    assert loaded.run.state == {"n1": 1, "n2": 2, "n9": 9}
    with pytest.raises(RunPositionTaken):
        await engine.put(copy, copy.sequence_number, step("2"))
    await engine.put(copy, copy.sequence_number, step("3", "other"), then={**DONE, "positions": 3})
    assert await types_of(engine) == before
    source = (await engine.engine.ports.runs.load_at("r", 4)).head
    origin = loaded.start.forked_from
    assert origin is not None
    assert (origin.sequence_number, origin.entry_digest) == (4, source.entry_digest)


async def test_state_at_every_position(engine: Engine) -> None:
    run = await leased(engine)
    seen = 2
    for first in range(1, 241, 40):
        puts = [
            step(str(number), state_change=[{"op": "set", "at": "/n", "to": number}])
            for number in range(first, first + 40)
        ]
        seen = (await engine.put(run, seen, *puts)).sequence_number
    for at in (3, 99, 100, 101, 150, 200, 242):
        assert (await engine.engine.ports.runs.load_at("r", at)).state == {"n": at - 2}
    assert (await engine.engine.ports.runs.load_at("r", 2)).state == {}


async def test_ten_slots_are_shared_by_procedures_in_turn_and_nobody_gets_a_run_twice(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.postgres.runs.RUN_HOLD_MS", 3_600_000)  # no machine is so slow that it ends meanwhile
    await engine.procedures.register(ProcedureSaid(name="other", version="1", program_digest=PROGRAM), WORKER)
    for number in range(20):
        await engine.start(f"many-{number}")
    held, _ = await engine.engine.ports.runs.hold_ready("default", [("onboard", f"1@{PROGRAM}")], 5)
    ids: list[str] = []
    async with asyncio.timeout(120):
        while len(ids) < 15:
            taken = await asyncio.gather(*(engine.lease(4, worker=f"worker-{n:04}", wait_ms=200) for n in range(5)))
            ids += [run.run_id for runs in taken for run in runs]
    assert len(ids) == len(set(ids)) == 15
    assert not {run.run_id for run in held} & set(ids)


async def test_a_parent_keeps_what_it_was_told_of_a_child_that_failed_and_is_retried(engine: Engine) -> None:
    run = await leased(engine)
    child = {"type": "child", "path": "1", **OPERATION, "procedure": "onboard", "input": inline(1).to_json()}
    answer = await engine.put(run, 2, then=child)
    child_id = (answer.result or {})["run_id"]
    (young,) = await engine.lease(wait_ms=30_000)
    error = {"type": "ValueError", "message": "no", "retryable": False}
    await engine.put(young, young.sequence_number, then={"type": "fail", "error": error})
    async with asyncio.timeout(120):
        while "answer" not in await types_of(engine):
            await engine.engine.sweeping.sweep(judges_workers=False)
    await engine.engine.answering.resume(child_id, AGENT, rationale="again")
    (young,) = await engine.lease(wait_ms=30_000)
    await engine.put(young, young.sequence_number, then={**DONE, "positions": 0})
    records = await engine.engine.ports.runs.load_records("r", after=3, limit=10)
    # Its last entry is another by now, so the answer names none.
    assert [(said(one)["outcome"], said(one)["value"]) for one in records] == [("ERROR", None)]


async def test_a_secret_is_sealed_and_a_repeat_of_it_is_the_same_put(engine: Engine, tmp_path: Path) -> None:
    run = await leased(engine)
    secret = {"tier": "secret", "value": {"token": "hunter2"}}
    for _ in range(2):
        answer = await engine.put(run, 2, step("1") | {"value": secret})
        assert (answer.directive, answer.sequence_number) == ("CONTINUE", 3)
    with pytest.raises(RunPositionTaken):
        await engine.put(run, 2, step("1") | {"value": {"tier": "secret", "value": {"token": "other"}}})
    ports = engine.engine.ports
    (record,) = await ports.runs.load_records("r", after=2, limit=10)
    assert isinstance(record.artifact, RunCheckpoint)
    kept = record.artifact.value
    assert isinstance(kept, SecretValue)
    assert b"hunter2" not in record.artifact.to_bytes()
    assert all(b"hunter2" not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert await ports.secrets.open("default", "r", "1", kept) == {"token": "hunter2"}
    with pytest.raises(SecretMissing):
        await ports.secrets.open("default", "r", "2", kept)


async def test_a_worker_that_is_gone_while_it_waits_gets_no_run(engine: Engine) -> None:
    gone, leasing = Gone(), engine.engine.leasing
    offered = [{"name": "onboard", "version": "1", "program_digest": PROGRAM}]
    asked = {"worker": "worker-two", "name": "here", "procedures": offered, "wait_ms": 60_000}
    waiting = asyncio.create_task(leasing.lease(LeaseRequest.made_of(asked), WORKER, gone=gone))
    while not leasing._waiting:
        await asyncio.sleep(0.01)
    gone.set()
    assert (await engine.start("r")).state == "SCHEDULED"  # not leased to it with its start
    assert await waiting == []
    assert (await again(engine)).run_id == "r"


@pytest.mark.parametrize("kind", ["bytes", "keys", "branches"])
async def test_a_run_with_all_that_its_limits_admit_goes_on_past_its_checkpoints(
    database: Database, tmp_path: Path, sessions: Sessions, kind: str
) -> None:
    """A state of nearly 1 MiB, one of many small members, and a thousand branches that wait: on the gateway that has
    seen it grow, on another one, and where it is verified."""
    async with open_engine(database.gateway_url, folder=tmp_path) as first:
        run = await leased(first)
        seq = run.sequence_number
        for number in range(1, 35):
            if kind == "branches":
                at = range(30 * (number - 1) + 1, min(1_000, 30 * number) + 1)
                puts = [sleep(f"1:{which}.1", "2090-01-01T00:00:00.000Z") for which in at]
            else:
                each = {"bytes": "x" * 30_000, "keys": {str(one): one for one in range(1_000)}}[kind]
                change = {"op": "set", "at": f"/{number}", "to": each}
                puts = [step(str(3 * number - 2)), step(str(3 * number - 1))]
                puts.append(step(str(3 * number), state_change=[change]))
            seq = (await first.put(run, seq, *puts)).sequence_number
        await first.put(run, seq, then={"type": "release"})
    async with open_engine(database.gateway_url, folder=tmp_path) as second:
        run = await again(second)
        if kind == "branches":
            answer = await second.put(run, run.sequence_number, then=suspend("1:1000.1"))
            assert answer.directive == "SUSPENDED"
        else:
            changed = step("103", state_change=[{"op": "set", "at": "/last", "to": 1}])
            assert (await second.put(run, run.sequence_number, changed)).directive == "CONTINUE"
    await verify_all(sessions)


async def test_a_state_is_not_nested_more_deeply_than_a_checkpoint_can_hold(engine: Engine, sessions: Sessions) -> None:
    """Level by level, in changes that are flat: the one that goes too far is refused, and the run goes on."""
    run = await leased(engine)
    levels = 0

    async def nest() -> None:
        nonlocal levels
        for levels in range(1, 100):
            change = {"op": "set", "at": "/a" * levels, "to": {}}
            await engine.put(run, levels + 1, step(str(levels), state_change=[change]))

    with pytest.raises(SchemaViolation, match="nests it too deeply"):
        await nest()
    assert levels > 60
    for number in range(levels, 110):  # past the checkpoint
        await engine.put(run, number + 1, step(str(number)))
    engine.engine.table.forget("r")
    deep: list[Change] = [SetAt(op="set", at="/a" * number, to={}) for number in range(levels, levels + 9)]
    with pytest.raises(SchemaViolation, match="nests it too deeply"):
        await engine.engine.starting.fork("r", at=None, principal=AGENT, run_id="deeper", state_change=deep)
    await engine.engine.starting.fork("r", at=None, principal=AGENT, run_id="as-deep")
    assert await engine.engine.answering.cancel("r", "olga") == "CANCELLED"
    await verify_all(sessions)
