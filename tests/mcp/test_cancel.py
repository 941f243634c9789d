"""A call that its caller took back: recorded as what is known of it, and not sent again."""

from __future__ import annotations

from dataclasses import replace

from app.domain.tga.ports import Unknown
from app.postgres.database import Database
from tests.runtime.scripted import SUCCESS, WRITE, call, new_key, open_scripted

CANCELLED = Unknown("disconnected", "the caller cancelled it; the server said nothing", is_cancelled=True)


async def test_a_cancelled_call_is_not_sent_again_and_its_outcome_is_recorded_as_unknown(database: Database) -> None:
    async with open_scripted(database.gateway_url, CANCELLED, SUCCESS) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()), wait_ms=5000)
        assert answer.state == "FAILED"
        assert answer.effect is not None
        assert (answer.effect.basis, answer.effect.outcome) == ("unknown", "FAILURE")
        assert answer.effect.error is not None
        assert (answer.effect.error.code, "cancelled" in answer.effect.error.message) == ("OUTCOME_UNKNOWN", True)
        assert len(scripted.connector.sent) == 1


async def test_a_cancelled_call_that_is_to_be_held_waits_for_an_operator(database: Database) -> None:
    tool = replace(WRITE, on_unknown_outcome="hold")
    async with open_scripted(database.gateway_url, CANCELLED, SUCCESS, tool=tool) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()), wait_ms=5000)
        assert (answer.state, answer.waiting) == ("EXECUTING", "operator")
        assert len(scripted.connector.sent) == 1
