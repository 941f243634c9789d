"""Scopes of a journal's page, folded: an operation with many others directly inside shows how many, and they are drawn
when asked for. Pure, from the rows of a waterfall.

A page that is short enough to be read is shown whole. The chosen operation is always drawn, with the scopes around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from app.console.waterfall import Row, outer_path

ROWS_SHOWN_WHOLE: Final = 40
INSIDE_SHOWN_MAX: Final = 8
OPEN_ALL: Final = "all"


def fold_scopes(rows: Sequence[Row], *, opened: str | None, chosen: Row | None) -> list[Row]:
    """The rows that are drawn; each scope says how many operations of this page are folded inside of it.

    `opened`: the address of the scope whose operations are drawn, or OPEN_ALL.
    """
    if len(rows) <= ROWS_SHOWN_WHOLE or opened == OPEN_ALL:
        return list(rows)
    by_path = _with_outer_rows(rows)
    directly = Counter(outer for path in by_path if (outer := outer_path(path)) is not None)
    kept_open = {opened, *_around(opened)} if opened else set()
    folded = {path for path, inside in directly.items() if inside > INSIDE_SHOWN_MAX and path not in kept_open}
    always = set() if chosen is None else {chosen.path, *_around(chosen.path)}
    drawn = []
    for row in by_path.values():
        hiding = next((path for path in reversed(_around(row.path)) if path in folded), None)  # the outermost
        if hiding is None or row.path in always:
            drawn.append(row)
        else:
            by_path[hiding].folded_inside += 1
    for row in drawn:
        row.is_opened = row.path in kept_open and directly[row.path] > INSIDE_SHOWN_MAX
    return drawn


def _around(path: str | None) -> list[str]:
    """The scopes around an address, the innermost first."""
    around = []
    while path is not None and (path := outer_path(path)) is not None:
        around.append(path)
    return around


def _with_outer_rows(rows: Sequence[Row]) -> dict[str, Row]:
    """By address, in the order of addresses. A scope that ends on a later page, or never, has no record on this one: it
    gets a row that leads to the first operation inside of it."""
    made: dict[str, Row] = {}
    known = {row.path for row in rows}
    for row in rows:
        for path in reversed(_around(row.path)):
            if path not in known:
                known.add(path)
                made[path] = Row(
                    path, "scope", "not ended on this page", row.began, row.at, x=row.x, width=100.0 - row.x
                )
        made[row.path] = row
    return made
