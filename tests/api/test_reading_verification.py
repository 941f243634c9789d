"""A trace recomputed over HTTP: each check by itself, a changed byte at its entry, and nothing of another tenant's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from app.api.verification_documents import (
    HeadPage,
    LogStanding,
    LogVerificationDocument,
    LogVerificationPage,
    VerificationDocument,
)
from app.core.limits import LOG_VERIFICATIONS_KEPT
from app.edge import log_verification
from app.edge.log_walk import LogVerification, walk_log
from app.edge.services import Services
from app.gateway.http_server import serve_http
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.log_verifications import LogVerificationStore
from app.postgres.sessions import Sessions
from tests.api.reading import Front, World
from tests.api.test_reading_traces import _erase
from tests.attacker import disarm
from tests.patience import HANG_S
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


async def test_of_an_erased_trace_nothing_is_claimed_about_what_its_artifacts_said(
    front: Front, sessions: Sessions
) -> None:
    records = completed_trace(1)
    await front.append_trace(records)
    await _erase(sessions, records)
    told, outcomes = await verified(front, 1)
    assert told["is_sound"], told
    assert told["is_erased"]
    assert (outcomes["entries"], outcomes["artifacts"]) == ("sound", "not_checked")
    assert "artifacts: they were erased, on the record; their digests stand" in told["not_checked"]


async def test_a_changed_byte_is_wrong_at_its_entry_and_other_traces_stay_sound(front: Front, admin: Admin) -> None:
    for n in (1, 2):
        await front.append_trace(completed_trace(n))
    told, outcomes = await verified(front, 1)
    assert told["is_sound"], told
    assert (told["entries"], told["findings"], told["leaf_index"]) == (4, [], None)
    assert told["leaves"] == [None] * 4
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


@asynccontextmanager
async def another_front(front: Front, **times: int) -> AsyncIterator[Front]:
    """A second gateway on the same database, with times of its own."""
    services = replace(
        front.services, log_verifications=log_verification.LogVerifications(**times), stopping=asyncio.Event()
    )
    other, ready = Front(services, front.tokens, front.ledger, front.client), asyncio.Event()

    def listens(_: str, port: int) -> None:
        other.port = port
        ready.set()

    serving = asyncio.create_task(serve_http(services, host="127.0.0.1", port=0, on_ready=listens))
    await asyncio.wait_for(ready.wait(), HANG_S)
    try:
        yield other
    finally:
        services.stopping.set()
        await serving


class Held:
    """A walk that stops at its beginning until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_go_on, self.walks = asyncio.Event(), asyncio.Event(), 0
        self.was_left = asyncio.Event()

        async def walk(services: Services, run: LogVerification) -> None:
            self.walks += 1
            run.streams_total = 7
            self.began.set()
            try:
                await self.may_go_on.wait()
            except asyncio.CancelledError:
                self.was_left.set()
                raise
            await walk_log(services, run)

        monkeypatch.setattr(log_verification, "walk_log", walk)


async def _until(front: Front, path: str, **wanted: object) -> dict[str, Any]:
    async with asyncio.timeout(HANG_S):
        while True:
            told: dict[str, Any] = await front.page(path)
            if all(told[name] == value for name, value in wanted.items()):
                return told
            await asyncio.sleep(0.02)


async def test_one_verification_at_a_time_over_all_gateways_and_any_of_them_tells_and_stops_it(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.append_trace(completed_trace(1))
    held = Held(monkeypatch)
    async with another_front(front, save_ms=50) as other:
        _, first = await front.post("/v1/log/verifications", None, "auditor")
        await asyncio.wait_for(held.began.wait(), HANG_S)
        for gateway in (front, other):
            status, second = await gateway.post("/v1/log/verifications", None, "operator")
            assert (status, second["code"]) == (409, "STATE_CONCURRENT_EXECUTION")
        path = f"/v1/log/verifications/{first['verification_id']}"
        await _until(other, path, state="running", streams_total=7)
        status, stopped = await other.post(f"{path}/stop", None, "auditor")
        assert (status, stopped["state"]) == (200, "stopped")
        assert (await front.page(path))["state"] == "stopped"
        assert (await front.page("/v1/log/standing"))["verified"] is None, "what was stopped says nothing of the log"
        held.may_go_on.set()
        _, again = await other.post("/v1/log/verifications", None, "auditor")
        async with front.follow(f"/v1/log/verifications/{again['verification_id']}/events") as subscriber:
            assert (await subscriber.all_events())[-1].data["state"] == "sound"
    for who in ("agent", "supervisor"):
        assert (await front.get("/v1/log/verifications", who))[0] == 403
    status, problem, _ = await front.get("/v1/log/verifications/none")
    assert (status, problem["code"]) == (404, "VERIFICATION_NOT_FOUND")


async def test_what_a_dead_gateway_was_verifying_goes_on_at_whoever_looks_and_the_dead_one_writes_no_more(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gateway never saves again within the test; the second takes whoever is silent for gone at once."""
    await front.append_trace(completed_trace(1))
    held = Held(monkeypatch)
    async with another_front(front, save_ms=600_000) as dead, another_front(front, save_ms=50, silent_ms=0) as other:
        _, first = await dead.post("/v1/log/verifications", None, "auditor")
        await asyncio.wait_for(held.began.wait(), HANG_S)
        path = f"/v1/log/verifications/{first['verification_id']}"
        assert (await front.page(path))["state"] == "running"
        assert held.walks == 1, "a gateway that lives was overtaken"
        await other.page(path)
        async with asyncio.timeout(HANG_S):
            while held.walks < 2:
                await asyncio.sleep(0.02)
        store = LogVerificationStore(front.services.sessions)
        late = {"state": "sound", "phase": "over"}
        assert await store.save(first["verification_id"], 1, late, is_over=True, is_conclusive=True) is None
        assert (await front.page(path))["state"] == "running"
        held.may_go_on.set()
        end = await _until(front, path, phase="over")
        assert (end["started_by"], end["state"]) == ("audrey", "sound")


async def test_a_gateway_that_was_overtaken_leaves_its_walk_with_its_next_word(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was only slow. Two walks of one verification would take a session each, and one of them for nothing."""
    await front.append_trace(completed_trace(1))
    held = Held(monkeypatch)
    async with another_front(front, save_ms=50) as slow, another_front(front, save_ms=50, silent_ms=0) as other:
        _, first = await slow.post("/v1/log/verifications", None, "auditor")
        await asyncio.wait_for(held.began.wait(), HANG_S)
        path = f"/v1/log/verifications/{first['verification_id']}"
        assert not held.was_left.is_set()
        await other.page(path)
        await asyncio.wait_for(held.was_left.wait(), HANG_S)
        assert (await front.page(path))["state"] == "running", (
            "who was overtaken has ended what another one goes on with"
        )
        held.may_go_on.set()
        assert (await _until(front, path, phase="over"))["state"] == "sound"
        assert held.walks == 2


async def test_only_a_gateway_that_was_silent_for_long_is_taken_for_gone(front: Front) -> None:
    """Both who lists verifications and the function that takes one over look at its last word."""
    patient = LogVerificationStore(front.services.sessions)
    eager = LogVerificationStore(front.services.sessions, silent_ms=0)
    assert await patient.begin("living", "default", {"state": "running"})
    for store, is_silent in ((patient, False), (eager, True)):
        kept = await store.load("living", "default")
        assert kept is not None
        assert kept.is_silent == is_silent
        assert [one.is_silent for one in await store.newest_first("default")] == [is_silent]
    assert await patient.take("living") is None, "a gateway that lives was overtaken"
    assert await eager.take("living") == 2
    assert await patient.save("living", 1, {}, is_over=False, is_conclusive=False) is None
    await patient.stop("living", "acme")
    assert await patient.save("living", 2, {}, is_over=False, is_conclusive=False) is False, "another tenant stopped it"
    await patient.stop("living", "default")
    assert await patient.save("living", 2, {}, is_over=True, is_conclusive=False) is True
    assert await eager.take("living") is None, "what has ended is taken over by no gateway"


async def test_another_tenant_verifies_the_log_and_learns_of_others_only_how_many_findings_there_are(
    front: Front, admin: Admin
) -> None:
    await front.append_trace(completed_trace(1))
    async with admin.transaction():
        await disarm(admin)
        await admin.execute(
            "UPDATE tga.links SET recorded_at = replace(recorded_at, '2026', '2027') WHERE sequence_number = 3"
        )
    seen = {}
    for who in ("auditor", "acme-operator"):
        status, started = await front.post("/v1/log/verifications", None, who)
        assert status == 202, started
        path = f"/v1/log/verifications/{started['verification_id']}"
        async with front.follow(f"{path}/events", who) as subscriber:
            seen[who] = (await subscriber.all_events())[-1].data
        LogVerificationDocument.model_validate(seen[who])
        stranger = "auditor" if who == "acme-operator" else "acme-operator"
        assert (await front.get(path, stranger))[0] == 404
        assert (await front.post(f"{path}/stop", None, stranger))[0] == 404
        assert [one["verification_id"] for one in (await front.page("/v1/log/verifications", who))["items"]] == [
            started["verification_id"]
        ]
    ours, theirs = seen["auditor"], seen["acme-operator"]
    assert (ours["state"], theirs["state"]) == ("wrong", "wrong")
    assert ours["findings_total"] == theirs["findings_total"] > 0
    assert trace_id(1) in json.dumps(ours)
    assert trace_id(1) not in json.dumps(theirs)
    for who in ("agent", "acme"):  # everyone is told whether it can be trusted
        standing = await front.page("/v1/log/standing", who)
        LogStanding.model_validate(standing)
        assert standing["verified"]["state"] == "wrong"
        assert standing["verified"]["started_by"] == (theirs["started_by"] if who == "acme" else None)


async def test_the_last_twenty_verifications_of_a_tenant_are_kept(front: Front) -> None:
    assert (await front.page("/v1/log/standing"))["verified"] is None
    store = LogVerificationStore(front.services.sessions)
    for number in range(LOG_VERIFICATIONS_KEPT + 3):
        for tenant in ("default", "acme"):
            told = {"verification_id": f"{tenant}-{number}", "what": "\x00 \ud800"}
            assert await store.begin(f"{tenant}-{number}", tenant, told)
            assert not await store.begin(f"{tenant}-more", tenant, told)
            assert await store.save(f"{tenant}-{number}", 1, told, is_over=True, is_conclusive=False) is False
            assert await store.save(f"{tenant}-{number}", 1, told, is_over=True, is_conclusive=False) is None
    kept = [one.verification_id for one in await store.newest_first("acme")]
    assert kept == [f"acme-{number}" for number in range(LOG_VERIFICATIONS_KEPT + 2, 2, -1)]
    assert await store.load("acme-2", "acme") is None
    assert await store.load("acme-9", "default") is None
