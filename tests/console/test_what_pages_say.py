"""What pages say, from values alone: no gateway and no browser."""

from __future__ import annotations

from typing import Any

from app.console.components import absolute_time, clock_time
from app.console.minute_line import minutes_drawn
from app.console.pages.call import checks_said, leaf_said
from app.console.pages.overview import _needs
from app.console.pages.runs import boxes_of_journal, boxes_of_steps


def verification(not_checked: list[str], **outcomes: str) -> dict[str, Any]:
    checks = [{"name": name, "outcome": outcome, "what": f"all of {name}"} for name, outcome in outcomes.items()]
    return {"checks": checks, "not_checked": not_checked}


def test_what_was_not_checked_is_said_once_and_in_its_own_line() -> None:
    no_head = "tree and signed head: no head covers the last entry yet; ask again in a second"
    told = verification(
        ["signatures: this stream has none", no_head, "other streams"],
        entries="sound",
        signatures="not_checked",
        tree="not_checked",
        signed_head="not_checked",
    )
    assert checks_said(told) == [
        ("sound", "Entries", "all of entries"),
        ("not_checked", "Signatures", "Not checked: this stream has none"),
        ("not_checked", "Tree", "Not checked: no head covers the last entry yet; ask again in a second"),
        ("not_checked", "Signed head", "Not checked: no head covers the last entry yet; ask again in a second"),
        ("not_checked", "Not checked", "other streams"),
    ]


def test_a_reason_whose_check_was_made_stands_for_itself() -> None:
    told = verification(["signatures: of two keys"], signatures="wrong", tree="not_checked")
    assert checks_said(told) == [
        ("wrong", "Signatures", "all of signatures"),
        ("not_checked", "Tree", "all of tree"),
        ("not_checked", "Not checked", "signatures: of two keys"),
    ]
    assert checks_said(None) == []


def test_times_are_written_in_utc_and_say_in_which_form_a_script_may_write_them_locally() -> None:
    title = 'datetime="2026-11-17T23:05:00.250+01:00" title="2026-11-17 22:05:00.250 UTC"'
    at = "2026-11-17T23:05:00.250+01:00"
    assert clock_time(at) == f'<time {title} data-at="clock">22:05:00.250</time>'
    assert clock_time(at, zoned=True) == f'<time {title} data-at="clock-zone">22:05:00.250 UTC</time>'
    assert absolute_time(at) == f'<time {title} data-at="full">17 Nov 2026, 22:05:00 UTC</time>'


def test_an_entry_names_its_leaf_or_says_that_it_has_none() -> None:
    told = {"leaves": [0, 1_234_567, None]}
    assert [leaf_said(told, number) for number in (1, 2, 3, 4)] == [
        "leaf 0",
        "leaf 1,234,567",
        "not yet in the tree",
        "not yet in the tree",
    ]
    assert leaf_said(None, 1) is None


def test_a_journal_is_boxes_of_bounded_number_that_say_in_words_what_they_are() -> None:
    newest = ["run_attempt", "run_intent", "run_answer", "run_checkpoint", "run_checkpoint", "run_end"]
    made = boxes_of_journal({"entries": 1_212, "newest": newest})
    assert [box[0] for box in made["boxes"]] == ["b-scope", "b-wait", "b-tool", "b-step", "b-step", "b-model"]
    assert made["shown"] == "6 of 1,212"
    assert made["label"] == (
        "The 6 newest of 1,212 entries: 1 change of the attempt, 1 begin of an operation, 1 answer, 2 checkpoints, "
        "1 other entry"
    )
    assert len({height for _, height in made["boxes"]}) >= 3  # told apart without colour
    whole = boxes_of_journal({"entries": 1, "newest": ["run_start"]})
    assert (whole["label"], whole["shown"]) == ("1 entry: 1 other entry", "1")
    assert boxes_of_journal(None)["boxes"] == []


def test_operations_of_a_run_are_boxes_with_words_and_say_whether_there_are_earlier_ones() -> None:
    steps = [{"kind": "tool", "status": "completed"}] * 30 + [{"kind": "step", "status": "failed"}]
    made = boxes_of_steps({"steps": steps, "steps_left_out": False})
    assert len(made["boxes"]) == 24
    assert made["label"] == "The 24 newest operations, there are earlier ones: 23 tool calls, 1 failed"
    few = {"steps": steps[-2:], "steps_left_out": False}
    assert boxes_of_steps(few)["label"] == "2 operations: 1 tool call, 1 failed"
    assert boxes_of_steps(few | {"steps_left_out": True})["shown"] == "newest 2"
    asks = {"steps": [{"kind": "ask", "status": "waiting"}], "steps_left_out": False}
    assert boxes_of_steps(asks)["label"] == "1 operation: 1 open"


def _waits(name: str, expires_at: str | None) -> dict[str, Any]:
    return {"kind": "call", "trace_id": name, "expires_at": expires_at, "principal_id": "a", "arguments": {}}


def test_what_needs_someone_stands_by_urgency_and_a_held_call_before_what_has_a_day() -> None:
    now = "2026-01-01T12:00:00.000Z"
    waiting = [
        _waits("no-end", None),
        _waits("a-day", "2026-01-02T12:00:00.000Z"),
        _waits("soon", "2026-01-01T12:59:00.000Z"),
        _waits("sooner", "2026-01-01T12:10:00.000Z"),
    ]
    held = [
        {"trace_id": "held-now", "updated_at": "2026-01-01T11:59:50.000Z"},
        {"trace_id": "held-long", "updated_at": "2026-01-01T09:00:00.000Z"},
    ]
    rows = _needs(waiting, held, [{"trace_id": "changed"}], now)
    assert [row["item"]["trace_id"] for row in rows] == [
        *("sooner", "soon", "held-long", "held-now", "a-day", "no-end", "changed"),
    ]
    assert [row["due"] for row in rows[:4]] == ["10 min left", "59 min left", "for 3 h", "for 10 s"]


def _minute(began: str, failed: int = 0, p95_ms: int | None = None) -> dict[str, Any]:
    return {"began": f"2026-01-01T{began}:00.000Z", "asked": 1, "failed": failed, "p50_ms": p95_ms, "p95_ms": p95_ms}


def test_the_last_hour_of_a_server_is_drawn_by_minute_and_said_in_words() -> None:
    now = "2026-01-01T12:30:20.000Z"
    minutes = [
        _minute("11:29", 7, 9_000),  # an hour and a minute ago: not shown
        _minute("11:31", 0, 100),
        _minute("12:20", 2, 400),
        _minute("12:21", 0, 200),
        _minute("12:25", 1),
        _minute("12:30", 0, 50),
    ]
    drawn = minutes_drawn(minutes, now)
    assert drawn is not None
    assert drawn["stretches"] == ["M0 26V20.00H1V26Z", "M49 26V2.00H50V14.00H51V26Z", "M59 26V23.00H60V26Z"]
    assert drawn["failed"] == [49, 54]
    assert drawn["label"] == (
        "The last hour by minute: 95 % of calls were answered within 50 ms in this minute, within 400 ms in the slowest"
        " minute; 3 failed in 2 minutes, the last 5 min ago."
    )
    only_failed = minutes_drawn([_minute("12:29", 1)], now)
    assert only_failed is not None
    assert (only_failed["stretches"], only_failed["failed"]) == ([], [58])
    assert only_failed["label"] == "The last hour by minute: 1 failed in 1 minute, the last 1 min ago."
    assert minutes_drawn([], now) is None
    assert minutes_drawn(minutes[:1], now) is None
