"""Through the edge to the real runtime on a real PostgreSQL: calls, decisions, and whose business a trace is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from app.core.digest import digest_of
from app.core.errors import ToolNotFound
from app.domain.ledger.plans import Plan
from app.domain.tga.documents import ToolCall, TraceId
from app.domain.tga.ports import Dispatched
from app.domain.tools import Tool
from app.postgres.database import Database
from tests.api.wire import CALL, TRACE_ID, Front, OneServer, Reply, open_front, request
from tests.patience import HANG_S
from tests.runtime.scripted import SUCCESS, TIMED_OUT, WRITE, Script, Scripted, new_key, open_scripted

NOWHERE = "0197c2a4-5f0e-7c3a-9d54-ffffffffffff"


@dataclass
class House:
    """An edge in front of a real runtime."""

    front: Front
    inside: Scripted

    async def call(self, who: str = "agent", **fields: Any) -> Reply:
        return await self.front.ask(request(body={**CALL, "idempotency_key": new_key(), **fields}, who=who))

    async def do(self, trace_id: str, action: str, who: str, body: Any = None) -> Reply:
        return await self.front.ask(request(f"/v1/traces/{trace_id}/{action}", body, who=who))

    async def asked(self, **fields: Any) -> tuple[str, str]:
        """A call that waits for a person: its trace, and the digest of its request."""
        self.inside.supervisor.answer = "ask"
        reply = await self.call(**fields)
        assert (reply.status, reply.document["waiting"]) == (202, "supervisor")
        stored = await self.inside.traces.load_trace(TraceId(reply.document["trace_id"]))
        return reply.document["trace_id"], stored.state.action_request_digest


@asynccontextmanager
async def open_house(
    database: Database, *answers: Dispatched | Script, tool: Any = WRITE, **settings: Any
) -> AsyncIterator[House]:
    async with (
        open_scripted(database.gateway_url, *answers, tool=tool, real_time=True) as inside,
        open_front(
            runtime=inside.runtime,
            traces=inside.traces,
            sessions=inside.sessions,
            pins=inside.system.pins,
            **settings,
        ) as front,
    ):
        yield House(front, inside)


async def test_a_repeat_is_answered_from_the_record_byte_for_byte_and_only_to_its_caller(database: Database) -> None:
    async with open_house(database) as house:
        key = new_key()
        first = await house.call(idempotency_key=key)
        again = await house.call(idempotency_key=key)
        assert (first.status, first.document["replayed"], first.document["state"]) == (200, False, "COMPLETED")
        assert (again.status, again.headers["idempotent-replayed"]) == (200, "true")
        assert again.body == first.body.replace(b'"replayed":false', b'"replayed":true')
        house.inside.tools.tools.clear()  # the tool is gone, the record stands
        assert (await house.call(idempotency_key=key)).body == again.body
        for reply in (
            await house.call("agent-2", idempotency_key=key),
            await house.call(idempotency_key=key, arguments={"amount": 2}),
        ):
            assert (reply.status, reply.code) == (422, "IDEMPOTENCY_KEY_REUSED")
            assert first.document["trace_id"].encode() not in reply.body
        # Another tenant's server of that name is another server, which does not exist.
        assert (await house.call("stranger", idempotency_key=key)).code == "TOOL_NOT_FOUND"
        assert len(house.inside.connector.sent) == 1


async def test_the_edge_says_what_is_missing_or_wrong_and_stores_nothing(database: Database) -> None:
    async with open_house(database) as house:
        missing = await house.call(idempotency_key=None)
        assert (missing.status, missing.code) == (400, "IDEMPOTENCY_KEY_MISSING")
        unknown = await house.call(tool_name="no-such")
        assert (unknown.status, unknown.code) == (404, "TOOL_NOT_FOUND")
        wrong = await house.call(arguments={"amount": "much"})
        assert (wrong.status, wrong.code) == (422, "ARGUMENTS_INVALID")
        assert house.inside.ledger.plans == []


async def test_a_taken_trace_id_is_409_without_a_word_about_whose_it_is(database: Database) -> None:
    release = asyncio.Event()

    async def slowly(call: ToolCall) -> Dispatched:
        await release.wait()
        return SUCCESS

    async with open_house(database, SUCCESS, slowly) as house:
        finished = (await house.call()).document["trace_id"]
        running = (await house.call(wait_ms=0)).document["trace_id"]
        waiting, _ = await house.asked()
        house.inside.supervisor.answer = "allow"
        before = len(house.inside.connector.sent)
        replies = [
            await house.call(who, trace_id=trace_id)
            for who in ("agent", "agent-2")
            for trace_id in (finished, running, waiting)
        ]
        release.set()
        assert {(reply.status, reply.code) for reply in replies} == {(409, "STATE_CONCURRENT_EXECUTION")}
        assert len({reply.body for reply in replies}) == 1
        assert len(house.inside.connector.sent) == before
        # A fresh one is taken as it is.
        assert (await house.call(trace_id=NOWHERE)).document["trace_id"] == NOWHERE


async def test_a_decision_is_bound_to_the_request_used_once_and_leads_to_the_call(database: Database) -> None:
    async with open_house(database) as house:
        trace_id, digest = await house.asked()
        other = await house.do(
            trace_id, "decision", "supervisor", {"decision": "APPROVE", "action_request_digest": "0" * 64}
        )
        assert (other.status, other.code) == (409, "REQUEST_MISMATCH")
        assert house.inside.connector.sent == []
        body = {"decision": "APPROVE", "action_request_digest": digest, "rationale": "fine"}
        done = await house.do(trace_id, "decision", "supervisor", body)
        assert (done.status, done.document["state"]) == (200, "COMPLETED")
        assert done.document["decision"]["decided_by"]["id"] == "ada"
        assert done.document["tool_effect"]["outcome"] == "SUCCESS"
        again = await house.do(trace_id, "decision", "supervisor", body)
        assert (again.status, again.code) == (409, "ALREADY_DECIDED")
        assert len(house.inside.connector.sent) == 1


async def test_an_approval_that_takes_long_is_202(database: Database) -> None:
    release = asyncio.Event()

    async def slowly(call: ToolCall) -> Dispatched:
        await release.wait()
        return SUCCESS

    async with open_house(database, slowly) as house:
        trace_id, digest = await house.asked()
        body = {"decision": "APPROVE", "action_request_digest": digest, "wait_ms": 50}
        reply = await house.do(trace_id, "decision", "supervisor", body)
        assert (reply.status, reply.document["state"]) == (202, "EXECUTING")
        assert reply.headers["location"] == f"/v1/traces/{trace_id}"
        release.set()


async def test_a_denial_succeeds_and_its_caller_is_denied_for_ever(database: Database) -> None:
    async with open_house(database) as house:
        key = new_key()
        trace_id, digest = await house.asked(idempotency_key=key)
        pending = await house.call(idempotency_key=key)
        assert (pending.status, pending.document["trace_id"]) == (202, trace_id)
        body = {"decision": "DENY", "action_request_digest": digest, "rationale": "not today"}
        denied = await house.do(trace_id, "decision", "supervisor", body)
        assert (denied.status, denied.document["state"], denied.document["tool_effect"]) == (200, "DENIED", None)
        house.inside.supervisor.answer = "allow"
        repeat = await house.call(idempotency_key=key)
        assert (repeat.status, repeat.code, repeat.document["trace_id"]) == (403, "CALL_DENIED", trace_id)
        assert repeat.document["decision"]["rationale"] == "not today"
        assert house.inside.connector.sent == []


SIGNED = {"signature": "A" * 86 + "==", "key_id": "k", "decided_at": "2025-01-01T00:00:00.000Z"}


@pytest.mark.parametrize("left_out", [("signature",), ("key_id",), ("decided_at",), ("key_id", "decided_at")], ids=str)
async def test_half_a_signature_is_malformed(database: Database, left_out: tuple[str, ...]) -> None:
    async with open_house(database) as house:
        trace_id, digest = await house.asked()
        body = {"decision": "DENY", "action_request_digest": digest, **SIGNED}
        for field in left_out:
            del body[field]
        reply = await house.do(trace_id, "decision", "supervisor", body)
        assert (reply.status, reply.code) == (400, "INPUT_MALFORMED")


async def test_only_its_caller_withdraws_a_request(database: Database) -> None:
    async with open_house(database) as house:
        trace_id, _ = await house.asked()
        assert (await house.do(trace_id, "withdraw", "agent-2")).code == "TRACE_NOT_FOUND"
        assert (await house.do(trace_id, "withdraw", "supervisor")).code == "FORBIDDEN"
        done = await house.do(trace_id, "withdraw", "agent")
        assert (done.status, done.document["state"]) == (200, "DENIED")
        assert done.document["decision"]["decided_by"] == {"type": "withdrawal", "id": "agent-1"}
        assert (await house.do(trace_id, "withdraw", "agent")).code == "ALREADY_DECIDED"


async def test_a_caller_that_goes_away_before_its_body_came_has_asked_for_nothing(database: Database) -> None:
    async with open_house(database) as house:
        trace_id, _ = await house.asked()
        async with await house.front.open() as wire:
            await wire.send(request(f"/v1/traces/{trace_id}/withdraw", {"rationale": "x"})[: -len('{"rationale":"x"}')])
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        assert (await house.inside.traces.load_trace(TraceId(trace_id))).state.state == "PENDING"


ACTIONS: dict[str, Any] = {
    "decision": {"decision": "DENY", "action_request_digest": "0" * 64},
    "withdraw": None,
    "recover": None,
    "resolve": {"action": "failed", "tool_call_digest": "0" * 64, "rationale": "x"},
}


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_foreign_trace_is_as_good_as_none(database: Database, action: str) -> None:
    async with open_house(database) as house:
        trace_id, _ = await house.asked()
        replies = [
            await house.do(trace, action, who, ACTIONS[action])
            for who, trace in (
                ("stranger", trace_id),
                ("stranger", NOWHERE),
                ("agent-2", trace_id),
                ("supervisor", NOWHERE),
                ("operator", "no-id"),
            )
        ]
        assert {(reply.status, reply.code) for reply in replies} == {(404, "TRACE_NOT_FOUND")}
        assert len({reply.body for reply in replies}) == 1
        assert (await house.inside.traces.load_trace(TraceId(trace_id))).state.state == "PENDING"


async def test_who_sees_a_trace_may_still_not_do_everything_to_it(database: Database) -> None:
    async with open_house(database) as house:
        trace_id, digest = await house.asked()
        deciding = {"decision": "APPROVE", "action_request_digest": digest}
        for action, who, body in (
            ("decision", "agent", deciding),
            ("decision", "operator", deciding),
            ("recover", "agent", None),
            ("recover", "supervisor", None),
            ("resolve", "supervisor", ACTIONS["resolve"]),
            ("withdraw", "operator", None),
        ):
            reply = await house.do(trace_id, action, who, body)
            assert (reply.status, reply.code) == (403, "FORBIDDEN"), (action, who)
        assert house.inside.connector.sent == []


async def test_a_hold_is_ended_by_an_operator(database: Database) -> None:
    tool = replace(WRITE, on_unknown_outcome="hold", max_attempts=1)
    async with open_house(database, TIMED_OUT, tool=tool) as house:
        held = await house.call()
        assert (held.status, held.document["waiting"]) == (202, "operator")
        trace_id = held.document["trace_id"]
        digest = (await house.inside.traces.load_trace(TraceId(trace_id))).state.tool_call_digest
        wrong = await house.do(trace_id, "resolve", "operator", ACTIONS["resolve"])
        assert (wrong.status, wrong.code) == (409, "TRACE_NOT_HELD")
        body: dict[str, Any] = {"action": "failed", "tool_call_digest": digest, "rationale": "none there", "output": 1}
        assert (await house.do(trace_id, "resolve", "operator", body)).code == "SCHEMA_VIOLATION"
        body = {"action": "succeeded", "tool_call_digest": digest, "rationale": "seen", "output": {"paid": True}}
        done = await house.do(trace_id, "resolve", "operator", body)
        assert (done.status, done.document["state"]) == (200, "COMPLETED")
        assert done.document["tool_effect"]["output"] == {"encoding": "json", "value": {"paid": True}}
        assert done.document["tool_effect"]["resolution"]["resolved_by"] == "ops"


async def test_a_changed_definition_is_accepted_by_an_operator_and_only_as_it_is_now(database: Database) -> None:
    class OneTool(OneServer):
        def resolve_for(self, tenant: str, server_id: str, tool_name: str) -> Tool:
            if (tenant, server_id, tool_name) != ("default", "crm", "create"):
                raise ToolNotFound("no such tool")
            return changed

    changed = replace(WRITE, definition_digest=digest_of({"tool": "changed"}))
    async with open_house(database, registry=OneTool()) as house:
        assert (await house.call()).status == 200  # pins what it sees first
        house.inside.tools.tools["crm", "create"] = changed
        quarantined = await house.call()
        assert (quarantined.status, quarantined.code) == (409, "TOOL_QUARANTINED")

        async def accept(digest: str, *, who: str = "operator", tool: str = "create") -> Reply:
            body = {"definition_digest": digest}
            return await house.front.ask(request(f"/v1/tools/crm/{tool}/pin", body, who=who))

        assert (await accept(changed.definition_digest, who="agent")).code == "FORBIDDEN"
        assert (await accept(changed.definition_digest, tool="other")).code == "TOOL_NOT_FOUND"
        assert (await accept(WRITE.definition_digest)).code == "REQUEST_MISMATCH"
        assert (await house.call()).code == "TOOL_QUARANTINED"
        done = await accept(changed.definition_digest)
        assert (done.status, done.document["status"]) == (200, "pinned")
        assert done.document["pinned_digest"] == changed.definition_digest
        assert (await house.call()).status == 200


async def test_recovery_of_a_trace_that_rests_changes_nothing(database: Database) -> None:
    async with open_house(database) as house:
        trace_id = (await house.call()).document["trace_id"]
        reply = await house.do(trace_id, "recover", "operator")
        assert (reply.status, reply.document["state"]) == (200, "COMPLETED")
        waiting, _ = await house.asked()
        reply = await house.do(waiting, "recover", "operator", {"wait_ms": 1_000})
        assert (reply.status, reply.document["waiting"]) == (200, "supervisor")
        assert len(house.inside.connector.sent) == 1


async def test_what_is_acknowledged_while_stopping_is_finished(database: Database) -> None:
    release = asyncio.Event()

    async def slowly(call: ToolCall) -> Dispatched:
        await release.wait()
        return SUCCESS

    async with open_house(database, slowly, grace_ms=100) as house, await house.front.open() as wire:
        await wire.send(request(body={**CALL, "idempotency_key": new_key()}))
        async with await house.front.open() as keyless:
            body = {"server_id": "crm", "tool_name": "read", "arguments": {"amount": 1}, "trace_id": TRACE_ID}
            await keyless.send(request(body=body))
            async with asyncio.timeout(HANG_S):
                while len(house.inside.connector.sent) < 2:
                    await asyncio.sleep(0.01)
            house.front.services.stopping.set()
            replies = [await wire.reply(), await keyless.reply()]
        assert [(reply.status, reply.document["state"]) for reply in replies] == [(202, "EXECUTING")] * 2
        assert replies[1].headers["location"] == f"/v1/traces/{TRACE_ID}"
        await house.front.serving
        release.set()
        await house.inside.runtime.close()
        for reply in replies:
            stored = await house.inside.traces.load_trace(TraceId(reply.document["trace_id"]))
            assert stored.state.state == "COMPLETED"
        assert len(house.inside.connector.sent) == 2


async def test_a_decision_that_is_under_way_while_stopping_is_told_as_far_as_it_is_known(database: Database) -> None:
    release = asyncio.Event()

    async def slowly(call: ToolCall) -> Dispatched:
        await release.wait()
        return SUCCESS

    async def hold(_: Plan) -> None:
        await release.wait()

    async with open_house(database, slowly, grace_ms=200) as house:
        (running, digest), (uncommitted, other_digest) = await house.asked(), await house.asked()
        async with await house.front.open() as first, await house.front.open() as second:
            body = {"decision": "APPROVE", "action_request_digest": digest}
            await first.send(request(f"/v1/traces/{running}/decision", body, who="supervisor"))
            async with asyncio.timeout(HANG_S):
                while not house.inside.connector.sent:
                    await asyncio.sleep(0.01)
            house.inside.ledger.before = hold
            plans = len(house.inside.ledger.plans)
            body = {"decision": "APPROVE", "action_request_digest": other_digest}
            await second.send(request(f"/v1/traces/{uncommitted}/decision", body, who="supervisor"))
            async with asyncio.timeout(HANG_S):
                while len(house.inside.ledger.plans) == plans:
                    await asyncio.sleep(0.01)
            house.front.services.stopping.set()
            told, unknown = await first.reply(), await second.reply()
        release.set()
        assert (told.status, told.document["state"]) == (202, "EXECUTING")
        assert (unknown.status, unknown.code) == (503, "STORE_OUTCOME_UNKNOWN")
        assert unknown.document["trace_id"] == uncommitted


async def test_readiness_looks_at_the_store(database: Database) -> None:
    async with open_house(database) as house:
        assert (await house.front.ask(request("/readyz", method="GET", who=None))).status == 200
        await house.inside.sessions.close()
        await asyncio.sleep(0.6)  # what it found is believed for a moment
        reply = await house.front.ask(request("/readyz", method="GET", who=None))
        assert (reply.status, reply.code) == (503, "STORE_UNAVAILABLE")
        assert (await house.front.ask(request("/healthz", method="GET", who=None))).status == 200
