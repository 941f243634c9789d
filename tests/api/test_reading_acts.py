"""What people did: which acts are a person's, in the order of the log, of the own tenant only; erased with payloads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.api.reading_documents import ActPage
from app.domain.system.documents import SYSTEM_MODELS
from app.domain.tga.replay import LogRecord
from app.postgres.call_facts import fold_acts, rebuild_calls
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import ACME, Front, World, folded
from tests.api.test_reading_traces import _erase
from tests.invariants.plans import plan_of
from tests.traces import (
    action_request,
    completed_trace,
    denied_trace,
    failed_trace,
    records_of,
    supervisor_decision,
    time_at,
    tool_call,
    tool_effect,
    trace_id,
)

ADA = {"type": "person", "id": "ada"}


@pytest.fixture
async def front(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Front]:
    async with World.of(database, sessions, ledger, tmp_path).open() as opened:
        yield opened


async def acts(front: Front, who: str = "auditor", limit: int = 2) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = await front.page(f"/v1/acts?limit={limit}{cursor}", who)
        ActPage.model_validate(page)
        items += page["items"]
        if page["next"] is None:
            return items
        cursor = f"&cursor={page['next']}"


def decided(n: int, decision: str, by: dict[str, str], why: str | None = None, **asked: Any) -> list[LogRecord]:
    request = action_request(n, **asked)
    return records_of(request, supervisor_decision(request, decision=decision, decided_by=by, rationale=why))


def resolved(n: int, action: str) -> list[LogRecord]:
    request = action_request(n)
    decision = supervisor_decision(request)
    call = tool_call(n, request, decision)
    said = {"action": action, "resolved_by": "grace", "rationale": "the book", "resolved_at": time_at(9)}
    outcome = {"failed": "FAILURE"}.get(action, "SUCCESS")
    basis = "answer" if action == "redispatch" else "resolution"
    return records_of(request, decision, call, tool_effect(call, outcome=outcome, basis=basis, resolution=said))


async def test_acts_of_people_are_listed_and_what_the_policy_time_and_agents_did_is_not(
    front: Front, sessions: Sessions
) -> None:
    withdrawal = {"type": "withdrawal", "id": "agent-1"}
    a_persons = {"principal": {"principal_id": "agent-1", "tenant": "default", "roles": ["agent", "operator"]}}
    # What an agent says inside of its arguments or a tool in its answer is no act, whatever it looks like.
    lies: dict[str, Any] = {
        "arguments": {"decided_by": {"id": "ada", "type": "person"}, "resolution": {"resolved_by": "ada"}}
    }
    for records in (
        completed_trace(1, **lies),
        failed_trace(2),
        denied_trace(3),
        decided(4, "APPROVE", ADA, "fine"),
        decided(5, "DENY", ADA),
        decided(6, "DENY", {"type": "expiry", "id": "expiry"}, expires_at=time_at(1)),
        decided(7, "DENY", withdrawal, "an agent's own"),
        decided(8, "DENY", withdrawal, "a person's own", **a_persons),
        resolved(9, "succeeded"),
        resolved(10, "failed"),
        resolved(11, "redispatch"),
        decided(12, "APPROVE", ADA, **ACME),
    ):
        await front.append_trace(records)
    await folded(sessions)
    found = await acts(front)
    assert [(one["act"], one["by"], one["id"], one["reason"]) for one in reversed(found)] == [
        ("approved", "ada", trace_id(4), "fine"),
        ("denied", "ada", trace_id(5), None),
        ("withdrew", "agent-1", trace_id(8), "a person's own"),
        ("resolved_as_succeeded", "grace", trace_id(9), "the book"),
        ("resolved_as_failed", "grace", trace_id(10), "the book"),
        ("redispatched", "grace", trace_id(11), "the book"),
    ]
    for one in found:
        assert (one["kind"], one["server_id"], one["tool_name"]) == ("trace", "crm", "create_ticket")
        entry = (await front.page(f"/v1/traces/{one['id']}/entries"))["items"][one["sequence_number"] - 1]
        assert entry["entry"]["recorded_at"] == one["at"]
    (theirs,) = await acts(front, "acme")
    assert (theirs["id"], theirs["server_id"]) == (trace_id(12), "crm"), "as the tenant calls it"
    for who in ("agent", "worker", "nobody"):
        status, problem, _ = await front.get("/v1/acts", who)
        assert (status, problem["code"]) == (403, "FORBIDDEN")


async def test_an_erased_act_goes_with_its_payload_and_the_erasure_itself_is_one(
    front: Front, sessions: Sessions, database: Database
) -> None:
    gone, stays = decided(1, "DENY", ADA, "the customer's name"), decided(2, "DENY", ADA, "another")
    for records in (gone, stays):
        await front.append_trace(records)
    await folded(sessions)
    assert len(await acts(front)) == 2
    await _erase(sessions, gone)
    assert [one["reason"] for one in await acts(front)] == ["another"], "at once, and not when it is folded"
    await folded(sessions)
    after = await acts(front)
    assert [(one["act"], one["by"], one["about"]) for one in after] == [
        ("erased", "audrey", f"trace:{trace_id(1)}"),
        ("denied", "ada", None),
    ]
    await rebuild_calls(sessions, database.admin_url)
    assert await acts(front) == after, "a rebuild finds something else"


async def test_folding_in_small_parts_finds_the_same_and_a_document_that_cannot_be_read_stops_nothing(
    front: Front, sessions: Sessions, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    await front.append(*(plan_of(decided(n, "DENY", ADA)) for n in range(1, 8)))
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    await admin.execute("ALTER TABLE tga.payloads DISABLE TRIGGER ALL")
    await admin.execute(
        'UPDATE tga.payloads p SET artifacts[2] = \'{"type":"person"\'::bytea FROM tga.heads h'
        " WHERE h.stream_no = p.stream_no AND h.stream = $1",
        f"trace:{trace_id(3)}",
    )
    while await fold_acts(sessions, 2) == 2:
        pass
    assert {one["id"] for one in await acts(front)} == {trace_id(n) for n in (1, 2, 4, 5, 6, 7)}
    assert (await front.get("/v1/acts?cursor=YTE"))[0] == 200, "a1: a place in this list"
    assert (await front.get("/v1/acts?cursor=dDE"))[0] == 400, "t1: one of another list"


def test_every_kind_of_system_document_is_either_an_act_or_known_not_to_be() -> None:
    migration = Path(__file__).parents[2] / "app" / "postgres" / "migrations" / "0035_acts.sql"
    asked_for = {"schedule", "schedule_removal", "procedure_registration"}
    read_from_a_file = {"policy_set"}
    listed = {name for name in SYSTEM_MODELS if f"WHEN '{name}' THEN" in migration.read_text("utf-8")}
    assert listed | asked_for | read_from_a_file == set(SYSTEM_MODELS)
