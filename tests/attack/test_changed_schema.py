"""A superuser changes what the guarantees rest on: start, `tga db status` and `tga doctor` name it.

Here with real commands and real gateways for some changes, those that went unseen once; tests/postgres/test_guards.py
changes everything there is.
"""

from __future__ import annotations

import asyncio
import json

import asyncpg
import pytest

from tests.cli.world import World

# What is done, and how each of the three names it.
CHANGES = {
    "DROP INDEX tga.heads_claim": "index heads_claim of tga.heads is missing",
    "ALTER TABLE tga.links DROP CONSTRAINT links_pkey": "constraint links_pkey of tga.links is missing",
    "ALTER TABLE tga.heads DISABLE TRIGGER birth_guard": "trigger birth_guard of tga.heads was changed",
    "CREATE OR REPLACE FUNCTION tga.refuse_change() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'": (
        "function tga.refuse_change was changed: body"
    ),
    "UPDATE pg_proc SET prosrc = replace(prosrc, 'sha256', 'md5') WHERE oid = 'tga.append'::regproc": (
        "function tga.append was changed: body"
    ),
    "DELETE FROM tga.transitions WHERE to_state = 'DENIED'": (
        "row (trace, PENDING, supervisor_decision, DENY, False) of tga.transitions is missing"
    ),
    "UPDATE tga.artifact_rules SET binds_field = NULL WHERE artifact_type = 'tool_effect'": (
        "row (trace, tool_effect) of tga.artifact_rules was changed: binds_field"
    ),
    "CREATE RULE quiet AS ON DELETE TO tga.heads DO INSTEAD NOTHING": "rule quiet of tga.heads is none of ours",
    "ALTER TABLE tga.api_keys ENABLE ROW LEVEL SECURITY": "table tga.api_keys was changed: row security",
    "ALTER FUNCTION tga.append SECURITY INVOKER": "function tga.append was changed: security",
}


def as_superuser(world: World, *statements: str) -> None:
    async def execute() -> None:
        session = await asyncpg.connect(world.admin_url)
        for statement in statements:
            await session.execute(statement)
        await session.close()

    asyncio.run(execute())


@pytest.fixture
def changed(still_world: World) -> World:
    """A ledger with a call in it, its gateway stopped, and everything changed."""
    world = still_world
    world.start()
    assert world.tga("call", "bank", "charge", "-a", "amount=5", "-k", "before").returncode == 0
    assert world.stop() == 0
    as_superuser(world, *CHANGES)
    return world


def test_start_status_and_doctor_name_what_was_changed(changed: World) -> None:
    world = changed
    status = world.tga_process("db", "status", "--json")
    assert status.returncode == 1, status.stderr
    problems = json.loads(status.stdout)["problems"]
    for named in CHANGES.values():
        (problem,) = [problem for problem in problems if problem["what"].startswith(named)]
        assert problem["refuses"] is True
        assert "tga verify --all" in problem["remedy"]
    told = world.tga_process("db", "status").stdout
    assert all(named in told for named in CHANGES.values())

    doctor = world.tga_process("doctor", "--json")
    assert doctor.returncode == 1, doctor.stderr
    findings = json.loads(doctor.stdout)
    for named in CHANGES.values():
        (finding,) = [finding for finding in findings if finding["what"].startswith(named)]
        assert finding["ok"] is False

    refused = world.tga_process("serve", TGA_PORT="0")
    assert refused.returncode == 3
    assert "error STORE_UNFIT" in refused.stderr
    assert any(named in refused.stderr for named in CHANGES.values())
    assert f"({len([p for p in problems if p['refuses']]) - 1} more: `tga db status`)" in refused.stderr
    assert world.executions("before") == 1
