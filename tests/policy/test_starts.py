"""Starting a procedure is judged like a call: what no rule permits is denied; rules see program, input and trigger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli.policy import explain_call, explain_start_policy
from app.core.errors import PolicyInvalid, StartDenied
from app.core.limits import POLICY_VALUES_MAX
from app.domain.policy.cedar import CedarPolicy
from app.domain.policy.question import AskedStart
from app.domain.runs.documents import Trigger
from app.domain.runs.judging import judge_start
from app.domain.system.documents import ProcedureRegistration
from app.gateway.policy_file import PolicyFile, packaged_policy_text
from app.settings import Settings
from tests.policy.asking import PERMIT_ALL, answer, principal_of, request_of, tool_of
from tests.traces import time_at

PERMIT_STARTS = 'permit(principal, action == Action::"start", resource);\n'
RUN: dict[str, Any] = {
    "run_id": "r-7",
    "procedure": "refund",
    "version": "2",
    "path": "3:2.1",
    "attempt": 1,
    "worker": "w",
}


def asked(given: Any = None, *roles: str, tenant: str = "default", **fields: Any) -> AskedStart:
    chosen: dict[str, Any] = {"procedure": "onboard", "version": "1.2.0", "program_digest": "a" * 64, "tags": ["crm"]}
    return AskedStart(
        **{
            "principal": principal_of("agent-1", *(roles or ("agent",)), tenant=tenant),
            **chosen,
            "input": given,
            "trigger_type": "call",
            **fields,
        }
    )


def started(text: str, given: Any = None, *roles: str, **fields: Any) -> str:
    return CedarPolicy(text).judge_start(asked(given, *roles, **fields)).answer


@pytest.mark.parametrize(("role", "expected"), [("agent", "allow"), ("operator", "allow"), ("admin", "allow")])
def test_the_packaged_policy_lets_agents_and_operators_start(role: str, expected: str) -> None:
    assert started(packaged_policy_text(), None, role) == expected


@pytest.mark.parametrize("role", ["worker", "supervisor", "auditor"])
def test_the_packaged_policy_lets_no_one_else_start(role: str) -> None:
    verdict = CedarPolicy(packaged_policy_text()).judge_start(asked(None, role))
    assert (verdict.answer, verdict.rationale) == ("deny", "no policy permits this start")


def test_a_policy_that_says_nothing_of_starts_starts_nothing_and_one_of_starts_calls_nothing() -> None:
    assert started('permit(principal, action == Action::"call", resource);') == "deny"
    assert answer(PERMIT_STARTS) == "deny"
    assert started(PERMIT_ALL) == "allow"


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ('resource == Procedure::"onboard"', "deny"),
        ('resource == Procedure::"offboard"', "allow"),
        ('resource.name == "onboard" && resource.version like "1.*"', "deny"),
        (f'resource.program_digest == "{"a" * 64}"', "deny"),
        (f'resource.program_digest == "{"b" * 64}"', "allow"),
        ('resource.tags.contains("crm")', "deny"),
        ('resource.tenant == "acme"', "allow"),
        ("context.input.amount > 100", "deny"),
        ("context.input.amount > 1000", "allow"),
        ('context.trigger.type == "call"', "deny"),
        ('context.trigger has id && context.trigger.id == "nightly"', "allow"),
        ('principal == Principal::"default/agent-1"', "deny"),
    ],
)
def test_rules_see_program_input_trigger_and_principal(condition: str, expected: str) -> None:
    text = f'{PERMIT_STARTS}forbid(principal, action == Action::"start", resource) when {{ {condition} }};'
    assert started(text, {"amount": 500}) == expected


def test_a_procedure_of_another_tenant_has_its_tenant_in_its_id() -> None:
    text = PERMIT_STARTS + 'forbid(principal, action, resource == Procedure::"onboard");'
    assert started(text) == "deny"
    assert started(text, tenant="acme") == "allow"
    assert started(text.replace('"onboard"', '"acme/onboard"'), tenant="acme") == "deny"


def test_a_rule_that_cannot_be_evaluated_denies_the_start() -> None:
    text = PERMIT_STARTS + '@id("typed") forbid(principal, action, resource) when { context.input.amount > 100 };'
    verdict = CedarPolicy(text).judge_start(asked({"amount": "much"}))
    assert verdict.answer == "deny"
    assert "typed could not be evaluated" in (verdict.rationale or "")
    assert started(text, None) == "deny"
    assert started(text, {"amount": 5}) == "allow"


def test_an_input_of_too_many_values_is_denied_only_where_a_rule_reads_it() -> None:
    large = {"items": list(range(POLICY_VALUES_MAX + 1))}
    assert started(PERMIT_STARTS, large) == "allow"
    reading = PERMIT_STARTS + 'forbid(principal, action == Action::"start", resource) when { context.input has x };'
    verdict = CedarPolicy(reading).judge_start(asked(large))
    assert (verdict.answer, verdict.rationale) == ("deny", "the input holds too many values")


async def test_a_denied_start_says_who_what_and_why() -> None:
    registration = ProcedureRegistration.made(
        system_id="default",
        recorded_at=time_at(1),
        recorded_by="worker-1",
        name="onboard",
        version="1.2.0",
        program_digest="a" * 64,
        language="python",
        description=None,
        input_schema=None,
        output_schema=None,
        state_schema=None,
        policy={
            "timeout_ms": None,
            "checkpoint_timeout_ms": None,
            "retry": {"retries": 0, "first_ms": 1, "max_ms": 1},
            "park_after": 1,
            "retention": "keep",
        },
        triggers=[],
        tags=["crm"],
    )
    text = '@id("not-at-night") forbid(principal, action, resource) when { context.trigger.type == "schedule" };'
    supervisor = PolicyFile(CedarPolicy(PERMIT_STARTS + text), None)
    by_call = Trigger(type="call", id=None)
    agent = principal_of("agent-1", "agent")
    assert (await judge_start(supervisor, agent, registration, {}, by_call)).answer == "allow"
    with pytest.raises(StartDenied, match=r"let agent-1 start onboard 1\.2\.0; found forbidden by not-at-night"):
        await judge_start(supervisor, agent, registration, {}, Trigger(type="schedule", id="nightly"))


# Calls that a run makes


def test_rules_see_the_run_that_makes_a_call() -> None:
    text = PERMIT_ALL + 'forbid(principal, action == Action::"call", resource) '
    text += 'unless { context has run && context.run.procedure == "refund" && context.run.version == "2" };'
    assert answer(text) == "deny"
    assert answer(text, run=RUN) == "allow"
    assert answer(text, run={**RUN, "procedure": "onboard"}) == "deny"


def test_an_answer_is_not_remembered_for_a_call_of_another_run() -> None:
    text = PERMIT_ALL + 'forbid(principal, action == Action::"call", resource) when { context has run && '
    policy = CedarPolicy(text + 'context.run.run_id == "r-7" && context.run.path == "3:2.1" };')
    tool = tool_of()
    found = [
        policy.judge(request_of(run={**RUN, **changes}), tool).answer
        for changes in ({"run_id": "r-8"}, {}, {"path": "1"}, {"run_id": "r-8"})
    ]
    assert found == ["allow", "deny", "allow", "allow"]
    assert policy.judge(request_of(), tool).answer == "allow"


# Mistakes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('permit(principal, action == Action::"begin", resource);', 'there is no Action::"begin"'),
        ('permit(principal, action, resource == Process::"x");', "there is no entity type Process"),
        ("permit(principal, action, resource) when { context.run.proc == 1 };", "context.run has no attribute proc"),
        ("permit(principal, action, resource) when { context.trigger.kind == 1 };", "context.trigger has no attribute"),
        ("permit(principal, action, resource) when { resource.digest == 1 };", "resource has no attribute digest"),
    ],
)
def test_what_does_not_exist_is_named(text: str, told: str) -> None:
    with pytest.raises(PolicyInvalid, match=told):
        CedarPolicy(text)


def test_a_rule_on_both_that_reads_what_only_one_has_is_warned_of() -> None:
    reading = "forbid(principal, action, resource) when { context.arguments has x };"
    (warning,) = CedarPolicy(PERMIT_ALL + reading).warnings
    assert "reads context.arguments, which only calls have, and looks at starts too" in warning
    # The warning is true.
    assert started(PERMIT_ALL + reading) == "deny"
    assert CedarPolicy('permit(principal, action == Action::"call", resource);' + reading).warnings == ()
    (warning,) = CedarPolicy(
        PERMIT_ALL + 'forbid(principal, action, resource) when { resource.version == "1" };'
    ).warnings
    assert "reads resource.version, which only starts have, and looks at calls too" in warning
    named = 'forbid(principal, action == Action::"start", resource) when { context.input has x };'
    assert CedarPolicy(PERMIT_ALL + named).warnings == ()


def test_a_rule_that_reads_the_run_without_asking_for_it_is_warned_of() -> None:
    text = 'permit(principal, action == Action::"call", resource) when { context.run.procedure == "refund" };'
    (warning,) = CedarPolicy(text).warnings
    assert "reads context.run, which a request may lack" in warning


# The command


def test_the_command_says_which_rule_decides_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.cedar"
    path.write_text(PERMIT_STARTS + '@id("small") forbid(principal, action, resource) when { context.input > 9 };')
    assert explain_start_policy(path, asked(5), as_json=False)
    told = capsys.readouterr().out
    assert "ALLOW  the run is started" in told
    assert 'procedure Procedure::"onboard" (1.2.0, crm)' in told
    assert not explain_start_policy(path, asked(10), as_json=False)
    told = capsys.readouterr().out
    assert "DENY  the run is not started" in told
    assert "forbidden by small" in told
    assert not explain_start_policy(path, asked(10, tenant="acme"), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["resource"]) == ("deny", 'Procedure::"acme/onboard"')
    assert list(document["actions"]) == ["start"]


async def test_the_command_explains_a_call_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "policy.cedar").write_text(
        PERMIT_ALL + '@id("runs-only") forbid(principal, action == Action::"call", resource) '
        'unless { context has run && context.run.procedure == "refund" && context.run.version == "2" };'
    )
    (tmp_path / "tga.toml").write_text(
        '[servers.bank]\ntransport = "http"\nbase_url = "http://127.0.0.1:9"\n'
        '[servers.bank.tools.charge]\nclass = "write"\n[policy]\nfile = "policy.cedar"\n'
    )
    settings = Settings.from_environment({"TGA_HOME": str(tmp_path)})
    who: dict[str, Any] = {"principal_id": "agent-1", "tenant": "default", "roles": ["agent"]}
    for in_run, expected in ((None, False), ("refund@2", True), ("refund", False), ("onboard@2", False)):
        found = await explain_call(
            settings, "bank", "charge", {}, principal_fields=who, intent=None, in_run=in_run, as_json=True
        )
        assert found is expected, in_run
        assert json.loads(capsys.readouterr().out)["verdict"] == ("allow" if expected else "deny")
