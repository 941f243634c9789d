"""I4 when someone has the rights to delete: an execution checkpoint that is due and not there is found."""

from __future__ import annotations

import pytest

from app.core.errors import CheckpointMissing, ChecksumMismatch
from app.postgres.database import Database
from tests.cli.test_commands import tga
from tests.conftest import Admin
from tests.postgres.test_erasing import erase
from tests.runtime.scripted import call, new_key, open_scripted
from tests.runtime.supervised import find
from tests.runtime.tampering import untriggered


@pytest.mark.parametrize("is_erased", [False, True], ids=["", "erased"])
async def test_a_deleted_execution_checkpoint_is_a_finding_of_its_own(
    *, is_erased: bool, database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        first, second = [await scripted.runtime.call(call(key=new_key())) for _ in range(2)]
        if is_erased:
            await erase(scripted, first.trace_id)
        assert await find(scripted.sessions) == []
        stream = f"trace:{first.trace_id}"
        async with untriggered(admin):
            await admin.execute("DELETE FROM tga.execution_checkpoints WHERE stream = $1", stream)
        (found,) = await find(scripted.sessions)
        assert (type(found), found.stream, found.sequence_number) == (CheckpointMissing, stream, 3)
    told = tga("verify", "--all", url=database.admin_url)
    assert (told.returncode, f"{stream}  entry 3  CHECKPOINT_MISSING" in told.stdout) == (1, True)
    assert tga("verify", second.trace_id, url=database.admin_url).returncode == 0


async def test_a_checkpoint_that_was_moved_to_another_entry_is_missed_at_its_own(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        await scripted.runtime.call(call(key=new_key()))
        async with untriggered(admin):
            await admin.execute("UPDATE tga.execution_checkpoints SET sequence_number = 2")
        assert CheckpointMissing in {type(error) for error in await find(scripted.sessions)}


async def test_a_call_that_is_denied_or_waits_has_no_checkpoint_and_needs_none(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        for answer in ("deny", "ask"):
            scripted.supervisor.answer = answer
            await scripted.runtime.call(call(key=new_key()))
        assert await find(scripted.sessions) == []


@pytest.mark.parametrize("field", ["server_id", "tool_name", "idempotency_key", "payload_digest", "tool_call_digest"])
async def test_a_rewritten_checkpoint_of_an_erased_trace_is_found(field: str, database: Database, admin: Admin) -> None:
    """Its payloads are gone and it cannot be folded any more; entries, claim and erasure still say what it must."""
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
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
