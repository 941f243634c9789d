"""Whatever goes wrong around a trace, it is not left owned by a living process that does not drive it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.core.errors import OutcomeUnknown, SchemaViolation, StoreUnavailable
from app.domain.ledger.plans import Plan
from app.domain.tga.documents import JsonOutput, ToolCall, TraceId
from app.domain.tga.ports import Answered, Dispatched, Unknown
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.ownership import acquire_stream
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.invariants.plans import plan_of
from tests.patience import HANG_S
from tests.runtime.scripted import SUCCESS, TIMED_OUT, WRITE, call, new_key, open_scripted
from tests.traces import EXECUTOR, completed_trace, executing_trace, pending_trace, trace_id


async def orphan(ledger: PostgresLedger, number: int) -> TraceId:
    """A trace whose executor is dead."""
    records = executing_trace(number, server_id="crm", tool_name="create", arguments={"amount": 1})
    await ledger.commit(plan_of(records, owner_after=EXECUTOR))
    return trace_id(number)


async def test_a_trace_whose_acquisition_was_lost_on_the_way_is_found_by_the_next_sweep(
    database: Database, ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = await orphan(ledger, 1)
    async with open_scripted(database.gateway_url) as scripted:
        acquire = scripted.traces.acquire

        async def acquired_but_never_heard(trace: TraceId) -> str:
            await acquire(trace)
            raise OutcomeUnknown("the answer was lost")

        async def not_now(trace: TraceId, executor_id: str) -> None:
            raise StoreUnavailable("not now")

        with monkeypatch.context() as patch:
            patch.setattr(scripted.traces, "acquire", acquired_but_never_heard)
            patch.setattr(scripted.traces, "release", not_now)
            (failed,) = [result async for result in scripted.runtime.recover_all()]
        assert isinstance(failed.error, OutcomeUnknown)
        assert (await scripted.traces.load_trace(lost)).owner == scripted.traces.executor_id()
        (found,) = [result async for result in scripted.runtime.recover_all()]
        assert found.answer is not None
        assert found.answer.state == "COMPLETED"


async def test_whoever_gives_up_on_a_recovery_does_not_interrupt_it(database: Database, ledger: PostgresLedger) -> None:
    ended = asyncio.Event()

    async def slow(_: ToolCall) -> Dispatched:
        await ended.wait()
        return SUCCESS

    trace = await orphan(ledger, 1)
    async with open_scripted(database.gateway_url, slow) as scripted:
        recovering = asyncio.create_task(scripted.runtime.recover(trace))
        async with asyncio.timeout(HANG_S):
            while not scripted.connector.sent:
                await asyncio.sleep(0.01)
        recovering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recovering
        ended.set()
        await scripted.runtime.close()
        assert (await scripted.traces.load_trace(trace)).state.state == "COMPLETED"
        assert len(scripted.connector.sent) == 1


async def test_one_that_breaks_its_connector_does_not_stop_the_others(
    database: Database, ledger: PostgresLedger
) -> None:
    async def breaks(_: ToolCall) -> Dispatched:
        raise ZeroDivisionError("a connector must not raise, and this one does")

    for number in (1, 2, 3):
        await orphan(ledger, number)
    async with open_scripted(database.gateway_url, breaks, SUCCESS) as scripted:
        results = [result async for result in scripted.runtime.recover_all(at_once=1)]
        codes = [None if result.error is None else result.error.code for result in results]
        assert codes == ["STATE_RECOVERY_FAILED", None, None]
        again = [result async for result in scripted.runtime.recover_all()]
        assert [result.answer and result.answer.state for result in again] == ["COMPLETED"]


@pytest.mark.parametrize("key", ["", "ключ", " spaced ", "x" * 256])
async def test_a_key_that_is_no_key_is_our_own_error_and_stores_nothing(
    key: str, database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        with pytest.raises(SchemaViolation, match="idempotency_key"):
            await scripted.runtime.call(call(key=key))
        assert scripted.connector.sent == []
    assert await admin.fetchval("SELECT count(*) FROM tga.heads WHERE stream LIKE 'trace:%'") == 0


async def test_a_store_that_refuses_the_effect_holds_up_neither_the_caller_nor_the_end(database: Database) -> None:
    async with open_scripted(database.gateway_url, real_time=True) as scripted:

        async def refuse_effects(plan: Plan) -> None:
            if len(plan.entries) == 1:
                raise StoreUnavailable("not now")

        scripted.ledger.before = refuse_effects
        with pytest.raises(OutcomeUnknown):
            await scripted.runtime.call(call(key="k"), wait_ms=500)
        async with asyncio.timeout(HANG_S):
            await scripted.runtime.close()
    async with open_scripted(database.gateway_url) as another:
        (found,) = [result async for result in another.runtime.recover_all()]
        assert found.answer is not None
        assert found.answer.state == "COMPLETED"


async def test_a_reconciling_question_does_not_carry_the_calls_own_key(database: Database) -> None:
    """A server that remembers answers by key would remember the question's, and give it to the call."""
    tool = replace(WRITE, on_unknown_outcome="reconcile", reconcile_tool="read")
    said = Answered("SUCCESS", JsonOutput(encoding="json", value={"executed": True, "output": {"id": 7}}))
    async with open_scripted(database.gateway_url, TIMED_OUT, said, tool=tool) as scripted:
        answer = await scripted.runtime.call(call(key="k"))
        asked = scripted.connector.sent[1]
        assert (asked.tool_name, asked.idempotency_key, asked.arguments) == ("read", None, {"idempotency_key": "k"})
        assert answer.effect is not None
        assert answer.effect.basis == "reconciliation"


async def test_a_reconciling_tool_that_is_gone_is_a_failed_recovery(database: Database) -> None:
    tool = replace(WRITE, on_unknown_outcome="reconcile", reconcile_tool="gone")
    lost = Unknown("disconnected", "gone")
    async with open_scripted(database.gateway_url, lost, tool=tool) as scripted:
        with pytest.raises(Exception, match="STATE_RECOVERY_FAILED"):
            await scripted.runtime.call(call(key=new_key()))


# What the database refuses from a caller that is not ours


def append_arguments(plan: Plan, **changed: Any) -> list[Any]:
    claim = plan.claim
    assert claim is not None
    given: dict[str, Any] = {
        "p_stream": [plan.stream],
        "e_plan": [1],
        "c_plan": [1],
        "keys": [claim.idempotency_key],
        **changed,
    }
    claims = len(given["c_plan"])
    entries = plan.entries[: len(given["e_plan"])]
    return [
        1000, given["p_stream"], [plan.executor_id], [None], [None],
        given["e_plan"], [e.entry for e in entries], [e.artifact for e in entries],
        given["c_plan"], ["crm"] * claims, ["t"] * claims, given["keys"], [bytes(32)] * claims,
        [], [], [], [], [], [], [], [], [], [], [], [],
    ]  # fmt: skip


APPEND = (
    "SELECT * FROM tga.append($1, $2::text[], $3::uuid[], $4::uuid[], $5::text[], $6::int[], $7::bytea[], $8::bytea[],"
    " $9::int[], $10::text[], $11::text[], $12::text[], $13::bytea[], $14::int[], $15::bytea[], $16::text[],"
    " $17::int[], $18::int[], $19::bytea[], $20::int[], $21::bytea[], $22::bytea[], $23::int[], $24::int[],"
    " $25::text[])"
)


async def test_two_claims_of_one_plan_are_refused_whole(sessions: Sessions, admin: Admin) -> None:
    plan = plan_of(pending_trace(1))
    with pytest.raises(SchemaViolation, match="stands twice"):
        await sessions.commit(APPEND, *append_arguments(plan, c_plan=[1, 1], keys=["a", "b"]))
    assert await admin.fetchval("SELECT count(*) FROM tga.claims") == 0


async def test_a_claim_without_a_birth_is_refused(sessions: Sessions, ledger: PostgresLedger, admin: Admin) -> None:
    plan = plan_of(pending_trace(1, tool_class="read", idempotency_key=None))
    await ledger.commit(plan)
    claiming = plan_of(pending_trace(1))
    (row,) = await sessions.commit(APPEND, *append_arguments(claiming, e_plan=[]))
    assert row["code"] == "STATE_RECOVERY_FAILED"
    assert await admin.fetchval("SELECT count(*) FROM tga.claims") == 0


async def test_a_stream_of_any_length_cannot_be_acquired(sessions: Sessions, admin: Admin) -> None:
    with pytest.raises(Exception, match="INPUT_TOO_LARGE"):
        await acquire_stream(sessions, "trace:" + "x" * 1000, EXECUTOR)
    assert await admin.fetchval("SELECT count(*) FROM tga.heads WHERE stream LIKE 'trace:%'") == 0


async def test_a_sequence_number_that_is_text_is_refused(ledger: PostgresLedger, admin: Admin) -> None:
    plan = plan_of(pending_trace(1))
    as_text = plan.entries[0].entry.replace(b'"sequence_number":1', b'"sequence_number":"1"')
    with pytest.raises(SchemaViolation, match="no number"):
        await ledger.commit(plan._replace(entries=[plan.entries[0]._replace(entry=as_text)]))
    assert await admin.fetchval("SELECT count(*) FROM tga.entries") == 0


async def test_nothing_is_sent_for_a_finished_stream(sessions: Sessions, ledger: PostgresLedger) -> None:
    plan = plan_of(completed_trace(1))
    await ledger.commit(plan)
    await acquire_stream(sessions, plan.stream, EXECUTOR)
    attempt = Plan(plan.stream, EXECUTOR, EXECUTOR, dispatch_attempt=2)
    with pytest.raises(Exception, match="STATE_INVALID_TRANSITION"):
        await ledger.commit(attempt)
