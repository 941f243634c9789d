"""A run's state is changed by deltas: as RFC 6901 says where, all of a checkpoint's or none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import SchemaViolation
from app.domain.runs.state import RemoveAt, SetAt, apply_changes


def put(at: str, to: Any) -> SetAt:
    return SetAt(op="set", at=at, to=to)


def gone(at: str) -> RemoveAt:
    return RemoveAt(op="remove", at=at)


def test_members_items_and_the_place_after_the_last() -> None:
    state: dict[str, Any] = {}
    apply_changes(
        state,
        [
            put("/a", []),
            put("/a/-", 1),
            put("/a/-", {"b": 2}),
            put("/a/1/b", 3),
            put("/a/2", 4),
            gone("/a/0"),
            put("/c~1d~0", 5),
        ],
    )
    assert state == {"a": [{"b": 3}, 4], "c/d~": 5}
    apply_changes(state, [gone("/a")])
    assert state == {"c/d~": 5}
    apply_changes(state, [put("", {"whole": True})])
    assert state == {"whole": True}


@pytest.mark.parametrize(
    "change",
    [put("/x/y", 1), gone("/x"), put("/a/3", 1), put("/a/01", 1), gone("/a/-"), gone(""), put("", 1), put("/a/0/b", 1)],
)
def test_what_is_not_there_is_named_and_nothing_of_the_checkpoint_is_applied(change: SetAt | RemoveAt) -> None:
    state: dict[str, Any] = {"a": [1, 2]}
    with pytest.raises(SchemaViolation):
        apply_changes(state, [put("/b", 1), gone("/a/0"), put("/a/-", 9), put("", {"a": [7]}), change])
    assert state == {"a": [1, 2]}


def test_a_change_stays_what_it_is_when_the_state_goes_on_changing() -> None:
    state: dict[str, Any] = {}
    first = [put("/a", []), put("/a/-", {"b": []}), put("/c", {}), put("/a/0", {"b": []})]
    apply_changes(state, first)
    apply_changes(state, [put("/a/0/b/-", 1), put("/a/-", 2), put("/c/d", 3)])
    assert [change.to for change in first] == [[], {"b": []}, {}, {"b": []}]
    whole = put("", {"a": []})
    apply_changes(state, [whole, put("/a/-", 1)])
    assert whole.to == {"a": []}


pointers = st.lists(st.sampled_from(["a", "b", "0", "1", "-", ""]), max_size=3).map(
    lambda steps: "".join(f"/{step}" for step in steps)
)
values = st.recursive(st.integers(0, 3), lambda v: st.lists(v, max_size=2) | st.dictionaries(st.sampled_from("ab"), v))
changes = st.lists(st.builds(put, pointers, values) | st.builds(gone, pointers), max_size=6)


@given(start=st.dictionaries(st.sampled_from("ab"), values), made=changes)
def test_all_or_nothing_whatever_is_changed(start: dict[str, Any], made: list[SetAt | RemoveAt]) -> None:
    state, one_by_one = copy.deepcopy(start), copy.deepcopy(start)
    try:
        for change in copy.deepcopy(made):
            apply_changes(one_by_one, [change])
    except SchemaViolation:
        with pytest.raises(SchemaViolation):
            apply_changes(state, copy.deepcopy(made))
        assert state == start
    else:
        apply_changes(state, copy.deepcopy(made))
        assert state == one_by_one
