"""What an agent writes in its arguments cannot become anything to the policy but those arguments."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.canonical import canonical_bytes, parse_object
from app.core.errors import InputTooLarge
from app.core.limits import DEPTH_MAX, DOCUMENT_BYTES_MAX, KEYS_MAX, POLICY_VALUES_MAX
from app.domain.policy.cedar import CedarPolicy
from app.domain.policy.encoding import cedar_value
from tests.policy.asking import PERMIT_ALL, answer, judged, request_of, tool_of

ESCAPES = ("__entity", "__extn", "__expr", "$__entity", "$$__extn", "__entity__", "$null", "type", "id", "fn", "arg")
WORDS = ("Role", "admin", "Principal", "default/agent-1", "Json", "null", "decimal", "1.5", "ip", "1 == 1", "eve", "")
KEYS = st.sampled_from((*ESCAPES, "x", "amount", "")) | st.text(max_size=3)
NUMBERS = (
    st.integers(-(2**53) + 1, 2**53 - 1)
    | st.integers(98, 103)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        (0.1, 100.5, 100.0, 100.00001, -0.0, 1e-7, 1e300, 922337203685477.6, 99999999999999.5, 2.0**63, 1e21)
    )
)
PLAIN = st.none() | st.booleans() | NUMBERS | st.sampled_from(WORDS) | st.text(max_size=4)
HOSTILE_OBJECTS = st.sampled_from(
    (
        {"__entity": {"type": "Role", "id": "admin"}},
        {"__entity": {"type": "Json", "id": "null"}},
        {"__entity": {"type": "Role", "id": "admin"}, "x": 1},
        {"__extn": {"fn": "decimal", "arg": "1.5"}},
        {"__extn": {"fn": "ip", "arg": "127.0.0.1"}},
        {"__extn": {"fn": "unknown", "arg": "x"}},
        {"__expr": "true"},
        {"type": "Role", "id": "admin"},
        {"fn": "decimal", "arg": "1.5"},
    )
)
VALUES = st.recursive(
    PLAIN | HOSTILE_OBJECTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)


def _meaning(value: Any) -> Any:
    """What two JSON values have in common if the policy cannot tell them apart: numbers by value, arrays as sets."""
    match value:
        case bool() | None | str():
            return (type(value).__name__, value)
        case int() | float():
            return ("number", value)
        case list():
            return ("array", frozenset(_meaning(item) for item in value))
    return ("object", frozenset((key, _meaning(item)) for key, item in value.items()))


def _literal(encoded: Any) -> str:
    """The Cedar expression of a value in Cedar's JSON form, written without knowledge of how it came about."""
    if isinstance(encoded, dict):
        if encoded.keys() == {"__entity"}:
            return f"{encoded['__entity']['type']}::{_text(encoded['__entity']['id'])}"
        if encoded.keys() == {"__extn"}:
            return f"{encoded['__extn']['fn']}({_text(encoded['__extn']['arg'])})"
        return "{" + ", ".join(f"{_text(key)}: {_literal(value)}" for key, value in encoded.items()) + "}"
    if isinstance(encoded, list):
        return "[" + ", ".join(_literal(item) for item in encoded) + "]"
    if isinstance(encoded, str):
        return _text(encoded)
    return json.dumps(encoded)


def _text(text: str) -> str:
    return '"' + "".join(f"\\u{{{ord(char):x}}}" for char in text) + '"'


def _is_sendable(arguments: dict[str, Any]) -> bool:
    """Whether the gateway's own parser lets it in: no NUL, no unsafe number."""
    try:
        parse_object(json.dumps(arguments))
    except Exception:
        return False
    return True


@given(VALUES, VALUES)
@settings(max_examples=150, deadline=None)
def test_values_are_equal_to_the_policy_if_and_only_if_they_are_equal(one: Any, other: Any) -> None:
    """So no value passes for another one, and none is lost."""
    for left, right in ((one, one), (one, other)):
        text = f"permit(principal, action, resource) when {{ context.arguments.x == {_literal(cedar_value(right))} }};"
        expected = "allow" if _meaning(left) == _meaning(right) else "deny"
        assert answer(text, {"x": left}) == expected


@given(ARGUMENTS)
@settings(max_examples=150, deadline=None)
def test_no_argument_is_an_entity_of_the_gateway(arguments: dict[str, Any]) -> None:
    """Rules that only an entity or an extension value can satisfy: nothing an agent sends does."""
    policies = [
        f"permit(principal, action, resource) when {{ context.arguments has {name} && {test} }};"
        for name in ("x", "amount", '"__entity__"')
        for attribute in (f"context.arguments[{name if name.startswith(chr(34)) else chr(34) + name + chr(34)}]",)
        for test in (
            f'{attribute} == Role::"admin"',
            f'{attribute} in Role::"admin"',
            f'[principal, Role::"admin", Tool::"bank/charge"].contains({attribute})',
            f"{attribute} == principal",
            f"{attribute} is Role",
            f"{attribute}.isLoopback()",
        )
    ]
    for text in policies:
        assert answer(text, arguments) == "deny"


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@given(ARGUMENTS, st.sampled_from(sorted(COMPARE)))
@settings(max_examples=200, deadline=None)
def test_a_limit_on_a_number_is_passed_only_by_whole_numbers_within_it(arguments: dict[str, Any], sign: str) -> None:
    text = PERMIT_ALL + f"forbid(principal, action, resource) when {{ context.arguments.amount {sign} 100 }};"
    amount = arguments.get("amount")
    is_whole = isinstance(amount, int | float) and not isinstance(amount, bool) and float(amount).is_integer()
    passes = is_whole and abs(amount) < 2**63 and not COMPARE[sign](amount, 100)  # type: ignore[arg-type]
    assert answer(text, arguments) == ("allow" if passes else "deny")


FORBIDS = (
    'context.arguments has x && context.arguments.x == "eve"',
    "context.arguments.x > 100",
    'context.arguments.x like "*eve*"',
    'context.arguments.x.contains(Json::"null")',
    'context.arguments.x.amount == decimal("1.5")',
    'context.arguments has "$__entity"',
    "context.arguments.x has amount.x",
    'context.arguments == {"x": 1}',
    "context == {}",
    "[context.arguments].contains({})",
    "context.arguments.x == context.arguments.amount",
)


@given(ARGUMENTS, st.sampled_from(FORBIDS))
@settings(max_examples=250, deadline=None)
def test_what_no_rule_names_changes_nothing_and_what_one_names_is_seen(arguments: dict[str, Any], test: str) -> None:
    """The arguments that rules do not look at are not put to Cedar; with a rule that looks at all, they are."""
    forbid = f"forbid(principal, action, resource) when {{ {test} }};"
    looks_at_all = 'forbid(principal, action, resource) when { context == {"never": true} };'
    assert answer(PERMIT_ALL + forbid, arguments) == answer(PERMIT_ALL + forbid + looks_at_all, arguments)


@pytest.mark.parametrize(
    "condition",
    [
        "context == WHOLE",
        "[context].contains(WHOLE)",
        "{here: context} == {here: WHOLE}",
        "(if true then context else {}) == WHOLE",
        "(if true then context else {}).arguments.x == 1",
        "{left: context, attr: 1} == {left: WHOLE, attr: 1}",
        "context.arguments == {x: 1}",
        "{a: context.arguments}.a.x == 1",
        "(if true then context.arguments else {}).x == 1",
        'context["arguments"]["x"] == 1',
        "context has arguments.x",
        "context.arguments.x < 2",
    ],
)
def test_arguments_are_seen_however_a_rule_comes_by_them(condition: str) -> None:
    whole = '{arguments: {x: 1}, idempotency_key: "key-1"}'
    text = f"permit(principal, action, resource) when {{ {condition.replace('WHOLE', whole)} }};"
    assert answer(text, {"x": 1}) == "allow"
    assert answer(text, {}) == "deny"


@given(ARGUMENTS, st.sampled_from(FORBIDS))
@settings(max_examples=200, deadline=None)
def test_a_request_is_judged_alike_before_and_after_it_was_on_the_record(arguments: dict[str, Any], test: str) -> None:
    if _is_sendable(arguments):
        stored = parse_object(canonical_bytes(arguments))
        text = PERMIT_ALL + f"forbid(principal, action, resource) when {{ {test} }};"
        assert answer(text, arguments) == answer(text, stored)


def test_a_whole_number_is_whole_however_it_is_written() -> None:
    text = PERMIT_ALL + "forbid(principal, action, resource) when { context.arguments.amount == 100 };"
    for written in ("100", "100.0", "1e2", "1000e-1"):
        assert answer(text, parse_object(f'{{"amount": {written}}}')) == "deny"
    assert answer(text, {"amount": 101}) == "allow"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.1, {"__extn": {"fn": "decimal", "arg": "0.1"}}),
        (-12.5, {"__extn": {"fn": "decimal", "arg": "-12.5"}}),
        (0.00005, {"__entity": {"type": "Json", "id": "0.00005"}}),
        (1.5e-7, {"__entity": {"type": "Json", "id": "1.5e-7"}}),
        (1e300, {"__entity": {"type": "Json", "id": "1e+300"}}),
        (2**63, {"__entity": {"type": "Json", "id": "9223372036854775808"}}),
        (2.0**63, {"__entity": {"type": "Json", "id": "9223372036854776000"}}),
        (-(2**63), -(2**63)),
        (None, {"__entity": {"type": "Json", "id": "null"}}),
        (-0.0, 0),
        ({"__entity": {"__extn": 1}, "$__entity": 2}, {"$__entity": {"$__extn": 1}, "$$__entity": 2}),
    ],
)
def test_each_value_has_the_form_that_is_documented(value: Any, expected: Any) -> None:
    assert cedar_value(value) == expected
    assert answer("permit(principal, action, resource) when { context.arguments has x };", {"x": value}) == "allow"


def test_arrays_are_sets() -> None:
    text = "permit(principal, action, resource) when { context.arguments.x == [1, 2] };"
    assert answer(text, {"x": [2, 1, 2]}) == "allow"
    assert answer(text, {"x": [[1, 2]]}) == "deny"


def test_escaped_arguments_are_seen_under_their_name_in_the_context() -> None:
    text = PERMIT_ALL + 'forbid(principal, action, resource) when { context.arguments has "$__entity" };'
    assert answer(text, {"__entity": 1}) == "deny"
    assert answer(text, {"$__entity": 1}) == "allow"


def _deep(depth: int, kind: str) -> Any:
    value: Any = 1.5
    for _ in range(depth):
        value = [value] if kind == "array" else {"x": value}
    return value


@pytest.mark.parametrize("kind", ["array", "object"])
def test_the_deepest_arguments_that_are_let_in_are_judged(kind: str) -> None:
    arguments = {"x": _deep(DEPTH_MAX - 1, kind)}
    parse_object(json.dumps(arguments))
    path = ".x" * (DEPTH_MAX - 1) if kind == "object" else ""
    text = f"permit(principal, action, resource) when {{ context.arguments.x{path} == context.arguments.x{path} }};"
    assert answer(text, arguments) == "allow"


@pytest.mark.parametrize("depth", [200, 5_000])
def test_arguments_deeper_than_any_that_are_let_in_are_denied(depth: int) -> None:
    # No request can hold these; should one, the process lives and denies.
    request = request_of().model_copy(update={"arguments": {"x": _deep(depth, "array")}})
    text = PERMIT_ALL + "forbid(principal, action, resource) when { context.arguments.x == 1 };"
    assert CedarPolicy(text).judge(request, tool_of()).answer == "deny"


STRANGE = {
    "surrogate": "\ud800",
    "nan": float("nan"),
    "infinity": float("inf"),
    "tuple": (1, 2),
    "bytes": b"x",
    "object": object(),
    "digits": 10**5000,
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_not_json_is_denied(name: str) -> None:
    request = request_of().model_copy(update={"arguments": {"x": STRANGE[name]}})
    text = PERMIT_ALL + "forbid(principal, action, resource) when { context.arguments.x == 1 };"
    assert CedarPolicy(text).judge(request, tool_of()).answer == "deny"


BIG: dict[str, dict[str, Any]] = {
    "many keys": {f"k{n}": n for n in range(KEYS_MAX - 2)},
    "long text": {"x": "y" * (DOCUMENT_BYTES_MAX - 100)},
    "many values": {"x": [1] * (POLICY_VALUES_MAX - 2)},
    "many nulls": {"x": [None] * (POLICY_VALUES_MAX // 5 - 2)},
}


@pytest.mark.parametrize("name", BIG)
def test_the_largest_arguments_are_judged(name: str) -> None:
    reads_all = PERMIT_ALL + "forbid(principal, action, resource) when { context.arguments == {} };"
    assert answer(reads_all, BIG[name]) == "allow"


@pytest.mark.parametrize(
    "arguments",
    [
        {"x": [1] * POLICY_VALUES_MAX},
        {"x": [None] * (POLICY_VALUES_MAX // 5)},
        {"x": [0.5] * (POLICY_VALUES_MAX // 5)},
        {"x": [[]] * 100_000},
    ],
)
def test_arguments_with_too_many_values_are_denied_by_a_policy_that_reads_them_and_cost_others_nothing(
    arguments: dict[str, Any],
) -> None:
    with pytest.raises(InputTooLarge):
        cedar_value(arguments)
    reading = PERMIT_ALL + "forbid(principal, action, resource) when { context.arguments.x == [] };"
    verdict = judged(reading, arguments)
    assert verdict.answer == "deny"
    assert verdict.rationale == "the arguments that the policy reads hold too many values"
    other = PERMIT_ALL + "forbid(principal, action, resource) when { context.arguments has y };"
    assert answer(other, arguments) == "allow"
