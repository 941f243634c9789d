"""`tga verify --all --jobs N`: the same findings for every number of processes. Every drill of test_tamper_drills.py
compares them too."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from app.cli.verify_workers import Workers
from app.core.errors import VerificationUnfinished
from app.postgres.sessions import Sessions
from tests.attacker import disarm
from tests.conftest import Admin
from tests.export.test_command import said, tga
from tests.export.world import World, run_ledger, small_ledger
from tests.forensics.jobs import found_by_any_number, found_in_pieces

DAMAGES = {
    "nothing": (),
    "artifacts in several pieces": (
        "UPDATE tga.payloads SET artifacts[1] = artifacts[1] || ' ' WHERE stream_no % 6 = 0",
    ),
    "streams without a head": ("DELETE FROM tga.heads WHERE stream_no IN (SELECT max(stream_no) FROM tga.heads)",),
    "a head in the middle that is gone": ("DELETE FROM tga.heads WHERE stream_no = 9",),
    "a number below zero": (
        "UPDATE tga.links SET stream_no = -7 WHERE stream_no = 9",
        "UPDATE tga.payloads SET stream_no = -7 WHERE stream_no = 9",
    ),
    "entries beyond all heads": ("UPDATE tga.links SET stream_no = 1000000 WHERE stream_no = 9",),
    "claims of one key": (
        "DO $$ DECLARE name text; BEGIN FOR name IN SELECT indexrelid::regclass::text FROM pg_index"
        " WHERE indrelid = 'tga.heads'::regclass AND indisunique"
        " AND pg_get_indexdef(indexrelid) LIKE '%idempotency_key%'"
        " LOOP EXECUTE 'DROP INDEX ' || name; END LOOP; END $$",
        "UPDATE tga.heads h SET idempotency_key = o.idempotency_key, subject = o.subject, name = o.name"
        " FROM (SELECT * FROM tga.heads WHERE idempotency_key IS NOT NULL ORDER BY stream_no LIMIT 1) o"
        " WHERE h.stream_no = (SELECT max(stream_no) FROM tga.heads WHERE idempotency_key IS NOT NULL)",
    ),
    "the key of a system stream": (
        "UPDATE tga.payloads SET artifacts[1] = artifacts[1] || ' ' WHERE stream_no ="
        " (SELECT stream_no FROM tga.heads WHERE stream = 'system:default')",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_pieces_find_what_one_walk_finds(world: World, sessions: Sessions, admin: Admin, damage: str) -> None:
    await run_ledger(world)
    await disarm(admin)
    for statement in DAMAGES[damage]:
        await admin.execute(statement)
    found = await found_by_any_number(world, sessions)
    assert bool(found) == (damage != "nothing")


class Killed(Workers):
    def __init__(self, jobs: Sequence[dict[str, Any]]) -> None:
        super().__init__(jobs)
        self._processes[-1].send_signal(signal.SIGKILL)


async def test_a_killed_process_is_no_verdict(world: World, sessions: Sessions) -> None:
    await world.fill(1, 12)
    with pytest.raises(VerificationUnfinished, match="ended early"):
        await found_in_pieces(world, sessions, 2, start=Killed)


async def test_the_command_says_the_same_with_two_processes(world: World, admin: Admin) -> None:
    await small_ledger(world)
    await world.sequence()
    one, two = (tga(world, "verify", "--all", "--json", "--jobs", jobs) for jobs in ("1", "2"))
    assert (one.returncode, said(one)) == (two.returncode, said(two)) == (0, said(one)), two.stderr
    await disarm(admin)
    await admin.execute("UPDATE tga.payloads SET artifacts[1] = artifacts[1] || ' ' WHERE stream_no % 4 = 0")
    one, two = (tga(world, "verify", "--all", "--json", "--jobs", jobs) for jobs in ("1", "2"))
    assert (one.returncode, said(one)) == (two.returncode, said(two)) == (1, said(one)), two.stderr
    assert said(one)["findings"]
