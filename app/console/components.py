"""The parts that pages are made of, as CONSOLE.md names them: each makes markup from values, and escapes them.

Templates reach them by these names; docs/console.md lists them with what they are for.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from markupsafe import Markup

from app.console.icons import icon
from app.console.shown_text import json_lines, shown
from app.core.limits import CONSOLE_JSON_CHARS_MAX

_SPACES: Final = re.compile(r"(\s+)")
STATE_ICONS: Final = {
    "PENDING": "clock",
    "AUTHORIZED": "check-o",
    "EXECUTING": "play",
    "COMPLETED": "check-f",
    "FAILED": "x-f",
    "DENIED": "slash",
    "HELD": "pause",
    "WAITING": "clock",
    "SCHEDULED": "clock",
    "SLEEPING": "sleep",
    "RUNNING": "play",
    "RUNNABLE": "play",
    "PARKED": "pause",
    "DIVERGED": "fork-x",
    "CANCELLED": "slash",
    "QUARANTINED": "shield-x",
}


def state_pill(state: str, word: str | None = None, *, large: bool = False) -> Markup:
    """Shape, word and colour together. `word` where more is to be said than the state's own name."""
    shape = icon(STATE_ICONS.get(state, "dash"))
    size = " state-lg" if large else ""
    return Markup('<span class="state st-{}{}">{}{}</span>').format(state, size, shape, word or state)


def digest(full: str | None, head: int = 8, tail: int = 4, *, copy: bool = True, what: str = "digest") -> Markup:
    """Shortened for the eye; selecting it copies all of it."""
    if not full:
        return Markup('<span class="muted">none</span>')
    if len(full) <= head + tail + 1:
        return Markup('<span class="dg">{}</span>').format(full)
    short = Markup(
        '<span class="dg" title="{full}"><span>{head}</span><span class="mid" aria-hidden="true">{mid}</span>'
        '<span class="ell" aria-hidden="true">…</span><span>{tail}</span></span>'
    ).format(full=full, head=full[:head], mid=full[head:-tail], tail=full[-tail:])
    return Markup('<span class="dgw">{}{}</span>').format(short, copy_button(full, what)) if copy else short


def identity(full: str | None, *, copy: bool = True) -> Markup:
    """An id: ids of one hour begin alike, so more of the end is shown."""
    return digest(full, 4, 8, copy=copy, what="id")


def copy_button(text: str, what: str = "text") -> Markup:
    return Markup(
        '<button type="button" class="copy" data-copy="{}" aria-label="Copy {what}" title="Copy {what}">{}</button>'
    ).format(text, icon("copy"), what=what)


def command(text: str, what: str = "Command") -> Markup:
    """A command to run elsewhere, with a button that copies it. A line ends between two words, not inside an option."""
    words = Markup("").join(
        Markup('<span class="word">{}</span>').format(part) if part.strip() else part for part in _SPACES.split(text)
    )
    return Markup('<pre class="cli" tabindex="0" role="group" aria-label="{}">{}{}</pre>').format(
        what, words, copy_button(text, what.lower())
    )


def version(said: str) -> Markup:
    """Of a program: one that is only a number is called so."""
    return Markup("{}{}").format("v" if said[:1].isdigit() else "", shown(said))


def tool(server_id: str | None, tool_name: str | None) -> Markup:
    return Markup('<span class="tool">{}<i>/</i>{}</span>').format(shown(server_id or "?"), shown(tool_name or "?"))


def json_view(
    value: Any,
    label: str,
    *,
    all_of_it: str | None = None,
    changed: frozenset[str] = frozenset(),
    chars_max: int = CONSOLE_JSON_CHARS_MAX,
) -> Markup:
    """The first 4 KiB of a value, or less. `all_of_it`: an address that has the rest."""
    lines, is_whole = json_lines(value, chars_max=chars_max, changed=changed)
    made = Markup('<pre class="json" tabindex="0" role="group" aria-label="{}">{}</pre>').format(label, lines)
    if not is_whole:
        way = Markup(' <a href="{}">All of it, as text</a>').format(all_of_it) if all_of_it else ""
        made += Markup('<p class="xs muted">The first {:,} characters are shown.{}</p>').format(chars_max, way)
    return made


# Time: relative with the absolute time in `title`; `at` shows the absolute one outright. All of it is written in UTC;
# `data-at` tells the script of the pages which form to write it in where the visitor has chosen local time.
def moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def after_ms(text: str | None, milliseconds: float | None) -> str | None:
    if text is None or milliseconds is None:
        return None
    return (moment(text) + timedelta(milliseconds=milliseconds)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[
        :-3
    ] + "Z"


def written_time(text: str) -> str:
    return moment(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def clock_time(text: str, *, zoned: bool = False) -> Markup:
    """The time of day, to the millisecond; the date is in `title`. `zoned`: with the name of the zone."""
    said = moment(text).astimezone(UTC).strftime("%H:%M:%S.%f")[:-3] + (" UTC" if zoned else "")
    return Markup('<time datetime="{}" title="{}" data-at="{}">{}</time>').format(
        text, written_time(text), "clock-zone" if zoned else "clock", said
    )


def absolute_time(text: str) -> Markup:
    at = moment(text).astimezone(UTC)
    return Markup('<time datetime="{}" title="{}" data-at="full">{}</time>').format(
        text, written_time(text), f"{at.day} {at:%b %Y, %H:%M:%S} UTC"
    )


def relative_time(text: str | None, now: str, words: str | None = None) -> Markup:
    if not text:
        return Markup('<span class="muted">never</span>')
    return Markup('<time datetime="{}" title="{}"{}>{}</time>').format(
        text, written_time(text), Markup("") if words else Markup(" data-rel"), words or ago(text, now)
    )


def ago(text: str, now: str) -> str:
    seconds = (moment(now) - moment(text)).total_seconds()
    words = span(abs(seconds) * 1000, whole=True)
    return f"in {words}" if seconds < 0 else f"{words} ago"


def span(milliseconds: float | None, *, whole: bool = False) -> str:
    """How long something took, in the units that people say it in."""
    if milliseconds is None:
        return "…"
    if milliseconds < 1000 and not whole:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    if seconds < 60:
        return f"{int(seconds)} s" if whole else f"{seconds:.1f} s"
    if seconds < 3600:
        rest = "" if whole else f" {int(seconds % 60)} s"
        return f"{int(seconds // 60)} min{rest}"
    if seconds < 86_400:
        minutes = int(seconds % 3600 // 60)
        return (
            f"{int(seconds // 3600)} h {minutes} min" if minutes and seconds < 21_600 else f"{int(seconds // 3600)} h"
        )
    return f"{int(seconds // 86_400)} d"


def between_ms(begin: str | None, end: str | None) -> float | None:
    if not begin or not end:
        return None
    return max(0.0, (moment(end) - moment(begin)).total_seconds() * 1000)


def commas(number: float) -> str:
    return f"{number:,}"


def sparkline(values: list[float], *, width: int = 100, height: int = 30, area: bool = True) -> Markup:
    """A line through the values; its geometry is attributes of SVG, never a style."""
    if len(values) < 2:
        return Markup("")
    top = max(values) or 1
    points = [
        (round(place * width / (len(values) - 1), 2), round(height - 2 - value / top * (height - 4), 2))
        for place, value in enumerate(values)
    ]
    line = "M" + "L".join(f"{x} {y}" for x, y in points)
    below = Markup('<path class="ar" d="{}L{} {}L0 {}Z"/>').format(line, width, height, height) if area else ""
    return Markup('{}<path class="ln" d="{}"/>').format(below, line)


def bar(percent: float, classes: str = "f-accent", label: str = "") -> Markup:
    return Markup(
        '<svg class="bar" role="img" aria-label="{}"><rect class="f-sunken" width="100%" height="6"/>'
        '<rect class="{}" width="{}%" height="6"/></svg>'
    ).format(label, classes, round(min(100.0, max(0.0, percent)), 2))
