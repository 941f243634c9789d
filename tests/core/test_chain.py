"""The table of a trace: what may follow in which state, and that nothing else may."""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.chain import Artifact, Head, Link, StreamKind, Transition, verify_link
from app.core.digest import GENESIS, Digest, digest_of, digest_of_bytes
from app.core.errors import ChecksumMismatch, InvalidTransition, SchemaViolation, SequenceGap, TgaError
from app.domain.system.documents import SYSTEM
from app.domain.tga.documents import ArtifactDocument, ExecutionLogEntry
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.replay import ACTION_OF_STATE, LogRecord, advance, fold, fold_next, head_of, verify_next
from app.domain.tga.transitions import TRACE
from tests.traces import (
    EXECUTOR,
    PATHS,
    action_request,
    completed_trace,
    supervisor_decision,
    time_at,
    tool_call,
    tool_effect,
    trace_id,
    traces,
)

STATES: Final = ("PENDING", "AUTHORIZED", "EXECUTING", "COMPLETED", "FAILED", "DENIED")
TERMINAL: Final = {"COMPLETED", "FAILED", "DENIED"}
ARTIFACTS: Final = (
    ("action_request", ""),
    ("supervisor_decision", "APPROVE"),
    ("supervisor_decision", "DENY"),
    ("tool_call", ""),
    ("tool_effect", "SUCCESS"),
    ("tool_effect", "FAILURE"),
)
# The specification's table, restated: from a state, with an artifact and its verdict, to a state.
ALLOWED: Final = {
    ("PENDING", "supervisor_decision", "APPROVE"): "AUTHORIZED",
    ("PENDING", "supervisor_decision", "DENY"): "DENIED",
    ("AUTHORIZED", "tool_call", ""): "EXECUTING",
    ("EXECUTING", "tool_effect", "SUCCESS"): "COMPLETED",
    ("EXECUTING", "tool_effect", "FAILURE"): "FAILED",
}
OTHER_DIGEST: Final = Digest("e" * 64)


def state_after(name: str) -> ExecutionState:
    state = fold(PATHS[name](1))
    assert state is not None
    assert state.state == name
    return state


def artifact_for(state: ExecutionState | None, artifact_type: str, verdict: str) -> ArtifactDocument:
    """The artifact, bound to the trace's last one whatever that is, so that only the table can object."""
    bound = head_of(state).artifact_digest or GENESIS
    request = action_request(1)
    if artifact_type == "action_request":
        return request
    if artifact_type == "supervisor_decision":
        return supervisor_decision(request, decision=verdict, action_request_digest=bound)
    call = tool_call(1, request, supervisor_decision(request), supervisor_decision_digest=bound)
    if artifact_type == "tool_call":
        return call
    return tool_effect(call, outcome=verdict, tool_call_digest=bound)


def record_claiming(
    state: ExecutionState | None, artifact: ArtifactDocument, *, from_state: str, to_state: str
) -> LogRecord:
    """A record that is sound in all but, perhaps, its transition."""
    head = head_of(state)
    body: dict[str, Any] = {
        "schema_id": "tga/v1/execution_log_entry",
        "schema_version": "1.0",
        "trace_id": artifact.trace_id,
        "sequence_number": head.sequence_number + 1,
        "prev_entry_digest": head.entry_digest,
        "from_state": from_state,
        "to_state": to_state,
        "artifact_type": artifact.artifact_type,
        "artifact_digest": artifact.digest(),
        "executor_id": EXECUTOR,
        "recorded_at": time_at(9),
    }
    return LogRecord(ExecutionLogEntry.from_json({**body, "entry_digest": digest_of(body)}), artifact)


# The table


def test_the_states_are_the_six_and_three_of_them_are_terminal() -> None:
    assert sorted(TRACE.states) == sorted(STATES)
    assert len(TRACE.states) == len(STATES)
    assert TRACE.terminal_states == TERMINAL
    assert sorted(ACTION_OF_STATE) == sorted(STATES)
    assert {state for state, action in ACTION_OF_STATE.items() if action == "return_result"} == TERMINAL


def test_a_state_that_only_a_birth_leaves_is_terminal() -> None:
    stillborn = StreamKind("x", "id", "x", "BORN", (), (Transition("BORN", "birth", "", "BORN", is_birth=True),))
    assert stillborn.states == ("BORN",)
    assert stillborn.terminal_states == {"BORN"}
    assert stillborn.stream("1") == "x:1"


def test_every_verdict_of_the_table_is_one_that_its_artifact_can_carry() -> None:
    assert {(t.artifact_type, t.verdict) for t in TRACE.transitions} == set(ARTIFACTS)
    assert len(TRACE.next_state) == len(TRACE.transitions) == len(ALLOWED) + 1


@pytest.mark.parametrize(("artifact_type", "verdict"), ARTIFACTS)
@pytest.mark.parametrize("state_name", STATES)
def test_the_table_admits_exactly_what_it_says(state_name: str, artifact_type: str, verdict: str) -> None:
    state = state_after(state_name)
    before = state.to_bytes()
    artifact = artifact_for(state, artifact_type, verdict)
    expected = ALLOWED.get((state_name, artifact_type, verdict))
    if expected is None:
        with pytest.raises(InvalidTransition):
            advance(state, artifact, executor_id=EXECUTOR, recorded_at=time_at(9))
    else:
        record, _ = advance(state, artifact, executor_id=EXECUTOR, recorded_at=time_at(9))
        assert (record.entry.from_state, record.entry.to_state) == (state_name, expected)
        assert fold_next(state, record).state == expected
    # Whatever an entry claims of its states, only the table's own pair passes.
    for from_state, to_state in product(STATES, STATES):
        record = record_claiming(state, artifact, from_state=from_state, to_state=to_state)
        if (from_state, to_state) == (state_name, expected):
            assert fold_next(state, record).state == expected
        else:
            with pytest.raises(InvalidTransition) as raised:
                fold_next(state, record)
            assert raised.value.stream == f"trace:{trace_id(1)}"
            assert raised.value.sequence_number == state.sequence_number + 1
    assert state.to_bytes() == before


@pytest.mark.parametrize(("artifact_type", "verdict"), ARTIFACTS)
def test_a_trace_is_born_by_a_request_and_by_nothing_else(artifact_type: str, verdict: str) -> None:
    artifact = artifact_for(None, artifact_type, verdict)
    for from_state, to_state in product(STATES, STATES):
        record = record_claiming(None, artifact, from_state=from_state, to_state=to_state)
        if (artifact_type, from_state, to_state) == ("action_request", "PENDING", "PENDING"):
            assert fold_next(None, record).state == "PENDING"
        else:
            with pytest.raises(InvalidTransition):  # though it binds to nothing, too
                fold_next(None, record)


@pytest.mark.parametrize("to_state", STATES)
@pytest.mark.parametrize("artifact_type", ["action_request", "supervisor_decision", "tool_call", "tool_effect"])
@pytest.mark.parametrize("state_name", STATES)
def test_without_its_payload_an_entry_is_still_judged_by_the_table(
    state_name: str, artifact_type: str, to_state: str
) -> None:
    state = state_after(state_name)
    artifact = artifact_for(state, artifact_type, next(v for t, v in ARTIFACTS if t == artifact_type))
    record = record_claiming(state, artifact, from_state=state_name, to_state=to_state)
    erased = LogRecord(record.entry, None)
    reachable = {to for (start, kind, _), to in ALLOWED.items() if (start, kind) == (state_name, artifact_type)}
    if to_state in reachable:
        assert verify_next(head_of(state), erased).state == to_state
    else:
        with pytest.raises(InvalidTransition):
            verify_next(head_of(state), erased)


# verify_link alone, without documents


def bare(kind: StreamKind, head: Head, transition: Transition) -> tuple[Link, Artifact]:
    rule = kind.rule_of[transition.artifact_type]
    document: dict[str, Any] = {kind.id_field: "id"}
    if rule.verdict_field is not None:
        document[rule.verdict_field] = transition.verdict
    if rule.binds_field is not None:
        document[rule.binds_field] = head.artifact_digest
    digest = digest_of(document)
    entry_digest = digest_of([head.entry_digest, digest])
    link = Link(
        sequence_number=head.sequence_number + 1,
        prev_entry_digest=head.entry_digest,
        entry_digest=entry_digest,
        computed_digest=entry_digest,
        from_state=head.state,
        to_state=transition.to_state,
        artifact_type=transition.artifact_type,
        artifact_digest=digest,
    )
    return link, Artifact(document, digest)


def heads(transition: Transition) -> Head:
    return (
        Head.unborn(TRACE)
        if transition.is_birth
        else Head(4, Digest("a" * 64), transition.from_state, Digest("b" * 64))
    )


every_transition = pytest.mark.parametrize(
    "transition", TRACE.transitions, ids=lambda t: f"{t.artifact_type} {t.verdict}"
)


@every_transition
def test_an_admitted_link_moves_the_head_to_itself(transition: Transition) -> None:
    head = heads(transition)
    link, artifact = bare(TRACE, head, transition)
    moved = verify_link(TRACE, head, link, artifact, identity="id")
    assert moved == Head(link.sequence_number, link.computed_digest, transition.to_state, Digest(link.artifact_digest))


@every_transition
def test_each_wrong_part_of_a_link_has_its_error(transition: Transition) -> None:
    head = heads(transition)
    link, artifact = bare(TRACE, head, transition)
    wrong: list[tuple[Link, Artifact, type[TgaError]]] = [
        (link._replace(sequence_number=link.sequence_number - 1), artifact, SequenceGap),
        (link._replace(sequence_number=link.sequence_number + 1), artifact, SequenceGap),
        (link._replace(prev_entry_digest=OTHER_DIGEST), artifact, ChecksumMismatch),
        (link._replace(entry_digest=OTHER_DIGEST), artifact, ChecksumMismatch),
        (link._replace(computed_digest=OTHER_DIGEST), artifact, ChecksumMismatch),
        (link._replace(artifact_digest=OTHER_DIGEST), artifact, ChecksumMismatch),
        (link, artifact._replace(computed_digest=OTHER_DIGEST), ChecksumMismatch),
        (link, artifact._replace(document={**artifact.document, "trace_id": "another"}), ChecksumMismatch),
        (link._replace(from_state="NOWHERE"), artifact, InvalidTransition),
        (link._replace(to_state="NOWHERE"), artifact, InvalidTransition),
        (link._replace(artifact_type="nothing"), artifact, InvalidTransition),
    ]
    rule = TRACE.rule_of[transition.artifact_type]
    if rule.binds_field is not None:
        unbound = {**artifact.document, rule.binds_field: OTHER_DIGEST}
        wrong.append((link, artifact._replace(document=unbound), ChecksumMismatch))
    if rule.verdict_field is not None:
        undecided = {**artifact.document, rule.verdict_field: "MAYBE"}
        wrong.append((link, artifact._replace(document=undecided), InvalidTransition))
    for wrong_link, wrong_artifact, expected in wrong:
        with pytest.raises(TgaError) as raised:
            verify_link(TRACE, head, wrong_link, wrong_artifact, identity="id")
        assert raised.type is expected, wrong_link


@every_transition
def test_when_all_is_wrong_sequence_speaks_first_then_chain_then_transition_then_binding(
    transition: Transition,
) -> None:
    head = heads(transition)
    link, artifact = bare(TRACE, head, transition)
    wrong = link._replace(sequence_number=99, prev_entry_digest=OTHER_DIGEST, to_state="NOWHERE")
    unbound = artifact._replace(document={**artifact.document, "trace_id": "another"})
    with pytest.raises(SequenceGap):
        verify_link(TRACE, head, wrong, unbound, identity="id")
    wrong = wrong._replace(sequence_number=link.sequence_number)
    with pytest.raises(ChecksumMismatch, match="link to the one before"):
        verify_link(TRACE, head, wrong, unbound, identity="id")
    wrong = wrong._replace(prev_entry_digest=link.prev_entry_digest)
    with pytest.raises(InvalidTransition):
        verify_link(TRACE, head, wrong, unbound, identity="id")
    wrong = wrong._replace(to_state=link.to_state)
    with pytest.raises(ChecksumMismatch, match="names another stream"):
        verify_link(TRACE, head, wrong, unbound, identity="id")


# Whole logs


@settings(deadline=None, max_examples=50)
@given(traces())
def test_a_log_with_an_entry_missing_repeated_or_moved_is_refused(records: list[LogRecord]) -> None:
    assert fold(records) is not None
    for at in range(len(records)):
        with pytest.raises(SequenceGap):
            fold([*records[: at + 1], *records[at:]])
        if at + 1 < len(records):
            with pytest.raises(SequenceGap):
                fold([*records[:at], *records[at + 1 :]])
            with pytest.raises(SequenceGap):
                fold([*records[:at], records[at + 1], records[at], *records[at + 2 :]])


def test_the_records_of_two_traces_do_not_mix() -> None:
    one, other = completed_trace(1), completed_trace(2)
    for at in range(1, len(one)):
        with pytest.raises(SchemaViolation):
            fold([*one[:at], other[at]])


def test_an_artifact_of_another_trace_is_refused_though_its_digest_fits() -> None:
    state = state_after("PENDING")
    foreign = supervisor_decision(action_request(2), action_request_digest=state.action_request_digest)
    record = record_claiming(state, foreign, from_state="PENDING", to_state="AUTHORIZED")
    body = {**record.entry.to_json(), "trace_id": state.trace_id}
    del body["entry_digest"]
    renamed = ExecutionLogEntry.from_json({**body, "entry_digest": digest_of(body)})
    with pytest.raises(ChecksumMismatch):
        fold_next(state, LogRecord(renamed, foreign))


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": {"title": "another"}},
        {"server_id": "other"},
        {"tool_name": "other"},
        {"tool_class": "read"},
        {"idempotency_key": "other"},
        {"tool_class": "read", "idempotency_key": None},
    ],
    ids=str,
)
def test_only_the_call_that_was_decided_on_may_follow(change: dict[str, Any]) -> None:
    state = state_after("AUTHORIZED")
    request = action_request(1)
    call = tool_call(1, request, supervisor_decision(request), **change)
    with pytest.raises(ChecksumMismatch):
        advance(state, call, executor_id=EXECUTOR, recorded_at=time_at(9))


def test_an_effect_of_another_tool_call_is_refused() -> None:
    records = completed_trace(1)
    effect = records[-1].artifact
    assert effect is not None
    state = fold(records[:-1])
    other = type(effect).from_json({**effect.to_json(), "tool_call_id": trace_id(7)})
    with pytest.raises(ChecksumMismatch):
        advance(state, other, executor_id=EXECUTOR, recorded_at=time_at(9))


def test_the_genesis_digest_is_64_zeros_and_the_first_entry_links_to_it() -> None:
    entry = completed_trace(1)[0].entry
    assert GENESIS == "0" * 64 == entry.prev_entry_digest
    assert entry.entry_digest == digest_of_bytes(entry.body_bytes())


@given(st.text(max_size=20), st.sampled_from((TRACE, SYSTEM)))
def test_a_streams_name_is_made_of_its_kind_and_id_and_parsed_back(identity: str, kind: StreamKind) -> None:
    other = SYSTEM if kind is TRACE else TRACE
    stream = kind.stream(identity)
    assert kind.has(stream)
    assert kind.identity_of(stream) == identity
    assert not other.has(stream)
    with pytest.raises(SchemaViolation):
        other.identity_of(stream)


@pytest.mark.parametrize("name", ["", "trace", "traces:1", "Trace:1", " trace:1", "trac:e:1"])
def test_what_is_no_name_of_a_kinds_stream_is_not_parsed(name: str) -> None:
    assert not TRACE.has(name)
    with pytest.raises(SchemaViolation):
        TRACE.identity_of(name)
