"""Scopes with much inside are folded, and nothing is lost: what is not drawn is counted at the scope around it."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from app.console.scope_folding import INSIDE_SHOWN_MAX, OPEN_ALL, ROWS_SHOWN_WHOLE, fold_scopes
from app.console.waterfall import Row, drawn
from tests.console.test_waterfall import step, time_at


def rows_of(*paths: str) -> list[Row]:
    return list(drawn([step(n, path, n, 1) for n, path in enumerate(paths, 1)], time_at(10**6)).rows)


def gather(branches: int, *, ends: bool = True) -> list[Row]:
    inside = [f"2:{n}.1" for n in range(1, branches + 1)]
    return rows_of("1", *inside, *(["2"] if ends else []))


def test_a_page_that_can_be_read_is_shown_whole() -> None:
    rows = gather(ROWS_SHOWN_WHOLE - 2)
    assert fold_scopes(rows, opened=None, chosen=None) == rows


def test_many_branches_are_one_row_that_says_how_many() -> None:
    shown = fold_scopes(gather(150), opened=None, chosen=None)
    assert [(row.path, row.folded_inside) for row in shown] == [("1", 0), ("2", 150)]


def test_a_scope_that_ends_on_another_page_has_a_row_here_all_the_same() -> None:
    rows = gather(150, ends=False)
    shown = fold_scopes(rows, opened=None, chosen=None)
    assert [(row.path, row.kind, row.folded_inside) for row in shown] == [("1", "step", 0), ("2", "scope", 150)]
    assert shown[1].at == rows[1].at


def test_what_is_opened_is_drawn_and_can_be_folded_again() -> None:
    shown = fold_scopes(gather(150), opened="2", chosen=None)
    assert len(shown) == 152
    assert [row.path for row in shown if row.is_opened] == ["2"]
    assert fold_scopes(gather(150), opened=OPEN_ALL, chosen=None) == gather(150)


def test_the_chosen_operation_is_drawn_inside_of_what_is_folded() -> None:
    rows = gather(150)
    chosen = next(row for row in rows if row.path == "2:77.1")
    shown = fold_scopes(rows, opened=None, chosen=chosen)
    assert [(row.path, row.folded_inside) for row in shown] == [("1", 0), ("2", 149), ("2:77.1", 0)]


def test_a_chain_of_scopes_is_not_folded_and_the_innermost_with_many_is() -> None:
    chain = [".".join(["1"] * depth) for depth in range(1, 40)]
    inside = [f"{chain[-1]}.{n}" for n in range(2, 60)]
    shown = fold_scopes(rows_of(*chain, *inside), opened=None, chosen=None)
    assert [row.path for row in shown] == chain
    assert shown[-1].folded_inside == len(inside)


OUTER = [str(n) for n in range(1, 8)]
INNER = [f"{outer}{branch}.{n}" for outer in OUTER for branch in ("", ":1", ":2") for n in range(1, 12)]
POOL = [*OUTER, *INNER, *(f"{path}:{branch}.{n}" for path in INNER[::9] for branch in (1, 2) for n in range(1, 12))]


@given(st.integers(0, 2**32), st.integers(0, 200), st.none() | st.sampled_from(POOL), st.integers(0, 199))
def test_every_operation_is_drawn_or_counted(seed: int, size: int, opened: str | None, place: int) -> None:
    made = Random(seed).sample(POOL, size)
    rows = rows_of(*made)
    chosen = rows[place % len(rows)] if rows else None
    shown = fold_scopes(rows, opened=opened, chosen=chosen)
    of_this_page = [row for row in shown if row.kind != "scope"]
    added = {row.path for row in shown if row.kind == "scope"}
    hidden = {row.path for row in rows} - {row.path for row in of_this_page}
    assert len(shown) == len({row.path for row in shown})
    assert added.isdisjoint(row.path for row in rows)
    assert sum(row.folded_inside for row in shown) >= len(hidden)
    assert (hidden == set()) == (sum(row.folded_inside for row in shown) == 0)
    assert chosen is None or chosen.path not in hidden
    assert all(row.folded_inside == 0 or row.folded_inside + 1 > INSIDE_SHOWN_MAX for row in shown)
