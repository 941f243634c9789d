"""Whatever is sent, the answer is a value or one of two errors, soon and in little memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any, Final

import orjson
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from app.core.canonical import canonical_bytes, parse_json, parse_object
from app.core.errors import InputMalformed, InputTooLarge, TgaError
from app.core.limits import DEPTH_MAX, DOCUMENT_BYTES_MAX, KEYS_MAX
from tests.traces import argument_values, completed_trace

# Of CPU time: how long it takes beside others is not its doing. What is worse than linear takes minutes; a processor
# that is shared by four takes twice as long for the same.
SECONDS_MAX: Final = 5.0
# The dearest found, "[{},{},...]" as large as a document may be, costs 26 times its size.
MEMORY_BYTES_MAX: Final = 40 * DOCUMENT_BYTES_MAX
MEGABYTES_50: Final = 50 * 1024 * 1024

thorough = settings(
    deadline=None,
    max_examples=500,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)

Document = bytes | str


def filled(before: str, unit: str, after: str = "") -> bytes:
    """As much of `unit` as fits into a document of the greatest size."""
    times = (DOCUMENT_BYTES_MAX - len(before.encode()) - len(after.encode())) // len(unit.encode())
    return (before + unit * times + after).encode()


BRACKETS: Final = "[]," * (DEPTH_MAX + 1)

MALFORMED: Final[dict[str, Document]] = {
    "a repeated key": b'{"a":1,"a":1}',
    "a repeated key, nested": b'{"x":[{"a":{"b":1,"c":2,"b":3}}]}',
    "a repeated key, once as an escape": b'{"a":1,"\\u0061":2}',
    "a repeated key, nested, as an escape": b'[{"x":{"\\u00e9":1,"\xc3\xa9":2}}]',
    "a repeated empty key": b'{"":1,"":2}',
    "a repeated key of 200,000 characters": b'{"' + b"k" * 100_000 + b'":1,"' + b"k" * 100_000 + b'":2}',
    "a repeated key with a lone surrogate": b'{"\\ud800":1,"\\ud800":2}',
    "NaN": b"NaN",
    "NaN, nested": b'{"a":[NaN]}',
    "Infinity": b"[Infinity]",
    "-Infinity": b"[-Infinity]",
    "-NaN": b"[-NaN]",
    "nan": b"[nan]",
    "1e400": b"[1e400]",
    "-1e400": b'{"a":-1e400}',
    "1e9999999999": b"1e9999999999",
    "2^53": b"9007199254740992",
    "-2^53": b"[-9007199254740992]",
    "2^53 as a real": b"9007199254740992.0",
    "2^53 by rounding": b"9007199254740991.5",
    "2^64": b"18446744073709551616",
    "1e16": b"1e16",
    "1e20": b"1e20",
    "-1e20": b"[-1e20]",
    "the last double before 1e21": b"999999999999999868928.0",
    "a lone high surrogate": b'"\\ud83d"',
    "a lone low surrogate": b'["\\ude00"]',
    "a lone high surrogate before text": b'"\\ud83dabc"',
    "a high surrogate before another": b'"\\ud83d\\ud83d"',
    "a high surrogate before an escape": b'"\\ud83d\\n"',
    "a reversed pair": b'{"a":"\\ude00\\ud83d"}',
    "a lone surrogate in a key": b'{"\\uD800":1}',
    "a lone low surrogate in a nested key": b'[{"a":{"x\\uDFFF":1}}]',
    "a reversed pair in a key": b'{"\\udc00\\ud800":1}',
    "NUL": b'"\\u0000"',
    "NUL in a nested value": b'{"a":["b\\u0000c"]}',
    "NUL in a key": b'{"\\u0000":1}',
    "NUL in a key after a backslash": b'{"\\\\\\u0000":1}',
    "a raw NUL": b'"a\x00b"',
    "a raw NUL between tokens": b"[1,\x00 2]",
    "a raw NUL at the end": b"[1]\x00",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a byte order mark as text": "\ufeff{}",
    "two byte order marks": b"\xef\xbb\xbf\xef\xbb\xbf{}",
    "a byte order mark within": b"[\xef\xbb\xbf1]",
    "UTF-16 with its mark": '{"a":1}'.encode("utf-16"),
    "UTF-16, little end": '{"a":1}'.encode("utf-16-le"),
    "UTF-16, big end": '{"a":1}'.encode("utf-16-be"),
    "UTF-32": '{"a":1}'.encode("utf-32"),
    "an overlong slash": b'"\xc0\xaf"',
    "an overlong NUL": b'"\xc0\x80"',
    "an overlong slash of three bytes": b'"\xe0\x80\xaf"',
    "an encoded surrogate": b'"\xed\xa0\xbd"',
    "an encoded pair of surrogates": b'"\xed\xa0\xbd\xed\xb8\x80"',
    "beyond U+10FFFF": b'"\xf4\x90\x80\x80"',
    "a truncated character": b'"\xf0\x9f\x98"',
    "a truncated character at the end": b'{"a":"\xc3',
    "a lone continuation byte": b'"\x80"',
    "Latin-1": '{"a":"é"}'.encode("latin-1"),
    "text with a raw surrogate": '"\ud800"',
    "text with a raw pair of surrogates": '"\ud83d\ude00"',
    "nothing": b"",
    "nothing, as text": "",
    "only spaces": b" \t\r\n",
    "trailing text": b"{} x",
    "two documents": b"{}{}",
    "two lines": b"{}\n{}",
    "a trailing comma in an object": b'{"a":1,}',
    "a trailing comma in a list": b"[1,]",
    "a missing value": b'{"a":}',
    "a missing comma": b'{"a":1 "b":2}',
    "an unclosed object": b'{"a":1',
    "an unopened list": b"]",
    "crossed brackets": b'{"a":[}]',
    "single quotes": b"{'a':1}",
    "no quotes": b"{a:1}",
    "a number as a key": b"{1:1}",
    "a comment": b"[1 /* one */]",
    "a comment to the line's end": b"[1] // one",
    "a hash comment": b"# one\n[1]",
    "a leading zero": b"01",
    "a negative leading zero": b"[-01]",
    "a plus": b"+1",
    "a point first": b".5",
    "a point last": b"[1.]",
    "an exponent without digits": b"[1e]",
    "an exponent sign without digits": b"[1e+]",
    "a minus alone": b"-",
    "hexadecimal": b"0x10",
    "underscores": b"1_000",
    "Arabic digits": "[١]",
    "full-width digits": "[１]",
    "a form feed between tokens": b"[1,\x0c2]",
    "a no-break space between tokens": "[1,\xa02]",
    "a line separator between tokens": "[1,\u20282]",
    "True": b"True",
    "None": b"None",
    "undefined": b"undefined",
    "half a word": b"[tru]",
    "a raw newline in a string": b'"a\nb"',
    "a raw tab in a string": b'"a\tb"',
    "a raw U+001F in a string": b'"a\x1fb"',
    "a raw newline in a key": b'{"a\n":1}',
    "an unknown escape": b'"\\x41"',
    "a short escape": b'"\\u12"',
    "a signed escape": b'"\\u+041"',
    "a spaced escape": b'"\\u 041"',
    "an unclosed string": b'"abc',
    "a string that ends in a backslash": b'"abc\\',
    "an unclosed string of escaped quotes": filled(f'[{BRACKETS}"', '\\"'),
    "an unclosed string of escaped backslashes": filled(f'[{BRACKETS}"', "\\\\"),
    "backslashes outside of any string": filled(f"[{BRACKETS}", '\\"'),
    "unclosed strings without end": filled(f"[{BRACKETS}", '"\\'),
    "quotes without end": filled(f"[{BRACKETS}", '"'),
    "strings without commas": filled(f"[{BRACKETS}", '"a"'),
    "closing brackets without end": filled("", "]"),
    "pairs of brackets without commas": filled("", "[]"),
    "escaped NULs without end": filled('"', "\\u0000", '"'),
    "lone surrogates without end": filled('["', "\\ud800", '"]'),
    "unsafe numbers without end": filled("[", "9007199254740992,", "1]"),
    "a document of control characters": filled("", "\x01"),
    "spaces without end": filled("", " "),
    "a repeated key last of many": b"{" + b"".join(b'"%d":1,' % n for n in range(9_000)) + b'"8999":1}',
}

DEEP: Final = 100_000
TOO_LARGE: Final[dict[str, Document]] = {
    "65 lists": b"[" * 65 + b"]" * 65,
    "65 lists, unclosed": b"[" * 65,
    "65 objects": b'{"a":' * 65 + b"1" + b"}" * 65,
    "65 of both": b'[{"a":' * 32 + b"[1]" + b"}]" * 32,
    "65 lists after closed ones": b"[" + b"[]," * 500 + b"[" * 64 + b"]" * 65,
    "65 lists between strings of brackets": b'["]]]]\\"]]]]",' * 65 + b"1" + b"]" * 65,
    "65 lists after strings that end in backslashes": b'["\\\\",' * 65 + b"1" + b"]" * 65,
    "65 objects under keys of brackets": b'{"}}]]\\"":' * 65 + b"1" + b"}" * 65,
    "100,000 lists": b"[" * DEEP,
    "100,000 lists, closed": b"[" * DEEP + b"]" * DEEP,
    "100,000 lists as text": "[" * DEEP,
    "40,000 objects": b'{"a":' * 40_000,
    "100,000 objects": b'{"a":' * DEEP,
    "20,000 of both, with strings of brackets": b'[{"]}":' * 20_000,
    "an integer of 65 digits": b"1" * 65,
    "an integer of 5,000 digits": b"[" + b"9" * 5_000 + b"]",
    "a negative integer of 5,000 digits": b"-" + b"9" * 5_000,
    "an integer of 1,000,000 digits": b"9" * 1_000_000,
    "an integer as large as a document": filled("", "9"),
    "a fraction of 5,000 digits": b"0." + b"3" * 5_000,
    "a fraction of 1,000,000 digits": b"0." + b"3" * 1_000_000,
    "a fraction as large as a document": filled("0.", "3"),
    "an exponent of 5,000 digits": b"1e" + b"9" * 5_000,
    "an exponent of 1,000,000 digits": b"1e-" + b"9" * 1_000_000,
    "an exponent as large as a document": filled("1e", "9"),
    "an exponent of zeros": filled("1e", "0"),
    "10,001 keys": json.dumps({str(n): 1 for n in range(KEYS_MAX + 1)}).encode(),
    "10,001 keys in many objects": json.dumps([{"a": 1}] * (KEYS_MAX + 1)).encode(),
    "10,001 keys, the same one twice": b"{" + b'"a":1,' * KEYS_MAX + b'"a":1}',
    "one byte more than a document may have": b" " * (DOCUMENT_BYTES_MAX - 1) + b"{}",
    "one byte more, in fewer characters": '"' + "é" * (DOCUMENT_BYTES_MAX // 2) + '"',
}

ACCEPTED: Final[dict[str, Document]] = {
    "64 lists": b"[" * 64 + b"]" * 64,
    "64 of both": b'[{"a":' * 32 + b"1" + b"}]" * 32,
    "brackets in strings": filled('["', "[{", '"]'),
    "brackets after escaped quotes": filled('["', '\\"[{', '"]'),
    "brackets between backslashes": filled('["', "\\\\[", '"]'),
    "as many lists as fit": filled("[", "[],", "1]"),
    "as many objects as fit": filled("[", "{},", "1]"),
    "as many strings as fit": filled("[", '"",', "1]"),
    "as many numbers as fit": filled("[", "0,", "1]"),
    "as many reals as fit": filled("[", "1.5,", "1]"),
    "as many escapes as fit": filled('"', "\\u00e9", '"'),
    "as many pairs of surrogates as fit": filled('"', "\\ud83d\\ude00", '"'),
    "as many escaped texts of NUL as fit": filled('"', "\\\\u0000", '"'),
    "one string as large as a document": filled('"', "a", '"'),
    "one astral string as large as a document": filled('"', "😀", '"'),
    "spaces around": filled("1", " "),
    "10,000 keys": json.dumps({str(n): 1 for n in range(KEYS_MAX)}).encode(),
    "2^53 - 1": b"[9007199254740991,-9007199254740991]",
    "1e21": b"[1e21,-1e21,1.7976931348623157e308]",
    "underflow": b"[1e-400,5e-324]",
    "64 digits": b"0." + b"3" * 62,
    "U+2028, DEL and noncharacters": '["\u2028\x7f\uffff\U0010ffff"]',
    "a pair of surrogates": b'{"\\ud83d\\ude00":"\\uD83D\\uDE00"}',
}


def measured(document: Document) -> tuple[object, float, int]:
    """What came of it, in how many seconds of CPU time, with how many bytes more than the input."""
    started = time.thread_time()
    try:
        outcome: object = parse_json(document)
    except (InputMalformed, InputTooLarge) as error:
        outcome = error
    seconds = time.thread_time() - started
    tracemalloc.start()
    try:
        try:
            parse_json(document)
        except (InputMalformed, InputTooLarge) as error:
            assert len(str(error)) < 1_000  # noqa: PT017
        return outcome, seconds, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_bounded(seconds: float, memory_bytes: int) -> None:
    assert seconds < SECONDS_MAX
    assert memory_bytes < MEMORY_BYTES_MAX


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_not_strict_json_is_refused_as_malformed(what: str) -> None:
    outcome, seconds, memory_bytes = measured(MALFORMED[what])
    assert type(outcome) is InputMalformed
    assert_bounded(seconds, memory_bytes)


@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_is_beyond_a_limit_is_refused_as_too_large(what: str) -> None:
    outcome, seconds, memory_bytes = measured(TOO_LARGE[what])
    assert type(outcome) is InputTooLarge
    assert_bounded(seconds, memory_bytes)


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_is_within_the_limits_is_read_in_bounded_time_and_memory(what: str) -> None:
    outcome, seconds, memory_bytes = measured(ACCEPTED[what])
    assert not isinstance(outcome, TgaError)
    assert outcome == json.loads(ACCEPTED[what])
    assert_bounded(seconds, memory_bytes)


@pytest.mark.parametrize("as_text", [False, True], ids=["bytes", "text"])
@pytest.mark.parametrize(
    "unit",
    [b" ", b"a", b"[", b'{"a":', b"9", b"\xff", b"\\"],
    ids=["space", "a", "list", "object", "9", "FF", "backslash"],
)
def test_fifty_megabytes_cost_nothing(unit: bytes, *, as_text: bool) -> None:
    raw = unit * (MEGABYTES_50 // len(unit))
    raw = b'"' + raw + b'"' if unit == b"a" else raw
    document = raw.decode("latin-1") if as_text else raw
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises(InputTooLarge):
            parse_json(document)
        memory_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.thread_time() - started < SECONDS_MAX
    assert memory_bytes < DOCUMENT_BYTES_MAX


@pytest.mark.parametrize("raw", [b"[]", b"1", b"null", b'"a"', b"true"])
def test_a_document_is_an_object(raw: bytes) -> None:
    with pytest.raises(InputMalformed):
        parse_object(raw)


# Anything at all


def same(one: Any, other: Any) -> bool:
    """Equal in value and kind, all the way down: 1 is not true; 1.0 and 1 are the same number to JSON."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def assert_read_alike_or_refused(document: Document) -> None:
    try:
        value = parse_json(document)
    except (InputMalformed, InputTooLarge) as error:
        event(error.code)
        return
    event("accepted")
    assert same(value, json.loads(document))
    assert same(value, orjson.loads(document))
    assert canonical_bytes(parse_json(canonical_bytes(value))) == canonical_bytes(value)


PIECES: Final = (
    *("{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", '"a"', '"a":', '"\\u0061":', "null", "true", "false", "NaN"),
    *("-", "+", "0", "1", "9", ".", "e", "E", "1e5", "1e400", "9007199254740993", "-0", "-0.0", "1e21", "Infinity"),
    *(
        "\\u0000",
        "\\ud800",
        "\\udc00",
        "\\ud83d\\ude00",
        "\\u",
        "\x00",
        "\x7f",
        "\u2028",
        "é",
        "😀",
        "\ufeff",
        "//",
        "'",
    ),
)
valid_texts = st.one_of(
    st.sampled_from([record.entry.to_bytes() for record in completed_trace(1)]),
    st.sampled_from([record.artifact.to_bytes() for record in completed_trace(1) if record.artifact is not None]),
    argument_values().map(lambda value: json.dumps(value).encode()),
    argument_values().map(lambda value: json.dumps(value, ensure_ascii=False, indent=1).encode()),
)


@st.composite
def mutated_texts(draw: st.DrawFn) -> bytes:
    raw = bytearray(draw(valid_texts))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        how = draw(st.sampled_from(("flip", "insert", "truncate", "delete", "repeat")))
        if how == "flip" and at < len(raw):
            raw[at] ^= draw(st.integers(1, 255))
        elif how == "insert":
            raw[at:at] = draw(st.sampled_from(PIECES)).encode()
        elif how == "truncate":
            del raw[at:]
        elif how == "delete":
            del raw[at : at + draw(st.integers(1, 8))]
        elif how == "repeat":
            raw[at:at] = raw[at : at + draw(st.integers(1, 64))]
    return bytes(raw)


@thorough
@given(st.binary(max_size=64))
def test_any_bytes_are_read_without_ambiguity_or_refused(raw: bytes) -> None:
    assert_read_alike_or_refused(raw)


@thorough
@given(st.text(st.characters(), max_size=32))
def test_any_text_is_read_without_ambiguity_or_refused(text: str) -> None:
    assert_read_alike_or_refused(text)


@settings(thorough, max_examples=1500)
@given(st.lists(st.sampled_from(PIECES), max_size=10).map("".join))
def test_any_tokens_are_read_without_ambiguity_or_refused(text: str) -> None:
    assert_read_alike_or_refused(text)
    assert_read_alike_or_refused(text.encode())


@settings(thorough, max_examples=1500)
@given(mutated_texts())
def test_any_damaged_document_is_read_without_ambiguity_or_refused(raw: bytes) -> None:
    assert_read_alike_or_refused(raw)


@thorough
@given(valid_texts)
def test_any_valid_document_is_accepted_and_read_without_ambiguity(raw: bytes) -> None:
    assert same(parse_json(raw), json.loads(raw))
    assert_read_alike_or_refused(raw)


# Values that never were JSON


def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def itself_as_object() -> Any:
    value: dict[str, Any] = {}
    value["a"] = [1.5, value]
    return value


def deep(depth: int, *, as_object: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if as_object else [value]
    return value


UNWRITABLE: Final[dict[str, tuple[Any, type[TgaError]]]] = {
    "a list in itself": (itself(), InputTooLarge),
    "an object in itself": (itself_as_object(), InputTooLarge),
    "100,000 lists": (deep(DEEP, as_object=False), InputTooLarge),
    "100,000 objects": (deep(DEEP, as_object=True), InputTooLarge),
    "65 lists": (deep(65, as_object=False), InputTooLarge),
    "bytes": (b"a", InputMalformed),
    "bytearray": ([bytearray(b"a")], InputMalformed),
    "a set": ({"a": {1}}, InputMalformed),
    "a tuple": ((1, 2), InputMalformed),
    "a tuple, nested": ({"a": [(1, 2)]}, InputMalformed),
    "an object": (object(), InputMalformed),
    "a type": ([int], InputMalformed),
    "a function": ({"a": len}, InputMalformed),
    "a complex number": (1j, InputMalformed),
    "an iterator": (iter([1]), InputMalformed),
    "a range": (range(3), InputMalformed),
    "NaN": (float("nan"), InputMalformed),
    "Infinity": ([float("inf")], InputMalformed),
    "-Infinity": ({"a": float("-inf")}, InputMalformed),
    "1e20": (1e20, InputMalformed),
    "2^53": (2**53, InputMalformed),
    "-2^53": ([-(2**53)], InputMalformed),
    "2^53 as a double": (2.0**53, InputMalformed),
    "2^64": (2**64, InputMalformed),
    "10^100,000": (10**100_000, InputMalformed),
    "10^100,000, nested": ({"a": [-(10**100_000)]}, InputMalformed),
    "a whole number as a key": ({1: 1}, InputMalformed),
    "null as a key": ({None: 1}, InputMalformed),
    "bytes as a key": ({b"a": 1}, InputMalformed),
    "a tuple as a key": ([{("a",): 1}], InputMalformed),
    "a lone surrogate": ("\ud800", InputMalformed),
    "a pair of lone surrogates": (["\ud83d\ude00"], InputMalformed),
    "a lone surrogate in a key": ({"\udfff": 1}, InputMalformed),
    "a lone surrogate beside a real": (["\ud800", 1.5], InputMalformed),
    "NUL": ("\x00", InputMalformed),
    "NUL in a key": ({"a": {"\x00": 1}}, InputMalformed),
    "NUL beside a real": ({"a\x00": 1.5}, InputMalformed),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_has_no_canonical_form_is_refused_and_never_written(what: str) -> None:
    value, expected = UNWRITABLE[what]
    started = time.thread_time()
    with pytest.raises(TgaError) as raised:
        canonical_bytes(value)
    assert raised.type is expected
    assert len(str(raised.value)) < 1_000
    assert time.thread_time() - started < SECONDS_MAX


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(st.characters(), max_size=3) | st.integers() | st.none(), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=2)
    ),
    max_leaves=8,
)


@thorough
@given(anything)
def test_any_value_is_written_or_refused(value: Any) -> None:
    try:
        written = canonical_bytes(value)
    except (InputMalformed, InputTooLarge) as error:
        event(error.code)
        return
    event("written")
    assert same(json.loads(written), parse_json(written))
