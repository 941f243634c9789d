"""A policy text that would not do what it says is refused, with the line; none can end the process."""

from __future__ import annotations

import pytest

from app.core.errors import PolicyInvalid
from app.core.limits import POLICY_BYTES_MAX, POLICY_NESTING_MAX, POLICY_OPERATORS_MAX
from app.domain.policy.cedar import CedarPolicy
from app.domain.policy.explaining import explain
from tests.policy.asking import PERMIT_ALL, request_of, tool_of

GOOD = '// a comment; with a semicolon\n@id("one;")\npermit(principal, action, resource);\n\n'  # four lines


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("permit(principal, action, resource) when {\n context.a >\n};", 7, "unexpected token `}`"),
        ("permit(principal, action, resource)\n", 5, "unexpected end of input"),
        ("perm(principal, action, resource);", 5, "invalid policy effect: perm"),
        ("permit(principal, action, resource) when {\n foo(1)\n};", 6, "`foo` is not a valid function"),
        ("permit(principal, action, resource) when {\n principal.a()\n};", 6, "`a` is not a valid method"),
        ("permit(principal,\n action,\n thing);", 7, "invalid variable in the policy scope: thing"),
        ("permit(principal, action, resource)\nwhen { context.a = 3 };", 5, "'=' is not a valid operator"),
        ('permit(principal, action, resource)\n when { context.a ==\n "unfinished };', 7, "invalid token"),
        ("permit(principal, action, resource);\n;", 6, "unexpected token `;`"),
        ("permit(principal, action, resource)\n/* no such comments */;", 6, "unexpected token `/`"),
        ("permit(principal, action,\n resource == ?resource);", 5, "has a slot"),
    ],
)
def test_what_is_not_cedar_is_refused_at_its_line(text: str, line: int, told: str) -> None:
    with pytest.raises(PolicyInvalid) as refused:
        CedarPolicy(GOOD + text, name="p.cedar")
    assert refused.value.what.startswith(f"p.cedar, line {line}: ")
    assert told in refused.value.what


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ('forbid(principal, action == Action::"cal", resource);', 'there is no Action::"cal"; there is call, '),
        ('forbid(principal, action in [Action::"call", Action::"all"], resource);', 'no Action::"all"'),
        ('forbid(principal in Role::"agents", action, resource);', 'there is no Role::"agents"'),
        ('forbid(principal is Principal in Role::"agents", action, resource);', 'there is no Role::"agents"'),
        ('forbid(principal == User::"eve", action, resource);', "there is no entity type User"),
        ("forbid(principal is User, action, resource);", "principal is never a User"),
        ('forbid(principal == Tool::"bank/charge", action, resource);', "principal is never a Tool"),
        ('forbid(principal, action, resource in Role::"agent");', "resource is never a Role"),
        ("forbid(principal, action, resource) when { resource is Tol };", "there is no entity type Tol"),
        ('forbid(principal, action, resource) when { [Role::"x"].contains(principal) };', 'no Role::"x"'),
        ("forbid(principal, action, resource) when { principal has name };", "principal has no attribute name"),
        ('forbid(principal, action, resource) when { resource.tag == "x" };', "resource has no attribute tag"),
        ("forbid(principal, action, resource) when { context has amount };", "context has no attribute amount"),
        (
            'forbid(principal, action == Action::"approve", resource) when { context.requester.name == "x" };',
            "principal has no attribute name",
        ),
        (
            'forbid(principal, action, resource) when { context.arguments has "__entity" };',
            'the argument __entity stands in the context as "$__entity"',
        ),
        ('@id("one;") forbid(principal, action, resource);', "the id one; is taken by the policy at line 2"),
        ('@id("policy0") permit(principal, action, resource);\npermit(principal, action, resource);', None),
        ('@id("policy2") permit(principal, action, resource);\npermit(principal, action, resource);', "id policy2"),
    ],
)
def test_a_slip_that_would_never_match_is_refused(rule: str, told: str | None) -> None:
    if told is None:
        assert [one.name for one in CedarPolicy(GOOD + rule).rules] == ["one;", "policy0", "policy2"]
        return
    with pytest.raises(PolicyInvalid) as refused:
        CedarPolicy(GOOD + rule)
    assert told in refused.value.what
    assert "line 5: " in refused.value.what or "line 6: " in refused.value.what


def test_all_that_exists_can_be_named() -> None:
    policy = CedarPolicy(
        """
        permit(principal in Role::"worker", action in [Action::"call", Action::"call_unattended"], resource)
        when { principal.id == "a" || principal.tenant == "b" || principal.roles.contains("agent") };
        forbid(principal is Principal, action == Action::"approve", resource is Tool in Server::"x")
        when { context.requester == principal || context.requester.tenant != principal.tenant }
        unless { context.arguments.x == Json::"null" || context.arguments["$__entity"] has y.z };
        permit(principal == Principal::"a/b", action, resource == Tool::"x/y")
        when { context has intent && context.intent like "a*" && [resource.server, resource.name].contains("z") };
        """
    )
    assert [rule.effect for rule in policy.rules] == ["permit", "forbid", "permit"]
    assert [rule.line for rule in policy.rules] == [2, 4, 7]
    assert list(policy.warnings) == []


def test_a_rule_that_denies_more_than_it_seems_to_is_warned_of() -> None:
    policy = CedarPolicy(
        PERMIT_ALL
        + "forbid(principal, action, resource) when { context.requester == principal };\n"
        + '@id("why") permit(principal, action == Action::"call", resource) when { context.intent == "x" };'
    )
    requester, intent = policy.warnings
    assert requester.startswith("line 2: policy1 reads context.requester, which only approve has")
    assert intent.startswith("line 3: why reads context.intent, which a request may lack")


@pytest.mark.parametrize("text", ["", "\n\n", "// nothing but a comment\n"])
def test_a_text_without_policies_is_refused(text: str) -> None:
    with pytest.raises(PolicyInvalid, match="has no policy"):
        CedarPolicy(text)


def _with_condition(condition: str) -> str:
    return f"permit(principal, action, resource) when {{ {condition} }};"


# Each of these, unbounded, overflows the stack of Cedar's parser.
OVERFLOWING = {
    "parentheses": "(" * 20_000 + "true" + ")" * 20_000,
    "sets": "[" * 20_000 + "]" * 20_000 + " == 1",
    "records": "{a: " * 20_000 + "1" + "}" * 20_000 + " == 1",
    "conditionals": "if true then true else " * 10_000 + "true",
    "conjunctions": "true && " * 30_000 + "true",
    "sums": "1 + " * 60_000 + "1 == 1",
    "attributes": "context" + ".a" * 100_000,
    "indexes": "context" + '["a"]' * 40_000,
    "methods": "context" + ".a.contains(1)" * 15_000,
    "tests": "context has a" + ".a" * 100_000,
    "unbalanced": "((((" * 20_000,
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_text_that_would_overflow_the_parser_is_refused_before_it(name: str) -> None:
    with pytest.raises(PolicyInvalid, match=r"line 2: .*(nest too deeply|too many operators)"):
        CedarPolicy(PERMIT_ALL + _with_condition(OVERFLOWING[name]))


@pytest.mark.parametrize(
    "condition",
    [
        "(" * (POLICY_NESTING_MAX - 1) + "true" + ")" * (POLICY_NESTING_MAX - 1),
        "true && " * POLICY_OPERATORS_MAX + "true",
        "if true then true else " * POLICY_OPERATORS_MAX + "true",
        "context.arguments has a" + ".a" * (POLICY_OPERATORS_MAX - 4) + " || true",
        "true || context.arguments" + ".a" * (POLICY_OPERATORS_MAX - 2),
        "[" + ", ".join(f'Principal::"default/{n}"' for n in range(5_000)) + "].contains(principal) || true",
    ],
)
def test_what_is_within_the_bounds_is_judged_and_explained(condition: str) -> None:
    policy = CedarPolicy(_with_condition(condition))
    explanation = explain(policy, request_of(), tool_of())
    assert explanation.verdict == policy.judge(request_of(), tool_of())
    assert explanation.verdict.answer == "allow"
    assert [standing for _, standing in explanation.standings[0]] == ["decides"]


def test_what_its_json_form_cannot_hold_is_refused() -> None:
    condition = "{a: " * 62 + "true && " * (POLICY_OPERATORS_MAX - 10) + "true" + "}" * 62 + " == 1"
    with pytest.raises(PolicyInvalid, match="nests too deeply"):
        CedarPolicy(_with_condition(condition))


def test_a_text_beyond_the_limit_is_refused() -> None:
    CedarPolicy(PERMIT_ALL + "//" + "x" * (POLICY_BYTES_MAX - len(PERMIT_ALL) - 2))
    with pytest.raises(PolicyInvalid, match="too large"):
        CedarPolicy(PERMIT_ALL + "//" + "é" * (POLICY_BYTES_MAX // 2))


@pytest.mark.parametrize("text", ["\ud800", "\x00", "\ufeff" + PERMIT_ALL, PERMIT_ALL + "\ud800"])
def test_strange_characters_are_refused(text: str) -> None:
    with pytest.raises(PolicyInvalid):
        CedarPolicy(text)


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ('resource.class == "wirte"', ["'wirte'"]),
        ('"READ" != resource.class', ["'READ'"]),
        ('principal.roles.contains("admn")', ["'admn'"]),
        ('principal.roles.containsAny(["admin", "boss", "agents"])', ["'boss'", "'agents'"]),
        ('["read", "none"].contains(resource.class)', ["'none'"]),
        ('resource.class == "write" && principal.roles.containsAll(["admin"])', []),
        ('resource.tags.contains("whatever") && resource.name == "x" && "a" == "b"', []),
        ("resource.class == resource.name", []),
    ],
)
def test_a_comparison_with_what_an_attribute_never_is_is_warned_of(condition: str, told: list[str]) -> None:
    policy = CedarPolicy(f"forbid(principal, action, resource) when {{ {condition} }};")
    assert [next(part for part in told if part in warning) for warning in policy.warnings] == told
    assert all(warning.startswith("line 1: policy0 compares ") for warning in policy.warnings)
