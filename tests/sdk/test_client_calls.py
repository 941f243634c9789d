"""Calls with a real gateway that is killed, answers that are lost, and a bank whose own book counts what was done."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.patience import HANG_S
from tests.sdk.gateways import KINDS, Gateways, Subject, new_key, subject
from tga_sdk import AsyncClient, Client, errors


@pytest.fixture(params=KINDS, ids=["sync", "async"])
async def agent(request: pytest.FixtureRequest, gateways: Gateways) -> AsyncIterator[Subject]:
    async with subject(request.param, gateways.url, gateways.world.keys["agent"]) as made:
        yield made


@pytest.fixture
async def person(gateways: Gateways) -> AsyncIterator[Subject]:
    async with subject(AsyncClient, gateways.url, gateways.world.keys["supervisor"]) as made:
        yield made


async def raised(kind: type[errors.TgaError], calling: Any) -> Any:
    with pytest.raises(kind) as caught:
        await calling
    assert type(caught.value) is kind
    return caught.value


async def waiting_trace(person: Subject, key: str) -> Any:
    """The request with this key, once it waits for a person."""
    async with asyncio.timeout(HANG_S):
        while True:
            for item in await person.approvals():
                found = await person.trace(item.trace_id)
                if found.idempotency_key == key:
                    return item
            await asyncio.sleep(0.02)


async def test_a_call_returns_the_output_and_its_repeat_is_answered_from_the_record(
    agent: Subject, gateways: Gateways
) -> None:
    key = new_key()
    first = await agent.call("bank", "charge", {"amount": 7}, key=key, intent="order 7")
    again = await agent.call("bank", "charge", {"amount": 7}, key=key)
    assert first.output["amount"] == 7
    assert (first.key, first.replayed, again.replayed) == (key, False, True)
    assert (again.output, again.trace_id) == (first.output, first.trace_id)
    assert gateways.executions(key) == 1
    made = await agent.call("bank", "charge", {"amount": 7})
    assert made.key != key
    assert gateways.executions(made.key) == 1


async def test_answers_that_are_lost_cost_nothing_but_time(agent: Subject, gateways: Gateways) -> None:
    key, before = new_key(), gateways.relay.lost
    gateways.relay.lose(3)
    done = await agent.call("bank", "charge", {"amount": 1}, key=key)
    assert gateways.relay.lost == before + 3
    assert (done.replayed, gateways.executions(key)) == (True, 1)


async def test_a_gateway_that_is_killed_again_and_again_executes_each_call_once(
    agent: Subject, gateways: Gateways
) -> None:
    seed = int(os.environ.get("TGA_SEED") or random.randrange(1_000_000))
    print(f"TGA_SEED={seed}")
    draw = random.Random(seed)
    keys = [new_key("killed") for _ in range(8)]

    async def one(key: str) -> Any:
        await asyncio.sleep(draw.random() / 2)
        ms = draw.choice([0, 200, 600])
        return await agent.call("bank", "slow_charge", {"amount": 1, "ms": ms}, key=key, timeout=HANG_S)

    calling = [asyncio.create_task(one(key)) for key in keys]
    for _ in range(3):
        await asyncio.sleep(draw.random() / 3)
        await gateways.restart()
    results = await asyncio.gather(*calling)
    assert [result.key for result in results] == keys
    assert {key: gateways.executions(key) for key in keys} == dict.fromkeys(keys, 1)


async def test_many_clients_with_one_key_have_one_effect(gateways: Gateways) -> None:
    key = new_key("shared")
    clients: list[Any] = [kind(gateways.url, gateways.world.keys["agent"]) for kind in KINDS * 6]
    subjects = [Subject(client) for client in clients]
    try:
        calls = [one.call("bank", "slow_charge", {"amount": 2, "ms": 150}, key=key) for one in subjects]
        results = await asyncio.gather(*calls)
    finally:
        await asyncio.gather(*(one.closed() for one in subjects))
    assert len({result.trace_id for result in results}) == 1
    assert len({result.output["charge_id"] for result in results}) == 1
    assert [result.replayed for result in results].count(False) == 1
    assert gateways.executions(key) == 1


async def test_a_call_that_waits_for_a_person_says_so_and_goes_on_with_its_key(
    agent: Subject, person: Subject, gateways: Gateways
) -> None:
    key = new_key()
    pending = await raised(errors.ApprovalPending, agent.call("bank", "refund", {"amount": 5}, key=key))
    assert (pending.key, pending.retryable, pending.may_have_run) == (key, True, False)
    assert (pending.state, pending.waiting) == ("PENDING", "supervisor")
    listed = await waiting_trace(person, key)
    assert (listed.trace_id, listed.arguments) == (pending.trace_id, {"amount": 5})
    moved = await person.approve(listed, rationale="as agreed")
    assert (moved.state, moved.output["amount"]) == ("COMPLETED", 5)
    done = await agent.call("bank", "refund", {"amount": 5}, key=key)
    assert (done.output, gateways.executions(key)) == (moved.output, 1)


async def test_waiting_for_a_person_outlasts_the_gateway(agent: Subject, person: Subject, gateways: Gateways) -> None:
    key = new_key()
    calling = asyncio.create_task(agent.call("bank", "refund", {"amount": 6}, key=key, wait="forever", timeout=HANG_S))
    await waiting_trace(person, key)
    await gateways.restart()
    listed = await waiting_trace(person, key)
    assert not calling.done()
    await person.approve(listed)
    done = await asyncio.wait_for(calling, HANG_S)
    assert (done.output["amount"], gateways.executions(key)) == (6, 1)


async def test_a_bounded_wait_for_a_person_ends(agent: Subject, gateways: Gateways) -> None:
    key = new_key()
    began = time.monotonic()
    pending = await raised(errors.ApprovalPending, agent.call("bank", "refund", {"amount": 5}, key=key, wait=0.3))
    assert 0.3 <= time.monotonic() - began < 20  # one request is held for 25 s where nobody says otherwise
    taken_back = await agent.withdraw(pending, rationale="not needed")
    assert taken_back.state == "DENIED"
    denied = await raised(errors.Denied, agent.call("bank", "refund", {"amount": 5}, key=key))
    assert (denied.decision["decided_by"]["type"], denied.may_have_run) == ("withdrawal", False)
    assert gateways.executions(key) == 0


async def test_a_denial_says_who_and_why(agent: Subject, person: Subject, gateways: Gateways) -> None:
    key = new_key()
    calling = asyncio.create_task(agent.call("bank", "refund", {"amount": 9}, key=key, wait=HANG_S))
    listed = await waiting_trace(person, key)
    gateways.relay.lose(1)  # of the decision: told again it is the same one
    assert (await person.deny(listed, rationale="too much")).state == "DENIED"
    denied = await raised(errors.Denied, calling)
    assert (denied.decision["decided_by"]["id"], denied.decision["rationale"]) == ("ada", "too much")
    assert (denied.retryable, denied.key, denied.trace_id) == (False, key, listed.trace_id)
    other = await raised(errors.GatewayError, person.approve(listed))
    assert other.code == "ALREADY_DECIDED"
    policy = await raised(errors.Denied, agent.call("bank", "charge", {"amount": 13}, key=new_key()))
    assert policy.decision["policy_ids"] == ["no-thirteen"]


async def test_each_refusal_has_its_class_and_says_whether_to_try_again(
    agent: Subject, person: Subject, gateways: Gateways
) -> None:
    key = new_key()
    await agent.call("bank", "charge", {"amount": 1}, key=key)
    reused = await raised(errors.KeyReused, agent.call("bank", "charge", {"amount": 2}, key=key))
    unfit = await raised(errors.ArgumentsInvalid, agent.call("bank", "charge", {"amount": "x"}, key=new_key()))
    unknown = await raised(errors.ToolNotFound, agent.call("bank", "nonsense", {}, key=new_key()))
    forbidden = await raised(errors.Forbidden, person.call("bank", "charge", {"amount": 1}, key=new_key()))
    async with subject(AsyncClient, gateways.url, "tga_nobody_knows_this") as stranger:
        unauthorized = await raised(errors.Unauthorized, stranger.call("bank", "charge", {"amount": 1}, key=new_key()))
    for error in (reused, unfit, unknown, forbidden, unauthorized):
        assert (error.retryable, error.may_have_run) == (False, False), error
        assert error.key
        assert error.remedy
    assert "amount" in str(unfit)
    assert "tga_nobody" not in str(unauthorized) + repr(vars(unauthorized))


async def test_failures_for_certain_and_unknown_ones_are_told_apart(agent: Subject, gateways: Gateways) -> None:
    failed = await raised(errors.CallFailed, agent.call("bank", "fail", {"status": 422}, key=new_key()))
    assert (failed.code, failed.retryable, failed.output) == ("HTTP_422", False, {"error": "this tool always fails"})
    key = new_key()
    flaky = {"amount": 1, "fail_times": 100, "status": 500}
    unknown = await raised(errors.OutcomeUnknown, agent.call("bank", "flaky", flaky, key=key))
    assert (unknown.code, unknown.retryable, unknown.may_have_run) == ("OUTCOME_UNKNOWN", False, True)
    assert (await raised(errors.OutcomeUnknown, agent.call("bank", "flaky", flaky, key=key))).trace_id
    held = await raised(errors.CallHeld, agent.call("careful", "flaky", flaky, key=new_key()))
    assert (held.waiting, held.retryable, held.may_have_run) == ("operator", True, True)


async def test_a_call_that_takes_too_long_is_found_again_by_its_key(agent: Subject, gateways: Gateways) -> None:
    key = new_key()
    slow = {"amount": 3, "ms": 4_000}
    unfinished = await raised(errors.Unfinished, agent.call("bank", "slow_charge", slow, key=key, timeout=1.0))
    assert (unfinished.key, unfinished.retryable, unfinished.may_have_run) == (key, True, True)
    assert unfinished.trace_id
    done = await agent.call("bank", "slow_charge", slow, key=key)
    assert (done.trace_id, gateways.executions(key)) == (unfinished.trace_id, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_without_a_gateway_the_error_has_the_key_and_nothing_was_sent(
    kind: type[Client] | type[AsyncClient], gateways: Gateways
) -> None:
    async with subject(kind, "http://127.0.0.1:9") as alone:
        lost = await raised(errors.GatewayUnreachable, alone.call("bank", "charge", {"amount": 1}, timeout=0.2))
        assert (lost.retryable, lost.may_have_run) == (True, False)
        assert str(lost.key).startswith("call-")
    # Of several addresses those that answer are asked.
    async with subject(kind, ["http://127.0.0.1:9", gateways.url], gateways.world.keys["agent"]) as both:
        assert (await both.call("bank", "balance")).output["balance"] >= 0


async def test_the_events_of_a_trace_come_once_each_through_restarts(
    agent: Subject, person: Subject, gateways: Gateways
) -> None:
    key = new_key()
    pending = await raised(errors.ApprovalPending, agent.call("bank", "refund", {"amount": 4}, key=key))
    following = asyncio.create_task(agent.followed("events", pending.trace_id))
    await gateways.restart()
    await person.approve(pending.trace_id)
    seen = await asyncio.wait_for(following, HANG_S)
    assert [(entry.sequence_number, entry.kind) for entry in seen] == [
        (1, "action_request"),
        (2, "supervisor_decision"),
        (3, "tool_call"),
        (4, "tool_effect"),
    ]
    assert seen[-1].state == "COMPLETED"
    assert [entry.sequence_number for entry in await agent.followed("events", pending.trace_id, after=2)] == [3, 4]
    assert await agent.followed("events", pending.trace_id, after=4) == []


async def test_traces_are_listed_shown_and_proven(agent: Subject, gateways: Gateways) -> None:
    done = await agent.call("bank", "charge", {"amount": 8}, key=new_key())
    listed = await agent.traces(tool="charge", state="COMPLETED", limit=3)
    assert done.trace_id in [item.trace_id for item in listed]
    assert len(listed) <= 3
    shown = await agent.trace(done.trace_id)
    assert shown.artifacts["tool_effect"]["outcome"] == "SUCCESS"
    proof = await agent.receipt(done.trace_id)
    assert proof.startswith("c2sp.org/tlog-proof@v1\n")
    assert (await raised(errors.NotFound, agent.trace("019b76da-a800-7000-8000-000000000001"))).code
    tools = {tool.tool_name: tool for tool in await agent.tools("bank")}
    assert tools["charge"].input_schema["required"] == ["amount"]
    assert "approval" in tools["refund"].tags
