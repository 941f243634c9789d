"""Recovery, expiry and lists look for streams in two small tables, copies of heads: a copy that differs is found."""

from __future__ import annotations

import pytest

from app.core.errors import RecoveryFailed
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.attacker import attacking
from tests.conftest import Admin
from tests.invariants.plans import plan_of
from tests.runtime.supervised import find
from tests.traces import completed_trace, denied_trace, executing_trace, pending_trace, trace_id

EXECUTING, WAITING, DENIED, COMPLETED = (f"trace:{trace_id(n)}" for n in (1, 2, 3, 4))
OF = "WHERE stream_no = (SELECT h.stream_no FROM tga.heads h WHERE h.stream = '{}')"

# What is done, and to which stream.
DAMAGES = {
    "not in work": (f"DELETE FROM tga.in_work {OF}", EXECUTING),
    "in work of another kind": (f"UPDATE tga.in_work SET kind = 'system' {OF}", EXECUTING),
    "at rest though in work": (
        f"INSERT INTO tga.at_rest SELECT stream_no, stream, tenant, state FROM tga.heads {OF}",
        EXECUTING,
    ),
    "not at rest though waiting": (f"DELETE FROM tga.at_rest {OF}", WAITING),
    "waits for nobody": (f"UPDATE tga.at_rest SET waiting = NULL {OF}", WAITING),
    "waits for another": (f"UPDATE tga.at_rest SET waiting = 'operator' {OF}", WAITING),
    "never expires": (f"UPDATE tga.at_rest SET expires_at = 'infinity' {OF}", WAITING),
    "of another tenant": (f"UPDATE tga.at_rest SET tenant = 'another' {OF}", WAITING),
    "of another name": (f"UPDATE tga.at_rest SET stream = 'trace:another' {OF}", WAITING),
    "not at rest though denied": (f"DELETE FROM tga.at_rest {OF}", DENIED),
    "in another state": (f"UPDATE tga.at_rest SET state = 'FAILED' {OF}", DENIED),
    "at rest though completed": (
        f"INSERT INTO tga.at_rest SELECT stream_no, stream, tenant, 'FAILED' FROM tga.heads {OF}",
        COMPLETED,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_copy_of_a_head_that_differs_is_found(
    damage: str, ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    for plan in (
        plan_of(executing_trace(1)),
        plan_of(pending_trace(2))._replace(waiting_after="supervisor"),
        plan_of(denied_trace(3)),
        plan_of(completed_trace(4)),
    ):
        await ledger.commit(plan)
    assert await find(sessions) == []
    statement, stream = DAMAGES[damage]
    async with attacking(admin):
        done = await admin.execute(statement.format(stream))
    assert done.endswith(" 1")
    (found,) = await find(sessions)
    assert (type(found), found.stream) == (RecoveryFailed, stream)
    assert "would not find the stream" in found.what
