"""Procedures over HTTP: who may register, what is refused and where it is wrong, what is listed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import Front, World

A, B = "a" * 64, "b" * 64


@pytest.fixture
async def front(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Front]:
    async with World.of(database, sessions, ledger, tmp_path).open() as opened:
        yield opened


def body(**more: Any) -> dict[str, Any]:
    return {"name": "onboard", "version": "1.2.0", "program_digest": A, **more}


async def test_a_worker_registers_and_everyone_of_its_tenant_sees_it(front: Front) -> None:
    schema = {"type": "object", "required": ["email"]}
    status, first = await front.post("/v1/procedures", body(input_schema=schema, tags=["crm"]), "worker")
    assert (status, first["is_new"], first["registered_by"]) == (200, True, "worker-1")
    _, again = await front.post("/v1/procedures", body(input_schema=schema, tags=["crm"]), "worker")
    assert again == {**first, "is_new": False}
    for who in ("agent", "auditor", "worker"):
        listed = await front.page("/v1/procedures", who)
        assert [(item["name"], item["version"], item["is_newest"]) for item in listed["items"]] == [
            ("onboard", "1.2.0", True)
        ]
    found = await front.page("/v1/procedures/onboard", "agent")
    assert (found["input_schema"], found["output_schema"], found["policy"]["park_after"]) == (schema, None, 5)
    assert (await front.page("/v1/procedures", "acme"))["items"] == []
    status, document, _ = await front.get("/v1/procedures/onboard", "acme")
    assert (status, document["code"]) == (404, "PROCEDURE_NOT_FOUND")


@pytest.mark.parametrize("who", ["agent", "auditor", "nobody"])
async def test_who_is_no_worker_registers_nothing(front: Front, who: str) -> None:
    status, document = await front.post("/v1/procedures", body(), who)
    assert (status, document["code"]) == (403, "FORBIDDEN")
    assert "worker" in document["expected"]
    assert (await front.page("/v1/procedures"))["items"] == []


@pytest.mark.parametrize("who", ["worker", "auditor", "nobody"])
async def test_who_may_not_submit_programs_is_told_before_they_are_looked_at(front: Front, who: str) -> None:
    lua = {"name": "onboard", "language": "lua", "source": "return 1", "files": {}}
    status, document = await front.post("/v1/procedures", lua, who)
    assert (status, document["code"]) == (403, "FORBIDDEN")
    assert (await front.page("/v1/procedures"))["items"] == []


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({"name": "crm:onboard"}, "/name"),
        ({"name": "n" * 64}, "/name"),
        ({"program_digest": "A" * 64}, "/program_digest"),
        ({"language": "visual basic"}, "/language"),
        ({"input_schema": {"type": "objekt"}}, "/input_schema at /type"),
        ({"output_schema": {"$ref": "https://example.org/schema"}}, "/output_schema at /$ref"),
        ({"state_schema": {"$ref": "#"}}, "/state_schema"),
        ({"policy": {"park_after": 0}}, "/policy/park_after"),
        ({"policy": {"retry": {"retries": -1}}}, "/policy/retry/retries"),
        ({"triggers": [{"event": "a b"}]}, "/triggers/0/event"),
        ({"tags": [""]}, "/tags/0"),
        ({"source": "return 1"}, "/source"),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_recorded(front: Front, changes: dict[str, Any], at: str) -> None:
    status, document = await front.post("/v1/procedures", body(**changes), "worker")
    assert (status, document["code"]) == (422, "SCHEMA_VIOLATION"), document
    assert at in document["detail"]
    assert (await front.page("/v1/procedures"))["items"] == []


async def test_the_list_goes_on_where_its_cursor_says(front: Front) -> None:
    for name in ("b", "a.1", "c-2"):
        for digest in (A, B):
            await front.post("/v1/procedures", body(name=name, program_digest=digest), "worker")
    whole = (await front.page("/v1/procedures"))["items"]
    assert [item["name"] for item in whole] == ["a.1", "a.1", "b", "b", "c-2", "c-2"]
    found, path = [], "/v1/procedures?limit=4"
    while path:
        page = await front.page(path)
        found += page["items"]
        path = f"/v1/procedures?limit=4&cursor={page['next']}" if page["next"] else ""
    assert found == whole
    assert [item["name"] for item in (await front.page("/v1/procedures?procedure=b"))["items"]] == ["b", "b"]
    of_traces = "dDAxOWI3NmRh"
    status, document, _ = await front.get(f"/v1/procedures?cursor={of_traces}")
    assert (status, document["code"]) == (400, "INPUT_MALFORMED")
