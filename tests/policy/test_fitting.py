"""A rule that can never match is told of, with what to write instead; one that can is not."""

from __future__ import annotations

import pytest

from app.domain.policy.cedar import CedarPolicy
from tests.policy.asking import PERMIT_ALL, request_of, tool_of

TOOLS = [
    tool_of(),
    tool_of(tool_name="pay", secret_arguments=("/card", "/to/iban", "/a~1b", "/list/0", "/__entity")),
    tool_of(server_id="other/theirs", tenant="other"),
    tool_of(server_id="files", tool_name="admin/list"),
]


def misfits(rule: str, **more: frozenset[str]) -> list[str]:
    return CedarPolicy(PERMIT_ALL + '@id("it") ' + rule).misfits(TOOLS, **more)


def _about(resource: str) -> str:
    return f"forbid(principal, action, {resource});"


def _when(condition: str, resource: str = 'resource == Tool::"bank/pay"') -> str:
    return f"forbid(principal, action, {resource}) when {{ {condition} }};"


@pytest.mark.parametrize(
    ("named", "instead"),
    [
        ('Tool::"bank/chagre"', 'Perhaps you mean Tool::"bank/charge"'),
        ('Tool::"other/theirs/charge"', 'Write Tool::"other%2Ftheirs/charge".'),
        ('Tool::"theirs/charge"', 'Perhaps you mean Tool::"other%2Ftheirs/charge"'),
        ('Tool::"nothing like it"', "`tga servers` lists what there is"),
        ('Server::"bnak"', 'Perhaps you mean Server::"bank"'),
        ('Server::"other%2Ftheirs"', 'Write Server::"other/theirs".'),
    ],
)
def test_an_id_that_nothing_has_is_told_of_wherever_it_stands(named: str, instead: str) -> None:
    for rule in (
        _about(f"resource in {named}"),
        _about(f"resource is Tool in {named}"),
        _when(f"resource in [{named}]", "resource"),
        _when(f'principal.id == "a" || [{named}].contains(resource)', "resource"),
        _when(f"resource is Tool in {named}", "resource"),
    ):
        (told,) = misfits(rule)
        assert told.startswith(f"line 2: it names {named}, which no ")
        assert instead in told


@pytest.mark.parametrize("named", ["bank/charge", "other%2Ftheirs/charge", "files/admin/list"])
def test_an_id_that_a_tool_has_is_not_told_of_and_matches(named: str) -> None:
    rule = f'resource == Tool::"{named}"'
    assert misfits(_about(rule)) == []
    policy = CedarPolicy(PERMIT_ALL + _about(rule))
    denied = [
        policy.judge(request_of(server_id=tool.server_id, tool_name=tool.tool_name), tool).answer for tool in TOOLS
    ]
    assert sorted(denied) == ["allow", "allow", "allow", "deny"]


def test_a_server_that_has_not_told_its_tools_may_have_any() -> None:
    away = frozenset({"mcp", "other/far", "other"})
    for named in ('Tool::"mcp/any/thing"', 'Server::"mcp"', 'Server::"other/far"', 'Tool::"other%2Ffar/x"'):
        assert misfits(_about(f"resource in {named}"), undiscovered=away) == []
    (told,) = misfits(_about('resource == Tool::"other/theirs/charge"'), undiscovered=away)
    assert told.endswith('Write Tool::"other%2Ftheirs/charge".')
    (told,) = misfits(_about('resource == Tool::"other/far/x"'), undiscovered=away - {"other"})
    assert told.endswith('Write Tool::"other%2Ffar/x".')


@pytest.mark.parametrize(
    ("condition", "path"),
    [
        ('context.arguments.card == "4111"', "context.arguments.card"),
        ('context.arguments has card && context.arguments["card"] == "4111"', "context.arguments.card"),
        ('context.arguments.card.number == "4111"', "context.arguments.card.number"),
        ("context.arguments.card has number", "context.arguments.card.number"),
        ('context.arguments.to == {"iban": "x"}', "context.arguments.to"),
        ('["x"].contains(context.arguments.to.iban)', "context.arguments.to.iban"),
        ('context.arguments["a/b"] like "4*"', 'context.arguments["a/b"]'),
        ('context.arguments.list.contains("4111")', "context.arguments.list"),
        ('context.arguments["$__entity"] == "x"', "context.arguments.__entity"),
        ('context.arguments == {"card": "4111"}', "context.arguments"),
        ('{"a": context} == {"a": 1}', "context.arguments"),
    ],
)
def test_a_rule_that_reads_a_secret_argument_is_told_of(condition: str, path: str) -> None:
    for resource in ('resource == Tool::"bank/pay"', 'resource in Server::"bank"', "resource", "resource is Tool"):
        (told,) = misfits(_when(condition, resource))
        assert told.startswith(f'line 2: it reads {path}, where Tool::"bank/pay" has a secret argument: ')


@pytest.mark.parametrize(
    "condition",
    [
        "context.arguments has card",
        "context.arguments has to.iban",
        "context has arguments",
        'context.arguments.to.name == "x"',
        "context.arguments.amount > 3",
        'context.arguments.card["$redacted"].commitment == "x"',
        'context has intent && context.intent == "card"',
        'principal.id == "card"',
    ],
)
def test_a_rule_that_reads_no_secret_value_is_not_told_of(condition: str) -> None:
    assert misfits(_when(condition)) == []


def test_a_rule_on_another_tool_may_read_what_is_secret_here() -> None:
    for resource in ('resource == Tool::"bank/charge"', 'resource in Server::"files"'):
        assert misfits(_when('context.arguments.card == "4111"', resource)) == []


def test_a_rule_on_a_server_itself_is_told_of() -> None:
    (told,) = CedarPolicy(PERMIT_ALL + _about('resource == Server::"bank"')).warnings
    assert "Write resource in Server::" in told
