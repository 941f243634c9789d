"""Schedules over HTTP: who may make, see and remove them; what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import Front, World

CRON = {"type": "cron", "expression": "30 2 * * *", "time_zone": "Europe/Berlin"}


@pytest.fixture
async def front(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Front]:
    async with World.of(database, sessions, ledger, tmp_path).open() as opened:
        schema = {"type": "object", "required": ["day"]}
        said = {"name": "report", "version": "1", "program_digest": "a" * 64, "input_schema": schema}
        status, _ = await opened.post("/v1/procedures", said, "worker")
        assert status == 200
        yield opened


async def asked(front: Front, method: str, name: str, who: str = "agent", **body: Any) -> tuple[int, dict[str, Any]]:
    url, headers = (
        URL(f"http://127.0.0.1:{front.port}/v1/schedules/{name}", encoded=True),
        {"Authorization": f"Bearer {who}"},
    )
    sent = body if method == "PUT" else None
    async with front.client.request(method, url, headers=headers, json=sent) as response:
        return response.status, await response.json()


async def put(front: Front, name: str = "nightly", who: str = "agent", **changes: Any) -> tuple[int, dict[str, Any]]:
    return await asked(front, "PUT", name, who, **{"procedure": "report", "input": {"day": 1}, "spec": CRON, **changes})


async def test_a_schedule_is_made_seen_changed_and_removed(front: Front) -> None:
    status, made = await put(front)
    assert (status, made["principal_id"], made["missed"], made["input"]) == (200, "agent-1", "one", {"day": 1})
    assert made["next_at"].endswith(("T00:30:00.000Z", "T01:30:00.000Z", "T01:00:00.000Z"))
    assert await put(front) == (200, made)
    assert await asked(front, "GET", "nightly") == (200, made)
    status, changed = await put(front, spec={"type": "interval", "every_ms": 60_000}, missed="all", version="1")
    assert (status, changed["version"], changed["spec"]["every_ms"]) == (200, "1", 60_000)
    assert await asked(front, "DELETE", "nightly") == (200, {"name": "nightly", "removed": True})
    for method in ("GET", "DELETE"):
        status, problem = await asked(front, method, "nightly")
        assert (status, problem["code"]) == (404, "SCHEDULE_NOT_FOUND")


async def test_an_agent_sees_and_changes_its_own_only_and_a_tenant_nothing_of_another(front: Front) -> None:
    await put(front, "mine")
    await put(front, "theirs", "agent-2")
    listed = await front.page("/v1/schedules", "agent")
    assert ([item["name"] for item in listed["items"]], listed["scope"]) == (["mine"], "own")
    assert [item["name"] for item in (await front.page("/v1/schedules"))["items"]] == ["mine", "theirs"]
    assert (await front.page("/v1/schedules", "acme"))["items"] == []
    for method in ("GET", "DELETE"):
        for who in ("agent", "acme-agent"):
            assert (await asked(front, method, "theirs", who))[0] == 404
    status, problem = await put(front, "theirs", "agent")
    assert (status, problem["code"]) == (403, "FORBIDDEN")
    assert (await asked(front, "GET", "theirs", "agent-2"))[1]["principal_id"] == "agent-2"
    # An auditor sees it and does nothing to it.
    assert (await asked(front, "GET", "theirs", "auditor"))[0] == 200
    for method in ("PUT", "DELETE"):
        assert (await asked(front, method, "theirs", "auditor"))[0] == 403


@pytest.mark.parametrize(
    ("changes", "status", "code", "told"),
    [
        ({"procedure": "unknown"}, 404, "PROCEDURE_NOT_FOUND", "unknown"),
        ({"version": "2"}, 404, "PROCEDURE_NOT_FOUND", "version"),
        ({"input": {}}, 422, "SCHEMA_VIOLATION", "the input"),
        ({"spec": {**CRON, "time_zone": "Mars/Base"}}, 422, "SCHEMA_VIOLATION", "time zone"),
        ({"spec": {**CRON, "expression": "0 0 31 2 *"}}, 422, "SCHEMA_VIOLATION", "cron expression"),
        ({"spec": {"type": "interval", "every_ms": 10}}, 422, "SCHEMA_VIOLATION", "/spec"),
        ({"spec": None}, 422, "SCHEMA_VIOLATION", "/spec"),
        ({"missed": "some"}, 422, "SCHEMA_VIOLATION", "/missed"),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_made(
    front: Front, changes: dict[str, Any], status: int, code: str, told: str
) -> None:
    found, problem = await put(front, **changes)
    assert (found, problem["code"]) == (status, code), problem
    assert told in problem["detail"]
    assert (await front.page("/v1/schedules"))["items"] == []


@pytest.mark.parametrize("name", ["a:b", "%00", "%F0%9F%98%80", "n" * 64, "-a", "a%20b"])
async def test_a_name_that_no_schedule_can_have_is_refused(front: Front, name: str) -> None:
    status, problem = await put(front, name)
    assert (status, problem["code"]) == (422, "SCHEMA_VIOLATION")
    for method in ("GET", "DELETE"):
        status, problem = await asked(front, method, name)
        assert (status, problem["code"]) == (404, "SCHEDULE_NOT_FOUND")


@pytest.mark.parametrize("name", ["%07", "n" * 129, "a%20b", "%C3%A4"])
async def test_a_name_that_no_event_can_have_is_refused(front: Front, name: str) -> None:
    url = URL(f"http://127.0.0.1:{front.port}/v1/triggers/{name}", encoded=True)
    headers = {"Authorization": "Bearer agent"}
    async with front.client.post(url, headers=headers, json={"event_id": "evt-1"}) as response:
        assert (response.status, (await response.json())["code"]) == (400, "INPUT_MALFORMED")


async def test_the_list_goes_on_where_its_cursor_says(front: Front) -> None:
    for name in ("b", "a.1", "c-2"):
        await put(front, name)
    first = await front.page("/v1/schedules?limit=2")
    assert [item["name"] for item in first["items"]] == ["a.1", "b"]
    last = await front.page(f"/v1/schedules?limit=2&cursor={first['next']}")
    assert ([item["name"] for item in last["items"]], last["next"]) == (["c-2"], None)
