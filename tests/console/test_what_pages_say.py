"""What pages say, from values alone: no gateway and no browser."""

from __future__ import annotations

from typing import Any

from app.console.pages.call import checks_said, leaf_said
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
