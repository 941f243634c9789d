"""The chart of bench.comparison, as one SVG that needs nothing else: bars of rates, the other figures in columns beside
them, and under them how it was measured, who was left out, and where a peer is better. Light and dark."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

WIDTH: Final = 960
MARGIN: Final = 24
BARS_AT: Final = 190
BARS_TO: Final = 540
LINE: Final = 20
BAR: Final = 13
NOTE_CHARS: Final = 132
NOTES_MAX: Final = 14
COLUMNS: Final = (
    ("a second", 612),
    ("p50 ms", 682),
    ("p99 ms", 752),
    ("CPU µs", 826),
    ("rate to ours", WIDTH - MARGIN),
)
TITLES: Final = {
    "call": "Calls",
    "repeat": "Repeats of finished calls",
    "run": "Runs of one step (for a peer a call is such a run)",
}
OURS: Final = {"call": "tga over HTTP", "repeat": "tga over HTTP", "run": "tga, a run"}
_STYLE: Final = """
svg { background: #ffffff } text { fill: #1c2429; font-size: 12px } .title { font-size: 18px; font-weight: 600 }
.panel { font-size: 14px; font-weight: 600 } .faint { fill: #56646d } .group { font-weight: 600 }
.number { text-anchor: end; font-variant-numeric: tabular-nums } .name { text-anchor: end }
.back { fill: #ffffff } .line { stroke: #d5dce0 }
.ours { fill: #1f6f5c } .peer { fill: #8496a1 } .bare { fill: #c3ccd2 }
@media (prefers-color-scheme: dark) {
  svg { background: #14191d } .back { fill: #14191d } text { fill: #e4e9ec } .faint { fill: #9fadb6 }
  .line { stroke: #333d44 } .ours { fill: #4cb79b } .peer { fill: #74858f } .bare { fill: #47545c }
}
"""

Median = Mapping[str, Any]


def draw(report: Mapping[str, Any]) -> str:
    """`report`: what bench.comparison writes as JSON."""
    medians: Sequence[Median] = report["medians"]
    parts = [_text(MARGIN, 34, "TGA Gateway beside pgbench and its peers", "title"), *_headline(report)]
    parts += _legend(74)
    y = 84
    for what, title in TITLES.items():
        lines = _lines_of(what, medians)
        if any(line["what"] == what for line in lines):
            drawn, y = _panel(title, OURS[what], lines, y + 26)
            parts += drawn
    for heading, notes in _notes(report):
        y += 30
        parts.append(_text(MARGIN, y, heading, "panel"))
        for note in notes:
            for number, piece in enumerate(textwrap.wrap(note, NOTE_CHARS)):
                y += 17
                parts.append(_text(MARGIN + (0 if number == 0 else 14), y, piece, "faint"))
    height = y + MARGIN
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" role="img"><title>TGA Gateway beside pgbench and its peers</title>'
        f'<style>{_STYLE}</style>\n<rect class="back" width="{WIDTH}" height="{height}"/>\n{body}\n</svg>\n'
    )


def _headline(report: Mapping[str, Any]) -> list[str]:
    rounds, seconds = report["rounds"], report["seconds"]
    times = "one round" if rounds == 1 else f"medians of {rounds} rounds in turns"
    said = (
        f"{report['machine']}; {report['began_at'][:10]}; {times}, {seconds:g} s each; synchronous commit on; "
        f"a write and fdatasync alone: {report['disk_sync_ms']:g} ms"
    )
    return [_text(MARGIN, 54, said, "faint")]


def _legend(y: int) -> list[str]:
    parts, x = [], MARGIN
    for kind, words in (("ours", "ours"), ("peer", "a peer"), ("bare", "pgbench: the same rows, nothing else")):
        parts += [
            f'<rect class="{kind}" x="{x}" y="{y - 10}" width="12" height="12"/>',
            _text(x + 18, y, words, "faint"),
        ]
        x += 40 + 7 * len(words)
    return parts


def _lines_of(what: str, medians: Sequence[Median]) -> list[Median]:
    """Of a run: ours, and the calls of those who are neither ours nor pgbench."""
    if what != "run":
        return [line for line in medians if line["what"] == what]
    peers = [line for line in medians if line["what"] == "call" and _kind(line["name"]) == "peer"]
    return [line for line in medians if line["what"] == what] + peers


def _kind(name: str) -> str:
    return "ours" if name.startswith("tga") else "bare" if name.startswith("pgbench") else "peer"


def _panel(title: str, ours: str, lines: Sequence[Median], y: int) -> tuple[list[str], int]:
    parts = [_text(MARGIN, y, title, "panel")]
    parts += [_text(x, y, heading, "number faint") for heading, x in COLUMNS]
    parts.append(f'<line class="line" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y + 7}" y2="{y + 7}"/>')
    most = max(line["per_second"] for line in lines)
    for at_once in sorted({line["at_once"] for line in lines}):
        of_ours = next((one["per_second"] for one in lines if (one["name"], one["at_once"]) == (ours, at_once)), None)
        group = [line for line in lines if line["at_once"] == at_once]
        y += 8
        for number, line in enumerate(group):
            y += LINE
            if number == 0:
                parts.append(_text(MARGIN, y, f"{at_once} at once", "group"))
            parts += _bar(line, y, most, of_ours)
    return parts, y + 8


def _bar(line: Median, y: int, most: float, of_ours: float | None) -> list[str]:
    width = max(1.5, line["per_second"] / most * (BARS_TO - BARS_AT - 90))
    x = BARS_AT + 90
    figures = (
        f"{line['per_second']:,.0f}",
        f"{line['p50_ms']:,.1f}",
        f"{line['p99_ms']:,.1f}",
        f"{line['cpu_us']:,.0f}",
        f"{line['per_second'] / of_ours:.2f}" if of_ours else "",
    )
    return [
        _text(x - 8, y, line["name"], "name"),
        f'<rect class="{_kind(line["name"])}" x="{x}" y="{y - BAR + 2}" width="{width:.1f}" height="{BAR}" rx="2"/>',
        *(_text(at, y, figure, "number") for figure, (_, at) in zip(figures, COLUMNS, strict=True)),
    ]


def _notes(report: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    better = list(report["where_a_peer_is_better"])
    if len(better) > NOTES_MAX:
        better = [*better[: NOTES_MAX - 1], f"and {len(better) - NOTES_MAX + 1} more: comparison.json has them all"]
    left = [
        f"{one['name']}: {one['database_bytes']:,.0f} bytes"
        + ("" if one["commits"] is None else f", {one['commits']:.1f} commits, {one['wal_bytes']:,.0f} bytes of WAL")
        for one in report["counted"]
    ]
    measured = [
        "Ours is the whole gateway as `tga serve` runs it, over HTTP, with a tool server of its own behind HTTP; the "
        "tools of peers are functions in their own process, which is their advantage. Client, gateway or peer, tool "
        "server and PostgreSQL share the machine. CPU is of all that answer a call, not of the client.",
        *(f"{name}: {settings}" for name, settings in report["settings"].items()),
    ]
    notes = [("What a call leaves, at 8 at once", left), ("How", measured)]
    if report["left_out"]:
        notes.append(("Left out", [f"{name}: {why}" for name, why in report["left_out"].items()]))
    notes.insert(0, ("Where a peer is better", better or ["in none of these figures, of those that ran here"]))
    return [(heading, lines) for heading, lines in notes if lines]


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(text)}</text>'
