"""I2: one key has one stream for ever, and one effect, recorded with the log's own; a repeat never reaches the tool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from app.core.errors import KeyClaimed, SchemaViolation, TgaError
from app.domain.ledger.plans import PlannedEntry
from app.domain.tga.documents import ActionRequest, ToolCall
from app.domain.tga.ports import Dispatched
from app.domain.tga.replay import LogRecord
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.state_store import PostgresStateStore
from tests.conftest import Admin
from tests.invariants.plans import plan_of
from tests.runtime.scripted import SUCCESS, call, open_scripted
from tests.traces import (
    completed_trace,
    denied_trace,
    executing_trace,
    failed_trace,
    pending_trace,
    trace_id,
)


@pytest.mark.parametrize("model", [ActionRequest, ToolCall])
def test_a_write_without_a_key_is_no_document(model: type[ActionRequest] | type[ToolCall]) -> None:
    records = executing_trace(1)
    document = next(r.artifact.to_json() for r in records if isinstance(r.artifact, model))
    assert model.from_json(document).tool_class == "write"
    with pytest.raises(SchemaViolation, match="idempotency_key"):
        model.from_json({**document, "idempotency_key": None})


@pytest.mark.parametrize("path", [completed_trace, failed_trace])
async def test_a_claim_gets_its_effect_with_the_logs_own(
    path: Callable[[int], list[LogRecord]], store: PostgresStateStore, admin: Admin
) -> None:
    records = path(1)
    for record in records[:3]:
        await store.append_log_entry(record)
    assert await admin.fetchval("SELECT count(*) FROM tga.claim_effects") == 0
    await store.append_log_entry(records[3])
    row = await admin.fetchrow(
        "SELECT c.idempotency_key, x.artifact_digest FROM tga.claims c JOIN tga.claim_effects x USING (stream)"
    )
    assert row is not None
    assert (row["idempotency_key"], row["artifact_digest"].hex()) == ("key-1", records[3].entry.artifact_digest)


async def test_of_many_with_one_key_one_is_stored(ledger: PostgresLedger, admin: Admin) -> None:
    contenders = [executing_trace(n, idempotency_key="the-key") for n in range(1, 41)]
    results = await asyncio.gather(*(ledger.commit(plan_of(r)) for r in contenders), return_exceptions=True)
    winners = [records for records, result in zip(contenders, results, strict=True) if result is None]
    losers = [result for result in results if result is not None]
    assert len(winners) == 1
    assert {type(loser) for loser in losers} == {KeyClaimed}
    assert {loser.owner_stream for loser in losers if isinstance(loser, KeyClaimed)} == {winners[0][0].stream}
    for table, count in {"claims": 1, "entries": 3, "artifacts": 3, "heads": 1}.items():
        assert await admin.fetchval(f"SELECT count(*) FROM tga.{table}") == count


async def test_a_request_denied_at_once_leaves_its_key_free(ledger: PostgresLedger, admin: Admin) -> None:
    await ledger.commit(plan_of(denied_trace(1, idempotency_key="k")))
    assert await admin.fetchval("SELECT count(*) FROM tga.claims") == 0
    await ledger.commit(plan_of(pending_trace(2, idempotency_key="k")))
    assert await admin.fetchval("SELECT stream FROM tga.claims") == f"trace:{trace_id(2)}"


async def test_a_read_without_a_key_claims_nothing(ledger: PostgresLedger, admin: Admin) -> None:
    await ledger.commit(plan_of(completed_trace(1, tool_class="read", idempotency_key=None)))
    assert await admin.fetchval("SELECT count(*) FROM tga.claims") == 0
    assert await admin.fetchval("SELECT count(*) FROM tga.claim_effects") == 0


async def test_a_refused_plan_claims_nothing(ledger: PostgresLedger, admin: Admin) -> None:
    records = pending_trace(1)
    plan = plan_of(records)
    late = plan.entries[0].entry.replace(b'"sequence_number":1', b'"sequence_number":2')
    wrong = plan._replace(entries=[PlannedEntry(late, plan.entries[0].artifact)])
    with pytest.raises(TgaError, match="STATE_SEQUENCE_GAP"):
        await ledger.commit(wrong)
    assert await admin.fetchval("SELECT count(*) FROM tga.claims") == 0


async def test_a_repeat_is_answered_with_the_recorded_effect_and_the_tool_is_not_called(database: Database) -> None:
    async with open_scripted(database.gateway_url) as first:
        answer = await first.runtime.call(call(key="k"))
        again = await first.runtime.call(call(key="k"))
        assert len(first.connector.sent) == 1
    async with open_scripted(database.gateway_url) as another_process:
        later = await another_process.runtime.call(call(key="k"))
        assert another_process.connector.sent == []
    effects = [known.effect.to_bytes() for known in (answer, again, later) if known.effect is not None]
    assert effects == [effects[0]] * 3
    assert [known.replayed for known in (answer, again, later)] == [False, True, True]


async def test_two_intended_identical_calls_with_their_own_keys_are_two_executions(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        one, other = [await scripted.runtime.call(call(key=key)) for key in ("k1", "k2")]
        assert one.trace_id != other.trace_id
        assert scripted.connector.sends_of_key == {"k1": 1, "k2": 1}


async def test_thousands_in_flight_need_only_a_few_sessions(database: Database, admin: Admin) -> None:
    opened = asyncio.Event()

    async def slow(_: ToolCall) -> Dispatched:
        await opened.wait()
        return SUCCESS

    async with open_scripted(database.gateway_url, slow) as scripted:
        tasks = [asyncio.create_task(scripted.runtime.call(call(key=f"k{n}"))) for n in range(2_000)]
        while len(scripted.connector.sent) < len(tasks):
            await asyncio.sleep(0.05)
        sessions = await admin.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'tga'"
        )
        opened.set()
        answers = await asyncio.gather(*tasks)
    assert sessions <= 9
    assert {answer.state for answer in answers} == {"COMPLETED"}
    assert await admin.fetchval("SELECT count(*) FROM tga.claim_effects") == 2_000
