"""What an export shows of the claims of erased traces: a key that was used twice, and nothing to guess arguments by."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.core.errors import RecoveryFailed
from tests.attacker import attacking
from tests.conftest import Admin
from tests.export.world import World, judge, judge_alone
from tests.traces import completed_trace, trace_id

KEY = "the one key"


@pytest.mark.parametrize("first_erased", [True, False], ids=["used again after it", "used again before it"])
async def test_a_key_of_an_erased_trace_that_was_used_again_is_found_in_an_export(
    *, first_erased: bool, world: World, admin: Admin, tmp_path: Path
) -> None:
    await world.announce()
    await admin.execute("DROP INDEX tga.heads_claim")
    await world.append(completed_trace(1, idempotency_key=KEY))
    if first_erased:
        await world.erase(1)
        async with attacking(admin):
            await admin.execute("DELETE FROM tga.claims")
    await world.append(completed_trace(2, idempotency_key=KEY))
    if not first_erased:
        await world.erase(1)
    await world.append(completed_trace(3))
    await world.sequence()
    await world.export(tmp_path / "bundle")
    ours, alone = (verdict(tmp_path / "bundle", world.verifier_key).findings for verdict in (judge, judge_alone))
    # At the erasure, which then explains no missing payload either.
    assert (RecoveryFailed.code, "system:default", 3) in ours
    assert {code for code, _, _ in ours} == {RecoveryFailed.code}
    assert sorted(map(str, alone)) == sorted(map(str, ours))


async def test_an_export_holds_neither_payload_digest_nor_salt_of_an_erased_trace(
    world: World, admin: Admin, tmp_path: Path
) -> None:
    await world.announce()
    await world.append(completed_trace(1, arguments={"pin": 7391}))
    stream = f"trace:{trace_id(1)}"
    payload = await admin.fetchval("SELECT payload_digest FROM tga.claims WHERE stream = $1", stream)
    await world.erase(1)
    salt = await admin.fetchval("SELECT claim_salt FROM tga.erasures WHERE stream = $1", stream)
    await world.sequence()
    await world.export(tmp_path / "bundle")
    assert judge(tmp_path / "bundle", world.verifier_key).findings == []
    written = b"".join(file.read_bytes() for file in (tmp_path / "bundle").rglob("*") if file.is_file())
    assert b"payload_commitment" in written
    for secret in (payload, salt):
        assert len(secret) == 32
        assert secret.hex().encode() not in written
        assert secret not in written
