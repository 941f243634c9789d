"""What accepts arguments at once accepts nothing that the judge refuses, whatever the schema; and is of use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from jsonschema.exceptions import SchemaError
from referencing.exceptions import Unresolvable

from app.config.input_schema import DIALECT, validator_of
from app.config.schema_acceptance import acceptance_of

WORDS = st.sampled_from(["a", "b", "ab", "", "a\n", "A", "1", "١", "a-b", "é", "e\u0301", "\ud800", "\u2028", "aa"])
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([1.0, 2.0, 0.1, 0.3, 1.5, -0.0, 1e20, 1e300, 2**53, 2**53 + 1, 2**64, 10**30, -(2**63) - 1]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
INSTANCES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
TYPES = st.sampled_from(["string", "number", "integer", "boolean", "null", "object", "array"])
PATTERNS = st.sampled_from(
    [
        *("^a", "a$", "^a$", "^[a-z]+$", "^[^a-z]+$", "^(a|ab)-?b?$", "^$", "a{2}", "^[A-Z]{1,2}$", "[0-9]"),
        *(
            r"\d",
            r"^\w+$",
            r"^\W$",
            r"\s",
            r"^\S+$",
            ".",
            "^.$",
            "(?=a)a",
            "(?i)A",
            r"\Aa\Z",
            "a{,2}",
            r"[^\d]",
            r"\u0061",
        ),
        *(r"\p{L}", "[a&&b]", "[a--b]", "^a*+$", r"(a)\1", "[[:alpha:]]"),
    ]
)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=2)
    named = st.dictionaries(st.sampled_from(["a", "b", "ab", ""]), inner, max_size=2)
    count = st.sampled_from([0, 1, 2, 2.0])
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
        "enum": st.lists(SCALARS, min_size=1, max_size=3),
        "const": INSTANCES,
        "required": st.lists(st.sampled_from(["a", "b", "ab"]), max_size=2, unique=True),
        "pattern": PATTERNS,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=1),
        "format": st.sampled_from(["date", "email", "uuid", "regex", "unheard-of"]),
        "multipleOf": st.sampled_from([1, 2, 0.1, 0.5, 1e-5]),
        "uniqueItems": st.booleans(),
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y", "#"]),
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
        "dependentRequired": st.just({"a": ["b"]}),
        "dependentSchemas": named,
        "description": WORDS,
        "default": INSTANCES,
        "x-other": INSTANCES,
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties"), count),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS),
        **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), several),
        **dict.fromkeys(("not", "items", "additionalProperties", "propertyNames", "contains", "if", "then"), inner),
        "properties": named,
    }
    return st.fixed_dictionaries({}, optional=keywords).flatmap(
        lambda whole: st.sampled_from([whole, *({key: whole[key] for key in whole if key != left} for left in whole)])
    )


SCHEMAS: st.SearchStrategy[Any] = st.recursive(st.booleans() | st.just({}), _schemas, max_leaves=5)


def _judged(schema: Any, instance: Any) -> bool:
    judge = validator_of(schema)
    try:
        judge.check_schema(schema)
        return judge.is_valid(instance)
    except (RecursionError, SchemaError, Unresolvable, UnicodeError, ZeroDivisionError, OverflowError):
        # The configuration refuses such a schema, or the call such arguments, before they come this far.
        assume(False)
        raise
    except Exception as error:  # `re.error`: Python cannot read the pattern
        assume(type(error).__name__ != "error")
        raise


@given(
    keyword=st.sampled_from(["", "properties", "items"]),
    part=SCHEMAS,
    defs=st.fixed_dictionaries({"x": SCHEMAS, "y": SCHEMAS}),
    instance=INSTANCES,
)
@example(keyword="", part={"pattern": "^a$"}, defs={}, instance="a\n")
@example(keyword="", part={"multipleOf": 0.1}, defs={}, instance=0.3)
@example(keyword="", part={"oneOf": [{"pattern": "^a$"}, {"type": "string"}]}, defs={}, instance="a\n")
@example(keyword="", part={"not": {"pattern": "^a$"}}, defs={}, instance="a\n")
@example(keyword="", part={"uniqueItems": True}, defs={}, instance=[1, 1.0])
@example(keyword="", part={"maximum": 2**53}, defs={}, instance=2**53 + 1)
@example(keyword="", part={"enum": [True]}, defs={}, instance=1)
@example(keyword="", part={"const": {"a": 1}}, defs={}, instance={"a": True})
def test_nothing_is_accepted_that_the_judge_refuses(keyword: str, part: Any, defs: Any, instance: Any) -> None:
    inside = {"properties": {"a": part}} if keyword == "properties" else {"items": part} if keyword else part
    schema = {"$defs": defs, **(inside if isinstance(inside, dict) else {"allOf": [inside]})}
    accepts = acceptance_of(schema)
    if accepts is not None and accepts(instance):
        assert _judged(schema, instance), (schema, instance)


def _plain(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several, count = st.lists(inner, min_size=1, max_size=3), st.integers(0, 3)
    named = st.dictionaries(st.sampled_from(["a", "b", "ab", ""]), inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES,
            "enum": st.lists(st.sampled_from(["a", "b", "é"]), min_size=1),
            "required": st.lists(st.sampled_from(["a", "b"]), unique=True),
            "properties": named,
            "$ref": st.sampled_from(["#/$defs/x"]),
            **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties"), count),
            **{name: st.integers(-3, 3) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
            **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), several),
            **dict.fromkeys(("items", "additionalProperties", "propertyNames"), inner),
        },
    )


@given(
    part=st.recursive(st.booleans() | st.just({}), _plain, max_leaves=6),
    x=_plain(st.booleans()).map(lambda x: {key: x[key] for key in x if key != "$ref"}),
    instance=INSTANCES,
)
def test_of_plain_schemas_it_says_just_what_the_judge_says(part: Any, x: Any, instance: Any) -> None:
    """Also for `oneOf`, inside which a no may be a yes: there both must agree in either direction."""
    schema = {"$schema": DIALECT, "$defs": {"x": x}, "allOf": [part]}
    accepts = acceptance_of(schema)
    assert accepts is not None
    assume("\\ud800" not in ascii(instance))  # calls with one are refused before
    assert accepts(instance) == _judged(schema, instance)


@pytest.mark.parametrize(
    ("schema", "fitting", "unfitting"),
    [
        ({"type": "object", "required": ["title"], "properties": {"title": {"type": "string"}}}, {"title": "x"}, {}),
        ({"items": {"pattern": "^[a-z-]+$"}}, ["from-mail"], ["From Mail"]),
        (
            {"$defs": {"id": {"maxLength": 3}}, "properties": {"id": {"$ref": "#/$defs/id"}}},
            {"id": "abc"},
            {"id": "abcd"},
        ),
    ],
)
def test_ordinary_schemas_are_accepted_at_once(schema: dict[str, Any], fitting: Any, unfitting: Any) -> None:
    accepts = acceptance_of(schema)
    assert accepts is not None
    assert accepts(fitting)
    assert not accepts(unfitting)


@pytest.mark.parametrize(
    "keyword",
    [
        {"multipleOf": 0.1},
        {"uniqueItems": True},
        {"not": {}},
        {"if": {}},
        {"contains": {}},
        {"unevaluatedProperties": False},
        {"$dynamicRef": "#"},
        {"patternProperties": {"a": {}}},
        {"pattern": r"\d"},
        {"oneOf": [{"pattern": "a"}]},
        {"maximum": 2**53},
        {"minimum": 0.5},
        {"enum": [1]},
        {"$ref": "https://example.com/schema"},
        {"unheard-of": 1},
    ],
    ids=str,
)
def test_what_leaves_room_is_left_to_the_judge(keyword: dict[str, Any]) -> None:
    assert acceptance_of({"properties": {"a": keyword}}) is None
