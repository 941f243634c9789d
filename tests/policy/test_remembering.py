"""A decision is remembered by all that the policy can read, and by nothing less."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from cedarpy import is_authorized_batch
from hypothesis import given
from hypothesis import strategies as st

from app.core.limits import POLICY_MEMORY_CONTEXT_BYTES_MAX, POLICY_MEMORY_VERDICTS_MAX
from app.domain.policy import cedar
from app.domain.policy.cedar import CedarPolicy
from app.domain.policy.question import AskedStart
from app.domain.policy.rules import arguments_read, context_read
from app.domain.tga.documents import ActionRequest
from app.domain.tools import Tool
from tests.policy.asking import PERMIT_ALL, principal_of, request_of, tool_of

# Each rule denies by another thing that a request, its principal or its tool can have.
RULES = (
    "context.arguments has amount && context.arguments.amount > 100",
    'context.arguments has "to" && context.arguments.to == "nobody"',
    'context has intent && context.intent == "harm"',
    'context has idempotency_key && context.idempotency_key like "x*"',
    'principal.id == "mallory"',
    'principal.tenant == "other"',
    'principal in Role::"worker"',
    'resource.name == "wipe"',
    'resource.class == "read"',
    'resource.tags.contains("money")',
    'context.arguments == {"amount": 1}',
)
POLICIES = [CedarPolicy(PERMIT_ALL + f"forbid(principal, action, resource) when {{ {rule} }};") for rule in RULES]

amounts = st.sampled_from([0, 1, 1.0, 101, "101", True, None, 1.5])
requests = st.builds(
    lambda amount, to, others, intent, key, principal: request_of(
        {**({} if amount is ... else {"amount": amount}), **({"to": to} if to else {}), **others},
        intent=intent,
        idempotency_key=key,
        principal=principal,
    ),
    amount=amounts | st.just(...),
    to=st.sampled_from(["", "nobody", "ada"]),
    others=st.sampled_from([{}, {"note": "a"}, {"note": "b"}]),
    intent=st.sampled_from([None, "harm", "help"]),
    key=st.sampled_from(["x1", "k1"]),
    principal=st.builds(
        lambda name, role, tenant: principal_of(name, *role, tenant=tenant),
        st.sampled_from(["ada", "mallory"]),
        st.sampled_from([(), ("worker",), ("agent",)]),
        st.sampled_from(["default", "other"]),
    ),
)
tools = st.builds(
    lambda name, kind, tags: tool_of(*tags, tool_name=name, tool_class=kind),
    st.sampled_from(["charge", "wipe"]),
    st.sampled_from(["read", "write"]),
    st.sampled_from([(), ("money",), ("approval",)]),
)


def asked_of(request: ActionRequest, tool: Tool) -> ActionRequest:
    return request.model_copy(update={"tool_name": tool.tool_name})


@given(st.sampled_from(POLICIES), requests, tools)
def test_what_is_remembered_is_what_a_policy_without_memory_says(
    policy: CedarPolicy, request: ActionRequest, tool: Tool
) -> None:
    request = asked_of(request, tool)
    fresh = CedarPolicy(policy.text).judge(request, tool)
    assert policy.judge(request, tool) == fresh
    assert policy.judge(request, tool) == fresh


@pytest.mark.parametrize("policy", POLICIES, ids=RULES)
def test_whoever_asks_for_whichever_tool_is_judged_for_what_they_are(policy: CedarPolicy) -> None:
    remembering = CedarPolicy(policy.text)
    roles: list[tuple[str, ...]] = [(), ("worker",), ("agent",)]
    for name, role, tenant in product(("ada", "mallory"), roles, ("default", "other")):
        request = request_of({}, principal=principal_of(name, *role, tenant=tenant))
        for tool_name, kind, tags in product(("charge", "wipe"), ("read", "write"), ((), ("money",), ("approval",))):
            tool = tool_of(*tags, tool_name=tool_name, tool_class=kind)
            asked = asked_of(request, tool)
            assert remembering.judge(asked, tool) == policy.verdict_of(*policy.outcomes(asked, tool))


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    asked = [0]
    ask = is_authorized_batch

    def counted(*arguments: Any) -> Any:
        asked[0] += 1
        return ask(*arguments)

    monkeypatch.setattr(cedar, "is_authorized_batch", counted)
    return asked


def test_cedar_is_asked_once_for_what_is_the_same_to_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counting(monkeypatch)
    policy = CedarPolicy(PERMIT_ALL + "forbid(principal, action, resource) when { context.arguments.amount > 9 };")
    for n in range(20):
        request = request_of({"amount": 1, "note": f"n{n}"}, idempotency_key=f"k{n}", intent=f"i{n}")
        assert policy.judge(request, tool_of()).answer == "allow"
    assert asked == [1]
    assert policy.judge(request_of({"amount": 10}), tool_of()).answer == "deny"
    assert asked == [2]


def test_what_could_not_be_evaluated_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counting(monkeypatch)
    policy = CedarPolicy(PERMIT_ALL + "forbid(principal, action, resource) when { context.arguments.amount > 9 };")
    for _ in range(3):
        assert policy.judge(request_of({}), tool_of()).answer == "deny"
    assert asked == [3]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cedar, "POLICY_MEMORY_VERDICTS_MAX", 10)
    policy = CedarPolicy(PERMIT_ALL + "forbid(principal, action, resource) when { context.arguments.amount > 9 };")
    for n in range(50):
        policy.judge(request_of({"amount": -n}), tool_of())
    assert len(policy._judged) == 10
    policy = CedarPolicy(PERMIT_ALL + 'forbid(principal, action, resource) when { context.arguments.text == "" };')
    assert policy.judge(request_of({"text": "x" * POLICY_MEMORY_CONTEXT_BYTES_MAX}), tool_of()).answer == "allow"
    assert not policy._judged
    assert POLICY_MEMORY_VERDICTS_MAX * (POLICY_MEMORY_CONTEXT_BYTES_MAX + 2_048) < 2**24


@pytest.mark.parametrize(
    ("condition", "arguments", "context"),
    [
        ("true", frozenset(), frozenset()),
        ("context.arguments.a == 1", {"a"}, {"arguments"}),
        ("context has intent && context.intent == principal.id", frozenset(), {"intent"}),
        ("context.arguments == {}", None, {"arguments"}),
        ("context == {}", None, None),
        ("[context].contains(context)", None, None),
    ],
)
def test_what_rules_read(condition: str, arguments: set[str] | None, context: set[str] | None) -> None:
    rules = CedarPolicy(f"permit(principal, action, resource) when {{ {condition} }};").rules
    assert arguments_read(rules) == arguments
    assert context_read(rules) == context


def test_a_request_for_another_tool_is_never_taken_for_one_that_was_allowed() -> None:
    policy = CedarPolicy(PERMIT_ALL)
    assert policy.judge(request_of(), tool_of()).answer == "allow"
    assert policy.judge(request_of(tool_name="wipe"), tool_of()).answer == "deny"
    assert policy.judge(request_of(server_id="other"), tool_of()).answer == "deny"


# Each rule denies by another thing that a start can have.
START_RULES = (
    'context.input has "to" && context.input.to == "nobody"',
    'context.trigger.type == "event"',
    'context.trigger has id && context.trigger.id == "e-2"',
    'principal.id == "mallory"',
    'principal.tenant == "other"',
    'principal in Role::"worker"',
    'resource.name == "wipe"',
    'resource.version == "2"',
    'resource.program_digest like "b*"',
    'resource.tags.contains("money")',
)
START_POLICIES = [
    CedarPolicy(PERMIT_ALL + f"forbid(principal, action, resource) when {{ {rule} }};") for rule in START_RULES
]


def start_of(given: Any = None, name: str = "ada", *roles: str, tenant: str = "default", **fields: Any) -> AskedStart:
    said = {"procedure": "onboard", "version": "1", "program_digest": "a" * 64, "tags": [], "trigger_type": "call"}
    return AskedStart(principal=principal_of(name, *roles, tenant=tenant), input=given, **{**said, **fields})


STARTS = [
    start_of(),
    start_of({"to": "nobody"}),
    start_of({"to": "ada"}),
    start_of(None, "mallory"),
    start_of(None, "ada", "worker"),
    start_of(None, "ada", "agent", tenant="other"),
    start_of(procedure="wipe"),
    start_of(version="2"),
    start_of(program_digest="b" * 64),
    start_of(tags=["money"]),
    start_of(trigger_type="event", trigger_id="e-1"),
    start_of(trigger_type="schedule", trigger_id="e-2"),
]


@pytest.mark.parametrize("policy", START_POLICIES, ids=START_RULES)
def test_starts_are_judged_for_what_they_are_in_whatever_order(policy: CedarPolicy) -> None:
    fresh = [CedarPolicy(policy.text).judge_start(start) for start in STARTS]
    remembering = CedarPolicy(policy.text)
    assert [remembering.judge_start(start) for start in STARTS] == fresh
    assert [remembering.judge_start(start) for start in reversed(STARTS)] == fresh[::-1]
    assert {verdict.answer for verdict in fresh} == {"allow", "deny"}


def test_cedar_is_asked_once_for_starts_that_are_the_same_to_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counting(monkeypatch)
    policy = CedarPolicy(PERMIT_ALL)
    for n in range(20):
        assert policy.judge_start(start_of({"n": n}, trigger_type="event", trigger_id=f"e{n}")).answer == "allow"
    assert asked == [1]
    assert policy.judge_start(start_of(version="2")).answer == "allow"
    assert asked == [2]
