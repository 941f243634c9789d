"""A question that nobody answers in time is told to others, and stays open; then comes its default, or TIMEOUT."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.clock import SystemClock
from app.domain.runs.engine.announcing import load_announcement
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.outbox import PostgresOutbox
from app.postgres.run_rows import rebuild_runs
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.connectors.servers import raw_server
from tests.invariants.plans import verify_all
from tests.runs.engines import NOW
from tests.runs.routes import Runs, ask, open_runs
from tests.runs.test_answering_routes import approvals
from tests.runtime.scripted import KEYS
from tests.webhooks.sending import OK, Delivery, rows_of, webhooks

EARLIER = "2025-12-31T00:00:00.000Z"
LESS_EARLY = "2025-12-31T00:00:01.000Z"
LATE = "2035-01-01T00:00:00.000Z"
LATER = "2035-01-01T00:00:01.000Z"
# What must happen before a question is over is tried with more time if the machine was too slow for it.
PATIENCE_S = (1, 10, 100)
NO = {"tier": "inline", "value": False}


@pytest.fixture
async def runs(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Runs]:
    async with open_runs(database, sessions, ledger, tmp_path, ask_webhooks=["ops", "boss"]) as opened:
        yield opened


def levels(*times: str, webhooks: tuple[str, ...] = ("boss",)) -> list[dict[str, Any]]:
    return [{"at": at, "webhooks": list(webhooks)} for at in times]


def after(milliseconds: int) -> str:
    return SystemClock().after(milliseconds)


async def journal(runs: Runs, run_id: str) -> list[dict[str, Any]]:
    items = (await runs.front.page(f"/v1/runs/{run_id}/checkpoints"))["items"]
    return [item for item in items if item["artifact_type"] in ("run_escalation", "run_answer")]


async def sweep_until(runs: Runs, run_id: str, count: int) -> list[dict[str, Any]]:
    """Look for what is due until so many escalations and answers stand on the journal."""
    async with asyncio.timeout(120):
        while len(found := await journal(runs, run_id)) < count:
            await runs.engine.engine.sweeping.sweep(judges_workers=False)
            await asyncio.sleep(0.02)
    return found


async def leased(runs: Runs, run_id: str) -> Any:
    """A new run; those that were tried before it may be ready, and come first."""
    await runs.start(run_id)
    async with asyncio.timeout(120):
        while True:
            for run in await runs.lease():
                if run["run_id"] == run_id:
                    return run


async def sweep_to_answer(runs: Runs, run_id: str) -> list[dict[str, Any]]:
    """Look for what is due until the question is over."""
    async with asyncio.timeout(240):
        while not (found := await journal(runs, run_id)) or found[-1]["artifact_type"] != "run_answer":
            await runs.engine.engine.sweeping.sweep(judges_workers=False)
            await asyncio.sleep(0.02)
    return found


async def test_it_is_escalated_to_others_who_are_told_and_stays_open(
    runs: Runs, sessions: Sessions, admin: Admin
) -> None:
    await runs.asking("r-1", webhooks=["ops"], escalations=levels(EARLIER, LATE), expires_at=LATER, default=NO)
    assert [row["webhook"] for row in await rows_of(admin)] == ["ops"]
    assert [item["level"] for item in await approvals(runs)] == [0]
    (first,) = await sweep_until(runs, "r-1", 1)
    assert (first["artifact_type"], first["path"], first["level"], first["announced_to"]) == (
        *("run_escalation", "1", 1, ["boss"]),
    )
    (item,) = await approvals(runs)
    assert (item["level"], item["intent_digest"]) == (1, first["intent_digest"])
    (awaited,) = (await runs.front.page("/v1/runs/r-1"))["awaits"]
    assert (awaited["level"], awaited["is_awaited"]) == (1, True)
    load_run = partial(load_announcement, runs.engine.engine.ports)
    async with raw_server(OK) as ops, raw_server(OK) as boss:
        deliverer = webhooks({"ops": ops.url, "boss": boss.url}, PostgresOutbox(sessions), KEYS, load_run=load_run)
        assert await deliverer.deliver_due() == 2
        await deliverer.close()
    (told,) = [Delivery.of(raw).document for raw in boss.requests]
    assert [(one["path"], one["level"]) for one in told["questions"]] == [("1", 1)]
    assert len(ops.requests) == 1
    await verify_all(sessions)


async def test_level_by_level_it_runs_into_its_default_of_which_nobody_is_told(runs: Runs, sessions: Sessions) -> None:
    for seconds in PATIENCE_S:
        run_id = f"r-{seconds}"
        both = [*levels(EARLIER), *levels(LESS_EARLY, webhooks=())]
        run = await leased(runs, run_id)
        question = ask("1", webhooks=["ops"], escalations=both, expires_at=after(seconds * 1000), default=NO)
        await runs.put(run, question, then={"type": "suspend", "awaits": ["1"]})
        found = await sweep_to_answer(runs, run_id)
        if len(found) == 3:
            break
    first, second, last = found
    assert [(one["level"], one["announced_to"]) for one in (first, second)] == [(1, ["boss"]), (2, ["ops", "boss"])]
    assert (last["artifact_type"], last["outcome"], last["value"], last["answered_by"]["id"]) == (
        *("run_answer", "OK", NO, "default"),
    )
    load_run = partial(load_announcement, runs.engine.engine.ports)
    async with raw_server(OK) as ops, raw_server(OK) as boss:
        deliverer = webhooks({"ops": ops.url, "boss": boss.url}, PostgresOutbox(sessions), KEYS, load_run=load_run)
        assert await deliverer.deliver_due() > 0
        await deliverer.close()
    assert (ops.requests, boss.requests) == ([], []), "it is over"
    await verify_all(sessions)


async def test_what_is_answered_is_not_escalated_and_an_answer_after_it_counts(runs: Runs, sessions: Sessions) -> None:
    soon = after(300)
    await runs.asking("quick", escalations=levels(soon))
    await runs.asking("slow", escalations=levels(EARLIER))
    answer = {"path": "1", "answer": True}
    await runs.ok(await runs.front.post("/v1/runs/quick/signals", answer, "supervisor"))
    await sweep_until(runs, "slow", 1)
    await runs.ok(await runs.front.post("/v1/runs/slow/signals", answer, "supervisor"))
    async with asyncio.timeout(60):
        while SystemClock().now() <= soon:
            await asyncio.sleep(0.02)
    await runs.engine.engine.sweeping.sweep(judges_workers=False)
    assert [one["artifact_type"] for one in await journal(runs, "quick")] == ["run_answer"]
    assert [one["artifact_type"] for one in await journal(runs, "slow")] == ["run_escalation", "run_answer"]
    assert await approvals(runs) == []
    await verify_all(sessions)


async def test_a_run_that_works_on_beside_its_question_keeps_its_worker(runs: Runs) -> None:
    """No worker leaves for it: the gateway tells others while the attempt goes on."""
    await runs.start("r-1")
    (run,) = await runs.lease()
    await runs.put(run, ask("1:1.1", escalations=levels(EARLIER)), ask("1:2.1", expires_at=after(300)))
    first, second = await sweep_until(runs, "r-1", 2)
    assert (first["artifact_type"], first["path"]) == ("run_escalation", "1:1.1")
    assert (second["artifact_type"], second["outcome"]) == ("run_answer", "TIMEOUT")
    told = await runs.put(run, after=4, then={"type": "suspend", "awaits": ["1:1.1"]})
    assert told["directive"] == "SUSPENDED"


async def test_it_is_escalated_while_a_suspension_is_held(runs: Runs) -> None:
    for seconds in PATIENCE_S:
        run = await leased(runs, f"r-{seconds}")
        soon, then = after(seconds * 100), after(seconds * 400)
        question = ask("1", escalations=levels(soon), expires_at=then, default=NO)
        told = await runs.put(run, question, then={"type": "suspend", "awaits": ["1"], "wait_ms": 60_000})
        if told["directive"] == "CONTINUE" and len(told["news"]) == 2:
            break
    assert told["directive"] == "CONTINUE"
    assert [one["artifact_type"] for one in told["news"]] == ["run_escalation", "run_answer"]


async def test_what_is_over_by_the_time_somebody_looks_is_not_escalated(runs: Runs) -> None:
    """No gateway was there: nobody could answer it any more."""
    await runs.asking("r-1", escalations=levels(EARLIER), expires_at=NOW)
    (only,) = await sweep_until(runs, "r-1", 1)
    assert (only["artifact_type"], only["outcome"]) == ("run_answer", "TIMEOUT")


async def test_levels_come_one_after_the_other_and_before_the_end(runs: Runs) -> None:
    await runs.start("r-1")
    (run,) = await runs.lease()
    late = {"escalations": levels("2030-01-01T00:00:00.000Z"), "expires_at": "2030-01-01T00:00:00.000Z"}
    for wrong in ({"escalations": levels(NOW, EARLIER)}, {"escalations": levels(NOW, NOW)}, late):
        body = {"lease": run["lease"], "attempt": 1, "after_seq": 2, "puts": [ask("1", **wrong)]}
        status, document = await runs.front.post("/v1/runs/r-1/checkpoints", body, "worker")
        assert (status, document["code"]) == (422, "SCHEMA_VIOLATION"), wrong


async def test_rows_that_are_made_anew_say_the_same(
    runs: Runs, database: Database, sessions: Sessions, admin: Admin
) -> None:
    await runs.asking("r-1", escalations=levels(EARLIER, "2030-01-01T00:00:00.000Z"))
    await sweep_until(runs, "r-1", 1)
    query = (
        "SELECT q.path, q.sequence_number, q.asked_at, q.level, r.due_at"
        "  FROM tga.run_requests q JOIN tga.runs r USING (stream_no)"
    )
    before = [tuple(row) for row in await admin.fetch(query)]
    assert before[0][3] == 1
    await admin.execute("DELETE FROM tga.run_requests")
    assert [one.error async for one in rebuild_runs(sessions, database.admin_url, SystemClock())] == [None]
    assert [tuple(row) for row in await admin.fetch(query)] == before
