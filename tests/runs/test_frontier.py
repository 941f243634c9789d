"""Addresses and the frontier: exactly the next position of each scope, however scopes nest, fail and are reopened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import RunPositionGap, RunPositionTaken, SchemaViolation, TgaError
from app.domain.runs.frontier import Begun, Frontier
from app.domain.runs.paths import branch_of, is_scope_inside, operation_of, path_at, place_of

BEGUN = Begun("0" * 64, "tool", "crm.create", "1" * 64)
scopes = st.recursive(
    st.just(""),
    lambda scope: (
        st.builds(path_at, scope, st.integers(1, 12))
        | st.builds(lambda s, p, b: branch_of(path_at(s, p), b), scope, st.integers(1, 12), st.integers(1, 12))
    ),
    max_leaves=4,
)


@given(scope=scopes, position=st.integers(1, 1_000))
def test_an_address_says_its_scope_and_position(scope: str, position: int) -> None:
    path = path_at(scope, position)
    assert place_of(path) == (scope, position)
    assert operation_of(path) == path
    assert operation_of(branch_of(path, 3)) == path
    assert is_scope_inside(path, path)
    assert is_scope_inside(branch_of(path, 3), path)
    assert not is_scope_inside(f"{path}0", path)


@given(st.text("0123456789.:-a", max_size=120))
def test_whatever_is_no_address_is_refused_by_our_own_error(text: str) -> None:
    try:
        scope, position = place_of(text)
    except SchemaViolation:
        return
    assert path_at(scope, position) == text


@pytest.mark.parametrize(
    "path", ["", "0", "01", "1.", ".1", "1..2", "1:2", "1:0.1", "3:1001.1", "1" + ".1" * 16, "-1", "1\n", "٣"]
)
def test_an_address_that_is_none_or_beyond_the_limits_is_refused(path: str) -> None:
    with pytest.raises(SchemaViolation):
        place_of(path)


def test_operations_of_a_scope_end_one_after_the_other() -> None:
    frontier = Frontier()
    frontier.end("1")
    with pytest.raises(RunPositionTaken):
        frontier.end("1")
    with pytest.raises(RunPositionGap):
        frontier.end("3")
    frontier.end("2")
    assert frontier.positions == 2


def test_an_operation_inside_opens_its_scope_and_the_end_around_closes_it() -> None:
    frontier = Frontier()
    frontier.end("1.1.1")
    frontier.end("1.1")
    frontier.end("1.2")
    assert frontier.performed_inside("1") == 2
    frontier.end("1")
    assert frontier.scopes == {"": (2, False, False)}
    with pytest.raises(RunPositionTaken):
        frontier.end("1.3")


def test_branches_are_scopes_of_their_own() -> None:
    frontier = Frontier()
    for path in ("1:2.1", "1:1.1", "1:2.2"):
        frontier.end(path)
    assert frontier.performed_inside("1") == 3
    with pytest.raises(RunPositionGap):
        frontier.end("1:1.3")
    frontier.end("1")
    assert frontier.positions == 1


def test_what_has_begun_cannot_begin_again_and_is_gone_with_its_end() -> None:
    frontier = Frontier()
    frontier.begin("1", BEGUN)
    with pytest.raises(RunPositionTaken):
        frontier.begin("1", BEGUN)
    with pytest.raises(RunPositionGap):
        frontier.begin("2", BEGUN)
    frontier.end("1")
    assert not frontier.begun


def test_the_end_around_ends_what_has_begun_inside() -> None:
    frontier = Frontier()
    frontier.begin("1:1.1", BEGUN)
    frontier.end("1:2.1")
    frontier.end("1", failed=True)
    assert not frontier.begun


def test_a_try_that_failed_keeps_what_succeeded_inside_and_reopens_what_failed_last() -> None:
    frontier = Frontier()
    frontier.end("1.1")
    frontier.end("1.2", failed=True)
    frontier.retry("1")
    assert (frontier.try_of("1"), frontier.try_of("1.2"), frontier.try_of("1.1")) == (2, 2, 1)
    with pytest.raises(RunPositionTaken):
        frontier.end("1.1")
    frontier.end("1.2")
    frontier.end("1")
    assert frontier.tries == {}


def test_an_operation_that_failed_is_reopened_with_what_failed_inside_it_only_while_it_is_the_last() -> None:
    frontier = Frontier()
    frontier.end("1:1.1")
    frontier.end("1:2.1.1")
    frontier.end("1:2.1", failed=True)
    frontier.end("1", failed=True)
    assert frontier.failed_last() == ["1"]
    reopened = frontier.copy()
    reopened.reopen("1")
    assert reopened.try_of("1:2.1") == 2
    with pytest.raises(RunPositionTaken):  # the first branch had succeeded: it is kept
        reopened.end("1:1.1")
    with pytest.raises(RunPositionTaken):  # and so is what succeeded inside what failed
        reopened.end("1:2.1.1")
    reopened.end("1:2.1")
    reopened.end("1")
    # Once the program has gone on, what had failed is history.
    frontier.end("2")
    with pytest.raises(RunPositionTaken):
        frontier.reopen("1")
    assert frontier.scopes == {"": (3, False, False)}


def test_what_a_person_resolves_is_no_failure_any_more() -> None:
    frontier = Frontier()
    frontier.end("1", failed=True)
    frontier.resolve("1", failed=False)
    assert frontier.failed_last() == []
    with pytest.raises(RunPositionTaken):
        frontier.resolve("1", failed=False)


actions = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "fail", "retry", "reopen", "resolve"]),
        st.sampled_from(["1", "2", "3", "1.1", "1.2", "2.1", "1:1.1", "1:2.1", "1:2.2", "1.1.1", "1:2.1.1", "2:1.1"]),
    ),
    max_size=30,
)


@given(actions)
def test_what_is_refused_changes_nothing_and_what_is_stated_reads_back(steps: list[tuple[str, str]]) -> None:
    frontier = Frontier()
    for action, path in steps:
        before = frontier.to_json()
        try:
            match action:
                case "begin":
                    frontier.begin(path, BEGUN)
                case "end" | "fail":
                    frontier.end(path, failed=action == "fail")
                case "retry":
                    frontier.retry(path)
                case "reopen":
                    frontier.reopen(path)
                case _:
                    frontier.resolve(path, failed=False)
        except TgaError:
            assert frontier.to_json() == before
        assert Frontier.from_json(frontier.to_json()) == frontier
        for scope, at in frontier.scopes.items():
            assert at.next >= 1
            assert scope == "" or at.ended or not _has_ended(frontier, operation_of(scope))
        for begun in frontier.begun:
            frontier.verify_next(begun)  # whatever has begun can still end


def _has_ended(frontier: Frontier, path: str) -> bool:
    try:
        frontier.verify_next(path)
    except RunPositionTaken:
        return True
    return False
