"""The SDK's RFC 8785 writes the published bytes, and refuses what the gateway refuses."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import example, given

from app.core.canonical import canonical_bytes, parse_json
from app.core.errors import InputMalformed
from tests.core.test_canonical import (
    GOLDEN,
    NAMES,
    Colour,
    Level,
    Real,
    Text,
    Whole,
    any_documents,
    any_numbers,
    published,
    thorough,
)
from tga_sdk.canonical import LEVELS_MAX, NotCanonical, canonical, is_plain


def written_by_the_gateway(value: Any) -> bytes | None:
    try:
        return canonical_bytes(value)
    except InputMalformed:
        return None


def written_by_the_sdk(value: Any) -> bytes | None:
    try:
        return canonical(value)
    except NotCanonical:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_the_published_documents_come_out_as_published(name: str) -> None:
    assert canonical(parse_json(published("input", f"{name}.json"))) == published("output", f"{name}.json")


def test_the_published_numbers_come_out_as_published_or_are_refused_as_the_gateway_does() -> None:
    refused = 0
    for line in published("es6-numbers-20k.txt").decode().split():
        bits, expected = line.split(",")
        (number,) = struct.unpack(">d", int(bits, 16).to_bytes(8))
        written = written_by_the_sdk(number)
        refused += written is None
        assert written == written_by_the_gateway(number)
        assert written in (None, expected.encode())
    assert 0 < refused < 1_000


@pytest.mark.parametrize(("text", "expected"), GOLDEN)
def test_the_gateways_own_vectors(text: str, expected: str) -> None:
    assert canonical(parse_json(text)) == expected.encode()


@thorough
@example({"\ufb33": 1, "😀": 2})
@example({"a": -0.0, "b": 1e21, "c": 5e-324, "d": True, "e": 1, "f": 0.0001, "g": 0.00009, "h": 1.5, "i": 1e16})
@example([Whole(7), Real(1.5), Real(-0.0), Level.HIGH, Colour.RED, Text("é")])
@example({Text("b"): 1, "a": 2})
@example({"a\x00": 1})
@example(["\\u0000", "\\\x00"])
@example({"\ud800": 1, "é": 2})
@example((1, 2))
@example([{1: 2}])
@example({True: 1})
@example({"a": {1, 2}})
@given(any_documents)
def test_same_bytes_and_same_refusals_as_the_gateway(value: Any) -> None:
    assert written_by_the_sdk(value) == written_by_the_gateway(value)


@thorough
@given(any_numbers)
def test_same_numbers_as_the_gateway(value: Any) -> None:
    assert written_by_the_sdk(value) == written_by_the_gateway(value)


@pytest.mark.parametrize("leaf", ["a", "é", 1.0])
def test_as_deep_as_the_gateway_reads_and_no_deeper(leaf: Any) -> None:
    deep: Any = leaf
    for _ in range(LEVELS_MAX):
        deep = {"in": deep} if isinstance(deep, list) else [deep]
    assert canonical(deep) == canonical_bytes(deep)
    with pytest.raises(NotCanonical, match="64 levels"):
        canonical([deep])


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(NotCanonical):
        canonical(value)


@pytest.mark.parametrize("value", [1.0, 5e-5, {"é": 1}, [Text("a")], Whole(1), 2**53, (1,), float("nan")])
def test_what_the_standard_library_would_write_otherwise_is_not_plain(value: Any) -> None:
    assert not is_plain(value)
