"""The chart of bench.comparison: calls a second by how many at once, as one SVG that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

WIDTH: Final = 860
LEFT: Final = 170
BAR: Final = 15
TITLES: Final = {"call": "Calls a second", "repeat": "Repeats a second", "run": "Runs of one step a second"}
OURS_COLOUR, OTHER_COLOUR, BARE_COLOUR = "#1f6f5c", "#8c9aa5", "#c9d1d6"


def draw(medians: Sequence[dict[str, Any]], machine: str) -> str:
    """`medians`: lines of `what`, `name`, `at_once`, `per_second`."""
    parts, y = [_text(LEFT, 22, machine, size=12)], 44
    for what, title in TITLES.items():
        lines = [line for line in medians if line["what"] == what]
        if not lines:
            continue
        most = max(line["per_second"] for line in lines)
        parts.append(_text(10, y, title, size=15, weight="bold"))
        for at_once in sorted({line["at_once"] for line in lines}):
            y += 24
            parts.append(_text(10, y, f"{at_once} at once", size=12, weight="bold"))
            for line in (line for line in lines if line["at_once"] == at_once):
                y += BAR + 4
                parts += _bar(line, y, most)
        y += 40
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'font-family="system-ui, sans-serif" role="img"><title>tga beside its peers</title>\n'
        f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _bar(line: dict[str, Any], y: int, most: float) -> list[str]:
    width = max(1.0, line["per_second"] / most * (WIDTH - LEFT - 110))
    name = line["name"]
    colour = OURS_COLOUR if name.startswith("tga") else BARE_COLOUR if name.startswith("pgbench") else OTHER_COLOUR
    said = f"{line['per_second']:,.0f}, p99 {line['p99_ms']:,.1f} ms"
    return [
        _text(LEFT - 8, y, name, size=12, anchor="end"),
        f'<rect x="{LEFT}" y="{y - BAR + 3}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
        _text(LEFT + width + 6, y, said, size=11),
    ]


def _text(x: float, y: float, text: str, *, size: int, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="#1c2429">{escape(text)}</text>'
    )
