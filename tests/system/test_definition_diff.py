"""Two definitions of a tool side by side: what differs is shown, and what cannot be seen is named."""

from __future__ import annotations

import time

import pytest

from app.core.limits import MCP_DEFINITION_BYTES_MAX
from app.domain.system.definition_diff import diff_definitions, with_hidden_named


def test_only_what_differs_is_shown_with_a_little_around_it() -> None:
    before = {"a": 1, "b": 2, "c": {"x": [1, 2], "y": "same"}, "d": "old", "e": 5, "f": 6, "g": 7}
    after = {**before, "d": "new"}
    assert diff_definitions(before, after).lines == (
        "  /c/x/1: 2",
        '  /c/y: "same"',
        '- /d: "old"',
        '+ /d: "new"',
        "  /e: 5",
        "  /f: 6",
    )
    assert diff_definitions(before, dict(reversed(before.items()))).lines == ()


def test_without_a_pinned_definition_all_of_it_is_new() -> None:
    assert diff_definitions(None, {"a": {}, "b": []}).lines == ("+ /a: {}", "+ /b: []")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, äöü 漢字 🙂", "plain text, äöü 漢字 🙂"),
        ("a\u200bb", "a<U+200B ZERO WIDTH SPACE>b"),
        ("a\u200b\u200b\u200bb", "a<3 x U+200B ZERO WIDTH SPACE>b"),
        ("\u202eevil", "<U+202E RIGHT-TO-LEFT OVERRIDE>evil"),
        ("a\u00a0b", "a<U+00A0 NO-BREAK SPACE>b"),
        ("\x1b[31m", "<U+001B ESCAPE>[31m"),
        ("a\u3164b", "a<U+3164 HANGUL FILLER>b"),
        ("a\ufe0fb", "a<U+FE0F VARIATION SELECTOR-16>b"),
        ("\ufeff", "<U+FEFF ZERO WIDTH NO-BREAK SPACE>"),
        ("x" + "".join(chr(0xE0000 + ord(c)) for c in "hi there"), 'x<invisible letters that spell "hi there">'),
    ],
)
def test_what_cannot_be_seen_is_named(text: str, shown: str) -> None:
    assert with_hidden_named(text) == shown


def test_names_of_arguments_hide_nothing_either() -> None:
    diff = diff_definitions({}, {"properties": {"to\u200b": 1}})
    assert diff.lines[-1] == "+ /properties/to<U+200B ZERO WIDTH SPACE>: 1"
    assert [(one.where, one.at, one.times) for one in diff.hidden] == [
        ("found", "/properties/to<U+200B ZERO WIDTH SPACE>", 1)
    ]


def test_the_largest_definitions_are_compared_in_bounded_time() -> None:
    lines = MCP_DEFINITION_BYTES_MAX // 2
    before = {"description": "a\n" * lines}
    after = {"description": "b\n" * (lines // 2) + "a\n" * (lines // 2)}
    began = time.process_time()
    assert len(diff_definitions(before, after).lines) > lines // 2
    assert time.process_time() - began < 5
