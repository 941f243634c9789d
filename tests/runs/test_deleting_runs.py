"""DELETE of a run: the payloads of one that has ended are gone for ever, its entries and digests stand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.runs.routes import Runs, open_runs


@pytest.fixture
async def runs(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Runs]:
    async with open_runs(database, sessions, ledger, tmp_path) as opened:
        yield opened


async def delete(runs: Runs, run_id: str, who: str = "operator") -> tuple[int, Any]:
    url = f"http://127.0.0.1:{runs.front.port}/v1/runs/{run_id}"
    async with runs.front.client.delete(url, headers={"Authorization": f"Bearer {who}"}) as answer:
        return answer.status, await answer.json(content_type=None)


async def test_a_run_that_has_ended_is_erased_once(runs: Runs) -> None:
    await runs.start("r-1", "4111-SECRET")
    status, document = await delete(runs, "r-1")
    assert (status, document["code"]) == (409, "RUN_UNFINISHED")
    await runs.ok(await runs.front.post("/v1/runs/r-1/cancel", {}))
    before = (await runs.front.page("/v1/runs/r-1/entries"))["items"]
    assert await delete(runs, "r-1") == (200, {"run_id": "r-1", "erased": True, "is_new": True})
    assert await delete(runs, "r-1") == (200, {"run_id": "r-1", "erased": True, "is_new": False})
    _, after, raw = await runs.front.get("/v1/runs/r-1/entries")
    assert b"SECRET" not in raw
    assert [{**item, "artifact": None} for item in before] == after["items"]
    status, document, _ = await runs.front.get("/v1/runs/r-1")
    assert (status, document["code"]) == (410, "RUN_ERASED")
    (listed,) = (await runs.front.page("/v1/runs"))["items"]
    assert (listed["run_id"], listed["status"]) == ("r-1", "cancelled")
