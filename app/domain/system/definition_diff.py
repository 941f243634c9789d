"""How two definitions of a tool differ, line by line, for the person who must decide whether the change is meant.

Characters that a reader would not see are named where they stand: a zero-width space, an override of the direction, the
invisible letters in which instructions for models are smuggled. Pure; bounded by the size of the definitions.
"""

from __future__ import annotations

import difflib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

_CONTEXT_LINES: Final = 2
_COMPARED_LINES_MAX: Final = 400  # if more differ they are shown as a whole: comparing is quadratic
_CONTROLS: Final = {
    0x00: "NULL",
    0x08: "BACKSPACE",
    0x09: "TAB",
    0x0D: "CARRIAGE RETURN",
    0x1B: "ESCAPE",
    0x7F: "DELETE",
}
# Of kinds that are shown, and still invisible: fillers, blanks, joiners.
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_TAGS: Final = range(0xE0020, 0xE007F)  # ASCII, shifted to where nothing is drawn


@dataclass(frozen=True, slots=True)
class Hidden:
    """An invisible character, and where. `where` is `pinned` or `found`; `at` is a JSON pointer."""

    where: str
    at: str
    character: str
    times: int


@dataclass(frozen=True, slots=True)
class DefinitionDiff:
    """Each line begins with `-` (pinned only), `+` (found only) or a space (both)."""

    lines: tuple[str, ...]
    hidden: tuple[Hidden, ...]


def diff_definitions(pinned: Mapping[str, Any] | None, found: Mapping[str, Any]) -> DefinitionDiff:
    """Without a pinned definition, all of the found one is new."""
    before = [] if pinned is None else list(_lines(pinned))
    after = list(_lines(found))
    hidden = [*_hidden("pinned", pinned or {}), *_hidden("found", found)]
    return DefinitionDiff(tuple(_compared(before, after)), tuple(hidden))


def with_hidden_named(text: str) -> str:
    """The text with every invisible character as `<U+200B ZERO WIDTH SPACE>`, and smuggled letters spelled out."""
    shown = []
    for kind, run in groupby(text, key=_kind):
        part = "".join(run)
        if kind == "tag":
            spelled = "".join(chr(ord(character) - 0xE0000) for character in part)
            shown.append(f"<invisible letters that spell {json.dumps(spelled)}>")
        elif kind == "hidden":
            shown.extend(_times(character, len(list(same))) for character, same in groupby(part))
        else:
            shown.append(part)
    return "".join(shown)


def _times(character: str, times: int) -> str:
    return f"<{_named(character)}>" if times == 1 else f"<{times} x {_named(character)}>"


def _kind(character: str) -> str:
    if ord(character) in _TAGS:
        return "tag"
    category = unicodedata.category(character)
    is_hidden = (
        category[0] == "C"  # controls, formats, private use, surrogates, unassigned
        or (category[0] == "Z" and character != " ")  # spaces that are not the plain one, separators of lines
        or character in _BLANK
        or 0xFE00 <= ord(character) <= 0xFE0F  # variation selectors
        or 0xE0100 <= ord(character) <= 0xE01EF
    )
    return "hidden" if is_hidden else "shown"


def _named(character: str) -> str:
    code = ord(character)
    return f"U+{code:04X} {unicodedata.name(character, _CONTROLS.get(code, 'without a name'))}"


def _lines(definition: Mapping[str, Any]) -> Iterator[str]:
    for at, leaf in _leaves(definition, ""):
        if not isinstance(leaf, str):
            yield f"{with_hidden_named(at)}: {json.dumps(leaf)}"
            continue
        first, *more = leaf.split("\n")
        yield f'{with_hidden_named(at)}: "{with_hidden_named(first)}' + ("" if more else '"')
        for place, line in enumerate(more, 1):
            yield f"    {with_hidden_named(line)}" + ('"' if place == len(more) else "")


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Every value that holds no others, in the order of names, with the JSON pointer to it."""
    waiting = [(at, value)]
    while waiting:
        here, found = waiting.pop()
        if isinstance(found, Mapping) and found:
            inner = [(f"{here}/{_step(name)}", found[name]) for name in sorted(found)]
        elif isinstance(found, list) and found:
            inner = [(f"{here}/{place}", item) for place, item in enumerate(found)]
        else:
            yield here, found
            continue
        waiting += reversed(inner)


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _hidden(where: str, definition: Mapping[str, Any]) -> Iterator[Hidden]:
    for at, leaf in _leaves(definition, ""):
        written = at + leaf if isinstance(leaf, str) else at
        counted: dict[str, int] = {}
        for character in written:
            if character != "\n" and _kind(character) != "shown":
                counted[character] = counted.get(character, 0) + 1
        for character, times in counted.items():
            yield Hidden(where, with_hidden_named(at), _named(character), times)


def _compared(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """What begins and ends alike is set aside first: only the rest is compared."""
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    removed, added = before[start : len(before) - end], after[start : len(after) - end]
    if not removed and not added:
        return
    yield from (f"  {line}" for line in after[max(0, start - _CONTEXT_LINES) : start])
    if len(removed) + len(added) > _COMPARED_LINES_MAX:
        yield from (f"- {line}" for line in removed)
        yield from (f"+ {line}" for line in added)
    else:
        yield from _opcodes(removed, added)
    yield from (f"  {line}" for line in after[len(after) - end :][:_CONTEXT_LINES])


def _opcodes(removed: Sequence[str], added: Sequence[str]) -> Iterator[str]:
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, removed, added, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from (f"  {line}" for line in added[j1:j2])
        else:
            yield from (f"- {line}" for line in removed[i1:i2])
            yield from (f"+ {line}" for line in added[j1:j2])
