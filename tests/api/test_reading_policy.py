"""The policy over HTTP: what is in force, what was, and why a call would be decided so; for those who may ask."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.api.policy_documents import ExplanationDocument, PolicyDocument, PolicySetPage
from app.clock import SystemClock
from app.domain.system.log import SystemLog
from app.domain.system.policies import record_policy
from app.gateway.policy_file import packaged_policy_text
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.system import PostgresSystemRows
from tests.api.reading import Front, World

CHARGE = {"server_id": "pay", "tool_name": "charge", "arguments": {"amount": 5, "card": "4111"}}


@pytest.fixture
async def front(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Front]:
    async with World.of(database, sessions, ledger, tmp_path).open() as opened:
        yield opened


async def test_the_policy_in_force_and_those_before_it_are_shown(front: Front, sessions: Sessions) -> None:
    policy = front.services.policy
    assert policy is not None
    system = SystemLog(PostgresSystemRows(sessions), front.ledger, SystemClock(), front.services.traces.executor_id)
    texts = [f"// {n}\n{packaged_policy_text()}" for n in range(3)] + [packaged_policy_text()]
    from app.core.digest import digest_of_bytes

    for text in texts:
        await record_policy(system, SystemClock(), digest_of_bytes(text.encode()), text)
    shown = await front.page("/v1/policy")
    PolicyDocument.model_validate(shown)
    assert shown["policy_digest"] == policy.policy.digest
    assert [rule["id"] for rule in shown["rules"]] == [rule.name for rule in policy.policy.rules]
    assert shown["recorded_at"] is not None
    found, cursor = [], ""
    while True:
        page = await front.page(f"/v1/policy/sets?limit=3{cursor}")
        PolicySetPage.model_validate(page)
        found += [one["text"] for one in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert found == texts[::-1]


async def test_a_call_is_explained_as_the_policy_decides_it(front: Front) -> None:
    status, told = await front.post("/v1/policy/explain", {**CHARGE, "principal_id": "billing"}, "auditor")
    assert status == 200
    ExplanationDocument.model_validate(told)
    assert told["verdict"] == "ask"  # its tag wants a person
    assert set(told["actions"]) == {"call", "call_unattended"}
    assert told["actions"]["call"]["allowed"]
    assert not told["actions"]["call_unattended"]["allowed"]
    assert "decides" in {rule["standing"] for rule in told["actions"]["call"]["policies"]}
    assert "4111" not in str(told)
    status, told = await front.post("/v1/policy/explain", {"server_id": "pay", "tool_name": "balance"}, "supervisor")
    assert (status, told["verdict"]) == (200, "allow")


async def test_other_tenants_read_no_rule_and_explain_only_their_own_tools(front: Front) -> None:
    for path in ("/v1/policy", "/v1/policy/sets"):
        assert (await front.get(path, "acme"))[0] == 403
        assert (await front.get(path, "agent"))[0] == 403
    status, problem = await front.post("/v1/policy/explain", CHARGE, "acme")
    assert (status, problem["code"]) == (404, "TOOL_NOT_FOUND")
    own = {"server_id": "crm", "tool_name": "create_ticket"}
    status, told = await front.post("/v1/policy/explain", own, "acme")
    assert status == 200
    assert all(rule["text"] is None for action in told["actions"].values() for rule in action["policies"])
    assert (await front.post("/v1/policy/explain", CHARGE, "agent"))[0] == 403


async def test_what_cannot_be_called_cannot_be_explained(front: Front) -> None:
    for body, code in (
        ({"server_id": "pay"}, "SCHEMA_VIOLATION"),
        ({**CHARGE, "arguments": {"amount": "much"}}, "ARGUMENTS_INVALID"),
        ({**CHARGE, "tool_name": "gone"}, "TOOL_NOT_FOUND"),
        ({**CHARGE, "roles": ["king"]}, "SCHEMA_VIOLATION"),
    ):
        status, problem = await front.post("/v1/policy/explain", body, "auditor")
        assert (status >= 400, problem["code"]) == (True, code)
