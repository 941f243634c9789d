"""Reading traces over HTTP: what is recorded, byte for byte, to those who may see it, and nothing to others."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from app.api.approval_documents import ApprovalPage
from app.api.documents import EntryPage, FeedPage, ServerPage, ToolPage, TraceDocument, TracePage
from app.core.digest import GENESIS
from app.domain.system.documents import ErasedClaim, Erasure
from app.domain.system.log import SystemState, plan_system
from app.domain.tga.idempotency import decide_claim
from app.domain.tga.replay import LogRecord
from app.postgres.call_facts import fold_all, rebuild_calls
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import ACME, Front, World, waiting_plan
from tests.attacker import disarm
from tests.invariants.plans import plan_of
from tests.traces import (
    EXECUTOR,
    PATHS,
    completed_trace,
    denied_trace,
    failed_trace,
    pending_trace,
    time_at,
    trace_id,
)

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

FAR = "2999-01-01T00:00:00.000Z"


@pytest.fixture
def world(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> World:
    return World.of(database, sessions, ledger, tmp_path)


@pytest.fixture
async def front(world: World) -> AsyncIterator[Front]:
    async with world.open() as opened:
        yield opened


async def all_items(front: Front, path: str, who: str = "auditor") -> list[Any]:
    """Every item of a list, page after page."""
    found: list[Any] = []
    cursor = ""
    while True:
        page = await front.page(path + cursor, who)
        found += page["items"]
        if page["next"] is None:
            return found
        cursor = f"&cursor={page['next']}"


async def test_a_trace_is_shown_as_it_was_recorded(front: Front) -> None:
    for n, path in enumerate(sorted(PATHS)):
        await _append_and_compare(front, n, path)


async def _append_and_compare(front: Front, n: int, path: str) -> None:
    records = PATHS[path](n, expires_at=FAR if path == "PENDING" else None)
    await front.append_trace(records)
    status, document, raw = await front.get(f"/v1/traces/{trace_id(n)}")
    assert status == 200
    TraceDocument.model_validate(document)
    assert document["state"] == path
    assert (document["server_id"], document["tool_name"], document["principal_id"]) == (
        "crm",
        "create_ticket",
        "agent-1",
    )
    assert document["sequence_number"] == len(records)
    assert document["entry_digest"] == records[-1].entry.entry_digest
    assert document["action_request_digest"] == records[0].entry.artifact_digest
    assert document["idempotency_key"] == f"key-{n}"
    assert document["expires_at"] == (FAR if path == "PENDING" else None)
    assert document["erased"] is False
    recorded = {record.entry.artifact_type: record.artifact for record in records}
    assert {name for name, artifact in document["artifacts"].items() if artifact is not None} == set(recorded)
    for artifact in recorded.values():
        assert artifact is not None
        assert artifact.to_bytes() in raw


async def test_an_auditor_can_compute_every_digest_from_the_answer(front: Front) -> None:
    await front.append_trace(completed_trace(1, arguments={"price": 1e-7, "text": 'ü\u2028 \\ "'}))
    document, raw = (await front.get(f"/v1/traces/{trace_id(1)}/entries"))[1:]
    EntryPage.model_validate(document)
    assert document["next"] is None
    previous = GENESIS
    for item, (entry, artifact) in zip(document["items"], _embedded(raw), strict=True):
        assert json.loads(entry) == item["entry"]
        assert hashlib.sha256(entry).hexdigest() == item["entry_digest"]
        assert hashlib.sha256(artifact).hexdigest() == item["entry"]["artifact_digest"]
        assert item["entry"]["prev_entry_digest"] == previous
        previous = item["entry_digest"]
    assert [item["sequence_number"] for item in document["items"]] == [1, 2, 3, 4]


def _embedded(raw: bytes) -> list[tuple[bytes, bytes]]:
    """The bytes of each entry and artifact, cut out of the answer."""
    found, decoder, text = [], json.JSONDecoder(), raw.decode()
    place = 0
    while (start := text.find('"entry":', place)) >= 0:
        start += len('"entry":')
        _, end = decoder.raw_decode(text, start)
        artifact = end + len(',"artifact":')
        _, place = decoder.raw_decode(text, artifact)
        found.append((text[start:end].encode(), text[artifact:place].encode()))
    return found


async def test_entries_come_in_pages_after_any_number(front: Front) -> None:
    await front.append_trace(completed_trace(1))
    for after in range(5):
        document = await front.page(f"/v1/traces/{trace_id(1)}/entries?after_seq={after}")
        assert [item["sequence_number"] for item in document["items"]] == list(range(after + 1, 5))
    found, after_seq = [], "0"
    while after_seq is not None:
        document = await front.page(f"/v1/traces/{trace_id(1)}/entries?after_seq={after_seq}&limit=1")
        found += [item["sequence_number"] for item in document["items"]]
        after_seq = document["next"]
    assert found == [1, 2, 3, 4]


async def test_what_is_foreign_is_answered_as_what_does_not_exist(front: Front) -> None:
    """The same bytes before the trace exists and after, for another tenant, and for another principal of this one."""
    for n, suffix in enumerate(("", "/entries", "/events")):
        await _compare_with_missing(front, n, suffix)


async def _compare_with_missing(front: Front, n: int, suffix: str) -> None:
    path = f"/v1/traces/{trace_id(n)}{suffix}"
    strangers = ("acme", "acme-agent", "agent-2")
    before = [await front.get(path, who) for who in strangers]
    await front.append_trace(completed_trace(n))
    assert [await front.get(path, who) for who in strangers] == before
    assert {(status, document["code"]) for status, document, _ in before} == {(404, "TRACE_NOT_FOUND")}
    malformed = await front.get(f"/v1/traces/{'z' * 36}{suffix}")
    assert malformed == before[0]
    for who in ("auditor", "agent"):
        async with front.follow(path, who) as subscriber:
            assert subscriber.response.status == 200


async def test_who_has_no_role_reads_nothing(front: Front) -> None:
    await front.append_trace(completed_trace(1))
    one = f"/v1/traces/{trace_id(1)}"
    paths = (
        "/v1/traces",
        one,
        f"{one}/entries",
        f"{one}/events",
        "/v1/events",
        "/v1/approvals",
        "/v1/servers",
        "/v1/tools",
    )
    for path in paths:
        for accept in ("*/*", "text/event-stream"):
            status, document, _ = await front.get(path, "nobody", Accept=accept)
            assert (status, document["code"]) == (403, "FORBIDDEN")
            status, document, _ = await front.get(path, None, Accept=accept)
            assert (status, document["code"]) == (401, "UNAUTHENTICATED")


async def test_a_tampered_trace_answers_its_code_and_shows_nothing(front: Front, admin: Admin) -> None:
    await front.append_trace(completed_trace(1, arguments={"amount": 1}))
    await front.append_trace(completed_trace(2))
    await _tamper(admin, 1)
    status, document, raw = await front.get(f"/v1/traces/{trace_id(1)}")
    assert (status, document["code"]) == (409, "STATE_CHECKSUM_MISMATCH")
    assert (document["trace_id"], document["sequence_number"]) == (trace_id(1), 1)
    assert b"amount" not in raw
    status, document, raw = await front.get(f"/v1/traces/{trace_id(1)}/entries")
    assert (status, document["code"]) == (409, "STATE_CHECKSUM_MISMATCH")
    assert b"amount" not in raw
    async with front.follow(f"/v1/traces/{trace_id(1)}/events") as subscriber:
        (event,) = await subscriber.all_events()
    assert (event.name, event.data["code"]) == ("problem", "STATE_CHECKSUM_MISMATCH")
    # The feed says so at its place, and goes on.
    feed = await front.page("/v1/events")
    FeedPage.model_validate(feed)
    problems = {(item["stream"], item["sequence_number"]): item["problem"] for item in feed["items"]}
    assert len(problems) == 8
    (code,) = [problem["code"] for problem in problems.values() if problem]
    assert code == "STATE_CHECKSUM_MISMATCH"
    # And a list does not read payloads.
    assert len((await front.page("/v1/traces"))["items"]) == 2


async def test_a_line_break_in_a_stored_document_never_ends_an_event(front: Front, admin: Admin) -> None:
    """Whoever rewrites the store, with every digest in it, still cannot make the gateway send half a document."""
    await front.append_trace(pending_trace(1))
    forged = b'{"forged":1,\n\n"sequence_number":1}'
    async with admin.transaction():
        await disarm(admin)
        await admin.execute("UPDATE tga.entries SET entry = $1, entry_digest = sha256($1)", forged)
        await disarm(admin)
        await admin.execute("DELETE FROM tga.artifacts")
    for path in (f"/v1/traces/{trace_id(1)}/events", "/v1/events"):
        async with front.follow(path) as subscriber:
            event = await subscriber.next_event()
        assert event is not None
        assert "forged" not in json.dumps(event.data)
    for path in (f"/v1/traces/{trace_id(1)}", f"/v1/traces/{trace_id(1)}/entries"):
        status, document, _ = await front.get(path)
        assert (status, document["code"]) == (409, "STATE_CHECKSUM_MISMATCH")


async def test_a_missing_entry_is_a_gap(front: Front, admin: Admin) -> None:
    await front.append_trace(completed_trace(1))
    async with admin.transaction():
        await disarm(admin)
        await admin.execute("DELETE FROM tga.entries WHERE sequence_number = 3")
    for path in (f"/v1/traces/{trace_id(1)}", f"/v1/traces/{trace_id(1)}/entries"):
        status, document, _ = await front.get(path)
        assert (status, document["code"]) == (409, "STATE_SEQUENCE_GAP")
    async with front.follow(f"/v1/traces/{trace_id(1)}/events", **{"Last-Event-ID": "2"}) as subscriber:
        (event,) = await subscriber.all_events()
    assert (event.name, event.data["code"]) == ("problem", "STATE_SEQUENCE_GAP")


async def test_an_erased_trace_still_says_what_its_entries_say(front: Front, sessions: Sessions, admin: Admin) -> None:
    records = completed_trace(1, arguments={"amount": 77})
    await front.append_trace(records)
    before = await front.page(f"/v1/traces/{trace_id(1)}")
    await _erase(sessions, records)
    status, document, raw = await front.get(f"/v1/traces/{trace_id(1)}")
    assert status == 200
    TraceDocument.model_validate(document)
    assert b"amount" not in raw
    gone = {"artifacts", "tool_call_id", "erased"}
    assert {name: document[name] for name in document if name not in gone} == {
        name: before[name] for name in before if name not in gone
    }
    assert (document["artifacts"], document["erased"], document["tool_call_id"]) == (None, True, None)
    entries = await front.page(f"/v1/traces/{trace_id(1)}/entries")
    assert [item["artifact"] for item in entries["items"]] == [None] * 4
    assert [item["entry_digest"] for item in entries["items"]] == [record.entry.entry_digest for record in records]
    async with admin.transaction():
        await disarm(admin)
        await admin.execute("UPDATE tga.entries SET entry = entry || ' ' WHERE stream LIKE 'trace:%'")
    status, document, _ = await front.get(f"/v1/traces/{trace_id(1)}")
    assert (status, document["code"]) == (409, "STATE_CHECKSUM_MISMATCH")


async def test_what_was_folded_from_payloads_goes_with_them(
    front: Front, sessions: Sessions, admin: Admin, database: Database
) -> None:
    traces = [completed_trace(1), failed_trace(2), denied_trace(3)]
    for records in traces:
        await front.append_trace(records)
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    await fold_all(sessions)

    async def facts() -> list[dict[str, Any]]:
        return [dict(row) for row in await admin.fetch("SELECT * FROM tga.call_facts ORDER BY stream_no")]

    known = await facts()
    assert [(one["decided_by"], bool(one["policy_ids"])) for one in known] == [("policy", True)] * 3
    assert [one["attempts"] for one in known] == [1, 1, 0]
    assert known[1]["error_code"] is not None
    await _erase(sessions, traces[1])
    after = await facts()
    assert (after[0], after[2]) == (known[0], known[2]), "the facts of a trace that is not erased went too"
    one = after[1]
    told = (one["decided_by"], one["decider"], one["error_code"], one["dispatch_ms"], one["attempts"])
    assert told == (None, None, None, None, 0)
    assert one["policy_ids"] == []
    await rebuild_calls(sessions, database.admin_url)
    assert await facts() == after, "a rebuild finds something else than an erasure leaves"


async def test_lists_are_complete_and_without_repeats_while_traces_are_added(front: Front) -> None:
    await front.append(*(plan_of(completed_trace(2 * n)) for n in range(60)))
    added = asyncio.create_task(front.append(*(plan_of(completed_trace(2 * n + 1)) for n in range(60))))
    while not added.done():
        ids = [item["trace_id"] for item in await all_items(front, "/v1/traces?limit=7")]
        assert ids == sorted(set(ids), reverse=True)
        assert {trace_id(2 * n) for n in range(60)} <= set(ids)
    await added
    assert len(await all_items(front, "/v1/traces?limit=50")) == 120
    page = await front.page("/v1/traces?limit=3")
    TracePage.model_validate(page)
    assert page["items"][0] == {
        "trace_id": trace_id(119),
        "state": "COMPLETED",
        "waiting": None,
        "server_id": "crm",
        "tool_name": "create_ticket",
        "principal_id": "agent-1",
        "idempotency_key": "key-119",
        "attempts": 1,
        "decided_by": {"type": "policy", "id": "policy-1"},
        "error_code": None,
        "decided_ms": 1000,
        "dispatch_ms": 1000,
        "total_ms": page["items"][0]["total_ms"],
        "requested_at": "2026-01-01T00:00:00.119Z",
        "updated_at": page["items"][0]["updated_at"],
        "expires_at": None,
    }


async def test_lists_are_filtered_and_scoped(front: Front) -> None:
    await front.append(
        plan_of(completed_trace(1)),
        plan_of(PATHS["DENIED"](2, tool_name="other")),
        plan_of(completed_trace(3, principal={"principal_id": "agent-2", "tenant": "default"})),
        plan_of(completed_trace(4, **ACME)),
    )

    async def listed(query: str, who: str) -> list[str]:
        return [item["trace_id"] for item in await all_items(front, f"/v1/traces?limit=50{query}", who)]

    assert await listed("", "auditor") == [trace_id(3), trace_id(2), trace_id(1)]
    assert await listed("", "agent") == [trace_id(2), trace_id(1)]
    assert await listed("&principal_id=agent-2", "agent") == []
    assert await listed("", "acme") == [trace_id(4)]
    assert await listed("&server_id=crm", "acme") == [trace_id(4)], "a tenant's own name for its server"
    assert await listed("&server_id=acme/crm", "auditor") == []
    assert await listed("&state=DENIED", "auditor") == [trace_id(2)]
    assert await listed("&tool_name=other&state=COMPLETED", "auditor") == []
    (item,) = (await front.page("/v1/traces", "acme"))["items"]
    assert item["server_id"] == "crm"


async def test_approvals_are_listed_for_who_may_see_them(front: Front) -> None:
    await front.append(
        waiting_plan(pending_trace(1, expires_at=FAR, arguments={"amount": 7})),
        waiting_plan(pending_trace(2, principal={"principal_id": "agent-2", "tenant": "default"})),
        waiting_plan(pending_trace(3, **ACME)),
        plan_of(completed_trace(4)),
    )
    page = await front.page("/v1/approvals")
    ApprovalPage.model_validate(page)
    assert [item["trace_id"] for item in page["items"]] == [trace_id(1), trace_id(2)]
    assert page["items"][0]["arguments"] == {"amount": 7}
    trace = await front.page(f"/v1/traces/{trace_id(1)}")
    assert page["items"][0]["action_request_digest"] == trace["action_request_digest"]
    assert trace["waiting"] == "supervisor"
    for who, expected in (("agent", [1]), ("agent-2", [2]), ("acme", [3])):
        items = await all_items(front, "/v1/approvals?limit=1", who)
        assert [item["trace_id"] for item in items] == [trace_id(n) for n in expected]


async def test_servers_and_tools_are_the_tenants_own(front: Front) -> None:
    await front.services.pins.see(front.services.registry.tools())
    servers, tools = await front.page("/v1/servers"), await front.page("/v1/tools")
    ServerPage.model_validate(servers)
    ToolPage.model_validate(tools)
    (server,) = servers["items"]
    assert (server["server_id"], server["base_url"]) == ("pay", "http://127.0.0.1:9001")
    assert server["tools"] == ["charge", "balance"]
    charge, balance = tools["items"]
    assert (charge["server_id"], charge["tool_name"], charge["tool_class"]) == ("pay", "charge", "write")
    assert (charge["secret_arguments"], charge["tags"], charge["pin"]["status"]) == (["/card"], ["approval"], "pinned")
    assert charge["description"] == "Charge a card."
    assert balance["pin"]["pinned_digest"] == balance["definition_digest"]
    assert (await front.page("/v1/servers", "agent"))["items"][0]["base_url"] is None
    (of_acme,) = (await front.page("/v1/tools", "acme"))["items"]
    assert (of_acme["server_id"], of_acme["tool_name"]) == ("crm", "create_ticket")
    assert (await front.page("/v1/tools?server_id=pay", "acme"))["items"] == []
    assert len((await front.page("/v1/tools?server_id=pay"))["items"]) == 2


async def _tamper(admin: Admin, n: int) -> None:
    async with admin.transaction():
        await disarm(admin)
        await admin.execute(
            "UPDATE tga.artifacts SET artifact = convert_to(replace(convert_from(artifact, 'UTF8'),"
            " '\"amount\":1', '\"amount\":9'), 'UTF8') WHERE stream = $1 AND sequence_number = 1",
            f"trace:{trace_id(n)}",
        )


async def _erase(sessions: Sessions, records: list[LogRecord]) -> None:
    """As the gateway does it: the erasure goes on the system stream, and the payloads go."""
    claim, salt = decide_claim(records), bytes(32)
    document = Erasure(
        system_id="default",
        recorded_at=time_at(0),
        recorded_by="audrey",
        erased_stream=records[0].stream,
        last_sequence_number=len(records),
        last_entry_digest=records[-1].entry.entry_digest,
        artifact_digests=[record.entry.artifact_digest for record in records],
        claim=None if claim is None else ErasedClaim.of(claim, salt=salt),
        rationale="asked for",
    )
    plan = plan_system(SystemState("default"), [document], executor_id=EXECUTOR, recorded_at=time_at(0))
    (row,) = await sessions.commit(
        "SELECT * FROM tga.erase(1000, $1, $2, $3, $4, $5, $6)",
        records[0].stream,
        plan.stream,
        EXECUTOR,
        plan.entries[0].entry,
        plan.entries[0].artifact,
        None if claim is None else salt,
    )
    assert row["code"] is None, row
