"""The drawing of a journal: rows in the order of addresses, to scale, quiet stretches folded, whatever comes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.console.pages.run import _program, _standing
from app.console.waterfall import BREAKS_DRAWN_MAX, FOLDS_MAX, Standing, drawn

BEGIN = datetime(2026, 11, 17, 9, 0, tzinfo=UTC)


def time_at(seconds: float) -> str:
    return (BEGIN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def step(number: int, path: str, began: float, took: float, **more: Any) -> dict[str, Any]:
    return {
        "artifact_type": "run_checkpoint",
        "sequence_number": number,
        "recorded_at": time_at(began + took),
        "started_at": time_at(began),
        "duration_ms": round(took * 1000),
        "path": path,
        "kind": "step",
        "name": f"at {path}",
        "outcome": "OK",
        "attempt": 1,
        **more,
    }


def intent(number: int, path: str, at: float, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "artifact_type": "run_intent",
        "sequence_number": number,
        "recorded_at": time_at(at),
        "path": path,
        "kind": kind,
        "name": kind,
        "request": {},
        "attempt": 1,
        **more,
    }


def answer(number: int, path: str, at: float, outcome: str = "OK") -> dict[str, Any]:
    said = {"artifact_type": "run_answer", "sequence_number": number, "recorded_at": time_at(at), "path": path}
    return {**said, "outcome": outcome}


def test_an_outer_operation_begins_with_the_first_inside_of_it_and_addresses_stand_in_order() -> None:
    records = [step(1, "2:10.1", 1, 1), step(2, "2:9.1", 1, 3), step(3, "2", 4, 0, kind="gather"), step(4, "1", 0, 0.5)]
    rows = drawn(records, time_at(5)).rows
    assert [row.path for row in rows] == ["1", "2", "2:9.1", "2:10.1"]
    assert rows[1].x == rows[2].x == rows[3].x
    assert rows[1].bar == "b-scope"


def test_a_worker_whose_clock_is_wrong_is_drawn_at_the_time_of_the_record_and_as_long_as_it_took() -> None:
    for wrong in (-86_400, 0, 300):
        records = [
            attempt(1, 0, "LEASED", 1),
            step(2, "1", 1, 2, started_at=time_at(1 + wrong)),
            # in one commit with the next: recorded when that one had ended
            step(3, "2", 3, 1, started_at=time_at(3 + wrong), recorded_at=time_at(8)),
            step(4, "3", 4, 4, started_at=time_at(4 + wrong)),
        ]
        picture = drawn(records, time_at(10))
        assert picture.folds == []
        assert [row.took for row in picture.rows] == ["2.0 s", "1.0 s", "4.0 s"]
        assert [(round(row.x), round(row.x + row.width)) for row in picture.rows] == [(10, 30), (30, 40), (40, 80)]


def test_a_day_asleep_is_folded_and_the_rest_is_to_scale() -> None:
    records = [step(1, "1", 0, 4), intent(2, "2", 4, "sleep"), answer(3, "2", 86_404), step(4, "3", 86_404, 4)]
    picture = drawn(records, time_at(86_408))
    (fold,) = picture.folds
    assert fold.words == "24 h later" or fold.words == "1 d later"
    one, asleep, three = picture.rows
    assert abs(one.width - three.width) < 0.01
    assert one.width > 40
    assert (asleep.kind, asleep.bar) == ("sleep", "b-sleep")


def test_what_is_open_reaches_until_now_and_what_failed_shows_so() -> None:
    picture = drawn([step(1, "1", 0, 1, outcome="ERROR", error={}), intent(2, "2", 1, "ask")], time_at(3))
    failed, open_ = picture.rows
    assert failed.bar == "b-fail"
    assert (open_.took, open_.bar, round(open_.x + open_.width)) == ("waits", "b-wait", 100)


def attempt(number: int, at: float, change: str, attempt: int) -> dict[str, Any]:
    said = {"artifact_type": "run_attempt", "sequence_number": number, "recorded_at": time_at(at), "change": change}
    return {**said, "attempt": attempt, "worker": {"name": "w", "principal_id": "w"}}


def test_a_lost_worker_and_a_fenced_one_stand_at_their_time_with_their_words() -> None:
    records = [
        attempt(1, 0, "LEASED", 1),
        step(2, "1", 0, 2),
        attempt(3, 4, "LOST", 1),
        attempt(4, 5, "LEASED", 2),
        step(5, "2", 5, 1),
        attempt(6, 7, "FENCED", 1),
        attempt(7, 8, "RELEASED", 2),
        step(8, "3", 9, 1),
    ]
    picture = drawn(records, time_at(10))
    assert [(round(one.x), one.kind, one.words) for one in picture.breaks] == [
        (40, "lost", "attempt 1 lost"),
        (70, "fenced", "attempt 1 fenced"),
    ]
    assert all(one.is_named for one in picture.breaks)
    assert picture.breaks_total == 2


def test_many_lost_workers_are_lines_and_words_never_stand_on_one_another() -> None:
    lost = [attempt(number, number * 0.1, "LOST", number) for number in range(1, 60)]
    picture = drawn([step(60, "1", 0, 9.5), *lost], time_at(10))
    assert (len(picture.breaks), picture.breaks_total) == (BREAKS_DRAWN_MAX, 59)
    assert picture.breaks[-1].words == "attempt 59 lost"
    named = [one.x for one in picture.breaks if one.is_named]
    assert len(named) >= 1
    assert all(after - before >= 20 for before, after in pairwise(named))


def test_a_worker_that_is_lost_in_a_quiet_stretch_stands_between_two_folds() -> None:
    picture = drawn([step(1, "1", 0, 4), attempt(2, 1_000, "LOST", 1), step(3, "2", 2_000, 4)], time_at(2_004))
    (lost,) = picture.breaks
    first, second = picture.folds
    assert abs(first.x + first.width - lost.x) < 0.01
    assert abs(second.x - lost.x) < 0.01


def test_a_fork_shows_its_source_as_one_stretch_and_counts_its_own_attempts() -> None:
    records = [
        attempt(-5, 0, "LEASED", 1),
        step(-4, "1", 0, 2),
        attempt(-3, 3, "LOST", 1),
        attempt(-2, 4, "LEASED", 2),
        intent(-1, "2", 5, "tool"),
        attempt(3, 50, "LEASED", 1),
        intent(4, "2", 60, "tool"),
        answer(5, "2", 62),
        attempt(6, 65, "LOST", 1),
        attempt(7, 80, "LEASED", 2),
    ]
    picture = drawn(records, time_at(100))
    assert [mark.words for mark in picture.attempts] == ["source", "attempt 1", "attempt 2"]
    assert [one.words for one in picture.breaks] == ["source's attempt 1 lost", "attempt 1 lost"]
    first, again = picture.rows
    assert (first.is_inherited, again.is_inherited) == (True, False)
    assert again.took == "2.0 s", "the fork's call began when the fork made it, and not when its source did"
    assert again.x > picture.attempts[1].x


def test_the_clocks_of_a_forks_worker_and_of_its_sources_are_not_mixed() -> None:
    records = [
        step(-1, "1", 0, 2, started_at=time_at(-3_600)),  # an hour behind
        step(1, "2", 4, 2),
        step(2, "3", 6, 2),
    ]
    assert [round(row.x) for row in drawn(records, time_at(10)).rows] == [0, 40, 60]


def test_a_run_that_is_over_or_rests_ends_its_axis_and_does_not_wait() -> None:
    records = [step(1, "1", 0, 8), intent(2, "2", 8, "ask"), step(3, "3", 8, 2, outcome="ERROR", error={})]
    said: dict[Standing, str] = {"over": "never ended", "resting": "open", "page": "ends later"}
    for standing, words in said.items():
        picture = drawn(records, time_at(10), standing)
        assert picture.folds == []
        assert (picture.rows[1].took, picture.rows[1].bar) == (words, "b-left")
        assert round(picture.rows[2].x + picture.rows[2].width) == 100


@pytest.mark.parametrize(
    ("state", "has_later", "standing"),
    [
        ("RUNNING", False, "live"),
        ("WAITING", False, "live"),
        ("SCHEDULED", False, "live"),
        ("FAILED", False, "resting"),
        ("PARKED", False, "resting"),
        ("DIVERGED", False, "resting"),
        ("COMPLETED", False, "over"),
        ("CANCELLED", False, "over"),
        ("RUNNING", True, "page"),
        ("FAILED", True, "page"),
    ],
)
def test_only_the_last_page_of_a_run_that_is_at_work_or_waits_reaches_until_now(
    state: str, has_later: bool, standing: str
) -> None:
    assert _standing(state, has_later=has_later) == standing


paths = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))
moments = st.floats(0, 10**7, allow_nan=False)
records = st.lists(
    st.builds(lambda path, at, took: step(1, path, at, took), paths, moments, st.floats(0, 10**5))
    | st.builds(lambda path, at, kind: intent(1, path, at, kind), paths, moments, st.sampled_from(["ask", "tool"]))
    | st.builds(lambda path, at: answer(1, path, at), paths, moments),
    max_size=30,
)


@given(records)
def test_everything_stands_on_the_page(made: list[dict[str, Any]]) -> None:
    for number, record in enumerate(made):
        record["sequence_number"] = number + 1
    picture = drawn(made, time_at(10**7 + 10**6))
    assert len(picture.folds) <= FOLDS_MAX
    assert {row.path for row in picture.rows} == {record["path"] for record in made}
    for row in picture.rows:
        assert 0 <= row.x <= 100
        assert 0 < row.width <= 100.6
        assert row.took


def test_the_program_is_marked_where_the_run_waits_and_else_where_the_chosen_entry_was_made() -> None:
    records = [
        step(1, "1", 0, 1, source="p.lua:2"),
        intent(2, "2:1.1", 2, "ask", source="p.lua:3"),
        intent(3, "2:2.1", 2, "sleep", source="p.lua:4"),
        step(4, "2:3.1", 2, 1, source="p.lua:5"),
    ]
    rows, text = drawn(records, time_at(9)).rows, {"source": "a\nb\nc\nd\ne\nf"}

    def here(at: int, *awaited: str | None) -> tuple[list[int], bool]:
        run = {"awaits": [{"is_awaited": True, "source": one} for one in awaited]} if awaited else None
        found = _program(text, rows, at, run)
        assert found is not None
        return found["here"], found["is_waiting"]

    assert here(1) == ([2], False)
    assert here(2) == ([3], False)
    assert here(4) == ([5], False)  # what ended last
    assert here(4, "p.lua:3", "p.lua:4", "p.lua:3") == ([3, 4], True)  # waits in two branches, not where it last ended
    assert here(4, None) == ([5], False)  # an older worker has not said it
    assert here(4, "p.lua") == ([], True)  # a tail call leaves no line behind
    assert here(4, "p.lua:\u00b2", "p.lua:99999999999") == ([], True)
