"""A tool server that takes no connections is waited out: nothing was sent, so nothing is lost but time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.limits import BACKOFF_MAX_MS, UNREACHABLE_FOR_MS
from app.domain.tga.documents import JsonOutput
from app.domain.tga.ports import Answered, Dispatched, NotSent
from app.postgres.database import Database
from tests.runtime.scripted import REFUSED, SUCCESS, TIMED_OUT, WRITE, call, new_key, open_scripted

ONCE = replace(WRITE, max_attempts=1)
EXECUTED = Answered("SUCCESS", JsonOutput(encoding="json", value={"executed": True, "output": 7}))


async def test_an_outage_of_seconds_costs_nothing_but_time_and_no_attempt(database: Database) -> None:
    async with open_scripted(database.gateway_url, *[REFUSED] * 5, SUCCESS, tool=ONCE) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert answer.state == "COMPLETED"
    assert answer.effect is not None
    assert [(one.attempt, one.result) for one in answer.effect.attempts] == [(1, "answered")]
    assert scripted.clock.slept_s == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert len(scripted.ledger.plans) == 2  # before it was tried, and after; no row for a try that was refused


async def test_an_outage_that_lasts_ends_as_not_sent_and_says_that_a_new_key_is_safe(database: Database) -> None:
    async with open_scripted(database.gateway_url, REFUSED, tool=ONCE) as scripted:
        first = await scripted.runtime.call(call(key="order-7"))
        tries = len(scripted.connector.sent)
        again = await scripted.runtime.call(call(key="order-7"))
        assert len(scripted.connector.sent) == tries  # I2: the key has its effect
        scripted.connector.answers = [SUCCESS]
        other = await scripted.runtime.call(call(key="order-7-again"))
    assert first.effect is not None
    assert first.effect.error is not None
    assert (first.state, first.effect.basis, first.effect.error.code) == ("FAILED", "not_sent", "NOT_SENT")
    assert "certainly nothing was executed" in first.effect.error.message
    assert "use a new key: that is safe" in first.effect.error.message
    assert "connection refused" in first.effect.error.message
    assert [(one.attempt, one.result) for one in first.effect.attempts] == [(1, "refused")]
    assert again.effect == first.effect
    assert other.state == "COMPLETED"
    pauses = scripted.clock.slept_s
    assert UNREACHABLE_FOR_MS - 1000 < sum(pauses) * 1000 <= UNREACHABLE_FOR_MS
    assert pauses[:-1] == sorted(pauses[:-1])
    assert max(pauses) * 1000 <= BACKOFF_MAX_MS


@pytest.mark.parametrize("within_ms", [0, 250])
async def test_how_long_it_is_waited_out_is_the_operators_choice(database: Database, within_ms: int) -> None:
    tool = replace(WRITE, unreachable_for_ms=within_ms)
    async with open_scripted(database.gateway_url, REFUSED, tool=tool) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert answer.state == "FAILED"
    assert sum(scripted.clock.slept_s) * 1000 <= within_ms
    assert len(scripted.connector.sent) == (1 if within_ms == 0 else 3)  # at 0, 100 and at most 250 ms


async def test_what_can_never_be_sent_is_not_waited_for(database: Database) -> None:
    unwritable = NotSent("the arguments cannot be written: INPUT_MALFORMED", is_hopeless=True)
    async with open_scripted(database.gateway_url, unwritable) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert answer.effect is not None
    assert (answer.effect.basis, len(scripted.connector.sent), scripted.clock.slept_s) == ("not_sent", 1, [])


async def test_an_outage_after_a_lost_answer_is_waited_out_and_uses_up_one_attempt(database: Database) -> None:
    tool = replace(WRITE, max_attempts=2)
    answers: list[Dispatched] = [TIMED_OUT, *[REFUSED] * 6, SUCCESS]
    async with open_scripted(database.gateway_url, *answers, tool=tool) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert answer.state == "COMPLETED"
    assert answer.effect is not None
    assert [(one.attempt, one.result) for one in answer.effect.attempts] == [(1, "timed_out"), (2, "answered")]
    assert [plan.dispatch_attempt for plan in scripted.ledger.plans] == [None, 2, None]  # one fence for the attempt


async def test_an_outage_that_lasts_after_a_lost_answer_leaves_the_outcome_unknown(database: Database) -> None:
    async with open_scripted(database.gateway_url, TIMED_OUT, REFUSED) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert answer.effect is not None
    assert answer.effect.error is not None
    assert (answer.effect.basis, answer.effect.error.code) == ("unknown", "OUTCOME_UNKNOWN")
    assert "safe" not in answer.effect.error.message
    assert [one.result for one in answer.effect.attempts] == ["timed_out", "refused"]


async def test_a_reconciling_question_is_waited_out_too(database: Database) -> None:
    tool = replace(WRITE, on_unknown_outcome="reconcile", reconcile_tool="read", max_attempts=2)
    answers: list[Dispatched] = [TIMED_OUT, *[REFUSED] * 6, EXECUTED]
    async with open_scripted(database.gateway_url, *answers, tool=tool) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert answer.state == "COMPLETED"
    assert answer.effect is not None
    assert answer.effect.basis == "reconciliation"
    assert [sent.tool_name for sent in scripted.connector.sent] == ["create", *["read"] * 7]


async def test_a_send_that_an_operator_ordered_is_waited_out_and_not_held_again(database: Database) -> None:
    tool = replace(WRITE, on_unknown_outcome="hold", max_attempts=1)
    answers: list[Dispatched] = [TIMED_OUT, *[REFUSED] * 3, SUCCESS]
    async with open_scripted(database.gateway_url, *answers, tool=tool) as scripted:
        held = await scripted.runtime.call(call(key=new_key()))
        assert held.waiting == "operator"
        answer = await scripted.runtime.resolve(
            held.trace_id,
            action="redispatch",
            tool_call_digest=scripted.connector.sent[0].digest(),
            resolved_by="olga",
            rationale="the server was restarted",
        )
    assert answer.state == "COMPLETED"
    assert len(scripted.connector.sent) == 5
