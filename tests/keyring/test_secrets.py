"""Secret arguments: out of the record, back into the call, and never the wrong ones."""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.core.canonical import canonical_bytes
from app.core.errors import SecretMissing, SettingInvalid
from app.domain.tga.secrets import find_secrets, redact, reveal, sealed_document, values_from, verify_pointer

SALT = bytes(range(32))
# RFC 6901, section 5, with an array of objects beside it.
EXAMPLE: dict[str, Any] = {
    "foo": ["bar", "baz"],
    "": 0,
    "a/b": 1,
    "c%d": 2,
    "e^f": 3,
    "g|h": 4,
    "i\\j": 5,
    'k"l': 6,
    " ": 7,
    "m~n": 8,
    "~1": 9,
    "0": {"-": None},
    "rows": [{"card": "4111"}, {"card": None}],
}

_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_keys = st.sampled_from(["", "a", "b", "a/b", "~", "~1", "0", "1", "-", "\n"]) | _texts
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(-1e6, 1e6) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=12,
)
_arguments = st.dictionaries(_keys, _json, max_size=4)


def escaped(token: str) -> str:
    return token.replace("~", "~0").replace("/", "~1")


def all_pointers(value: Any, at: str = "") -> list[str]:
    found = [at]
    members = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, member in members:
        found += all_pointers(member, f"{at}/{escaped(str(key))}")
    return found


@st.composite
def _calls(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    arguments = draw(_arguments)
    real = st.sampled_from(all_pointers(arguments))
    made_up = st.lists(_keys, max_size=4).map(lambda tokens: "".join(f"/{escaped(token)}" for token in tokens))
    return arguments, draw(st.lists(real | made_up, max_size=5))


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("/foo", ["bar", "baz"]),
        ("/foo/0", "bar"),
        ("/", 0),
        ("/a~1b", 1),
        ("/c%d", 2),
        ("/e^f", 3),
        ("/g|h", 4),
        ("/i\\j", 5),
        ('/k"l', 6),
        ("/ ", 7),
        ("/m~0n", 8),
        ("/~01", 9),
        ("/0/-", None),
        ("/rows/0/card", "4111"),
        ("/rows/1/card", None),
        ("", EXAMPLE),
    ],
)
def test_a_pointer_finds_its_value(pointer: str, value: Any) -> None:
    assert find_secrets(EXAMPLE, [pointer]) == {pointer: value}


@pytest.mark.parametrize(
    "pointer",
    [
        "/bar",
        "/foo/2",
        "/foo/-",
        "/foo/-1",
        "/foo/00",
        "/foo/01",
        "/foo/+1",
        "/foo/ 1",
        "/foo/١",
        "/foo/0/0",
        "/foo/1e0",
        "/foo/" + "9" * 5000,
        "/rows/0/card/x",
        "/ /x",
        "/0/-/x",
        "/~01~01",
    ],
)
def test_a_path_that_leads_nowhere_is_skipped(pointer: str) -> None:
    assert find_secrets(EXAMPLE, [pointer]) == {}


@pytest.mark.parametrize("pointer", ["foo", "#/foo", "/~", "/~2", "/a~", "~0", " /a"])
def test_what_is_no_pointer_is_refused(pointer: str) -> None:
    with pytest.raises(SettingInvalid, match="not a JSON pointer"):
        verify_pointer(pointer)
    with pytest.raises(SettingInvalid):
        find_secrets(EXAMPLE, [pointer])


def test_a_secret_within_a_secret_is_taken_with_it() -> None:
    arguments: dict[str, Any] = {"a": {"b": 1}, "ab": 2}
    assert find_secrets(arguments, ["/a/b", "/a", "/ab", "/a"]) == {"/a": {"b": 1}, "/ab": 2}


def test_a_commitment_is_the_documented_hmac() -> None:
    redacted = redact({"card": "4111", "amount": 5}, {"/card": "4111"}, salt=SALT)
    expected = hmac.new(SALT, b'/card\n"4111"', hashlib.sha256).hexdigest()
    assert redacted == {"card": {"$redacted": {"commitment": expected}}, "amount": 5}


def test_equal_values_at_two_places_and_of_two_traces_do_not_look_equal() -> None:
    arguments: dict[str, Any] = {"a": "same", "b": "same"}
    secrets = find_secrets(arguments, ["/a", "/b"])
    one, other = redact(arguments, secrets, salt=SALT), redact(arguments, secrets, salt=SALT[::-1])
    assert len({json.dumps(value) for value in (one["a"], one["b"], other["a"], other["b"])}) == 4


@given(_calls())
def test_what_is_redacted_is_revealed_and_the_original_stays(call: tuple[dict[str, Any], list[str]]) -> None:
    arguments, pointers = call
    before = copy.deepcopy(arguments)
    secrets = find_secrets(arguments, pointers)
    redacted = redact(arguments, secrets, salt=SALT)
    assert arguments == before
    kept = copy.deepcopy(redacted)
    values = values_from(sealed_document(secrets))
    revealed = reveal(redacted, values, salt=SALT)
    assert redacted == kept
    assert revealed == arguments
    assert canonical_bytes(revealed) == canonical_bytes(arguments)
    for pointer in pointers:  # every secret is gone, whole or with what it stands in
        found = find_secrets(redacted, [pointer])
        assert all(
            set(value) == {"$redacted"} for value in found.values() if isinstance(value, dict) and pointer in secrets
        )


@given(_calls(), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=4, max_size=20))
def test_no_text_of_a_secret_is_in_the_record(call: tuple[dict[str, Any], list[str]], secret: str) -> None:
    arguments, pointers = call
    arguments = {**arguments, "s": {"e": [secret, {"c": secret}]}}
    assume(not any(pointer in ("", "/s", "/s/e") for pointer in pointers))
    pointers = [*pointers, "/s/e/0", "/s/e/1"]
    inner = canonical_bytes(secret)[1:-1]
    assume(inner not in canonical_bytes({**arguments, "s": {"e": [{"$redacted": {"commitment": ""}}]}}))
    secrets = find_secrets(arguments, pointers)
    record = canonical_bytes(redact(arguments, secrets, salt=SALT))
    for pointer, value in secrets.items():  # by chance the secret may be four hex digits
        commitment = hmac.new(SALT, pointer.encode() + b"\n" + canonical_bytes(value), hashlib.sha256).hexdigest()
        assert commitment.encode() in record
        record = record.replace(commitment.encode(), b"")
    assert inner not in record


@pytest.mark.parametrize(
    "values",
    [
        {"/card": "4112"},
        {"/card": {"$redacted": {"commitment": "0" * 64}}},
        {"/other": "4111"},
        {"/amount": 5},
        {"/card": "4111", "/amount": 5},
        {"/absent": "4111"},
        {"/amount/x": "4111"},
        {"": {}},
    ],
)
def test_a_value_that_the_record_does_not_commit_to_at_its_place_is_missing(values: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"card": "4111", "other": "9999", "amount": 5}
    redacted = redact(arguments, find_secrets(arguments, ["/card", "/other"]), salt=SALT)
    with pytest.raises(SecretMissing) as caught:
        reveal(redacted, values, salt=SALT)
    assert "411" not in str(caught.value)


@pytest.mark.parametrize(
    "marker",
    [
        {"$redacted": None},
        {"$redacted": {}},
        {"$redacted": {"commitment": 1}},
        {"$redacted": {"commitment": "é"}},
        {"$redacted": {"commitment": "\ud800"}},
        {"$redacted": {"commitment": "0" * 64}},
        {"$redacted": {"commitment": "0" * 64, "more": 1}},
        {"$redacted": {"commitment": "0" * 64}, "more": 1},
    ],
)
def test_a_forged_commitment_reveals_nothing(marker: Any) -> None:
    with pytest.raises(SecretMissing):
        reveal({"card": marker}, {"/card": "4111"}, salt=SALT)


def test_a_commitment_with_anything_beside_it_is_none() -> None:
    redacted: dict[str, Any] = redact({"card": "4111"}, {"/card": "4111"}, salt=SALT)
    for place in (redacted["card"], redacted["card"]["$redacted"]):
        place["more"] = 1
        with pytest.raises(SecretMissing, match="no commitment"):
            reveal(redacted, {"/card": "4111"}, salt=SALT)
        del place["more"]
    assert reveal(redacted, {"/card": "4111"}, salt=SALT) == {"card": "4111"}


def test_the_salt_of_another_trace_does_not_fit() -> None:
    redacted = redact({"card": "4111"}, {"/card": "4111"}, salt=SALT)
    with pytest.raises(SecretMissing):
        reveal(redacted, {"/card": "4111"}, salt=SALT[::-1])


@pytest.mark.parametrize("salt", [b"", b"x" * 31, b"x" * 33])
def test_a_salt_that_is_not_whole_is_refused(salt: bytes) -> None:
    with pytest.raises(SecretMissing, match="salt"):
        redact({"card": "4111"}, {"/card": "4111"}, salt=salt)
    with pytest.raises(SecretMissing, match="salt"):
        reveal({}, {}, salt=salt)


def test_a_caller_that_sends_what_looks_redacted_changes_nothing() -> None:
    forged = {"$redacted": {"commitment": "0" * 64}}
    arguments: dict[str, Any] = {"card": forged, "note": forged}
    secrets = find_secrets(arguments, ["/card"])
    redacted = redact(arguments, secrets, salt=SALT)
    assert redacted["card"] != forged
    assert reveal(redacted, secrets, salt=SALT) == arguments
