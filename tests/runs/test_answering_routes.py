"""Questions of runs over HTTP: they stand beside the calls that wait, and the first answer that fits counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.api.approval_documents import ApprovalPage
from app.core.canonical import canonical_bytes
from app.core.digest import digest_of_bytes
from app.core.errors import Forbidden, RunAnswerInvalid, RunNotFound
from app.mcp_server.supervising import supervise
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import PEOPLE, waiting_plan
from tests.runs.routes import Runs, ask, open_runs
from tests.traces import pending_trace


@pytest.fixture
async def runs(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Runs]:
    async with open_runs(database, sessions, ledger, tmp_path) as opened:
        yield opened


async def approvals(runs: Runs, who: str = "supervisor", limit: int = 50) -> list[dict[str, Any]]:
    found, path = [], f"/v1/approvals?limit={limit}"
    while path:
        page = await runs.front.page(path, who)
        ApprovalPage.model_validate(page)
        assert len(page["items"]) <= limit
        found += page["items"]
        path = f"/v1/approvals?limit={limit}&cursor={page['next']}" if page["next"] else ""
    return found


async def test_questions_stand_beside_the_calls_that_wait(runs: Runs) -> None:
    for n in (1, 2):
        await runs.front.append(waiting_plan(pending_trace(n)))
    await runs.start("r-1")
    (run,) = await runs.lease()
    await runs.put(run, ask("1:1.1", "first"), ask("1:2.1", "second", message="And this?"))
    await runs.asking("r-2", context={"tier": "inline", "value": {"amount": 7}})
    for limit in (1, 2, 3, 50):
        items = await approvals(runs, limit=limit)
        assert [item["kind"] for item in items] == ["call", "call", "run", "run", "run"], limit
        assert [(item["run_id"], item["path"], item["name"]) for item in items[2:]] == [
            ("r-1", "1:1.1", "first"),
            ("r-1", "1:2.1", "second"),
            ("r-2", "1", "pay?"),
        ]
    last = items[-1]
    assert (last["procedure"], last["principal_id"], last["expires_at"], last["problem"]) == (
        *("onboard", "agent-1", None, None),
    )
    assert last["request"]["context"] == {"tier": "inline", "value": {"amount": 7}}
    entries = (await runs.front.page("/v1/runs/r-2/entries"))["items"]
    intent = next(item for item in entries if item["entry"]["artifact_type"] == "run_intent")
    assert (
        last["intent_digest"]
        == intent["entry"]["artifact_digest"]
        == digest_of_bytes(canonical_bytes(intent["artifact"]))
    )
    assert last["asked_at"] == intent["entry"]["recorded_at"]
    assert len(await approvals(runs, "agent")) == 5
    assert [item["kind"] for item in await approvals(runs, "agent-2")] == []
    assert await approvals(runs, "acme") == []


async def test_calls_and_questions_are_listed_in_one_order_soonest_expiry_first(runs: Runs) -> None:
    """One list with one cursor: none is left out and none is shown twice, however small a page is."""
    ends: dict[str, str] = {}  # by its name; what never expires comes last
    for n, year in enumerate((2991, 2995, None, 2993, None, 2999, 2990)):
        expires_at = None if year is None else f"{year}-01-01T00:00:00.000Z"
        await runs.front.append(waiting_plan(pending_trace(n, expires_at=expires_at)))
        ends[str(pending_trace(n)[0].entry.trace_id)] = expires_at or "never"
    for n, year in enumerate((2992, None, 2995, 2989, 2999)):
        expires_at = None if year is None else f"{year}-06-01T00:00:00.000Z"
        await runs.asking(f"r-{n}", expires_at=expires_at)
        ends[f"r-{n}"] = expires_at or "never"
    for limit in (1, 2, 3, 5, 50):
        names = [item.get("trace_id") or item["run_id"] for item in await approvals(runs, limit=limit)]
        assert sorted(names) == sorted(ends), limit
        assert [ends[name] for name in names] == sorted(ends.values()), limit
    count = (await runs.front.page("/v1/approvals?limit=1", "supervisor"))["count"]
    assert count == {"calls": 7, "questions": 5, "is_exact": True}


async def test_a_question_goes_when_it_is_answered_or_its_run_ends(runs: Runs) -> None:
    for run_id in ("answered", "cancelled"):
        await runs.asking(run_id)
    await runs.asking("late", expires_at="2020-01-01T00:00:00.000Z")
    assert [item["run_id"] for item in await approvals(runs)] == ["answered", "cancelled"]
    await runs.ok(await runs.front.post("/v1/runs/answered/signals", {"path": "1", "answer": True}, "supervisor"))
    await runs.ok(await runs.front.post("/v1/runs/cancelled/cancel", {}))
    assert await approvals(runs) == []


async def test_ask_first_wins(runs: Runs) -> None:
    """Bound to the exact question, typed, and the first answer counts. What is refused leaves it open."""
    await runs.asking("r-1")
    (item,) = await approvals(runs)
    for answer, code in (
        ({"path": "1", "answer": "yes"}, "RUN_ANSWER_INVALID"),
        ({"path": "1", "answer": True, "intent_digest": "0" * 64}, "RUN_ANSWER_UNASKED"),
        ({"path": "2", "answer": True}, "RUN_ANSWER_UNASKED"),
        ({"path": "1", "name": "paid"}, "INPUT_MALFORMED"),
    ):
        status, document = await runs.front.post("/v1/runs/r-1/signals", answer, "supervisor")
        assert (status >= 400, document["code"]) == (True, code)
        assert "strict JSON" not in document["remedy"], "the remedy is for what was wrong"
    assert len(await approvals(runs)) == 1
    good = {"path": "1", "answer": True, "intent_digest": item["intent_digest"]}
    told = await asyncio.gather(
        *(runs.front.post("/v1/runs/r-1/signals", {**good, "answer": n == 0}, "supervisor") for n in range(4))
    )
    assert sorted(status for status, _ in told) == [200, 409, 409, 409]
    entries = (await runs.front.page("/v1/runs/r-1/entries"))["items"]
    assert [item["entry"]["artifact_type"] for item in entries].count("run_answer") == 1


async def test_a_repeat_of_the_answer_that_counted_is_answered_as_it_was(runs: Runs) -> None:
    await runs.asking("r-1")
    body = {"path": "1", "answer": True}
    first = await runs.ok(await runs.front.post("/v1/runs/r-1/signals", body, "supervisor"))
    again = await runs.ok(await runs.front.post("/v1/runs/r-1/signals", body, "supervisor"))
    assert first["sequence_number"] == again["sequence_number"]
    other = await runs.front.post("/v1/runs/r-1/signals", {**body, "answer": False}, "supervisor")
    assert (other[0], other[1]["code"]) == (409, "RUN_ANSWER_UNASKED")


async def test_mcp_lists_and_answers(runs: Runs) -> None:
    await runs.asking("r-1")
    services, ada = runs.front.services, PEOPLE["supervisor"]
    (item,) = (await supervise(services, ada, "tga__approvals", {}))["items"]
    assert item == (await approvals(runs))[0]
    named = {name: item[name] for name in ("run_id", "path", "intent_digest")}
    with pytest.raises(RunAnswerInvalid):
        await supervise(services, ada, "tga__answer", {**named, "answer": 1})
    with pytest.raises(Forbidden):
        await supervise(services, PEOPLE["agent"], "tga__answer", {**named, "answer": True})
    with pytest.raises(RunNotFound):
        await supervise(services, PEOPLE["acme-supervisor"], "tga__answer", {**named, "answer": True})
    told = await supervise(services, ada, "tga__answer", {**named, "answer": True})
    assert told == {"run_id": "r-1", "path": "1", "state": "SCHEDULED"}
    assert (await supervise(services, ada, "tga__approvals", {}))["items"] == []
