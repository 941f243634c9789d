"""Allow, ask or deny: and never an allow that Cedar did not plainly say."""

from __future__ import annotations

import json
from typing import Any

import cedarpy
import pytest

from app.core.digest import digest_of_bytes
from app.domain.identity import Principal
from app.domain.policy import cedar
from app.domain.policy.cedar import CedarPolicy
from app.gateway.policy_file import packaged_policy_text
from tests.policy.asking import PERMIT_ALL, answer, judged, principal_of, request_of, tool_of
from tests.traces import action_request, supervisor_decision

CALL = '@id("may-call") permit(principal, action == Action::"call", resource);\n'
UNATTENDED = '@id("alone") permit(principal, action == Action::"call_unattended", resource);\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL + UNATTENDED, "allow"),
        (PERMIT_ALL, "allow"),
        (CALL, "ask"),
        (UNATTENDED, "deny"),
        ("forbid(principal, action, resource);", "deny"),
        (PERMIT_ALL + 'forbid(principal, action == Action::"call", resource);', "deny"),
        (PERMIT_ALL + 'forbid(principal, action == Action::"call_unattended", resource);', "ask"),
        ('permit(principal == Principal::"default/agent-1", action, resource);', "allow"),
        ('permit(principal == Principal::"other/agent-1", action, resource);', "deny"),
        ('permit(principal in Role::"agent", action, resource);', "allow"),
        ('permit(principal in Role::"admin", action, resource);', "deny"),
        ('permit(principal, action, resource == Tool::"bank/charge");', "allow"),
        ('permit(principal, action, resource in Server::"bank");', "allow"),
        ('permit(principal, action, resource in Server::"shop");', "deny"),
        ('permit(principal, action, resource) when { resource.class == "write" };', "allow"),
        ('permit(principal, action, resource) when { resource.tags.contains("money") };', "allow"),
        ("permit(principal, action, resource) when { resource.tenant == principal.tenant };", "allow"),
        ('permit(principal, action, resource) when { principal.roles.contains("agent") };', "allow"),
        ("permit(principal, action, resource) when { context.arguments.amount <= 100 };", "allow"),
        ("permit(principal, action, resource) when { context.arguments.amount < 100 };", "deny"),
        ('permit(principal, action, resource) when { context has intent && context.intent like "*rent*" };', "allow"),
        ('permit(principal, action, resource) when { context.idempotency_key == "key-1" };', "allow"),
        ("permit(principal, action, resource) when { context has tool_definition_digest };", "deny"),
    ],
)
def test_the_answer_follows_from_both_actions(text: str, expected: str) -> None:
    principal = {"principal_id": "agent-1", "tenant": "default", "roles": ["agent"]}
    assert answer(text, {"amount": 100}, "money", principal=principal, intent="the rent is due") == expected


def test_the_packaged_policy_asks_for_tools_tagged_approval_and_allows_others() -> None:
    text = packaged_policy_text()
    assert answer(text) == "allow"
    assert answer(text, {}, "money") == "allow"
    assert answer(text, {}, "money", "approval") == "ask"


def test_the_packaged_examples_are_valid_policies() -> None:
    text = packaged_policy_text()
    start = text.index("// Four eyes")
    examples = "\n".join(
        line.removeprefix("// ")
        for line in text[start:].splitlines()
        if line.removeprefix("// ").startswith(("@id", "forbid", "permit", "when", "unless"))
    )
    policy = CedarPolicy(text + examples)
    assert len(policy.rules) == 7
    assert policy.judge(request_of({"amount": 101}), tool_of()).answer == "ask"
    assert policy.judge(request_of({"amount": 100}), tool_of()).answer == "allow"


def test_a_verdict_names_the_policies_that_decided_and_the_digest_of_the_text() -> None:
    text = CALL + "permit(principal, action, resource) when { 1 == 2 };\n" + UNATTENDED
    verdict = judged(text)
    assert verdict.policy_digest == digest_of_bytes(text.encode())
    assert verdict.policy_ids == ("may-call", "alone")
    assert verdict.rationale is None
    forbidden = judged(text + "forbid(principal, action, resource);")
    assert forbidden.policy_ids == ("policy3",)
    assert forbidden.rationale == "forbidden by policy3"
    silent = judged("forbid(principal, action, resource) when { false };")
    assert silent.policy_ids == ()
    assert silent.rationale == "no policy permits this call"


def test_ids_fit_the_record_whatever_the_file_calls_its_policies() -> None:
    texts = [f'@id("{"é " * 200}{n}") permit(principal, action, resource);' for n in range(1)]
    texts += [f'@id("p {n}") permit(principal, action, resource);' for n in range(100)]
    verdict = judged("".join(texts))
    assert verdict.answer == "allow"
    assert len(verdict.policy_ids) == 64
    request = action_request(1)
    decision = supervisor_decision(request, policy_ids=list(verdict.policy_ids), policy_digest=verdict.policy_digest)
    assert decision.policy_ids[1] == "p-0"
    forbids = "".join(f'@id("{"x" * 124}{n}") forbid(principal, action, resource);' for n in range(100))
    denied = judged(forbids)
    supervisor_decision(request, decision="DENY", policy_ids=list(denied.policy_ids), rationale=denied.rationale)


# What makes a policy fail, and what an attacker can choose of it: a value of another kind, a missing one, an overflow.
FAILING = [
    ("context.arguments.amount > 100", {"amount": "1"}),
    ("context.arguments.amount > 100", {"amount": None}),
    ("context.arguments.amount > 100", {"amount": 1.5}),
    ("context.arguments.amount > 100", {"amount": 1e300}),
    ("context.arguments.amount > 100", {"amount": [101]}),
    ("context.arguments.amount > 100", {}),
    ("context.arguments.amount + 9223372036854775807 > 100", {"amount": 9007199254740991}),
    ("context.arguments.to.name == 1", {"to": "x"}),
    ('context.arguments.to.name == "eve"', {"to": None}),
    ('context.arguments.to like "*eve*"', {"to": {"__entity": "eve"}}),
    ("ip(context.arguments.to).isLoopback()", {"to": "localhost"}),
    ('context.arguments.amount.greaterThan(decimal("1.0"))', {"amount": 2}),
    ('context.arguments.amount.greaterThan(decimal("1.0"))', {"amount": 1.00001}),
    ('context.intent like "*eve*"', {}),
]


@pytest.mark.parametrize(("condition", "arguments"), FAILING)
def test_a_forbid_that_cannot_be_evaluated_denies(condition: str, arguments: dict[str, Any]) -> None:
    forbid = f'@id("limit") forbid(principal, action, resource) when {{ {condition} }};'
    verdict = judged(PERMIT_ALL + forbid, arguments)
    assert verdict.answer == "deny"
    assert list(verdict.policy_ids) == ["limit"]
    assert verdict.rationale is not None
    assert verdict.rationale.startswith("limit could not be evaluated: ")


@pytest.mark.parametrize(("condition", "arguments"), FAILING)
def test_a_policy_on_unattended_calls_that_cannot_be_evaluated_asks(condition: str, arguments: dict[str, Any]) -> None:
    for effect in ("forbid", "permit"):
        rule = f'{effect}(principal, action == Action::"call_unattended", resource) when {{ {condition} }};'
        assert answer(PERMIT_ALL + rule, arguments) == "ask"


def test_a_permit_that_cannot_be_evaluated_denies_although_another_permits() -> None:
    assert answer(PERMIT_ALL + "permit(principal, action, resource) when { context.arguments.nothing };") == "deny"


def test_a_rationale_quotes_no_argument() -> None:
    card = "4111-1111"
    for condition in (
        'decimal(context.arguments.x).lessThan(decimal("1.0"))',
        "ip(context.arguments.x).isLoopback()",
        'datetime(context.arguments.x) > datetime("2024-01-01")',
        "principal.getTag(context.arguments.x) == 1",
        "context.arguments.x > 1",
        "context.arguments.y.foo",
        "context.arguments.z + 9223372036854775807 > 1",
    ):
        text = PERMIT_ALL + f"forbid(principal, action, resource) when {{ {condition} }};"
        verdict = judged(text, {"x": card, "y": 41111111.000001, "z": 41111111})
        assert verdict.answer == "deny"
        assert "4111" not in str(verdict.rationale)


def _answering(monkeypatch: pytest.MonkeyPatch, *results: dict[str, Any]) -> None:
    monkeypatch.setattr(cedar, "is_authorized_batch", lambda *_: [cedarpy.AuthzResult(result) for result in results])


ALLOWED = {"decision": "Allow", "diagnostics": {"reason": ["policy0"], "errors": []}}


@pytest.mark.parametrize(
    "strange",
    [
        {"decision": "NoDecision", "diagnostics": {}},
        {"decision": "NoDecision", "diagnostics": {"errors": ["failed to build request: 4111"]}},
        {"decision": "Perhaps", "diagnostics": {"reason": ["policy0"]}},
        {"diagnostics": {"reason": ["policy0"]}},
        {"decision": "Allow", "diagnostics": {"reason": []}},
        {"decision": "Allow"},
        {"decision": "Allow", "diagnostics": {"reason": ["policy7"]}},
        {"decision": "Allow", "diagnostics": {"reason": ["policy0"], "errors": ["something new"]}},
        {"decision": "Allow", "diagnostics": {"reason": ["policy1"]}},
        {"decision": "Allow", "diagnostics": {"reason": ["policy0"], "errors": None}},
    ],
)
def test_whatever_else_the_engine_says_is_no_allow(monkeypatch: pytest.MonkeyPatch, strange: dict[str, Any]) -> None:
    text = PERMIT_ALL + "forbid(principal, action, resource) when { false };"
    _answering(monkeypatch, ALLOWED, ALLOWED)
    assert judged(text).answer == "allow"
    _answering(monkeypatch, strange, ALLOWED)
    denied = judged(text)
    assert denied.answer == "deny"
    assert "4111" not in str(denied.rationale)
    _answering(monkeypatch, ALLOWED, strange)
    assert judged(text).answer != "allow"
    _answering(monkeypatch, strange)
    assert CedarPolicy(text).judge_approval(request_of(), tool_of(), principal_of("ada")).answer == "deny"


def test_fewer_answers_than_questions_are_no_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, ALLOWED)
    assert answer(PERMIT_ALL) == "deny"


class PanicException(BaseException):
    """As the extension raises it: no Exception."""


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError, PanicException])
def test_an_engine_that_fails_denies(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def fail(*_: Any) -> Any:
        raise error("4111")

    policy = CedarPolicy(PERMIT_ALL)
    monkeypatch.setattr(cedar, "is_authorized_batch", fail)
    verdict = policy.judge(request_of(), tool_of())
    assert verdict.answer == "deny"
    assert "4111" not in str(verdict.rationale)
    assert policy.judge_approval(request_of(), tool_of(), principal_of("ada")).answer == "deny"


def test_an_interrupt_is_not_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    policy = CedarPolicy(PERMIT_ALL)
    monkeypatch.setattr(cedar, "is_authorized_batch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        policy.judge(request_of(), tool_of())


def test_a_request_for_another_tool_is_denied() -> None:
    policy = CedarPolicy(PERMIT_ALL)
    assert policy.judge(request_of(), tool_of(tool_name="balance")).answer == "deny"
    assert policy.judge_approval(request_of(), tool_of(server_id="shop"), principal_of("ada")).answer == "deny"


FOUR_EYES = (
    '@id("four-eyes") forbid(principal, action == Action::"approve", resource)\n'
    "when { context.requester == principal };\n"
)


def _approval(text: str, approver: Principal, **fields: Any) -> str:
    return CedarPolicy(text).judge_approval(request_of(**fields), tool_of(), approver).answer


def test_four_eyes_nobody_approves_their_own_request() -> None:
    for text in (FOUR_EYES, PERMIT_ALL + FOUR_EYES, packaged_policy_text() + FOUR_EYES):
        assert _approval(text, principal_of("agent-1", "supervisor")) == "deny"
        assert _approval(text, principal_of("ada", "supervisor")) == "allow"
        assert _approval(text, principal_of("agent-1", "supervisor", tenant="other")) == "allow"


def test_four_eyes_holds_whatever_roles_were_gained_since() -> None:
    asked = {"principal_id": "eve", "tenant": "default", "roles": ["agent"]}
    verdict = CedarPolicy(FOUR_EYES).judge_approval(
        request_of(principal=asked), tool_of(), principal_of("eve", "supervisor", "agent")
    )
    assert verdict.answer == "deny"
    assert list(verdict.policy_ids) == ["four-eyes"]
    assert verdict.rationale == "forbidden by four-eyes"


def test_an_approval_is_allowed_where_the_policy_says_nothing() -> None:
    for text in (packaged_policy_text(), CALL, 'forbid(principal, action == Action::"call", resource);'):
        assert _approval(text, principal_of("ada")) == "allow"


def test_an_approval_is_denied_where_the_policy_forbids_or_cannot_be_evaluated() -> None:
    assert _approval("forbid(principal, action, resource);", principal_of("ada")) == "deny"
    failing = 'forbid(principal, action == Action::"approve", resource) when { context.arguments.amount > 9 };'
    assert _approval(PERMIT_ALL + failing, principal_of("ada"), arguments={"amount": None}) == "deny"
    assert _approval(PERMIT_ALL + failing, principal_of("ada"), arguments={"amount": 9}) == "allow"


def test_a_permit_that_names_approve_makes_it_needed() -> None:
    text = PERMIT_ALL.replace("action,", 'action == Action::"call",') + (
        'permit(principal in Role::"supervisor", action in [Action::"approve"], resource);'
    )
    assert _approval(text, principal_of("ada", "supervisor")) == "allow"
    assert _approval(text, principal_of("ada", "operator")) == "deny"


def test_the_requester_is_known_by_its_roles_to_rules_on_approvals() -> None:
    text = 'forbid(principal, action == Action::"approve", resource) when { context.requester in Role::"agent" };'
    asked = {"principal_id": "eve", "tenant": "default", "roles": ["agent"]}
    assert _approval(text, principal_of("ada"), principal=asked) == "deny"
    assert _approval(text, principal_of("ada")) == "allow"


def test_no_two_principals_and_no_two_tools_are_one() -> None:
    text = 'permit(principal == Principal::"a/b/c", action, resource);'
    assert answer(text, principal={"principal_id": "b/c", "tenant": "a"}) == "allow"
    assert answer(text, principal={"principal_id": "c", "tenant": "a/b"}) == "deny"
    assert answer(text.replace("a/b/c", "a%2Fb/c"), principal={"principal_id": "c", "tenant": "a/b"}) == "allow"
    assert answer(text.replace("a/b/c", "a%2Fb/c"), principal={"principal_id": "c", "tenant": "a%2Fb"}) == "deny"
    policy = CedarPolicy('permit(principal, action, resource == Tool::"a/b/c");')
    nested = tool_of(server_id="a/b", tool_name="c")
    assert policy.judge(request_of(server_id="a/b", tool_name="c"), nested).answer == "deny"


def test_names_with_quotes_and_escapes_are_names_and_nothing_more() -> None:
    name = 'x"||true||"\\u{22}'
    text = f"permit(principal == Principal::{json.dumps('default/' + name)}, action, resource);"
    assert answer(text, principal={"principal_id": name, "tenant": "default"}) == "allow"
    assert (
        answer(
            'permit(principal == Principal::"default/x", action, resource);',
            principal={"principal_id": name, "tenant": "default"},
        )
        == "deny"
    )
