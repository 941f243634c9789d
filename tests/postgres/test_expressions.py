"""The text of an expression is settled: the same after a dump and restore, another when it means something else."""

from __future__ import annotations

import pytest

from app.postgres.expressions import settled_expression, settled_query
from tests.conftest import Admin


@pytest.mark.parametrize(
    ("made", "restored"),
    [
        ("(((a >= 1) AND (a <= 6)) AND (b = 2))", "((a >= 1) AND (a <= 6) AND (b = 2))"),
        ("((a = 1) OR ((b = 2) OR (c = 3)))", "((a = 1) OR (b = 2) OR (c = 3))"),
        ("(a  =\n 1)", "(a = 1)"),
    ],
)
def test_what_a_restore_writes_otherwise_is_the_same(made: str, restored: str) -> None:
    assert settled_expression(made) == settled_expression(restored)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("((a AND b) OR c)", "(a AND (b OR c))"),
        ("(NOT (a AND b))", "((NOT a) AND b)"),
        ("((a = 1) AND (b = 2))", "((a = 1) OR (b = 2))"),
        ("(a = 'x (AND) y')", "(a = 'x AND y')"),
        ("(a = 'it''s  two')", "(a = 'it''s two')"),
        ("f(a, (b AND c))", "f(a, b AND (c))"),
    ],
)
def test_what_means_something_else_stays_another(one: str, other: str) -> None:
    assert settled_expression(one) != settled_expression(other)


async def test_a_view_is_told_in_the_same_words_by_every_version(admin: Admin) -> None:
    await admin.execute(
        "CREATE VIEW pg_temp.seen AS SELECT h.stream, h.state FROM tga.heads h"
        " WHERE h.sequence_number BETWEEN 1 AND 6 AND h.is_open"
    )
    told = settled_query(await admin.fetchval("SELECT pg_get_viewdef('pg_temp.seen'::regclass)"))
    assert (
        told
        == "SELECT stream, state FROM heads h WHERE ((sequence_number >= 1) AND (sequence_number <= 6) AND is_open)"
    )
