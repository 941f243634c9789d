"""The table of a run: every state with every artifact and verdict, restated from RUNS.md and compared."""

from __future__ import annotations

import itertools

import pytest

from app.core.chain import Head
from app.core.errors import InvalidTransition
from app.domain.runs.documents import RUN_MODELS, RunDocument
from app.domain.runs.replay import RUN_DOCUMENTS, RunRecord
from app.domain.runs.transitions import RUN
from tests.runs import journal
from tests.traces import EXECUTOR, time_at

STATES = ("SCHEDULED", "RUNNING", "WAITING", "FAILED", "PARKED", "DIVERGED", "COMPLETED", "CANCELLED")
OPEN = STATES[:6]
ARTIFACTS: dict[str, RunDocument] = {
    "run_start": journal.start(),
    **{
        f"run_attempt {change}": journal.attempt(1, change)
        for change in ("LEASED", "RELEASED", "LOST", "FAILED", "FENCED")
    },
    "run_intent": journal.intent("1"),
    "run_checkpoint": journal.checkpoint("1"),
    "run_answer YES": journal.answer("1", "0" * 64, wakes="YES"),
    "run_answer NO": journal.answer("1", "0" * 64),
    "run_escalation": journal.escalation("1", "0" * 64),
    "run_signal": journal.signal("go", "1"),
    "run_suspension": journal.suspension("1"),
    **{f"run_end {o}": journal.end(o) for o in ("COMPLETED", "FAILED", "PARKED", "DIVERGED", "CANCELLED")},
    "run_resumption": journal.resumption(),
}
# Restated from the design: where it is admitted, and where it leads ("": it stays).
ADMITTED: dict[str, dict[str, str]] = {
    "run_start": {},
    "run_attempt LEASED": {"SCHEDULED": "RUNNING"},
    "run_attempt RELEASED": {"RUNNING": "SCHEDULED"},
    "run_attempt LOST": {"RUNNING": "SCHEDULED"},
    "run_attempt FAILED": {"RUNNING": "SCHEDULED"},
    "run_attempt FENCED": {"SCHEDULED": "", "RUNNING": "", "WAITING": ""},
    "run_intent": {"RUNNING": ""},
    "run_checkpoint": {"RUNNING": ""},
    "run_answer YES": {"WAITING": "SCHEDULED"},
    "run_answer NO": dict.fromkeys(OPEN, ""),
    "run_escalation": dict.fromkeys(OPEN[:3], ""),
    "run_signal": dict.fromkeys(OPEN, ""),
    "run_suspension": {"RUNNING": "WAITING"},
    "run_end COMPLETED": {"RUNNING": "COMPLETED"},
    "run_end DIVERGED": {"RUNNING": "DIVERGED"},
    "run_end FAILED": dict.fromkeys(OPEN[:3], "FAILED"),
    "run_end PARKED": dict.fromkeys(OPEN[:2], "PARKED"),
    "run_end CANCELLED": dict.fromkeys(OPEN, "CANCELLED"),
    "run_resumption": dict.fromkeys(OPEN[3:], "SCHEDULED"),
}


def test_the_table_names_these_states_and_artifacts() -> None:
    assert set(RUN.states) == set(STATES)
    assert RUN.terminal_states == {"COMPLETED", "CANCELLED"}
    assert set(RUN.rule_of) == set(RUN_MODELS)
    assert len(RUN.next_state) == len(RUN.transitions) == sum(map(len, ADMITTED.values())) + 1


@pytest.mark.parametrize(("state", "name"), list(itertools.product(STATES, ARTIFACTS)))
def test_each_state_admits_each_artifact_as_designed_and_no_other(state: str, name: str) -> None:
    artifact, head = ARTIFACTS[name], Head(7, "b" * 64, state, "c" * 64)  # type: ignore[arg-type]
    planned, after, is_admitted = RUN_DOCUMENTS.plan(
        head, artifact, identity="r", executor_id=EXECUTOR, recorded_at=time_at(0)
    )
    leads_to = ADMITTED[name].get(state)
    assert is_admitted == (leads_to is not None)
    entry = RUN_DOCUMENTS.read(planned.entry, planned.artifact, entry_digest=after.entry_digest).entry
    if leads_to is None:
        with pytest.raises(InvalidTransition):
            RUN_DOCUMENTS.verify_next(head, RunRecord(entry, artifact))
    else:
        assert RUN_DOCUMENTS.verify_next(head, RunRecord(entry, artifact)).state == (leads_to or state)


def test_a_run_is_born_by_its_start_alone() -> None:
    unborn = Head.unborn(RUN)
    for name, artifact in ARTIFACTS.items():
        _, _, is_admitted = RUN_DOCUMENTS.plan(
            unborn, artifact, identity="r", executor_id=EXECUTOR, recorded_at=time_at(0)
        )
        assert is_admitted == (name == "run_start")
