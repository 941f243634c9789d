"""I4 when someone has the rights to write: an execution checkpoint that says something else than the log is found.

A trace needs none (docs/adr/0029): the ones here were asked for, as a caller of the state store may.
"""

from __future__ import annotations

import pytest

from app.core.errors import ChecksumMismatch, SequenceGap
from app.domain.tga.documents import TraceId
from app.domain.tga.execution_state import ExecutionCheckpoint
from app.domain.tga.replay import fold
from app.domain.tga.transitions import TRACE
from app.postgres.database import Database
from app.postgres.state_store import PostgresStateStore
from tests.conftest import Admin
from tests.postgres.test_erasing import erase
from tests.runtime.scripted import call, new_key, open_scripted
from tests.runtime.supervised import find
from tests.runtime.tampering import untriggered


async def write_checkpoint(store: PostgresStateStore, trace_id: TraceId) -> None:
    """At the entry that made it EXECUTING."""
    records = await store.list_log_entries(trace_id, 0)
    state = fold(records[:3])
    assert state is not None
    await store.write_checkpoint(ExecutionCheckpoint.of(state, created_at=records[2].entry.recorded_at))
    assert await store.load_latest_checkpoint(trace_id) is not None


async def test_calls_leave_no_checkpoint_and_need_none(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        for answer in ("allow", "deny", "ask"):
            scripted.supervisor.answer = answer
            await scripted.runtime.call(call(key=new_key()))
        assert await admin.fetchval("SELECT count(*) FROM tga.execution_checkpoints") == 0
        assert await find(scripted.sessions) == []


@pytest.mark.parametrize("is_erased", [False, True], ids=["", "erased"])
async def test_a_checkpoint_that_was_asked_for_is_verified_and_its_loss_loses_nothing(
    *, is_erased: bool, database: Database, admin: Admin, store: PostgresStateStore
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        await write_checkpoint(store, TraceId(answer.trace_id))
        if is_erased:
            await erase(scripted, answer.trace_id)
        else:
            state = await store.load_state(TraceId(answer.trace_id))
        assert await find(scripted.sessions) == []
        async with untriggered(admin):
            await admin.execute("DELETE FROM tga.execution_checkpoints")
        assert await find(scripted.sessions) == []
        if not is_erased:
            assert await store.load_state(TraceId(answer.trace_id)) == state


async def test_a_checkpoint_that_was_moved_to_another_entry_is_found(
    database: Database, admin: Admin, store: PostgresStateStore
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        await write_checkpoint(store, TraceId(answer.trace_id))
        async with untriggered(admin):
            await admin.execute("UPDATE tga.execution_checkpoints SET sequence_number = 2")
        (found,) = await find(scripted.sessions)
        assert (type(found), found.stream, found.sequence_number) == (SequenceGap, TRACE.stream(answer.trace_id), 2)


@pytest.mark.parametrize("field", ["server_id", "tool_name", "idempotency_key", "payload_digest", "tool_call_digest"])
async def test_a_rewritten_checkpoint_of_an_erased_trace_is_found(
    field: str, database: Database, admin: Admin, store: PostgresStateStore
) -> None:
    """Its payloads are gone and it cannot be folded any more; entries, claim and erasure still say what it must."""
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        await write_checkpoint(store, TraceId(answer.trace_id))
        await erase(scripted, answer.trace_id)
        value = "0" * 64 if field.endswith("_digest") else "another"
        async with untriggered(admin):
            await admin.execute(
                "UPDATE tga.execution_checkpoints SET checkpoint_state = convert_to(regexp_replace("
                "convert_from(checkpoint_state, 'UTF8'), $1, $2), 'UTF8')",
                f'"{field}":"[^"]*"',
                f'"{field}":"{value}"',
            )
            await admin.execute("UPDATE tga.execution_checkpoints SET checkpoint_digest = sha256(checkpoint_state)")
        (found,) = await find(scripted.sessions)
        assert (type(found), found.stream) == (ChecksumMismatch, f"trace:{answer.trace_id}")
