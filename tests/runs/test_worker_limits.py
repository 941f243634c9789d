"""Workers that wait: they take no place from other requests, are bounded by themselves, and are let go at a stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from app.config import LimitsConfig
from app.edge.streaming import GoneWith
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.runs.routes import OFFER, Runs, ask, open_runs

LIMITS = LimitsConfig(requests_per_second=100_000, burst=100_000, in_flight_per_principal=1, waiting_workers=2)
LONG_MS = 60_000
GUARD_S = 30  # less than LONG_MS: who waits to the end fails


@pytest.fixture
def opened(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> Callable[[], Any]:
    return lambda: open_runs(database, sessions, ledger, tmp_path, limits=LIMITS)


def polling(runs: Runs, worker: str) -> asyncio.Task[tuple[int, Any]]:
    lease = {"worker": worker, "name": "w", "procedures": [OFFER], "wait_ms": LONG_MS}
    return asyncio.create_task(runs.front.post("/v1/worker/lease", lease, "worker"))


async def until_waiting(runs: Runs, count: int) -> None:
    async with asyncio.timeout(GUARD_S):
        while runs.front.services.admission.subscribed < count:
            await asyncio.sleep(0.01)


async def test_waiting_workers_take_no_place_of_other_requests_and_are_bounded(opened: Callable[[], Any]) -> None:
    async with opened() as runs:
        polls = [polling(runs, f"worker-{n}") for n in range(2)]
        await until_waiting(runs, 2)
        assert (await runs.front.get("/v1/runs", "worker"))[0] == 200
        status, document = await polling(runs, "worker-2")
        assert (status, document["code"], document["retry_after_s"]) == (429, "TOO_MANY_IN_FLIGHT", 1)
        await runs.start("r-1")
        async with asyncio.timeout(GUARD_S):
            done, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        assert [run["run_id"] for poll in done for run in poll.result()[1]["runs"]] == ["r-1"]
        runs.front.services.stopping.set()
        await asyncio.gather(*polls)


async def test_a_heartbeat_gets_through_while_its_principal_has_every_place_taken(opened: Callable[[], Any]) -> None:
    async with opened() as runs:
        await runs.start("r-1")
        (run,) = await runs.lease()
        suspend = {"type": "suspend", "awaits": ["1"], "wait_ms": LONG_MS}
        held = asyncio.create_task(runs.put(run, ask("1"), then=suspend))
        async with asyncio.timeout(GUARD_S):
            while (await runs.front.page("/v1/runs/r-1"))["sequence_number"] < 3:
                await asyncio.sleep(0.01)
        assert (await runs.front.get("/v1/runs", "worker"))[0] == 429
        beat = {"worker": "worker-one", "name": "w", "runs": [{"run_id": "r-1", "lease": run["lease"]}]}
        for path in ("/v1/worker/heartbeat", "/v1/runs/r-1/heartbeat"):
            assert (await runs.front.post(path, beat, "worker"))[0] == 200
        runs.front.services.stopping.set()
        async with asyncio.timeout(GUARD_S):
            assert (await held)["directive"] == "SUSPENDED", "nobody is held when the gateway stops"


async def test_a_worker_that_closes_its_connection_gets_no_run_and_leaves_its_place(opened: Callable[[], Any]) -> None:
    async with opened() as runs:
        admission = runs.front.services.admission
        poll = polling(runs, "worker-one")
        await until_waiting(runs, 1)
        poll.cancel()  # its client closes the connection of a request that is given up
        await asyncio.wait([poll])
        async with asyncio.timeout(GUARD_S):
            while admission.subscribed:
                await asyncio.sleep(0.01)
        assert (await runs.start("r-1"))["state"] == "SCHEDULED"
        assert [run["run_id"] for run in await runs.lease()] == ["r-1"]


async def test_who_waits_in_process_is_told_by_its_messages_that_it_is_gone() -> None:
    left = asyncio.Event()

    async def receive() -> Any:
        await left.wait()
        return {"type": "http.disconnect"}

    told = asyncio.Event()
    with GoneWith(Request({"type": "http"}, receive)) as gone:
        gone.on_set = told.set
        await asyncio.sleep(0)
        assert not gone.is_set()
        left.set()
        async with asyncio.timeout(GUARD_S):
            await told.wait()
        assert gone.is_set()


async def test_a_gateway_that_stops_lets_waiting_workers_go_with_an_empty_answer(opened: Callable[[], Any]) -> None:
    async with opened() as runs:
        poll = polling(runs, "worker-one")
        await until_waiting(runs, 1)
        runs.front.services.stopping.set()
        async with asyncio.timeout(GUARD_S):
            assert await poll == (200, {"runs": []})
