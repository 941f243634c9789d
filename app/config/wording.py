"""How values and names are shown in messages: printable, and never long."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from app.core.limits import POINTER_CHARS_MAX, SHOWN_CHARS_MAX

_NAMES_SHOWN_MAX = 10


def pointer_to(path: Iterable[str | int]) -> str:
    written = "".join(f"/{escaped(step)}" for step in path)
    return written if len(written) <= POINTER_CHARS_MAX else written[:POINTER_CHARS_MAX] + "…"


def escaped(step: str | int) -> str:
    return ascii(str(step))[1:-1].replace("~", "~0").replace("/", "~1")


def shown(value: object) -> str:
    written = ascii(value)
    if len(written) <= SHOWN_CHARS_MAX:
        return written
    return f"a {type(value).__name__} of {len(written)} characters"


def kind_of(value: object) -> str:
    """What a value is, without showing it: it may be a secret."""
    for kind, name in (
        (bool, "true or false"),
        (str, "a text"),
        (int, "a number"),
        (float, "a number"),
        (list, "a list"),
    ):
        if isinstance(value, kind):
            return name
    return "a table" if isinstance(value, dict) else "something else"


def listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN_MAX
    return ", ".join(map(_bare, ordered[:_NAMES_SHOWN_MAX])) + (f" and {more} more" if more > 0 else "")


def one_of(kind: str, name: str, names: Iterable[str]) -> str:
    """What `name` may have been meant to be, among `names`."""
    known = list(names)
    close = difflib.get_close_matches(name[:SHOWN_CHARS_MAX], known, n=3)
    if close:
        return f"{kind}, such as {', '.join(map(_bare, close))}"
    return f"{kind} ({listed(known) or 'there is none'})"


def _bare(name: str) -> str:
    return ascii(name)[1:-1] if len(name) <= SHOWN_CHARS_MAX else shown(name)
