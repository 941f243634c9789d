"""Values as text: nothing hidden stays hidden, nothing is left out silently, and a page stays small. No browser."""

from __future__ import annotations

import json

import pytest

from app.console.components import json_view
from app.console.shown_text import arguments_shown, hidden_in, shown, summary_of

HIDDEN = "\u202e\u200b\u2066\ufeff\u00ad\u2028\U000e0041\u3164\x07\x7f\ud800"


@pytest.mark.parametrize("character", list(HIDDEN))
def test_what_a_reader_would_not_see_is_numbered(character: str) -> None:
    for made in (shown(f"a{character}b"), json_view({"k" + character: "v" + character}, "x")):
        assert character not in made
        assert f"U+{ord(character):04X}" in made or f"\\u{ord(character):04x}" in made
    assert hidden_in({"a": [character]}) == 1


@pytest.mark.parametrize("text", ["العربية", "naïve café", "日本語", "line\nline\ttab", "👍"])
def test_what_people_write_is_left_as_it_is(text: str) -> None:
    assert shown(text) == text


def test_markup_is_text() -> None:
    evil = "<script>alert(1)</script>\"'&"
    for made in (
        shown(evil),
        json_view({evil: evil}, "x"),
        summary_of({evil: evil}),
        arguments_shown({evil: evil})[0]["value"],
    ):
        assert "<script" not in made


@pytest.mark.parametrize(
    "value", ["A" * 5_000_000, "\u202e" * 100_000, ["x"] * 100_000, {str(n): "\u200b" * 50 for n in range(5_000)}]
)
def test_however_large_a_value_is_its_view_is_small_and_says_that_it_is_cut(value: object) -> None:
    made = json_view(value, "x", all_of_it="/all")
    assert len(made.encode()) < 60_000
    assert "The first 4,096 characters are shown" in made
    assert 'href="/all"' in made


def test_deep_nesting_is_cut_with_a_word_about_it() -> None:
    value = json.loads("[" * 200 + "]" * 200)
    assert "nested deeper than 24 levels" in json_view(value, "x")


def test_a_long_argument_hides_no_other() -> None:
    rows = arguments_shown({"a": "A" * 100_000, "amount": 18900, "z": "\u202e" * 9_000})
    assert [str(row["name"]) for row in rows] == ["a", "amount", "z"]
    assert "18900" in rows[1]["value"]
    assert sum(len(row["value"]) for row in rows) < 60_000
    many = arguments_shown({f"n{number}": number for number in range(500)})
    assert "450 more arguments" in many[-1]["value"]


@pytest.mark.parametrize("value", [18900, 1.0, 1e21, True, None, "007"])
def test_values_are_never_prettified(value: object) -> None:
    assert json.dumps(value).replace('"', "&#34;") in arguments_shown({"v": value})[0]["value"]
