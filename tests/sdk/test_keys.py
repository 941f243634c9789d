"""Keys: the same for the same parts, another for others, and none for what has no stable form."""

from __future__ import annotations

import enum
import re
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tga_sdk import KeyUnstable, key_for

PARTS = st.recursive(
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.integers(-(10**99), 10**99)
    | st.booleans()
    | st.uuids()
    | st.dates()
    | st.datetimes(timezones=st.just(UTC))
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
# What the gateway takes as a key (app/domain/ledger/documents.py).
ADMITTED = re.compile(r"[!-~]([ -~]*[!-~])?")


def typed(part: Any) -> Any:
    """For comparison: True is not 1, and a list is not the text of it."""
    return [typed(inner) for inner in part] if isinstance(part, list) else (type(part).__name__, part)


@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(PARTS, min_size=1, max_size=4))
def test_keys_are_equal_exactly_if_their_parts_are(one: list[Any], other: list[Any]) -> None:
    key = key_for(*one)
    assert key == key_for(*one)
    assert (key == key_for(*other)) == (typed(one) == typed(other))
    assert ADMITTED.fullmatch(key)
    assert len(key) <= 255
    assert not key.startswith("run:")


def test_keys_are_readable_and_the_same_in_another_process() -> None:
    assert key_for("order", 7) == "order/7"
    assert key_for("refund", "ö 1", True) == "refund/'%C3%B6%201'/=true"
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2)))
    parts = (at, date(2026, 1, 2), UUID(int=7), b"\x00", ["a", ("b", -1)])
    key = key_for(*parts)
    assert key == (
        "=time.20260102T010405.000000Z/=date.2026-01-02/=uuid.00000000-0000-0000-0000-000000000007/=bytes.00/(a,(b,-1))"
    )
    program = "from tga_sdk import key_for; print(key_for('a' * 400, 1))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == key_for("a" * 400, 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "bc"), ("ab", "c")),
        (("a", "b"), ("a/b",)),
        ((7,), ("7",)),
        ((True,), (1,)),
        ((True,), ("=true",)),
        ((["a"], "b"), (["a", "b"],)),
        (([],), ("()",)),
        (("x" * 300,), ("x" * 301,)),
        ((b"\x01",), ("=bytes.01",)),
    ],
)
def test_these_differ(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert key_for(*one) != key_for(*other)


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "part",
    [
        1.0,
        float("nan"),
        None,
        {1},
        frozenset(),
        {"a": 1},
        object(),
        Decimal("1.0"),
        Colour.RED,
        10**100,
        "\ud800",
        datetime(2026, 1, 1),  # noqa: DTZ001
        ["a", None],
        (1.5,),
        range(3),
        iter([1]),
    ],
)
def test_what_has_no_stable_form_is_refused(part: Any) -> None:
    with pytest.raises(KeyUnstable, match=r"part 2(\[\d\])? of the key"):
        key_for("order", part)


def test_a_key_of_nothing_is_refused() -> None:
    with pytest.raises(KeyUnstable):
        key_for()
