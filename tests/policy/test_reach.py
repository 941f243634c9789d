"""Which tools a principal is told of: never one too few, and none that the policy denies whatever is asked."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from app.core.limits import POLICY_TOOLS_AT_ONCE, PRINCIPALS_REMEMBERED
from app.domain.identity import Principal
from app.domain.policy.cedar import CedarPolicy
from app.domain.system.pins import PinState
from app.domain.tools import Tool
from app.mcp_server.tool_visibility import ToolVisibility
from tests.policy.asking import PERMIT_ALL, principal_of, request_of, tool_of

CALL = 'permit(principal, action == Action::"call", resource)'
FORBID = 'forbid(principal, action == Action::"call", resource)'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PERMIT_ALL, True),
        (f"{CALL};", True),
        ('permit(principal, action == Action::"call_unattended", resource);', False),
        (f"{CALL} when {{ context.arguments.amount < 10 }};", True),
        (f'{CALL} when {{ principal in Role::"admin" && context.arguments.amount < 10 }};', False),
        (f'{CALL} when {{ principal in Role::"agent" && context.arguments.amount < 10 }};', True),
        (f'{CALL} when {{ principal in Role::"admin" || context.arguments.amount < 10 }};', True),
        (f'{CALL} unless {{ resource.tags.contains("money") || context.arguments has x }};', False),
        (f'{CALL} unless {{ resource.tags.contains("toys") || context.arguments has x }};', True),
        (f'{CALL} unless {{ resource.tags.contains("money") && context.arguments has x }};', True),
        (f'{PERMIT_ALL} {FORBID} when {{ resource.tags.contains("money") }};', False),
        (f"{PERMIT_ALL} {FORBID} when {{ context.arguments has x }};", True),
        (f'{PERMIT_ALL} {FORBID} unless {{ principal in Role::"agent" }};', True),
        (f'{PERMIT_ALL} {FORBID} unless {{ principal in Role::"admin" }};', False),
        ("forbid(principal, action, resource) when { context has intent };", False),
        # A rule that cannot be evaluated denies; the tool is listed, so that somebody notices.
        (f"{PERMIT_ALL} {FORBID} when {{ resource.name < 3 }};", True),
    ],
)
def test_a_tool_is_listed_unless_the_policy_denies_it_whatever_is_asked(text: str, expected: bool) -> None:
    assert CedarPolicy(text).might_allow(principal_of("agent-1", "agent"), [tool_of("money")]) == [expected]


def test_what_the_policy_would_not_deny_is_always_listed() -> None:
    """Rules made by chance: whenever some arguments are not denied, the tool is listed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    plain = [
        'principal in Role::"agent"',
        'principal in Role::"admin"',
        'resource.tags.contains("money")',
        "true",
        "false",
    ]
    asking = [
        "context.arguments.amount < 5",
        "context.arguments has card",
        'context has intent && context.intent like "*a*"',
    ]

    def condition(depth: int) -> str:
        if depth == 0 or chance.random() < 0.3:
            return chance.choice(plain + asking)
        if chance.random() < 0.2:
            return f"!({condition(depth - 1)})"
        return f"({condition(depth - 1)} {chance.choice(['&&', '||'])} {condition(depth - 1)})"

    hidden = 0
    for _ in range(150):
        rules = [
            f'{chance.choice(["permit", "permit", "forbid"])}(principal, action == Action::"call", resource) '
            f"{chance.choice(['when', 'unless'])} {{ {condition(3)} }};"
            for _ in range(chance.randint(1, 4))
        ]
        policy, tool = CedarPolicy("\n".join(rules)), tool_of("money")
        principal = principal_of("agent-1", "agent")
        asked = [
            request_of({"amount": amount, **card}, principal=principal, intent=intent)
            for amount in (1, 9)
            for card in ({}, {"card": "4"})
            for intent in (None, "a rent")
        ]
        (is_listed,) = policy.might_allow(principal, [tool])
        hidden += not is_listed
        if not is_listed:
            assert {policy.judge(request, tool).answer for request in asked} == {"deny"}, rules
    assert hidden > 0


class CountingPolicy:
    """What a policy is asked, and how much of it at once."""

    digest = CedarPolicy(PERMIT_ALL).digest

    def __init__(self) -> None:
        self.asked: list[int] = []

    def might_allow(self, principal: Principal, tools: Sequence[Tool]) -> list[bool]:
        self.asked.append(len(tools))
        return [not tool.tool_name.endswith("7") for tool in tools]


class InForce:
    def __init__(self) -> None:
        self.policy = CountingPolicy()


class AllPinned:
    def state_of(self, tool: Tool) -> PinState:
        return PinState("pinned", tool.definition_digest, tool.definition_digest, None)


async def test_the_policy_is_asked_once_for_each_tool_and_principal_and_a_few_at_a_time() -> None:
    force = InForce()
    visibility = ToolVisibility(AllPinned(), force)
    tools = [tool_of(tool_name=f"t{number}") for number in range(100)]
    ann = principal_of("ann", "agent")
    for _ in range(50):
        assert len(await visibility.visible(ann, tools)) == 90
    assert sum(force.policy.asked) == 100
    assert max(force.policy.asked) <= POLICY_TOOLS_AT_ONCE
    assert len(await visibility.visible(ann, [*tools, tool_of(tool_name="new")])) == 91
    assert sum(force.policy.asked) == 101
    await visibility.visible(ann, [tool_of("approval", tool_name="t1")])  # other tags: another question
    assert sum(force.policy.asked) == 102


async def test_no_more_is_remembered_than_so_many_principals() -> None:
    force = InForce()
    visibility = ToolVisibility(AllPinned(), force)
    for number in range(PRINCIPALS_REMEMBERED + 10):
        await visibility.visible(principal_of(f"p{number}", "agent"), [tool_of()])
    before = sum(force.policy.asked)
    await visibility.visible(principal_of(f"p{PRINCIPALS_REMEMBERED + 9}", "agent"), [tool_of()])
    assert sum(force.policy.asked) == before
    await visibility.visible(principal_of("p0", "agent"), [tool_of()])
    assert sum(force.policy.asked) == before + 1


async def test_a_new_policy_is_asked_anew() -> None:
    force = InForce()
    visibility = ToolVisibility(AllPinned(), force)
    await visibility.visible(principal_of("ann", "agent"), [tool_of()])
    force.policy = CountingPolicy()
    force.policy.digest = CedarPolicy("forbid(principal, action, resource);").digest
    await visibility.visible(principal_of("ann", "agent"), [tool_of()])
    assert force.policy.asked == [1]
