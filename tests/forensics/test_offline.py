"""The same drills, found without the database: a bundle of the tampered log, and the last head that a client held."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.core.errors import ChecksumMismatch
from app.domain.log.heads import SignedHead
from app.postgres.sessions import Sessions
from tests.attacker import renumber
from tests.conftest import Admin, Server
from tests.export.world import World, judge, judge_alone
from tests.forensics.test_tamper_drills import STREAM, _forge_head, _remove, _rewind
from tests.forensics.test_tamper_drills import attacker as attacker
from tests.forensics.test_tamper_drills import heads as heads
from tests.log.test_restored import Dump
from tests.traces import completed_trace, trace_id

Heads = tuple[SignedHead, SignedHead]


async def found_by_both(world: World, folder: Path, held: SignedHead) -> set[str]:
    await world.export(folder)
    ours = judge(folder, world.verifier_key, held=[held])
    theirs = judge_alone(folder, world.verifier_key, held=[held])
    assert set(ours.codes) == set(theirs.codes)
    return set(ours.codes)


async def test_an_untouched_log_continues_the_head_that_was_kept(world: World, heads: Heads, tmp_path: Path) -> None:
    for number, held in enumerate(heads):
        assert await found_by_both(world, tmp_path / str(number), held) == set()


async def test_a_changed_entry(world: World, attacker: Admin, heads: Heads, tmp_path: Path) -> None:
    await attacker.execute(
        "UPDATE tga.entries SET entry = convert_to(replace(convert_from(entry, 'UTF8'), '-01T', '-02T'), 'UTF8')"
        " WHERE stream = $1 AND sequence_number = 1",
        STREAM,
    )
    assert "PROOF_INVALID" in await found_by_both(world, tmp_path / "bundle", heads[1])


async def test_a_deleted_entry_cannot_be_exported_as_if_it_were_whole(
    world: World, attacker: Admin, heads: Heads, tmp_path: Path
) -> None:
    await attacker.execute("DELETE FROM tga.entries WHERE stream = $1 AND sequence_number = 1", STREAM)
    with pytest.raises(ChecksumMismatch):
        await world.export(tmp_path / "bundle")
    assert judge(tmp_path / "bundle", world.verifier_key).codes == ["BUNDLE_INVALID"]


async def test_a_truncated_tail(world: World, attacker: Admin, heads: Heads, tmp_path: Path) -> None:
    cut = heads[1].head.size - 3
    rows = await attacker.fetch("DELETE FROM tga.leaves WHERE leaf_index >= $1 RETURNING stream, sequence_number", cut)
    for row in rows:
        await attacker.execute("DELETE FROM tga.entries WHERE stream = $1 AND sequence_number = $2", *row)
    assert await found_by_both(world, tmp_path / "bundle", heads[1]) == {"STATE_SEQUENCE_GAP"}
    await attacker.execute("DELETE FROM tga.tree_heads WHERE size > $1", cut)  # and nothing that tells of more
    assert await found_by_both(world, tmp_path / "again", heads[1]) == {"LOG_FORKED"}


async def test_a_trace_recomputed_whole(world: World, attacker: Admin, heads: Heads, tmp_path: Path) -> None:
    stream = f"trace:{trace_id(10)}"
    count = await attacker.fetchval("SELECT count(*) FROM tga.entries WHERE stream = $1", stream)
    number = await attacker.fetchval("SELECT stream_no FROM tga.heads WHERE stream = $1", stream)
    tables = ("entries", "artifacts", "execution_checkpoints", "claims", "claim_effects", "heads")
    await _remove(attacker, [stream], *tables)
    await world.append(completed_trace(10, arguments={"title": "another", "priority": 1})[:count])
    await renumber(attacker, stream, number)
    assert await found_by_both(world, tmp_path / "bundle", heads[1]) & {"PROOF_INVALID", "LOG_FORKED"}


async def test_everything_after_n_recomputed(
    world: World, sessions: Sessions, attacker: Admin, heads: Heads, tmp_path: Path
) -> None:
    await _rewind(attacker, heads[0].head.size)
    await world.fill(40, 9)
    await attacker.fetch("SELECT * FROM tga.integrate(10000)")
    await _forge_head(world, sessions, attacker)
    assert await found_by_both(world, tmp_path / "bundle", heads[1]) == {"NOTE_INVALID", "LOG_FORKED"}
    await attacker.execute("DELETE FROM tga.tree_heads WHERE size > $1", heads[0].head.size)
    assert await found_by_both(world, tmp_path / "again", heads[1]) == {"LOG_FORKED"}


async def test_an_old_backup(server: Server, world: World, tmp_path: Path) -> None:
    if server.embedded is None:
        pytest.skip("pg_dump of this server's version is not known")
    await world.announce()
    await world.fill(1, 6)
    await world.sequence()
    dump = Dump(server, world.database, tmp_path)
    await world.fill(10, 6)
    held = await world.sequence()
    restored = await dump.restore(server)
    async with await Sessions.open(restored.gateway_url, sessions_max=2) as old:
        world.sessions = old
        assert await found_by_both(world, tmp_path / "bundle", held) == {"LOG_FORKED"}
    assert judge(tmp_path / "bundle", world.verifier_key).findings == []  # without the head nobody could tell
