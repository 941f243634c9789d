"""Random programs through the pure half of runs, with a fault at every commit: same result, each effect once.

The gateway's fold and the SDK's journal are written apart; what holds them together is here. Five defects that a
prototype had are planted one by one, and each is found.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import app.domain.runs.replay as fold_module
from app.domain.runs.replay import fold
from tests.conftest import IS_SOAK
from tests.runs import simulator
from tests.runs.simulator import Crash, Gateway, Node, Outcome, Suspended, Worker, run_to_the_end
from tga_sdk.journal import Diverged, Journal, Operation, OperationsAtOnce, Scope

names = st.sampled_from(["plan", "pay", "tell"])
leaves = st.one_of(
    st.builds(Node, st.just("step"), names, fails=st.sampled_from([0, 0, 0, 1, 3]), changes=st.booleans()),
    st.builds(Node, st.just("step"), names, at_most_once=st.just(True)),
    st.builds(Node, st.just("step"), names, recompute=st.just(True)),
    st.builds(Node, st.sampled_from(["tool", "tool", "ask", "sleep", "child"]), names),
)
nodes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            Node,
            st.just("step"),
            names,
            inside=st.lists(inner, max_size=3).map(tuple),
            fails=st.sampled_from([0, 0, 1, 3]),
            changes=st.booleans(),
        ),
        st.builds(Node, st.just("step"), names, inside=st.lists(inner, max_size=2).map(tuple), recompute=st.just(True)),
        st.builds(
            Node,
            st.just("gather"),
            names,
            branches=st.lists(st.lists(inner, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
        ),
    ),
    max_leaves=8,
)
programs = st.lists(nodes, min_size=1, max_size=4).map(tuple)
often = settings(
    deadline=None,
    max_examples=200 if IS_SOAK else 20,  # the engine itself is driven by test_machine.py
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking such programs takes minutes
)

EVERYTHING = (
    Node("step", "plan", inside=(Node("step", "plan", changes=True), Node("tool", "pay")), changes=True, fails=1),
    Node(
        "gather",
        "tell",
        branches=(
            (Node("tool", "pay"), Node("step", "plan", changes=True)),
            (Node("ask", "pay"), Node("step", "tell", inside=(Node("tool", "tell"),), changes=True)),
            (Node("sleep", "plan"),),
        ),
    ),
    Node("step", "pay", at_most_once=True),
    Node("step", "tell", recompute=True, inside=(Node("tool", "plan"),)),
    Node("child", "plan"),
)


def one_fault(at: int, fault: str) -> Iterator[str]:
    return itertools.chain(itertools.repeat("none", at), [fault])


def some_faults(seed: int, share: float) -> Iterator[str]:
    chance = random.Random(seed)
    # They end: a run that is hit for ever never gets on.
    return iter([chance.choice(["before", "after", "lost"]) if chance.random() < share else "none" for _ in range(60)])


def was_interrupted(outcome: Outcome) -> bool:
    return any(getattr(r.artifact, "outcome", None) == "INTERRUPTED" for r in outcome.gateway.stored.records)


def assert_as_without_faults(outcome: Outcome, calm: Outcome) -> None:
    assert outcome.recorded_again == []
    assert set(outcome.gateway.book.values()) <= {1}
    assert fold(outcome.gateway.stored.records) == outcome.gateway.run
    if not was_interrupted(outcome):
        assert outcome.result == calm.result
        assert outcome.state == calm.state
        assert outcome.gateway.book == calm.gateway.book


@often
@given(program=programs, seed=st.integers(0, 1_000))
def test_one_fault_at_any_commit_changes_neither_result_nor_state_nor_effects(
    program: tuple[Node, ...], seed: int
) -> None:
    calm = run_to_the_end(program, seed=seed, faults=iter(()))
    commits = len(calm.gateway.stored.records)
    for at in random.Random(seed).sample(range(commits), k=min(commits, 5)):
        for fault in ("before", "after", "lost"):
            outcome = run_to_the_end(program, seed=seed + at, faults=one_fault(at, fault), zombies=True)
            assert_as_without_faults(outcome, calm)


@often
@given(program=programs, seed=st.integers(0, 1_000), share=st.sampled_from([0.1, 0.3, 0.6]))
def test_many_faults_and_zombies_beside_them_change_nothing(program: tuple[Node, ...], seed: int, share: float) -> None:
    calm = run_to_the_end(program, seed=seed, faults=iter(()))
    outcome = run_to_the_end(program, seed=seed, faults=some_faults(seed, share), zombies=True)
    assert_as_without_faults(outcome, calm)


@often
@given(program=programs, seeds=st.lists(st.integers(0, 1_000), min_size=2, max_size=2, unique=True))
def test_the_order_in_which_branches_are_faster_changes_no_address(program: tuple[Node, ...], seeds: list[int]) -> None:
    one, other = (run_to_the_end(program, seed=seed, faults=iter(())) for seed in seeds)
    assert (one.result, one.state, one.gateway.book) == (other.result, other.state, other.gateway.book)


def test_every_single_fault_of_a_program_with_everything_in_it() -> None:
    calm = run_to_the_end(EVERYTHING, seed=1, faults=iter(()))
    assert set(calm.gateway.book.values()) == {1}
    for at, fault in itertools.product(range(len(calm.gateway.stored.records)), ("before", "after", "lost")):
        assert_as_without_faults(run_to_the_end(EVERYTHING, seed=2, faults=one_fault(at, fault), zombies=True), calm)


def test_a_retry_reopens_nothing_inside_what_is_computed_again() -> None:
    interrupted = Node("step", "pay", at_most_once=True)
    program = (Node("step", "plan", inside=(Node("step", "tell", inside=(interrupted,), recompute=True),), fails=1),)
    calm = run_to_the_end(program, seed=1, faults=iter(()))
    for at, fault in itertools.product(range(len(calm.gateway.stored.records)), ("before", "after", "lost")):
        assert_as_without_faults(run_to_the_end(program, seed=2, faults=one_fault(at, fault), zombies=True), calm)


# --- defects, planted ---


def is_found() -> bool:
    """Whether some seed shows that something is wrong."""
    for seed in range(12):
        try:
            calm = run_to_the_end(EVERYTHING, seed=1, faults=iter(()))
            outcome = run_to_the_end(EVERYTHING, seed=seed, faults=some_faults(seed, 0.3), zombies=True)
            assert_as_without_faults(outcome, calm)
        except Exception:
            return True
    return False


def test_without_a_defect_nothing_is_found() -> None:
    assert not is_found()


def test_a_missing_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "_verify_attempt", lambda run, attempt: None)
    assert is_found()


def test_branches_that_share_a_scope_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scope, "branch", lambda self, path, number: Scope(f"{path}:1"))
    assert is_found()


def test_repeats_that_are_not_recognised_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Gateway.commit
    monkeypatch.setattr(Gateway, "commit", lambda self, *made, after: original(self, *made, after=10**9))
    assert is_found()


def test_branches_that_are_not_isolated_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "is_isolated", lambda path: False)
    calm = run_to_the_end(EVERYTHING, seed=1, faults=iter(()))
    assert calm.state["log"].count("tell") > 1  # the branch's own change, and the gather's merge of it


def test_a_journal_that_forgets_what_has_begun_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_intents(self: Journal, record: Any) -> None:
        if record["artifact_type"] != "run_intent":
            original(self, record)

    original = Journal.add
    monkeypatch.setattr(Journal, "add", without_intents)
    assert is_found()


# --- divergence ---


def half_way(program: tuple[Node, ...], *, commits: int) -> Gateway:
    """A run whose worker was lost after so many commits."""
    gateway = Gateway(one_fault(commits, "before"))
    chance = random.Random(1)
    try:
        while True:
            try:
                Worker(gateway, program, chance).drive()
            except Suspended:
                gateway.answer_one(chance)
            else:
                return gateway
    except Crash:
        return gateway


def changed(program: tuple[Node, ...], how: str) -> tuple[Node, ...]:
    first, second, *rest = program
    return {
        "renamed": (Node("step", "other"), second, *rest),
        "another kind": (Node("tool", "one"), second, *rest),
        "inserted": (Node("step", "new"), first, second, *rest),
        "removed": (second, *rest),
        "swapped": (second, first, *rest),
        "renamed around": (Node("step", "other", inside=first.inside), second, *rest),
    }[how]


@pytest.mark.parametrize("how", ["renamed", "another kind", "inserted", "removed", "swapped", "renamed around"])
def test_a_changed_program_is_stopped_at_the_first_address_that_differs_before_any_effect(how: str) -> None:
    program = (
        Node("step", "one", inside=(Node("tool", "pay"),)),
        Node("step", "two"),
        Node("tool", "three"),
        Node("step", "four"),
    )
    gateway = half_way(program, commits=6)
    records, book = len(gateway.stored.records), dict(gateway.book)
    worker = Worker(gateway, changed(program, how), random.Random(2))
    with pytest.raises(Diverged) as diverged:
        worker.drive()
    assert diverged.value.path == "2"
    assert len(gateway.stored.records) == records + 2  # the lost attempt, and this one: no more
    assert dict(gateway.book) == book


def test_a_program_that_ends_before_its_journal_does_is_stopped() -> None:
    program = (Node("step", "one"), Node("step", "two"))
    gateway = half_way(program, commits=3)
    with pytest.raises(Diverged) as diverged:
        Worker(gateway, program[:1], random.Random(2)).drive()
    assert diverged.value.path == "the end"


def test_divergence_names_both_sides_and_the_line() -> None:
    journal = Journal()
    record = {"sequence_number": 3, "artifact_type": "run_checkpoint", "path": "1", "kind": "step", "name": "plan"}
    journal.add(
        {**record, "input_digest": "a", "outcome": "OK", "value": 1, "error": None, "resume": "snapshot", "inner": 0}
    )
    with pytest.raises(Diverged, match=r"at 1 \(x\.py:7\) the journal has step plan, the program performs tool pay"):
        journal.match("1", Operation("tool", "pay", "b"), source="x.py:7")
    with pytest.raises(Diverged, match="step plan with another input"):
        journal.match("1", Operation("step", "plan", "b"))


def test_what_had_begun_in_the_source_of_a_fork_begins_anew() -> None:
    journal = Journal()
    asked = {"artifact_type": "run_intent", "path": "1", "kind": "ask", "name": "pay?", "input_digest": "a"}
    journal.add({**asked, "sequence_number": -1})
    journal.add({"artifact_type": "run_signal", "sequence_number": 0, "name": "go"})
    journal.add({"artifact_type": "run_start", "sequence_number": 1, "forked_from": {"run_id": "r"}})
    assert (journal.look("1"), journal.signals) == (None, [])


def test_two_operations_at_once_in_one_scope_are_refused_at_once() -> None:
    scope = Scope()
    scope.enter(Operation("step", "one", "a"))
    with pytest.raises(OperationsAtOnce, match=r"ctx\.gather"):
        scope.enter(Operation("step", "two", "b"))


def test_a_long_journal_keeps_little() -> None:
    journal, scope = Journal(), "1"
    for number in range(1, 20_001):
        journal.add(_ended(number, f"{scope}.{number}.1"))
        journal.add(_ended(number, f"{scope}.{number}", inner=1))
    journal.add(_ended(20_002, scope, inner=20_000))
    assert sum(len(kept) for kept in journal._ended.values()) == 1


def _ended(number: int, path: str, inner: int = 0) -> dict[str, Any]:
    return {
        "sequence_number": number,
        "artifact_type": "run_checkpoint",
        "path": path,
        "kind": "step",
        "name": "s",
        "input_digest": "d",
        "outcome": "OK",
        "value": None,
        "error": None,
        "resume": "snapshot",
        "inner": inner,
    }


assert simulator.RETRIES == 2  # `fails=3` above is beyond them
