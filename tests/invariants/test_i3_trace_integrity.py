"""I3: what was decided is what is called, with the same ids until its effect is recorded, and never after."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.digest import digest_of
from app.core.errors import ChecksumMismatch, InvalidTransition, RecoveryFailed, SequenceGap
from app.domain.tga.documents import ExecutionLogEntry, ToolCall, ToolEffect
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.replay import ACTION_OF_STATE, LogRecord, advance, fold
from app.domain.tga.transitions import TRACE
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.state_store import PostgresStateStore
from tests.attacker import attacking
from tests.conftest import Admin
from tests.invariants.plans import plan_of
from tests.runtime.scripted import open_scripted
from tests.traces import EXECUTOR, authorized_trace, completed_trace, executing_trace, time_at, tool_call_id, trace_id


def state_after(records: list[LogRecord]) -> ExecutionState:
    state = fold(records)
    assert state is not None
    return state


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": {"title": "another", "priority": 2}},
        {"server_id": "another"},
        {"tool_name": "another"},
        {"idempotency_key": "another"},
        {"tool_class": "read"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_only_the_call_that_was_decided_on_can_be_made(change: dict[str, Any]) -> None:
    authorized, executing = authorized_trace(1), executing_trace(1)
    call = executing[2].artifact
    assert isinstance(call, ToolCall)
    with pytest.raises(ChecksumMismatch, match="not the one that was asked for"):
        advance(state_after(authorized), call.model_copy(update=change), executor_id=EXECUTOR, recorded_at=time_at(9))


def test_an_effect_of_another_call_is_refused() -> None:
    records = completed_trace(1)
    effect = records[3].artifact
    assert isinstance(effect, ToolEffect)
    other = effect.model_copy(update={"tool_call_id": tool_call_id(2)})
    with pytest.raises(ChecksumMismatch, match="another tool call"):
        advance(state_after(records[:3]), other, executor_id=EXECUTOR, recorded_at=time_at(9))


def test_a_state_names_the_call_to_repeat_and_the_action_to_take() -> None:
    """Recovery is the ordinary table entered in the middle: the state alone says what is next."""
    executing, completed = executing_trace(1), completed_trace(1)
    state = state_after(executing)
    assert (state.tool_call_id, state.idempotency_key) == (tool_call_id(1), "key-1")
    assert ACTION_OF_STATE[state.state] == "dispatch"
    assert ACTION_OF_STATE[state_after(completed).state] == "return_result"
    assert set(ACTION_OF_STATE) == set(TRACE.states)
    assert {s for s, action in ACTION_OF_STATE.items() if action == "return_result"} == TRACE.terminal_states


async def test_a_second_effect_is_refused_and_the_first_one_stands(store: PostgresStateStore) -> None:
    records = completed_trace(1)
    for record in records:
        await store.append_log_entry(record)
    with pytest.raises(SequenceGap):
        await store.append_log_entry(records[3])
    second = records[3].entry.to_json() | {"sequence_number": 5, "prev_entry_digest": records[3].entry.entry_digest}
    del second["entry_digest"]
    entry = ExecutionLogEntry.from_json({**second, "entry_digest": digest_of(second)})
    with pytest.raises(InvalidTransition):  # though it does not bind to the artifact before it either
        await store.append_log_entry(LogRecord(entry, records[3].artifact))
    assert await store.list_log_entries(trace_id(1), 3) == records[3:]


def test_a_trace_whose_payload_is_gone_cannot_go_on() -> None:
    records = executing_trace(1)
    with pytest.raises(RecoveryFailed, match="payload is missing"):
        fold([records[0]._replace(artifact=None), *records[1:]])


async def test_without_a_recorded_effect_the_same_call_is_dispatched_again_with_the_same_ids(
    database: Database, ledger: PostgresLedger
) -> None:
    records = executing_trace(1, server_id="crm", tool_name="create", arguments={"amount": 1})
    await ledger.commit(plan_of(records))
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.recover(trace_id(1))
        (sent,) = scripted.connector.sent
        assert sent == records[2].artifact
        assert (sent.tool_call_id, sent.idempotency_key) == (tool_call_id(1), "key-1")
        assert (answer.state, answer.tool_call_id) == ("COMPLETED", tool_call_id(1))


async def test_with_a_recorded_effect_nothing_is_dispatched(database: Database, ledger: PostgresLedger) -> None:
    records = completed_trace(1, server_id="crm", tool_name="create", arguments={"amount": 1})
    await ledger.commit(plan_of(records))
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.recover(trace_id(1))
        assert scripted.connector.sent == []
        assert (answer.state, answer.effect) == ("COMPLETED", records[3].artifact)


async def test_an_effect_on_the_claim_that_the_log_lacks_stops_recovery(
    database: Database, ledger: PostgresLedger, admin: Admin
) -> None:
    records = executing_trace(1, server_id="crm", tool_name="create", arguments={"amount": 1})
    await ledger.commit(plan_of(records))
    async with attacking(admin):
        await admin.execute(
            "INSERT INTO tga.claim_effects VALUES ($1, decode(repeat('ab', 32), 'hex'))", records[0].stream
        )
    async with open_scripted(database.gateway_url) as scripted:
        with pytest.raises(RecoveryFailed, match="claim and log disagree"):
            await scripted.runtime.recover(trace_id(1))
        assert scripted.connector.sent == []
