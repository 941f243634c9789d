"""What an agent engineer sees while a person decides, and in every problem: whether to come back, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.core.errors import KeyClaimed, RateLimited, TgaError, TraceNotFound
from app.domain.tga.documents import ToolCall, TraceId
from app.domain.tga.ports import Dispatched
from app.edge.problems import RETRY_AFTER_S, STATUS, document_of, problem
from app.postgres.database import Database
from tests.api.test_edge_actions import House, open_house
from tests.api.wire import CALL, TRACE_ID, Front, Reply, request
from tests.patience import HANG_S
from tests.runtime.scripted import SUCCESS, new_key


async def held(house: House, **fields: Any) -> tuple[asyncio.Task[Reply], str]:
    """A call whose caller waits for a person, and its trace."""
    house.inside.supervisor.answer = "ask"
    known = len(house.inside.ledger.plans)
    calling = asyncio.create_task(house.call(wait_ms=int(HANG_S * 1000), **fields))
    async with asyncio.timeout(HANG_S):
        while len(house.inside.ledger.plans) == known:
            await asyncio.sleep(0.01)
    return calling, house.inside.ledger.plans[-1].stream.removeprefix("trace:")


async def decide(house: House, trace_id: str, decision: str) -> Reply:
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                stored = await house.inside.traces.load_trace(TraceId(trace_id))
                break
            except TraceNotFound:  # its birth is being committed
                await asyncio.sleep(0.01)
    digest = stored.state.action_request_digest
    body = {"decision": decision, "action_request_digest": digest, "rationale": "as agreed"}
    async with asyncio.timeout(HANG_S):
        # As it begins to wait the runtime still has it in its hands, and says that it may be asked again.
        while (reply := await house.do(trace_id, "decision", "supervisor", body)).status == 409:
            assert (reply.code, reply.document["retryable"]) == ("STATE_CONCURRENT_EXECUTION", True)
            await asyncio.sleep(0.01)
    return reply


async def test_a_given_wait_ms_holds_until_a_person_has_decided(database: Database) -> None:
    async with open_house(database) as house:
        calling, trace_id = await held(house)
        assert (await decide(house, trace_id, "APPROVE")).status == 200
        reply = await calling
        assert (reply.status, reply.document["state"], reply.document["replayed"]) == (200, "COMPLETED", False)
        assert reply.document["trace_id"] == trace_id
        assert reply.document["tool_effect"]["outcome"] == "SUCCESS"

        calling, trace_id = await held(house)
        assert (await decide(house, trace_id, "DENY")).status == 200
        denied = await calling
        assert (denied.status, denied.code, denied.document["retryable"]) == (403, "CALL_DENIED", False)
        assert "as agreed" in denied.document["detail"]


async def test_a_repeat_waits_for_the_person_too(database: Database) -> None:
    async with open_house(database) as house:
        key = new_key()
        trace_id, digest = await house.asked(idempotency_key=key)
        again = asyncio.create_task(house.call(idempotency_key=key, wait_ms=int(HANG_S * 1000)))
        while house.front.services.admission.in_flight == 0:
            await asyncio.sleep(0.01)
        await house.do(trace_id, "decision", "supervisor", {"decision": "APPROVE", "action_request_digest": digest})
        reply = await again
        assert (reply.status, reply.document["trace_id"], reply.document["replayed"]) == (200, trace_id, True)


async def test_without_wait_ms_a_call_that_waits_for_a_person_is_202_at_once_and_says_when_to_look(
    database: Database,
) -> None:
    async with open_house(database) as house:
        house.inside.supervisor.answer = "ask"
        given: list[dict[str, Any]] = [{}, {"wait_ms": 0}, {"wait_ms": 1}]
        for fields in given:
            reply = await house.call(**fields)
            assert (reply.status, reply.document["waiting"]) == (202, "supervisor")
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.headers["location"] == f"/v1/traces/{reply.document['trace_id']}"


async def test_who_waits_for_a_person_does_not_stand_in_the_tool_servers_line(database: Database) -> None:
    async with open_house(database) as house:
        calling, trace_id = await held(house)
        admission = house.front.services.admission
        async with asyncio.timeout(HANG_S):
            while any(admission._of_server.values()):
                await asyncio.sleep(0.01)
        await decide(house, trace_id, "APPROVE")
        assert (await calling).status == 200


@pytest.mark.parametrize("wait_ms", [0, 1, 50])
async def test_a_recovery_is_answered_with_what_the_call_is_answered_with(database: Database, wait_ms: int) -> None:
    """However short its wait: finished with the effect, or under way and without a word of it."""
    release = asyncio.Event()

    async def slowly(call: ToolCall) -> Dispatched:
        await release.wait()
        return SUCCESS

    async with open_house(database, SUCCESS, slowly) as house:
        key = new_key()
        called = await house.call(idempotency_key=key)
        trace_id = called.document["trace_id"]
        recovered = await house.do(trace_id, "recover", "operator", {"wait_ms": wait_ms})
        assert (recovered.status, recovered.document["state"]) == (200, "COMPLETED")
        assert recovered.document["tool_effect"] == called.document["tool_effect"]
        assert recovered.document["tool_call_id"] == called.document["tool_call_id"]

        running = (await house.call(wait_ms=0)).document["trace_id"]
        under_way = await house.do(running, "recover", "operator", {"wait_ms": wait_ms})
        assert (under_way.code, under_way.document["retryable"]) == ("STATE_CONCURRENT_EXECUTION", True)
        release.set()


async def test_a_recovery_that_ends_while_the_gateway_stops_is_told_with_its_effect(database: Database) -> None:
    async with open_house(database, grace_ms=100) as house:
        called = await house.call()
        trace_id = called.document["trace_id"]
        runtime = house.inside.runtime
        asked = asyncio.Event()

        async def waits(*_: Any, **__: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        runtime.recover = waits  # type: ignore[method-assign]
        recovering = asyncio.create_task(house.do(trace_id, "recover", "operator", {}))
        await asked.wait()
        house.front.services.stopping.set()
        reply = await recovering
        assert (reply.status, reply.document["state"]) == (200, "COMPLETED")
        assert reply.document["tool_effect"] == called.document["tool_effect"]


def test_every_problem_says_whether_to_come_back_and_when() -> None:
    for kind in STATUS:
        if kind is KeyClaimed:  # the runtime's own: who claimed it first is answered for
            continue
        error: TgaError = kind("what") if kind is not RateLimited else RateLimited("what", retry_after_s=7)
        document, answer = document_of(error), problem(error)
        assert document["retryable"] is (kind in RETRY_AFTER_S), kind.code
        assert document.get("retry_after_s") == (
            None if kind not in RETRY_AFTER_S else int(answer.headers["retry-after"])
        )
        assert ("retry-after" in answer.headers) is document["retryable"]


async def test_a_taken_trace_id_is_not_to_be_sent_again(database: Database) -> None:
    async with open_house(database) as house:
        assert (await house.call(trace_id=TRACE_ID)).status == 200
        taken = await house.call(trace_id=TRACE_ID)
        assert (taken.status, taken.document["retryable"]) == (409, False)
        assert "retry-after" not in taken.headers


async def test_what_is_refused_before_any_route_says_so_too(front: Front) -> None:
    nowhere = await front.ask(request("/v1/nowhere", method="GET"))
    nobody = await front.ask(request(body=CALL, who=None))
    assert (nowhere.document["retryable"], nobody.document["retryable"]) == (False, False)
