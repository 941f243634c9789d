"""A call that a run makes says so on the record, and the policy sees it; keys of runs are not for direct calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from app.core.canonical import parse_object
from app.core.errors import KeyReserved
from app.domain.addresses import RunOfCall
from app.domain.policy.cedar import CedarPolicy
from app.gateway.policy_file import PolicyFile
from app.postgres.database import Database
from tests.conftest import Admin
from tests.invariants.plans import contents, verify_all
from tests.runtime.scripted import call, new_key, open_scripted
from tests.runtime.supervised import decide, runtime_of

RUN: Final = RunOfCall(run_id="onboard-7", procedure="onboard", version="1", path="3:2.1", attempt=2, worker="host-1")


async def requests(admin: Admin) -> list[dict[str, Any]]:
    rows = await admin.fetch("SELECT artifact FROM tga.artifacts WHERE stream LIKE 'trace:%' ORDER BY stream")
    found = [parse_object(row["artifact"]) for row in rows]
    return [one for one in found if one["schema_id"] == "tga/v1/action_request"]


async def test_the_run_is_on_the_record_and_a_direct_call_says_nothing_of_runs(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        await scripted.runtime.call(replace(call(key="run:onboard-7/3:2.1"), run=RUN))
        await scripted.runtime.call(call(key=new_key()))
        of_run, direct = await requests(admin)
        assert of_run["run"] == RUN.model_dump()
        assert "run" not in direct
        await verify_all(scripted.sessions)


@pytest.mark.parametrize("key", ["run:", "run:onboard-7/3", "run:x"])
async def test_a_direct_call_with_a_key_of_runs_is_refused_and_stores_nothing(
    database: Database, admin: Admin, key: str
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        await scripted.runtime.call(call(key=new_key()))
        await scripted.runtime.call(replace(call(key="run:onboard-7/3"), run=RUN))
        before = await contents(admin)
        with pytest.raises(KeyReserved, match="does not begin with run:"):
            await scripted.runtime.call(call(key=key))
        assert await contents(admin) == before
        assert len(scripted.connector.sent) == 2
        # Only the prefix counts.
        await scripted.runtime.call(call(key="runs:7"))


async def test_a_repeat_by_the_same_run_is_answered_from_the_record(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asking = replace(call(key="run:onboard-7/3"), run=RUN)
        first = await scripted.runtime.call(asking)
        again = await scripted.runtime.call(replace(asking, run=RUN.model_copy(update={"attempt": 3})))
        assert (again.trace_id, again.replayed) == (first.trace_id, True)
        assert len(scripted.connector.sent) == 1


async def test_the_policy_judges_the_run_again_before_a_person_approves(database: Database) -> None:
    text = 'permit(principal, action == Action::"call", resource) '
    text += 'when { context has run && context.run.procedure == "onboard" && context.run.path == "3:2.1" };'
    policy = PolicyFile(CedarPolicy(text), None)
    async with open_scripted(database.gateway_url) as scripted:
        scripted.supervisor = policy  # type: ignore[assignment]
        runtime = runtime_of(scripted)
        denied = await runtime.call(call(key=new_key()))
        assert denied.state == "DENIED"
        waiting = await runtime.call(replace(call(key="run:onboard-7/3"), run=RUN))
        assert (waiting.state, waiting.waiting) == ("PENDING", "supervisor")
        ended = await decide(scripted, waiting.trace_id, runtime=runtime)
        assert ended.state == "COMPLETED"
        await runtime.close()
