"""Runs as they are listed and read over HTTP: the list, entries, events, the feed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.api.run_documents import RunPage
from app.core.digest import digest_of_bytes
from app.domain.runs.procedures import ProcedureSaid
from app.postgres import run_lists
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import PEOPLE
from tests.runs.engines import PROGRAM, step
from tests.runs.routes import Runs, open_runs


@pytest.fixture
async def runs(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Runs]:
    async with open_runs(database, sessions, ledger, tmp_path) as opened:
        yield opened


async def listed(runs: Runs, query: str = "", who: str = "auditor") -> list[str]:
    page = await runs.front.page(f"/v1/runs{query}", who)
    RunPage.model_validate(page)
    assert page["next"] is None
    return [item["run_id"] for item in page["items"]]


async def test_listing_order_status_prefix(runs: Runs) -> None:
    said = ProcedureSaid(name="bill", version="2", program_digest=PROGRAM)
    await runs.engine.procedures.register(said, PEOPLE["worker"])
    assert await listed(runs) == []
    await runs.complete("order-1")
    await runs.fail("order-2")
    await runs.asking("invoice-1")
    await runs.start("order-3", who="operator")
    await runs.front.post("/v1/runs", {"procedure": "bill", "run_id": "bill-1"})
    newest_first = ["bill-1", "order-3", "invoice-1", "order-2", "order-1"]
    assert await listed(runs) == newest_first
    assert await listed(runs, "?status=running") == ["bill-1", "order-3"]
    assert await listed(runs, "?status=waiting_for_human") == ["invoice-1"]
    assert await listed(runs, "?status=waiting") == []
    assert await listed(runs, "?status=completed") == ["order-1"]
    assert await listed(runs, "?status=failed") == ["order-2"]
    assert await listed(runs, "?status=parked") == []
    assert await listed(runs, "?procedure=bill") == ["bill-1"]
    assert await listed(runs, "?prefix=order-") == ["order-3", "order-2", "order-1"]
    assert await listed(runs, "?prefix=order-&status=failed") == ["order-2"]
    assert await listed(runs, "?prefix=order_") == [], "a prefix is no pattern"
    assert await listed(runs, "?principal_id=olga") == ["order-3"]
    (ended,) = (await runs.front.page("/v1/runs?prefix=order-1&newest=24"))["items"]
    entries = (await runs.front.page("/v1/runs/order-1/entries"))["items"]
    kinds = [one["entry"]["artifact_type"] for one in entries]
    assert ended["journal"] == {"entries": len(kinds), "newest": kinds}
    page = RunPage.model_validate(await runs.front.page("/v1/runs?newest=2"))
    shown = {one.run_id: one.journal for one in page.items}
    assert shown["order-1"] is not None
    assert (shown["order-1"].entries, shown["order-1"].newest) == (len(kinds), kinds[-2:])
    assert [one["journal"] for one in (await runs.front.page("/v1/runs"))["items"]] == [None] * 5
    found, path = [], "/v1/runs?limit=2"
    while path:
        page = await runs.front.page(path)
        found += [item["run_id"] for item in page["items"]]
        path = f"/v1/runs?limit=2&cursor={page['next']}" if page["next"] else ""
    assert found == newest_first


async def test_runs_that_began_in_a_time(runs: Runs) -> None:
    for n in range(4):
        await runs.start(f"run-{n}", who="operator" if n == 2 else "agent")
        await asyncio.sleep(0.002)  # two are never of one millisecond
    began = {item["run_id"]: item["started_at"] for item in (await runs.front.page("/v1/runs"))["items"]}
    assert len(set(began.values())) == 4
    assert await listed(runs, f"?since={began['run-1']}") == ["run-3", "run-2", "run-1"]
    assert await listed(runs, f"?until={began['run-2']}") == ["run-1", "run-0"]
    middle = f"since={began['run-1']}&until={began['run-3']}"
    assert await listed(runs, f"?{middle}") == ["run-2", "run-1"]
    assert await listed(runs, f"?{middle}&status=running") == ["run-2", "run-1"]
    assert await listed(runs, f"?{middle}&status=completed") == []
    assert await listed(runs, f"?{middle}&prefix=run-") == ["run-2", "run-1"]
    assert await listed(runs, f"?{middle}&prefix=run-&status=running&principal_id=olga") == ["run-2"]
    assert await listed(runs, f"?since={began['run-2']}&until={began['run-2']}") == []
    assert await listed(runs, "?since=0001-01-01T00:00:00Z&until=9999-12-31T23:59:59.999Z") == list(began)
    found, path = [], f"/v1/runs?limit=1&{middle}"
    while path:
        page = await runs.front.page(path)
        found += [item["run_id"] for item in page["items"]]
        path = f"/v1/runs?limit=1&{middle}&cursor={page['next']}" if page["next"] else ""
    assert found == ["run-2", "run-1"]
    for wrong in ("since=yesterday", "until=2026-02-30T00:00:00Z", "since=2026-01-01"):
        status, problem, _ = await runs.front.get(f"/v1/runs?{wrong}")
        assert (status, problem["code"]) == (400, "INPUT_MALFORMED")


async def test_an_item_says_where_the_run_stands_and_who_should_act(runs: Runs) -> None:
    await runs.asking("r-1")
    await runs.front.post("/v1/procedures", {"name": "lone", "version": "7", "program_digest": PROGRAM}, "worker")
    await runs.front.post("/v1/runs", {"procedure": "lone", "run_id": "r-2"})
    lone, asks = (await runs.front.page("/v1/runs"))["items"]
    whole = await runs.front.page("/v1/runs/r-1")
    del asks["journal"]  # which is asked for
    del asks["updated_at"]  # of the head; the run's own is that of its last document
    assert asks == {name: whole[name] for name in asks}
    assert (asks["status"], asks["waiting"], asks["state"], asks["attempt"]) == (
        *("waiting_for_human", "person", "WAITING"),
        1,
    )
    assert lone["notice"] == "no worker for lone 7: start one, or one that accepts this version"
    assert lone["notice"] == (await runs.front.page("/v1/runs/r-2"))["notice"]


async def test_a_runs_head_without_its_steps(runs: Runs) -> None:
    await runs.asking("r-1")
    whole = await runs.front.page("/v1/runs/r-1")
    assert (len(whole["steps"]), whole["steps_left_out"]) == (1, False)
    assert await runs.front.page("/v1/runs/r-1?steps=1") == await runs.front.page("/v1/runs/r-1?steps=1000") == whole
    head = await runs.front.page("/v1/runs/r-1?steps=0")
    assert head == {**whole, "steps": [], "steps_left_out": head["steps_left_out"]}
    for wrong in ("1001", "-1", "all", "01"):
        status, problem, _ = await runs.front.get(f"/v1/runs/r-1?steps={wrong}")
        assert (status, problem["code"]) == (400, "INPUT_MALFORMED")


async def test_few_steps_of_a_run_are_the_newest_of_all(runs: Runs) -> None:
    """However little of the journal is read for them; an operation that was tried again stands where it began."""
    await runs.start("r-1")
    (run,) = await runs.lease()
    fault = {"type": "E", "message": "m", "retryable": True}
    steps = [step(str(n), n) for n in range(1, 61)]
    tries = [step("61", outcome="RETRY", value=None, error=fault) | {"try_number": n} for n in range(1, 31)]
    for one in tries:
        del one["value"]
    last = [step(str(n), n) for n in range(62, 66)]
    after = 2
    for puts in (steps[:30], steps[30:], tries[:15], tries[15:], [step("61") | {"try_number": 31}, *last]):
        after = (await runs.put(run, *puts, after=after))["sequence_number"]
    whole = await runs.front.page("/v1/runs/r-1")
    assert [one["path"] for one in whole["steps"]] == [str(n) for n in range(1, 66)]
    assert whole["steps"][60]["tries"] == 31
    for count in (1, 4, 5, 6, 24, 64, 65, 66, 1000):
        few = await runs.front.page(f"/v1/runs/r-1?steps={count}")
        assert few["steps"] == whole["steps"][-count:], count
        assert few["steps_left_out"] == (count < 65), count


async def test_who_sees_what(runs: Runs) -> None:
    await runs.start("mine")
    await runs.start("theirs", who="agent-2")
    assert await listed(runs, who="agent") == ["mine"]
    assert await listed(runs, "?principal_id=agent-2", who="agent") == []
    assert await listed(runs, who="operator") == ["theirs", "mine"]
    for who in ("acme", "acme-operator", "acme-agent"):
        assert await listed(runs, who=who) == []


async def test_a_page_looks_at_so_many_rows_and_the_next_goes_on(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(7):
        await runs.start(f"run-{n}", who="operator" if n == 0 else "agent")
    for name in ("_RUNS", "_RUNS_IN_STATES"):
        query: Any = getattr(run_lists, name)
        fewer = (
            query.replace("5000", "3")
            if isinstance(query, str)
            else {k: q.replace("5000", "3") for k, q in query.items()}
        )
        monkeypatch.setattr(run_lists, name, fewer)
    monkeypatch.setattr(run_lists, "LIST_ROWS_LOOKED_AT_MAX", 3)
    for query in ("?principal_id=olga", "?principal_id=olga&status=running"):
        pages, path = [], f"/v1/runs{query}"
        while path:
            page = await runs.front.page(path)
            pages.append([item["run_id"] for item in page["items"]])
            path = f"/v1/runs{query}&cursor={page['next']}" if page["next"] else ""
        assert pages == [[], [], ["run-0"]], query


@pytest.mark.parametrize(
    "query",
    ["status=done", "prefix=a%2Fb", "prefix=-", "state=RUNNING", "cursor=dDAxOWI3NmRh", "limit=0", "procedure="],
)
async def test_a_filter_that_is_none_is_refused(runs: Runs, query: str) -> None:
    status, document, _ = await runs.front.get(f"/v1/runs?{query}")
    assert (status, document["code"]) == (400, "INPUT_MALFORMED")


async def test_entries_are_sent_byte_for_byte_and_in_pages(runs: Runs) -> None:
    await runs.start("r-1", {"x": 1})
    (run,) = await runs.lease()
    await runs.put(run, step("1"), step("2"))
    _, whole, raw = await runs.front.get("/v1/runs/r-1/entries")
    assert [item["entry"]["artifact_type"] for item in whole["items"]] == [
        *("run_start", "run_attempt", "run_checkpoint", "run_checkpoint")
    ]
    for item in whole["items"]:
        assert item["entry"]["run_id"] == "r-1"
        start = raw.index(b'"entry":{', raw.index(item["entry_digest"].encode())) + len(b'"entry":')
        end = raw.index(b',"artifact":', start)
        assert digest_of_bytes(raw[start:end]) == item["entry_digest"]
    found, path = [], "/v1/runs/r-1/entries?limit=3"
    while path:
        page = await runs.front.page(path)
        found += page["items"]
        path = f"/v1/runs/r-1/entries?limit=3&after_seq={page['next']}" if page["next"] else ""
    assert found == whole["items"]


async def test_followers_and_feed_see_each(runs: Runs) -> None:
    """LittleHorse: progress is visible while it is made. A follower gets every entry once, comes back where it was, and
    is told of the end; the feed has the same entries for those who may see them, and for nobody else."""
    await runs.start("r-1")
    async with runs.front.follow("/v1/runs/r-1/events", "agent") as follower:
        seen = [await follower.next_event()]
        (run,) = await runs.lease()
        await runs.put(run, step("1"))
        seen += [await follower.next_event() for _ in range(2)]
    assert [(one.name, one.identity) for one in seen if one] == [("entry", str(n)) for n in (1, 2, 3)]
    await runs.put(run, after=3, then={"type": "complete", "output": {"tier": "inline", "value": 1}, "positions": 1})
    async with runs.front.follow("/v1/runs/r-1/events", "agent", **{"Last-Event-ID": "2"}) as follower:
        rest = await follower.all_events()
    assert [(one.name, one.identity) for one in rest] == [("entry", "3"), ("entry", "4"), ("end", "4")]
    assert rest[-1].data == {"state": "COMPLETED", "sequence_number": 4}
    assert (await runs.front.get("/v1/runs/r-1/events?after_seq=4", "agent"))[0] == 204

    async def fed(who: str) -> list[int]:
        items = (await runs.front.page("/v1/events", who))["items"]
        return [item["sequence_number"] for item in items if item["stream"] == "run:r-1"]

    assert await fed("agent") == await fed("auditor") == [1, 2, 3, 4]
    assert await fed("agent-2") == await fed("acme") == []
