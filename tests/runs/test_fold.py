"""The fold of a run's journal: what each record must agree with, and that a checkpoint may stand at every cut."""

from __future__ import annotations

import copy

import pytest

from app.core.errors import (
    ChecksumMismatch,
    ConcurrentExecution,
    InvalidTransition,
    RecoveryFailed,
    RunAnswerUnasked,
    RunPositionGap,
    RunPositionTaken,
    SchemaViolation,
    TgaError,
)
from app.domain.runs.documents import RunDocument
from app.domain.runs.replay import Run, fold, fold_next
from tests.runs import journal
from tests.runs.journal import (
    Journal,
    advance,
    answer,
    attempt,
    checkpoint,
    end,
    intent,
    resumption,
    running,
    signal,
    suspension,
)
from tests.traces import EXECUTOR, time_at


def refused(made: Journal, artifact: RunDocument, error: type[TgaError]) -> TgaError:
    """The error, after seeing that the run is as it was and that the error says where."""
    before, number = made.run.to_json(), made.run.head.sequence_number
    with pytest.raises(error) as caught:
        made.append(artifact)
    assert made.run.to_json() == before
    assert (caught.value.stream, caught.value.sequence_number) == ("run:r", number + 1)
    return caught.value


def whole() -> Journal:
    """A run through everything: nesting, a gather with a tool and a question, a lost attempt, a failure, a retry."""
    made = running(checkpoint("1.1"), checkpoint("1", inner=1, state_change=[{"op": "set", "at": "/plan", "to": [1]}]))
    made.append(intent("2:1.1", "tool"))
    tool = made.last_digest
    made.append(intent("2:2.1", "ask", "pay"))
    ask = made.last_digest
    made.append(suspension("2:1.1", "2:2.1", wake="ALL"), answer("2:1.1", tool))
    made.append(answer("2:2.1", ask, "person", wakes="YES"), attempt(2), attempt(2, "LOST"), attempt(3))
    made.append(attempt(1, "FENCED"), attempt(2, "FENCED"))
    made.append(
        checkpoint("2", "gather", "both", inner=2, attempt=3),
        signal("paid", "s-1"),
        intent("3", "signal", "paid", attempt=3),
    )
    made.append(answer("3", made.last_digest, "signal", answered_by={"type": "signal", "id": "s-1"}))
    made.append(checkpoint("4.1", attempt=3), checkpoint("4.2", outcome="ERROR", attempt=3))
    made.append(checkpoint("4", outcome="ERROR", attempt=3, inner=2), end("FAILED", attempt=3, positions=4))
    made.append(resumption(made.run, reopens=["4"]), attempt(4), checkpoint("4.2", attempt=4, try_number=2))
    made.append(checkpoint("4", attempt=4, try_number=2, inner=2), end(attempt=4, positions=4))
    return made


def test_a_fold_from_any_cut_gives_what_the_fold_from_nothing_gives() -> None:
    records = whole().records
    everything = fold(records)
    assert everything is not None
    assert everything.head.state == "COMPLETED"
    for cut in range(1, len(records) + 1):
        upto = fold(records[:cut])
        assert upto is not None
        assert fold(records[cut:], start=Run.from_json(upto.to_json())) == everything


def test_every_damaged_record_is_found_at_its_entry() -> None:
    records = whole().records
    for place, record in enumerate(records):
        for other in (place - 1, place + 1):
            if 0 <= other < len(records):
                wrong = [*records[:place], records[other], *records[place + 1 :]]
                with pytest.raises(TgaError) as caught:
                    fold(wrong)
                assert caught.value.sequence_number == place + 1
        with pytest.raises(RecoveryFailed):
            fold([*records[:place], record._replace(artifact=None)])


def test_only_the_current_attempt_is_heard() -> None:
    made = running(checkpoint("1"), attempt(1, "LOST"), attempt(2))
    for late in (checkpoint("2"), intent("2"), suspension("2"), end(positions=1), attempt(1, "RELEASED")):
        refused(made, late, ConcurrentExecution)
    made.append(attempt(1, "FENCED"))
    refused(made, attempt(1, "FENCED"), ChecksumMismatch)  # recorded once
    refused(made, attempt(2, "FENCED"), ChecksumMismatch)  # it is not over
    refused(made, attempt(3, "FENCED"), ChecksumMismatch)  # it has not been


def test_attempts_are_counted_and_the_program_is_the_one_that_was_started() -> None:
    made = Journal()
    refused(made, attempt(2), ChecksumMismatch)
    refused(made, attempt(1, program_digest="b" * 64), ChecksumMismatch)
    made.append(attempt(1))


def test_attempts_without_a_checkpoint_between_are_counted_towards_parking() -> None:
    made = running(attempt(1, "LOST"), attempt(2), attempt(2, "FAILED"), attempt(3))
    assert made.run.failures == 2
    made.append(checkpoint("1", attempt=3), attempt(3, "RELEASED", not_before=time_at(9)))
    assert (made.run.failures, made.run.not_before) == (0, time_at(9))


def test_an_operation_stands_at_the_next_address() -> None:
    made = running(checkpoint("1"))
    refused(made, checkpoint("1"), RunPositionTaken)
    refused(made, intent("1"), RunPositionTaken)
    refused(made, checkpoint("3"), RunPositionGap)
    refused(made, checkpoint("2.2"), RunPositionGap)


def test_an_end_agrees_with_what_has_begun() -> None:
    made = running(intent("1", "step", "charge"))
    refused(made, checkpoint("1", "step", "refund"), RunPositionTaken)
    refused(made, checkpoint("1", "step", "charge", input_digest="b" * 64), RunPositionTaken)
    made.append(checkpoint("1", "step", "charge"))


def test_a_tool_a_question_a_sleep_a_signal_and_a_child_end_with_an_answer() -> None:
    for kind in journal.ANSWERED_BY:
        made = running(intent("1", kind, "x"))
        refused(made, checkpoint("1", kind, "x"), InvalidTransition)


def test_only_what_has_begun_can_be_interrupted() -> None:
    made = running()
    refused(made, checkpoint("1", outcome="INTERRUPTED"), InvalidTransition)
    made.append(intent("1", "step", "charge"), checkpoint("1", "step", "charge", outcome="INTERRUPTED"))
    assert made.run.frontier.failed_last() == ["1"]


def test_a_checkpoint_says_how_many_operations_were_performed_inside() -> None:
    made = running(checkpoint("1.1"), checkpoint("1.2"))
    refused(made, checkpoint("1", inner=1), ChecksumMismatch)
    refused(made, checkpoint("1", inner=3), ChecksumMismatch)
    made.append(checkpoint("1", inner=2))
    refused(made, end(positions=2), ChecksumMismatch)
    made.append(end(positions=1))


def test_a_try_has_the_number_that_comes_next() -> None:
    made = running(checkpoint("1", outcome="RETRY"))
    refused(made, checkpoint("1"), ChecksumMismatch)
    refused(made, intent("1"), ChecksumMismatch)
    refused(made, checkpoint("1", try_number=3), ChecksumMismatch)
    made.append(checkpoint("1", try_number=2))


def test_an_answer_is_of_an_intent_that_is_open_and_by_one_who_may_give_it() -> None:
    for kind, by in journal.ANSWERED_BY.items():
        made = running(signal("x", "who"), intent("1", kind, "x"))
        asked = made.last_digest
        refused(made, answer("1", "b" * 64, by), RunAnswerUnasked)
        refused(made, answer("2", asked, by), RunAnswerUnasked)
        others = (
            {"person", "timer", "signal", "child", "tool"} - {by} - ({"timer"} if kind in ("ask", "signal") else set())
        )
        for other in others:
            refused(made, answer("1", asked, other), RunAnswerUnasked)
        made.append(answer("1", asked, by))
        refused(made, answer("1", asked, by), RunAnswerUnasked)  # the first one wins


def test_signals_are_received_in_the_order_in_which_they_came() -> None:
    made = running(signal("a", "s-1"), signal("b", "s-2"), signal("a", "s-3"), intent("1", "signal", "a"))
    asked = made.last_digest
    refused(made, answer("1", asked, "signal", answered_by={"type": "signal", "id": "s-3"}), RunAnswerUnasked)
    refused(made, answer("1", asked, "signal", answered_by={"type": "signal", "id": "s-2"}), RunAnswerUnasked)
    made.append(answer("1", asked, "signal", answered_by={"type": "signal", "id": "s-1"}))
    assert [waiting.signal_id for waiting in made.run.signals] == ["s-2", "s-3"]


@pytest.mark.parametrize(("wake", "first"), [("ANY", "YES"), ("ALL", "NO")])
def test_an_answer_wakes_the_run_exactly_when_it_was_all_that_was_waited_for(wake: str, first: str) -> None:
    made = running(intent("1:1.1"))
    one = made.last_digest
    made.append(intent("1:2.1", "sleep", "nap"))
    two = made.last_digest
    made.append(suspension("1:1.1", "1:2.1", wake=wake))
    refused(made, answer("1:1.1", one, wakes="NO" if first == "YES" else "YES"), ChecksumMismatch)
    made.append(answer("1:1.1", one, wakes=first))
    if wake == "ALL":
        refused(made, answer("1:2.1", two, "timer", wakes="NO"), ChecksumMismatch)
        made.append(answer("1:2.1", two, "timer", wakes="YES"))
    assert made.run.head.state == "SCHEDULED"
    assert made.run.awaits == []


def test_an_answer_that_comes_before_the_worker_leaves_wakes_nobody() -> None:
    made = running(intent("1"))
    asked = made.last_digest
    refused(made, answer("1", asked, wakes="YES"), InvalidTransition)
    made.append(answer("1", asked))
    refused(made, suspension("1"), InvalidTransition)  # nothing is left to wait for


def test_a_run_waits_only_for_what_others_can_end() -> None:
    made = running(intent("1", "step", "charge"))
    refused(made, suspension("1"), InvalidTransition)
    refused(made, suspension("2"), InvalidTransition)
    made = running(intent("1"))
    refused(made, suspension("1", "1"), ChecksumMismatch)


def test_changes_of_state_come_with_their_checkpoint_and_those_in_a_branch_with_the_gather() -> None:
    change = [{"op": "set", "at": "/n", "to": 1}]
    made = running(checkpoint("1:1.1", state_change=change))
    assert made.run.state == {}
    made.append(checkpoint("1", "gather", "both", inner=1, state_change=change))
    assert made.run.state == {"n": 1}
    refused(made, checkpoint("2", state_change=[{"op": "remove", "at": "/m"}]), SchemaViolation)


def test_a_resumption_states_the_frontier_that_follows_from_it() -> None:
    made = running(checkpoint("1", outcome="ERROR"), end("FAILED", positions=1))
    refused(made, resumption(made.run, reopens=["1"], frontier_digest="b" * 64), ChecksumMismatch)
    refused(made, resumption(reopens=["2"]), RunPositionTaken)
    accepted = {"version": "2", "program_digest": "b" * 64}
    made.append(resumption(made.run, reopens=["1"], accepts=accepted))
    refused(made, attempt(2), ChecksumMismatch)  # the program is another one now
    made.append(attempt(2, program_digest="b" * 64), checkpoint("1", attempt=2, try_number=2))


def test_an_operator_ends_an_interrupted_step() -> None:
    made = running(intent("1", "step", "charge"), checkpoint("1", "step", "charge", outcome="INTERRUPTED"))
    made.append(end("PARKED", positions=1))
    word = {"path": "1", "outcome": "OK", "value": journal.inline("charged"), "error": None}
    made.append(resumption(made.run, resolves=[word]), attempt(2), checkpoint("2", attempt=2))


def test_a_fork_goes_on_from_its_source_and_proves_it() -> None:
    source = running(checkpoint("1", state_change=[{"op": "set", "at": "/n", "to": 1}]), intent("2"))
    at = copy.deepcopy(source.run)
    origin = {
        "run_id": "r",
        "sequence_number": at.head.sequence_number,
        "entry_digest": at.head.entry_digest,
        "state_change": [{"op": "set", "at": "/n", "to": 2}],
    }
    first = journal.start("f", trigger={"type": "fork", "id": "r"}, forked_from=origin)
    forked = Journal(first, source=at)
    assert forked.run.state == {"n": 2}
    assert at.state == source.run.state == {"n": 1}
    forked.append(attempt(1, run_id="f"), intent("2", run_id="f"))  # it begins anew, under the fork's own key
    with pytest.raises(RecoveryFailed):
        Journal(first)
    source.append(answer("2", source.last_digest))
    with pytest.raises(ChecksumMismatch):
        Journal(first, source=source.run)


def test_a_record_of_another_run_is_refused() -> None:
    made, other = running(), Journal(journal.start("s"))
    record, _ = advance(other.run, attempt(1, run_id="s"), executor_id=EXECUTOR, recorded_at=time_at(1))
    with pytest.raises(SchemaViolation):
        fold_next(made.run, record)
