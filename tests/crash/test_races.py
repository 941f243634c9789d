"""Many ask at once, and recovery looks at the very moment at which a call ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from app.core.errors import CallInFlight, ConcurrentExecution, TgaError
from app.domain.tga.documents import ToolCall, TraceId
from app.domain.tga.ports import Dispatched
from app.domain.tga.supervision import Ruling
from tests.crash.gateway import PERSON
from tests.crash.world import Database, GatewayDied, World, new_key
from tests.runtime.scripted import SUCCESS, Scripted, call, open_scripted

TRIALS = 600
DISPATCH_SENT = 4
DISPATCH_BEFORE = 3


def test_a_hundred_requests_with_one_key_from_two_processes_are_one_execution(world: World, base: Database) -> None:
    gateways, key = [world.gateway(base), world.gateway(base)], new_key()
    sent = [
        (gateway, gateway.send("call", tool="slow_charge", key=key, arguments={"amount": 2, "ms": 50}))
        for _ in range(50)
        for gateway in gateways
    ]
    answers = [gateway.receive(number) for gateway, number in sent]
    assert {answer.get("state") for answer in answers} == {"COMPLETED"}
    assert len({answer["effect"] for answer in answers}) == 1
    assert sum(not answer["replayed"] for answer in answers) == 1
    assert len(world.bank.requests(key)) == 1
    for gateway in gateways:
        gateway.exit()
    world.verify_all_is_well(base, {answers[0]["trace_id"]: answers[0]["effect"].encode()})


@pytest.mark.parametrize("asked", ["the same gateway", "another gateway"])
def test_a_repeat_waits_for_the_effect_and_is_told_when_it_takes_longer(
    world: World, base: Database, asked: str
) -> None:
    first, key = world.gateway(base), new_key()
    second = first if asked == "the same gateway" else world.gateway(base)
    arguments = {"amount": 2, "ms": 600}
    number = first.send("call", tool="slow_charge", key=key, arguments=arguments)
    world.bank.await_request(key)
    hurried = second.ask("call", tool="slow_charge", key=key, arguments=arguments, wait_ms=100)
    assert hurried["error"] == "CALL_IN_FLIGHT"
    patient = second.ask("call", tool="slow_charge", key=key, arguments=arguments)
    assert patient["effect"] == first.receive(number)["effect"]
    assert len(world.bank.requests(key)) == 1


def test_a_repeat_with_another_payload_is_refused_and_told_nothing(world: World, base: Database) -> None:
    gateway, key = world.gateway(base), new_key()
    assert gateway.call("charge", key, amount=2)["state"] == "COMPLETED"
    refused = gateway.call("charge", key, amount=3)
    assert refused["error"] == "IDEMPOTENCY_KEY_REUSED"
    assert "trace" not in refused["message"]
    assert len(world.bank.requests(key)) == 1


@pytest.mark.parametrize("repeats", [1, 50])
@pytest.mark.parametrize("die_at", [DISPATCH_BEFORE, DISPATCH_SENT])
def test_a_repeat_that_meets_a_dead_gateways_claim_drives_it(
    world: World, base: Database, die_at: int, repeats: int
) -> None:
    first, key = world.gateway(base, die_at=die_at), new_key()
    with pytest.raises(GatewayDied):
        first.call("charge", key, amount=2)
    second = world.gateway(base)
    numbers = [second.send("call", tool="charge", key=key, arguments={"amount": 2}) for _ in range(repeats)]
    answers = [second.receive(number) for number in numbers]
    assert {answer.get("state") for answer in answers} == {"COMPLETED"}, answers
    assert len({answer["effect"] for answer in answers}) == 1
    assert len(world.bank.executions(key)) == 1
    assert len(world.bank.requests(key)) == (1 if die_at == DISPATCH_BEFORE else 2)
    second.exit()
    world.verify_all_is_well(base, {answers[0]["trace_id"]: answers[0]["effect"].encode()})


async def answer_soon(_: ToolCall) -> Dispatched:
    await asyncio.sleep(random.random() * 0.004)
    return SUCCESS


@contextlib.asynccontextmanager
async def rivals(base: Database) -> AsyncIterator[tuple[Scripted, Scripted]]:
    """Two gateways with executors of their own; what either sends is counted."""
    async with (
        open_scripted(base.gateway_url, answer_soon, real_time=True) as first,
        open_scripted(base.gateway_url, answer_soon, real_time=True) as second,
    ):
        yield first, second


def test_a_recoverer_that_races_with_the_last_append_never_sends_again(base: Database) -> None:
    """The recoverers hammer exactly the traces that are being finished: by trace, and by sweeping."""

    async def recover_until_final(scripted: Scripted, trace_id: TraceId, sent: asyncio.Event) -> int:
        tries = 0
        await sent.wait()
        while True:
            tries += 1
            with contextlib.suppress(TgaError):
                if (await scripted.runtime.recover(trace_id)).is_final:
                    return tries
            await asyncio.sleep(0)

    async def sweep(scripted: Scripted, finished: asyncio.Event) -> list[TgaError | None]:
        errors: list[TgaError | None] = []
        while not finished.is_set():
            errors += [one.error async for one in scripted.runtime.recover_all()]
            await asyncio.sleep(0.005)
        return errors

    async def race() -> None:
        async with rivals(base) as (first, second):
            finished = asyncio.Event()
            sweeper = asyncio.create_task(sweep(second, finished))
            tries = 0
            for _ in range(TRIALS // 6):
                ids = [TraceId(first.clock.new_id()) for _ in range(6)]
                # Each from the moment that its own call is out: one who takes an id before its trace is born, as no
                # caller of the gateway can, would only keep it from being born.
                sent = {trace_id: asyncio.Event() for trace_id in ids}

                async def answer(tool_call: ToolCall, sent: dict[TraceId, asyncio.Event] = sent) -> Dispatched:
                    sent[TraceId(tool_call.trace_id)].set()
                    return await answer_soon(tool_call)

                first.connector.answers = [answer]
                made = [first.runtime.call(call(key=new_key(), trace_id=trace_id)) for trace_id in ids]
                raced = [
                    recover_until_final(rival, trace_id, sent[trace_id])
                    for trace_id in ids
                    for rival in (first, second)
                ]
                results = await asyncio.gather(*made, *raced)
                tries += sum(result for result in results if isinstance(result, int))
            finished.set()
            assert all(error is None or isinstance(error, ConcurrentExecution) for error in await sweeper)
            sends = first.connector.sends_of_key + second.connector.sends_of_key
            assert tries > 4 * TRIALS, "it was a race"
            assert len(sends) == TRIALS
            assert set(sends.values()) == {1}

    asyncio.run(race())
    assert base.verify() == []
    assert base.unrested() == []


def test_a_decision_given_twice_at_once_is_made_once_and_keeps_the_call_owned(base: Database) -> None:
    """The second one must not give back what the first one drives: a sweep elsewhere would send it again."""

    async def race() -> None:
        async with rivals(base) as (first, second):
            first.connector.answers = [slow]
            first.supervisor.answer = "ask"
            for _ in range(20):
                waiting = await first.runtime.call(call(key=new_key()))
                digest = (await first.traces.load_trace(waiting.trace_id)).state.action_request_digest
                decisions = [decide(first, waiting.trace_id, digest, after_s=n * 0.0007) for n in range(8)]
                answers = asyncio.gather(*decisions, return_exceptions=True)
                while not answers.done():
                    assert [one async for one in second.runtime.recover_all()] == []
                    await asyncio.sleep(0)
                made = [answer for answer in await answers if not isinstance(answer, BaseException)]
                assert len(made) == 1
                refusals = {type(answer) for answer in await answers if isinstance(answer, BaseException)}
                assert refusals == {ConcurrentExecution}
            assert set(first.connector.sends_of_key.values()) == {1}
            assert second.connector.sent == []

    async def slow(_: ToolCall) -> Dispatched:
        await asyncio.sleep(0.02)
        return SUCCESS

    async def decide(scripted: Scripted, trace_id: TraceId, digest: str, *, after_s: float) -> object:
        await asyncio.sleep(after_s)
        return await scripted.runtime.decide(trace_id, Ruling("APPROVE", PERSON, digest))

    asyncio.run(race())


def test_callers_with_little_patience_are_told_only_what_is_durable(base: Database) -> None:
    """An answer while the effect is being committed says EXECUTING: a crash would take anything more back."""

    async def race() -> None:
        async with rivals(base) as (first, _):
            committing, go_on = asyncio.Event(), asyncio.Event()

            async def hold_the_effect(plan: object) -> None:
                if len(first.ledger.plans) == 2:
                    committing.set()
                    await go_on.wait()

            first.ledger.before = hold_the_effect
            key = new_key()
            try:
                answer = await first.runtime.call(call(key=key), wait_ms=200)
                assert committing.is_set()
                assert (answer.state, answer.effect) == ("EXECUTING", None)
                with pytest.raises(CallInFlight):
                    await first.runtime.call(call(key=key), wait_ms=10)
            finally:
                go_on.set()
            assert (await first.runtime.call(call(key=key))).state == "COMPLETED"

    asyncio.run(race())
