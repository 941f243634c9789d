"""Values as text that cannot deceive: what is invisible or turns the reading direction is shown by its number.

Values are never reformatted: numbers and strings stand as they are recorded, in the order in which they are recorded.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any, Final

from markupsafe import Markup, escape

from app.console.icons import icon
from app.core.limits import CONSOLE_DEPTH_MAX, CONSOLE_JSON_CHARS_MAX, CONSOLE_ROWS_MAX, CONSOLE_VALUE_CHARS_MAX

# Besides what Unicode calls control, format, surrogate, private or unassigned: fillers that show nothing.
_BLANK: Final = frozenset("\u115f\u1160\u2800\u3164\uffa0\u034f\u17b4\u17b5\u2028\u2029")
_PLAIN: Final = frozenset("\n\t")
_NUMBER_CHARS: Final = 40
_NUMBERED_MAX: Final = 64
_ARGUMENT_CHARS_MIN: Final = 160
_NUMBERED: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})


def is_hidden(character: str) -> bool:
    """Whether a reader would not see it, or see others in another order because of it."""
    if character in _PLAIN or " " <= character <= "~":
        return False
    return character in _BLANK or unicodedata.category(character) in _NUMBERED


def hidden_in(value: Any) -> int:
    """How many such characters stand in a value's strings and names, at any depth."""
    count, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += 0 if one.isascii() and one.isprintable() else sum(map(is_hidden, one))
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one
    return count


def shown(text: object, *, chars_max: int = CONSOLE_VALUE_CHARS_MAX, hidden_max: int = _NUMBERED_MAX) -> Markup:
    """Escaped, cut with a word about it, and hidden characters numbered, up to `hidden_max` of them."""
    whole = str(text)
    kept = _with_few_hidden(whole[:chars_max], hidden_max)
    if kept.isascii() and kept.isprintable():
        made = escape(kept)
    else:
        made = Markup("").join(_numbered(one) if is_hidden(one) else escape(one) for one in kept)
    if len(whole) > len(kept):
        made += Markup(' <span class="cutoff">… first {:,} of {:,} characters</span>').format(len(kept), len(whole))
    return made


def _with_few_hidden(text: str, hidden_max: int) -> str:
    """Up to where more hidden characters stand than are numbered: each takes the room of a word."""
    if text.isascii() and text.isprintable():
        return text
    hidden = 0
    for place, one in enumerate(text):
        hidden += is_hidden(one)
        if hidden > hidden_max:
            return text[:place]
    return text


def _numbered(character: str) -> Markup:
    name = unicodedata.name(character, "a control or unassigned character")
    return Markup('<span class="ctl" title="{}">U+{:04X}</span>').format(name, ord(character))


class _Room:
    """How many characters may still be written."""

    def __init__(self, chars: int) -> None:
        self.left = chars


def json_lines(value: Any, *, chars_max: int, changed: frozenset[str] = frozenset()) -> tuple[Markup, bool]:
    """The value as coloured JSON, and whether all of it is there. `changed`: pointers that are marked."""
    room = _Room(chars_max)
    made = _json(value, room, 0, "", changed)
    return made, room.left >= 0


def _json(value: Any, room: _Room, depth: int, path: str, changed: frozenset[str]) -> Markup:
    if room.left < 0:
        return Markup('<span class="cutoff">…</span>')
    if isinstance(value, dict) and set(value) == {"$redacted"}:
        room.left -= 20
        return sealed(value)
    if isinstance(value, dict | list):
        return _nested(value, room, depth, path, changed)
    if isinstance(value, str):
        written = json.dumps(value[: max(room.left, 0) + 1], ensure_ascii=False)
        cut = len(value) > max(room.left, 0)
        text = shown(written, chars_max=len(written))
        room.left -= max(len(written), len(text) // 4) + (1 if cut else 0)
        tail = Markup('<span class="cutoff">… cut, {:,} characters in all</span>').format(len(value)) if cut else ""
        return Markup('<span class="s">{}{}</span>').format(text, tail)
    written = json.dumps(value)
    room.left -= len(written)
    kind = "b" if value is None or isinstance(value, bool) else "n"
    return Markup('<span class="{}">{}</span>').format(kind, written)


def _nested(value: dict[str, Any] | list[Any], room: _Room, depth: int, path: str, changed: frozenset[str]) -> Markup:
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    if not value:
        room.left -= 2
        return Markup('<span class="p">{}{}</span>').format(opening, closing)
    if depth >= CONSOLE_DEPTH_MAX:
        room.left -= 40
        return Markup('<span class="cutoff">{}… nested deeper than {} levels{}</span>').format(
            opening, CONSOLE_DEPTH_MAX, closing
        )
    pad, rows = "  " * (depth + 1), list[Markup]()
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, one in items:
        if room.left < 0:
            left = len(value) - len(rows)
            rows.append(Markup('{}<span class="cutoff">… and {:,} more</span>').format(pad, left))
            break
        place, label = f"{path}/{name}", Markup("")
        room.left -= len(pad)
        if isinstance(name, str):
            label = _json(name, room, depth, "", frozenset())
            label = Markup('<span class="k">{}</span><span class="p">: </span>').format(label)
        row = label + _json(one, room, depth + 1, place, changed)
        rows.append(Markup('{}<span class="chg">{}</span>').format(pad, row) if place in changed else pad + row)
    body = Markup('<span class="p">,</span>\n').join(rows)
    end = "  " * depth
    return Markup('<span class="p">{}</span>\n{}\n{}<span class="p">{}</span>').format(opening, body, end, closing)


def sealed(value: dict[str, Any]) -> Markup:
    """A value that was sealed before it was recorded: its commitment stands there instead."""
    inner = value["$redacted"]
    commitment = str(inner.get("commitment", "")) if isinstance(inner, dict) else ""
    words = f"sealed, {commitment[:8]}…{commitment[-4:]}" if len(commitment) > 12 else "sealed"
    return Markup('<span class="sealed">{}{}</span>').format(icon("lock", "i-sm"), words)


def summary_of(value: Any, *, chars_max: int = 80) -> Markup:
    """The beginning of an object on one line, for a list."""
    if not isinstance(value, dict):
        return Markup('<span class="cutoff">nothing is shown</span>')
    parts, left = list[str](), chars_max
    for name, one in value.items():
        written = f"{name}: {_brief(one, left)}"
        parts.append(written)
        left -= len(written) + 2
        if left <= 0:
            break
    whole = ", ".join(parts)
    cut = "…" if len(parts) < len(value) or len(whole) > chars_max else ""
    return Markup("{{{}{}}}").format(shown(whole[:chars_max], chars_max=chars_max), cut)


def _brief(value: Any, chars: int) -> str:
    if isinstance(value, str):
        return json.dumps(value[: max(chars, 1)], ensure_ascii=False)
    if isinstance(value, dict):
        return "sealed" if set(value) == {"$redacted"} else "{…}" if value else "{}"
    if isinstance(value, list):
        return "[…]" if value else "[]"
    return json.dumps(value)[:_NUMBER_CHARS]


def arguments_shown(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Each argument by its name, exactly as recorded; what does not fit is counted."""
    rows = list[dict[str, Any]]()
    # Each has its own room: a long one hides no other.
    each = max(_ARGUMENT_CHARS_MIN, 2 * CONSOLE_JSON_CHARS_MAX // max(1, len(arguments)))
    for name, value in arguments.items():
        room = _Room(each)
        if len(rows) >= CONSOLE_ROWS_MAX:
            left = len(arguments) - len(rows)
            rows.append(
                {"name": Markup("…"), "value": Markup("{:,} more arguments").format(left), "cut": True, "hidden": 0}
            )
            break
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        rows.append(
            {
                "name": shown(name, chars_max=120),
                "value": _json(value, room, 0, "", frozenset()),
                "is_number": is_number,
                "type": "integer" if isinstance(value, int) and is_number else "number" if is_number else "",
                "is_nested": isinstance(value, dict | list) and bool(value),
                "hidden": hidden_in([name, value]),
                "cut": False,
            }
        )
    return rows
