"""RFC 8785: our bytes are the published ones, both ways of writing them agree, and reading them back loses nothing."""

from __future__ import annotations

import enum
import json
import math
import struct
import time
from pathlib import Path
from typing import Any, Final

import pytest
import rfc8785
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from app.core import canonical
from app.core.canonical import canonical_bytes, parse_json, parse_object, read_canonical
from app.core.errors import InputMalformed, InputTooLarge
from app.core.limits import ARTIFACT_BYTES_MAX, DEPTH_MAX, DOCUMENT_BYTES_MAX, KEYS_MAX, SAFE_INTEGER_MAX
from tests.traces import action_request

PUBLISHED: Final = Path(__file__).parents[3] / "shared" / "data" / "rfc8785"
NAMES: Final = ("arrays", "french", "structures", "unicode", "values", "weird")
# None of the six published documents holds a number that our rules refuse; 1E30 among them has an exponent.
PUBLISHED_BUT_REFUSED: Final[frozenset[str]] = frozenset()

thorough = settings(
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


def published(*parts: str) -> bytes:
    if not PUBLISHED.is_dir():
        pytest.skip(f"the published RFC 8785 vectors are not beside this clone: {PUBLISHED} is missing")
    return PUBLISHED.joinpath(*parts).read_bytes()


# Published vectors


@pytest.mark.parametrize("name", NAMES)
def test_the_published_documents_come_out_as_published(name: str) -> None:
    raw = published("input", f"{name}.json")
    if name in PUBLISHED_BUT_REFUSED:
        with pytest.raises(InputMalformed):
            parse_json(raw)
        return
    value = parse_json(raw)
    expected = published("output", f"{name}.json")
    assert canonical_bytes(value) == expected
    assert canonical_bytes(value) == bytes.fromhex(published("outhex", f"{name}.txt").decode())
    assert parse_json(expected) == value


def test_no_published_document_is_left_out() -> None:
    published("input", "arrays.json")
    assert sorted(path.stem for path in PUBLISHED.joinpath("input").iterdir()) == sorted(NAMES)


def test_the_published_numbers_come_out_as_published_or_are_refused_by_the_rule() -> None:
    lines = published("es6-numbers-20k.txt").decode().split()
    refused = 0
    for line in lines:
        bits, expected = line.split(",")
        (number,) = struct.unpack(">d", int(bits, 16).to_bytes(8))
        assert rfc8785.dumps(number) == expected.encode()
        if SAFE_INTEGER_MAX < abs(number) < 1e21:
            refused += 1
            assert expected.lstrip("-").isdigit()
            with pytest.raises(InputMalformed):
                canonical_bytes(number)
            with pytest.raises(InputMalformed):
                parse_json(expected)
            with pytest.raises(InputMalformed):
                parse_json(f"{expected}.0")
        else:
            assert canonical_bytes(number) == expected.encode()
            assert parse_json(expected) == number
            assert canonical_bytes(parse_json(expected)) == expected.encode()
    assert len(lines) == 20_000
    assert 0 < refused < 1_000


# Vectors of our own, for a clone that stands alone

GOLDEN: Final[tuple[tuple[str, str], ...]] = (
    ("null", "null"),
    ("[true,false]", "[true,false]"),
    (' { "b" : 1 , "a" : [ ] , "" : { } } ', '{"":{},"a":[],"b":1}'),
    ('{"a10":1,"a2":2,"A":3,"_":4}', '{"A":3,"_":4,"a10":1,"a2":2}'),
    # UTF-16 order: the astral key (D83D...) stands before U+FB33, by code point it would stand after.
    ('{"\\ufb33":1,"\\ud83d\\ude00":2,"\\u20ac":3}', '{"€":3,"😀":2,"\ufb33":1}'),
    ('"\\u0001\\u001f\\u007f\\u0080\\u2028\\u2029"', '"\\u0001\\u001f\x7f\x80\u2028\u2029"'),
    ('"\\b\\t\\n\\f\\r\\"\\\\\\/"', '"\\b\\t\\n\\f\\r\\"\\\\/"'),
    ('"\\u000b\\u000B\\u0041\\u00e9\\uD83D\\uDE00"', '"\\u000b\\u000bAé😀"'),
    ("[0,-0,-0.0,0e5,1.0,1e0,10e-1]", "[0,0,0,0,1,1,1]"),
    ("[1e21,1E+21,-1e21,1e22,1.5e300]", "[1e+21,1e+21,-1e+21,1e+22,1.5e+300]"),
    ("[5e-324,1e-6,1e-7,1.7976931348623157e308]", "[5e-324,0.000001,1e-7,1.7976931348623157e+308]"),
    ("[9007199254740991,-9007199254740991]", "[9007199254740991,-9007199254740991]"),
    ("[0.1,333333333.33333329,4.50,2e-3,1e15]", "[0.1,333333333.3333333,4.5,0.002,1000000000000000]"),
)


@pytest.mark.parametrize(("text", "expected"), GOLDEN)
def test_our_own_vectors_come_out_as_written_down(text: str, expected: str) -> None:
    value = parse_json(text)
    assert canonical_bytes(value) == expected.encode()
    assert canonical_bytes(parse_json(expected)) == expected.encode()
    assert canonical_bytes({"in": [value]}) == b'{"in":[' + expected.encode() + b"]}"


# Both ways of writing agree


class Text(str):
    __slots__ = ()


class Whole(int):
    def __str__(self) -> str:
        return "not a number"

    __repr__ = __str__


class Real(float):
    def __str__(self) -> str:
        return "not a number"

    __repr__ = __str__


class Table(dict[str, Any]):
    pass


class Row(list[Any]):
    pass


class Colour(str, enum.Enum):  # noqa: UP042 (str() of it is not its value, which is the point)
    RED = "red"


class Level(int, enum.Enum):
    HIGH = 3


NASTY_BUT_WRITABLE: Final = (
    '\x01\b\t\n\x0b\f\r\x1f"\\/ ~\x7f\x80\x85\xa0éÿau0'
    "\u2028\u2029\ud7ff\ue000\ufb33\ufeff\ufffe\uffff\U00010000😀\U0010ffff"
)
NASTY: Final = NASTY_BUT_WRITABLE + "\x00\ud800\udbff\udc00\udfff"
MAGNITUDES: Final = (0.0, -0.0, 5e-324, 1e-7, 1e-6, 0.1, 1.5, 1e15, 2.0**53 - 1, 2.0**53, 1e20, 1e21, 1.8e308, -1e21)
INTEGERS: Final = (0, 1, -1, SAFE_INTEGER_MAX, -SAFE_INTEGER_MAX, SAFE_INTEGER_MAX + 1, -SAFE_INTEGER_MAX - 1, 2**64)

tame_text = st.text(st.characters(max_codepoint=0x7F, exclude_characters="\x00"), max_size=6)
plain_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=6)
nasty_text = st.text(NASTY, max_size=6)
safe_integers = st.integers(min_value=-SAFE_INTEGER_MAX, max_value=SAFE_INTEGER_MAX)


def trees(scalars: st.SearchStrategy[Any], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)

    return st.recursive(scalars, grow, max_leaves=12)


plain_documents = trees(
    st.none() | st.booleans() | safe_integers | plain_text | st.text(NASTY_BUT_WRITABLE, max_size=6), tame_text
)
any_numbers = st.integers() | st.floats() | st.sampled_from(MAGNITUDES) | st.sampled_from(INTEGERS)
any_scalars = st.one_of(
    st.none(),
    st.booleans(),
    any_numbers,
    plain_text,
    nasty_text,
    st.sampled_from((Colour.RED, Level.HIGH)),
    st.builds(Text, plain_text),
    st.builds(Whole, safe_integers),
    st.builds(Real, st.floats()),
)
any_documents = trees(any_scalars, tame_text | plain_text | nasty_text | st.builds(Text, nasty_text)) | st.builds(
    lambda table, row: Table({**table, "row": Row(row)}),
    st.dictionaries(tame_text, any_scalars, max_size=3),
    st.lists(any_scalars, max_size=3),
)


def numbers_in(value: Any) -> list[int | float]:
    if isinstance(value, dict):
        return [number for member in value.values() for number in numbers_in(member)]
    if isinstance(value, list):
        return [number for member in value for number in numbers_in(member)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def strings_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, member in value.items() for text in (key, *strings_in(member))]
    if isinstance(value, list):
        return [text for member in value for text in strings_in(member)]
    return [value] if isinstance(value, str) else []


def is_refused_by_rule(value: Any) -> bool:
    """The rules, restated: NUL, a lone surrogate, a number that prints as an unsafe integer or not at all."""
    for text in strings_in(value):
        if "\x00" in text or any("\ud800" <= character <= "\udfff" for character in text):
            return True
    return any(
        not math.isfinite(number) or SAFE_INTEGER_MAX < abs(number) < 1e21
        if isinstance(number, float)
        else abs(number) > SAFE_INTEGER_MAX
        for number in numbers_in(value)
    )


def written_by_authority(value: Any) -> bytes | None:
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError):
        return None


@settings(thorough, max_examples=600)
@given(plain_documents)
def test_the_fast_path_writes_what_the_authority_writes(value: Any) -> None:
    assert canonical._is_plain(value, DEPTH_MAX)
    assert canonical_bytes(value) == rfc8785.dumps(value)


@settings(thorough, max_examples=800)
@example({"\ufb33": 1, "😀": 2})
@example({"a": -0.0, "b": 1e21, "c": 5e-324, "d": True, "e": 1})
@example([Whole(7), Real(1.5), Real(-0.0), Level.HIGH, Colour.RED, Text("é")])
@example({Text("b"): 1, "a": 2})
@example({"a\x00": 1})
@example(["\\u0000", "\\\x00"])
@example({"\ud800": 1})
@example(["\udc00\ud800"])
@given(any_documents)
def test_any_document_gives_the_authoritys_bytes_or_is_refused_by_the_rule(value: Any) -> None:
    if is_refused_by_rule(value):
        with pytest.raises(InputMalformed):
            canonical_bytes(value)
    else:
        assert canonical_bytes(value) == written_by_authority(value)


def test_every_character_is_written_alike_on_both_paths() -> None:
    points = [point for point in range(1, 0x110000) if not 0xD800 <= point <= 0xDFFF]
    texts: list[Any] = ["".join(map(chr, points[start : start + 4096])) for start in range(0, len(points), 4096)]
    tables: list[Any] = [{chr(point): 1, "a": 2, f"{chr(point)}b": 3, "ab": 4} for point in range(1, 0x80)]
    for value in (*texts, *tables):
        assert canonical._is_plain(value, DEPTH_MAX)
        assert canonical_bytes(value) == rfc8785.dumps(value)


def test_a_backslash_before_u0000_is_text_and_not_nul() -> None:
    assert canonical_bytes("\\u0000") == b'"\\\\u0000"'
    assert parse_json(b'"\\\\u0000"') == "\\u0000"


@pytest.mark.parametrize("value", [1.5, {"é": 1}, [Text("a")], Table(), Row(), Whole(1), SAFE_INTEGER_MAX + 1, (1,)])
def test_what_orjson_would_write_otherwise_never_takes_the_fast_path(value: Any) -> None:
    assert not canonical._is_plain(value, DEPTH_MAX)


# Reading back


@thorough
@given(any_documents)
def test_what_is_written_reads_back_to_the_same_bytes(value: Any) -> None:
    if is_refused_by_rule(value):
        return
    written = canonical_bytes(value)
    assert canonical_bytes(parse_json(written)) == written
    assert parse_json(written) == json.loads(written)


PIECES: Final = (
    *(b"1.0", b"1.5", b"-0", b"1e16", b"1e-7", b"1E2", b"01", b"9007199254740991", b"9007199254740993", b"1" * 30),
    *(b'"', b",", b":", b"{", b"}", b"[", b"]", b" ", b"\n", b"\\", b'"a":1,', b"\\u0000", b"\\ud800", b"\\u0041"),
    *("é".encode(), "\U0001f600".encode(), "\ufb33".encode(), b"\x80", b"\xff", b"\x00", b"\x1f", b"\x7f", b"NaN"),
)


@st.composite
def changed_bytes(draw: st.DrawFn) -> bytes:
    """An object's canonical bytes, or another spelling of it, with up to three places changed."""
    value = draw(st.dictionaries(st.text(max_size=3), any_documents, max_size=3))
    spelled = canonical_bytes(value) if not is_refused_by_rule(value) else json.dumps({"a": 1}).encode()
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(spelled)))
        spelled = spelled[:at] + draw(st.sampled_from(PIECES)) + spelled[at + draw(st.integers(0, 3)) :]
    return spelled


@settings(thorough, max_examples=1500)
@example(b'{"a":1.0}')
@example(b'{"a":[1e16]}')
@example(b'{"a":-9007199254740993}')
@example(b'{"a":1,"a":1}')
@example(b'{"b":1,"a":2}')
@example('{"\U0001f600":1,"\ufb33":2}'.encode())
@example('{"a":"é: 1.5, 12345678901234567, \\":"}'.encode())
@example(b'{"a":"\\u0000"}')
@example(b'\xef\xbb\xbf{"a":1}')
@example(b'[{"a":1}]')
@given(changed_bytes())
def test_what_is_read_at_once_is_what_the_strict_reader_reads(raw: bytes) -> None:
    value = read_canonical(raw)
    if value is not None:
        strict = parse_object(raw)
        assert (value, canonical_bytes(strict)) == (strict, raw)
        assert json.dumps(value) == json.dumps(strict)  # 1 is not 1.0, nor True
    unsorted = read_canonical(raw, sorts=False)
    if unsorted is not None:
        assert json.dumps(unsorted) == json.dumps(parse_object(raw))


@settings(thorough, max_examples=1500)
@example(b'{"a":1,"a":1}')
@example(b'{"a":":","a":1}')
@example(b'{"a":1,"a":{"b":":"}}')
@example(b'{"a":1,"\\u0061":"\\u003a"}')
@example(b'[{"a":1,"a":2},"\\u003A"]')
@example(b'{"a":1,"a":"\\/:"}')
@example(b"[-0,-0.0,1E2]")
@example(b"[9007199254740991,9007199254740993,18446744073709551616]")
@example(b' { "a" : [ true , null ] , "b" : "x" } ')
@example(b'["\\u0000"]')
@example(b'["\\ud800"]')
@example(b'\xef\xbb\xbf{"a":1}')
@given(changed_bytes() | changed_bytes().map(lambda raw: raw.replace(b",", b" ,\n ").replace(b":", b" : ")))
def test_what_the_quick_reader_reads_is_what_the_hooks_read(raw: bytes) -> None:
    quick = canonical._read_usual(raw)
    if quick is not None:
        strict = parse_json(raw.decode("utf-8"))  # of text: always by the hooks
        assert json.dumps(quick) == json.dumps(strict)  # in the same order, and 1 is not 1.0, nor True


def test_a_body_as_callers_send_it_is_read_quickly() -> None:
    body = {"server_id": "crm", "arguments": {"é": 1}, "intent": 'é, at 10:30: "so"', "list": [1, [None, False]]}
    assert canonical._read_usual(json.dumps({**body, "arguments": {}}, ensure_ascii=False, indent=1).encode())
    assert canonical._read_usual(json.dumps(body).encode()) is None
    assert parse_json(json.dumps(body).encode()) == body
    assert canonical._read_usual(b'{"a":[' + b"[" * DEPTH_MAX + b"]" * DEPTH_MAX + b"]}") is None
    assert canonical._read_usual(b"{" + b",".join(b'"%d":0' % n for n in range(KEYS_MAX + 1)) + b"}") is None


def test_the_documents_of_a_call_are_read_at_once() -> None:
    request = action_request(
        1, arguments={"amount": 12, "note": 'é, at 10:30:16.5 for 12345678901234567 é"', "list": []}
    )
    assert read_canonical(request.to_bytes()) == request.to_json()
    assert read_canonical(canonical_bytes({"a": 12.5})) is None


def test_long_texts_that_look_like_numbers_or_keys_take_linear_time() -> None:
    for text in ("é" * 120_000, ":1." * 80_000, ",1e" * 80_000, "." + "1" * 250_000, "1" * 250_000, '"' * 120_000):
        raw = canonical_bytes({"a": text})
        began = time.process_time()
        read_canonical(raw)
        assert time.process_time() - began < 2


@thorough
@given(
    st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8))[0])
)
def test_a_double_keeps_its_value_through_text(number: float) -> None:
    if not math.isfinite(number) or SAFE_INTEGER_MAX < abs(number) < 1e21:
        with pytest.raises(InputMalformed):
            canonical_bytes(number)
        return
    assert parse_json(canonical_bytes(number)) == number
    assert parse_json(repr(number)) == number


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("leaf", [1, 1.5])
def test_reading_and_writing_have_the_same_bound_on_depth(leaf: float) -> None:
    deepest = [leaf, nested(DEPTH_MAX - 1)]
    assert parse_json(canonical_bytes(deepest)) == deepest
    too_deep = [leaf, nested(DEPTH_MAX)]
    with pytest.raises(InputTooLarge):
        canonical_bytes(too_deep)
    with pytest.raises(InputTooLarge):
        parse_json(json.dumps(too_deep))


@pytest.mark.parametrize("leaf", [1, 1.5])
def test_reading_and_writing_have_the_same_bound_on_keys(leaf: float) -> None:
    most: dict[str, Any] = {
        "in": [{str(number): leaf for number in range(KEYS_MAX - 1)}],
    }
    assert parse_json(canonical_bytes(most)) == most
    too_many = {**most, "one": "more"}
    with pytest.raises(InputTooLarge):
        canonical_bytes(too_many)
    with pytest.raises(InputTooLarge):
        parse_json(json.dumps(too_many))
    text_of_keys: Any = ['":' * 20_000, leaf]
    assert parse_json(canonical_bytes(text_of_keys)) == text_of_keys


@pytest.mark.parametrize("leaf", [1, 1.5])
def test_nothing_is_written_that_is_too_large_to_read(leaf: float) -> None:
    largest: Any = [leaf, ""]
    largest[1] = "a" * (ARTIFACT_BYTES_MAX - len(canonical_bytes(largest)))
    written = canonical_bytes(largest)
    assert len(written) == ARTIFACT_BYTES_MAX
    assert parse_json(written, bytes_max=ARTIFACT_BYTES_MAX) == largest
    with pytest.raises(InputTooLarge):
        canonical_bytes([leaf, largest[1] + "a"])
    assert canonical_bytes([leaf, largest[1] + "a"], bytes_max=ARTIFACT_BYTES_MAX + 1)


def test_a_request_that_grows_past_the_limits_is_refused_before_it_is_stored() -> None:
    grows = parse_json("[" + ",".join(["1e15"] * (DOCUMENT_BYTES_MAX // 6)) + "]")
    with pytest.raises(InputTooLarge):
        action_request(1, arguments={"list": grows}).to_bytes()
    with pytest.raises(InputTooLarge):
        action_request(1, arguments={str(number): 1 for number in range(KEYS_MAX)}).to_bytes()
