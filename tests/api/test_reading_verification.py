"""A trace recomputed over HTTP: each check by itself, a changed byte at its entry, and nothing of another tenant's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from app.api.verification_documents import (
    HeadPage,
    LogVerificationDocument,
    LogVerificationPage,
    VerificationDocument,
)
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import Front, World
from tests.attacker import disarm
from tests.traces import completed_trace, trace_id

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@pytest.fixture
async def front(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Front]:
    async with World.of(database, sessions, ledger, tmp_path).open() as opened:
        yield opened


async def verified(front: Front, n: int) -> tuple[Any, dict[str, str]]:
    told = await front.page(f"/v1/traces/{trace_id(n)}/verification")
    VerificationDocument.model_validate(told)
    return told, {check["name"]: check["outcome"] for check in told["checks"]}


async def test_a_changed_byte_is_wrong_at_its_entry_and_other_traces_stay_sound(front: Front, admin: Admin) -> None:
    for n in (1, 2):
        await front.append_trace(completed_trace(n))
    told, outcomes = await verified(front, 1)
    assert told["is_sound"], told
    assert (told["entries"], told["findings"], told["leaf_index"]) == (4, [], None)
    assert outcomes["tree"] == outcomes["signed_head"] == "not_checked"  # nothing is signed here
    assert any("no head covers" in one for one in told["not_checked"])
    assert {name for name, outcome in outcomes.items() if outcome == "sound"} >= {"entries", "transitions", "artifacts"}
    async with admin.transaction():
        await disarm(admin)
        await admin.execute(
            "UPDATE tga.payloads p SET artifacts[4] = convert_to(replace(convert_from(p.artifacts[4], 'UTF8'),"
            " 'SUCCESS', 'SUCCESs'), 'UTF8') FROM tga.heads h WHERE h.stream_no = p.stream_no AND h.stream = $1",
            f"trace:{trace_id(1)}",
        )
    told, outcomes = await verified(front, 1)
    assert not told["is_sound"]
    assert outcomes["artifacts"] == "wrong"
    assert {finding["sequence_number"] for finding in told["findings"]} == {4}
    assert told["findings"][0]["code"] == "STATE_CHECKSUM_MISMATCH"
    assert (await verified(front, 2))[0]["is_sound"]


async def test_only_who_sees_a_trace_or_run_verifies_it(front: Front) -> None:
    await front.append_trace(completed_trace(1))
    for who in ("acme", "agent-2"):
        status, problem, _ = await front.get(f"/v1/traces/{trace_id(1)}/verification", who)
        assert (status, problem["code"]) == (404, "TRACE_NOT_FOUND")
    status, problem, _ = await front.get("/v1/runs/none/verification")
    assert (status, problem["code"]) == (404, "RUN_NOT_FOUND")
    assert (await front.page(f"/v1/traces/{trace_id(1)}/verification", "agent"))["is_sound"]


async def test_heads_are_listed_newest_first_page_by_page(front: Front, admin: Admin) -> None:
    await admin.execute(
        "INSERT INTO tga.tree_heads (size, root, note) SELECT n, sha256(n::text::bytea), 'note ' || n"
        " FROM generate_series(1, 7) AS n"
    )
    sizes, cursor = [], ""
    while True:
        page = await front.page(f"/v1/log/heads?limit=3{cursor}", "agent")
        HeadPage.model_validate(page)
        sizes += [one["size"] for one in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert sizes == [7, 6, 5, 4, 3, 2, 1]


async def test_the_whole_log_is_verified_with_progress_and_what_is_found_stays_readable(
    front: Front, admin: Admin
) -> None:
    for n in range(1, 6):
        await front.append_trace(completed_trace(n))
    status, started = await front.post("/v1/log/verifications", None, "auditor")
    assert status == 202, started
    path = f"/v1/log/verifications/{started['verification_id']}"
    async with front.follow(f"{path}/events") as subscriber:
        events = await subscriber.all_events()
    end = events[-1]
    LogVerificationDocument.model_validate(end.data)
    assert (end.name, end.data["state"], end.data["started_by"]) == ("end", "sound", "audrey")
    assert (end.data["streams"], end.data["entries"]) == (5, 20)

    async with admin.transaction():
        await disarm(admin)
        await admin.execute(
            "UPDATE tga.links SET recorded_at = replace(recorded_at, '2026', '2027') WHERE sequence_number = 3"
            " AND stream_no = (SELECT stream_no FROM tga.heads WHERE stream = $1)",
            f"trace:{trace_id(2)}",
        )
    _, again = await front.post("/v1/log/verifications", None, "operator")
    async with front.follow(f"/v1/log/verifications/{again['verification_id']}/events") as subscriber:
        found = (await subscriber.all_events())[-1].data
    assert found["state"] == "wrong"
    assert (found["findings"][0]["stream"], found["findings"][0]["sequence_number"]) == (f"trace:{trace_id(2)}", 3)
    page = await front.page("/v1/log/verifications")
    LogVerificationPage.model_validate(page)
    assert [one["state"] for one in page["items"]] == ["wrong", "sound"]


async def test_one_verification_at_a_time_it_can_be_stopped_and_is_nobodys_of_another_tenant(front: Front) -> None:
    await front.append_trace(completed_trace(1))
    known = front.services.log_verifications
    _, first = await front.post("/v1/log/verifications", None, "auditor")
    run = known.find(first["verification_id"])
    assert run is not None
    status, second = await front.post("/v1/log/verifications", None, "auditor")
    if run.state == "running":
        assert (status, second["code"]) == (409, "STATE_CONCURRENT_EXECUTION")
    status, stopped = await front.post(f"/v1/log/verifications/{first['verification_id']}/stop", None, "auditor")
    assert status == 200
    assert stopped["state"] in ("stopped", "sound")
    for who in ("acme", "acme-operator", "agent", "supervisor"):
        assert (await front.get("/v1/log/verifications", who))[0] == 403
    status, problem, _ = await front.get("/v1/log/verifications/none")
    assert (status, problem["code"]) == (404, "VERIFICATION_NOT_FOUND")
