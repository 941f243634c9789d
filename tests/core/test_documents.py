"""A document is written as RFC 8785 writes its JSON, by whichever way; and reads back as itself."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import app.domain
from app.clock import SystemClock
from app.core.canonical import canonical_bytes
from app.core.chain import Head
from app.core.digest import digest_of, digest_of_bytes
from app.core.errors import ChecksumMismatch, InputTooLarge, InvalidTransition, SchemaViolation, TgaError
from app.core.limits import DEPTH_MAX, KEYS_MAX
from app.domain.addresses import RunOfCall
from app.domain.ledger.documents import Document, LogEntry, Part
from app.domain.ledger.owned_stream import OwnedStream
from app.domain.runs.procedures import ProcedureSaid
from app.domain.system.documents import SYSTEM_MODELS, ToolPin
from app.domain.tga import documents as models
from app.domain.tga.attempts import Attempts, effect_of_answer
from app.domain.tga.documents import (
    ARTIFACT_MODELS,
    ActionRequest,
    ArtifactDocument,
    ExecutionLogEntry,
    JsonOutput,
    ToolCall,
    ToolEffect,
    payload_digest,
)
from app.domain.tga.execution import TraceExecution
from app.domain.tga.execution_state import ExecutionCheckpoint, ExecutionState
from app.domain.tga.executor import TraceExecutor
from app.domain.tga.ports import Answered, Ports
from app.domain.tga.replay import TRACE_DOCUMENTS, fold, head_of, plan_next
from app.domain.tga.transitions import TRACE
from tests.runs import journal
from tests.traces import (
    EXECUTOR,
    action_request,
    completed_trace,
    executing_trace,
    records_of,
    supervisor_decision,
    time_at,
    tool_call,
    tool_call_id,
    tool_effect,
    trace_id,
    traces,
)

texts = st.text(max_size=8) | st.sampled_from(["\u0000", "\\u0000", "\ud800", "é", "\U0001f600", "\uffff"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)

OF_RUN = RunOfCall(run_id="r", procedure="p", version="1", path="3:2.1", attempt=1, worker="w")


def outcome_of(write: Any) -> bytes | type[TgaError]:
    try:
        return bytes(write())
    except TgaError as error:
        return type(error)


def nested(levels: int) -> Any:
    value: Any = "bottom"
    for _ in range(levels):
        value = [value]
    return value


@given(arguments=st.dictionaries(texts, anything, max_size=3), intent=texts | st.none())
@example(arguments={"\U0001f600": 1, "\uffff": 2}, intent=None)  # by code units the other way round
@example(arguments={"a": float("nan")}, intent=None)
@example(arguments={"a": 1e20}, intent=None)
@example(arguments={"a": 100.0}, intent="\u0000")
@example(arguments={}, intent="\ud800")
def test_a_request_is_written_as_its_json_is(arguments: dict[str, Any], intent: str | None) -> None:
    try:
        request = action_request(1, arguments=arguments, intent=intent)
    except ValueError:  # the model refuses it
        return
    assert outcome_of(request.to_bytes) == outcome_of(lambda: canonical_bytes(request.to_json()))
    found = outcome_of(lambda: request.payload_digest.encode())
    payload: Any = {"server_id": request.server_id, "tool_name": request.tool_name, "arguments": arguments}
    assert found == outcome_of(lambda: digest_of(payload).encode())
    if isinstance(found, bytes):
        assert found.decode() == payload_digest(request.server_id, request.tool_name, arguments)


@given(
    changed=st.fixed_dictionaries(
        {},
        optional={
            "trace_id": st.sampled_from([trace_id(2), "2", None]),
            "server_id": texts,
            "tool_name": texts,
            "tool_class": st.sampled_from(["read", "write"]),
            "arguments": anything | st.dictionaries(texts | st.integers(), anything, max_size=2),
            "idempotency_key": texts | st.sampled_from([None, " a", "a b", "k" * 300, 1]),
            "intent": texts | st.sampled_from([None, "i" * 5000, 1]),
            "traceparent": st.sampled_from(["00-" + "a" * 32 + "-" + "b" * 16 + "-01", "00", 1]),
            "run": st.sampled_from([OF_RUN, OF_RUN.model_dump(), None, {"run_id": "r"}, 1]),
        },
    )
)
@example(changed={"tool_class": "write", "idempotency_key": None})
@example(changed={"tool_class": "read", "idempotency_key": None})
@example(changed={"arguments": {1: 2}})
@example(changed={"run": None})
@example(changed={"run": {"run_id": "r"}})
@example(changed={"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
def test_what_a_caller_asks_is_the_request_that_is_validated_whole(changed: dict[str, Any]) -> None:
    fields = {**action_request(1).__dict__, **changed}
    for field in ("traceparent", "run"):
        if field not in changed:
            del fields[field]
    try:
        expected = ActionRequest(**fields)
    except ValueError:
        with pytest.raises(SchemaViolation) as refused:
            ActionRequest.asked(dict(fields))
        with pytest.raises(SchemaViolation) as named:
            ActionRequest.made(**fields)
        assert str(refused.value) == str(named.value)
        return
    asked = ActionRequest.asked(dict(fields))
    assert asked == expected
    assert asked.arguments is not fields["arguments"]
    assert outcome_of(asked.to_bytes) == outcome_of(expected.to_bytes)
    assert outcome_of(lambda: canonical_bytes(asked.to_json())) == outcome_of(expected.to_bytes)


def test_arguments_that_are_written_already_are_recorded_fingerprinted_and_sent_as_these_bytes() -> None:
    arguments: dict[str, Any] = {"b": [1, {"é": "x"}], "a": None}
    fields = {**action_request(1).__dict__, "arguments": arguments}
    del fields["traceparent"], fields["run"]
    written = canonical_bytes(arguments)
    quick = ActionRequest.asked(dict(fields), written_arguments=written)
    anew = ActionRequest.asked(dict(fields))
    assert (quick.to_bytes(), quick.payload_digest) == (anew.to_bytes(), anew.payload_digest)
    assert quick.payload_digest == payload_digest(quick.server_id, quick.tool_name, arguments)
    assert quick.written_arguments() is written
    assert anew.written_arguments() == written


class Loud(str):
    """A string that shows itself as another."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return '"LOUD"'

    __str__ = __repr__ = lambda self: '"LOUD"'


def test_what_a_caller_asks_is_in_plain_strings() -> None:
    """Entries are written from them as they are."""
    fields = {**action_request(1).__dict__, "traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "intent": "why"}
    del fields["run"]
    names = ("trace_id", "server_id", "tool_name", "idempotency_key", "intent", "traceparent")
    asked = ActionRequest.asked({**fields, **{name: Loud(fields[name]) for name in names}})
    assert {type(getattr(asked, name)) for name in names} == {str}
    assert asked == ActionRequest(**fields)


def test_who_asks_is_looked_at() -> None:
    fields = {**action_request(1).__dict__, "principal": None}
    with pytest.raises(SchemaViolation, match="principal"):
        ActionRequest.asked(fields)


@given(anything)
@example({"b": 1, "a": float("inf")})
def test_an_output_is_written_as_its_json_is(value: Any) -> None:
    request = action_request(1)
    call = tool_call(1, request, supervisor_decision(request))
    effect = tool_effect(call, output={"encoding": "json", "value": value})
    assert outcome_of(effect.to_bytes) == outcome_of(lambda: canonical_bytes(effect.to_json()))


@pytest.mark.parametrize("below", [-1, 0, 1])
def test_foreign_values_count_the_levels_above_them(below: int) -> None:
    request = action_request(1, arguments={"a": nested(DEPTH_MAX - 2 + below)})
    call = tool_call(1, action_request(1), supervisor_decision(action_request(1)))
    effect = tool_effect(call, output={"encoding": "json", "value": nested(DEPTH_MAX - 2 + below)})
    for document in (request, effect):
        expected = outcome_of(lambda: canonical_bytes(document.to_json()))  # noqa: B023 - used at once
        assert (expected is InputTooLarge) == (below > 0)
        assert outcome_of(document.to_bytes) == expected


@pytest.mark.parametrize("keys", [KEYS_MAX - 30, KEYS_MAX - 1, KEYS_MAX])
def test_all_keys_of_a_document_count(keys: int) -> None:
    request = action_request(1, arguments={f"k{n}": 0 for n in range(keys)})
    expected = outcome_of(lambda: canonical_bytes(request.to_json()))
    assert (expected is InputTooLarge) == (keys > KEYS_MAX - 30)
    assert outcome_of(request.to_bytes) == expected


def test_what_may_hold_anything_is_known_from_its_type() -> None:
    for module in pkgutil.walk_packages(app.domain.__path__, "app.domain."):  # whatever other tests have loaded
        importlib.import_module(module.name)
    recorded = [model for model in subclasses_of(Part) if model.__module__.startswith("app.domain.")]
    found = {model.__name__: model._foreign for model in recorded if model._foreign}
    asked = {"_Asking": ("arguments",), "ActionRequest": ("arguments",), "ToolCall": ("arguments",)}
    of_runs = {"InlineValue": ("value",), "EventValue": ("value",), "SetAt": ("to",), "AskRequest": ("answer_schema",)}
    schemas = ("input_schema", "output_schema", "state_schema")
    of_system = {"ToolPin": ("definition",), "ProcedureRegistration": schemas, ProcedureSaid.__name__: schemas}
    of_system["Schedule"], of_system["SubmissionSaid"] = ("input",), ("files",)
    of_workers = {"AskedOfAPerson": ("answer_schema",), "ThenTool": ("arguments",), "SecretSaid": ("value",)}
    assert found == {**asked, **of_runs, **of_workers, "JsonOutput": ("value",), **of_system}


def test_a_value_of_a_run_that_is_too_deep_for_its_document_is_refused_when_it_is_written_not_when_it_is_read() -> None:
    for levels in range(DEPTH_MAX - 6, DEPTH_MAX + 1):
        deep = journal.inline(nested(levels))
        change = {"op": "set", "at": "/a", "to": nested(levels)}
        fork = {"run_id": "s", "sequence_number": 1, "entry_digest": "5" * 64, "state_change": [change]}
        resolved = {"path": "1", "outcome": "OK", "value": deep, "error": None}
        for made in (
            journal.checkpoint("1", value=deep),
            journal.checkpoint("1", state_change=[change]),
            journal.start(trigger={"type": "fork", "id": "s"}, forked_from=fork),
            journal.resumption(resolves=[resolved]),
            journal.intent("1", "ask", "pay", request={**journal.REQUESTS["ask"], "context": deep}),
        ):
            try:
                written = made.to_bytes()
            except InputTooLarge:
                continue
            assert type(made).from_bytes(written) == made


def subclasses_of(base: type[Part]) -> set[type[Part]]:
    direct = set(base.__subclasses__())
    return direct | {deeper for model in direct for deeper in subclasses_of(model)}


@given(traces())
def test_what_is_made_of_known_fields_reads_back_as_the_same(records: list[Any]) -> None:
    for record in records:
        again = type(record.artifact).from_bytes(record.artifact.to_bytes())
        assert again == record.artifact
        assert again.digest() == record.artifact.digest() == record.entry.artifact_digest
        entry = ExecutionLogEntry.from_body_bytes(record.entry.body_bytes())
        assert entry == record.entry
        assert entry.body_bytes() == record.entry.body_bytes()
        assert ExecutionLogEntry.from_bytes(record.entry.to_bytes()) == entry
    state = fold(records)
    assert state is not None
    assert ExecutionState.from_bytes(state.to_bytes()) == state


@given(traces(), st.data())
def test_an_entry_read_at_once_is_the_one_that_its_model_reads(records: list[Any], data: st.DataObject) -> None:
    """As it was planned, and with any byte changed: what is not read at once is left to the model."""
    record = data.draw(st.sampled_from(records))
    raw = record.entry.body_bytes()
    assert TRACE_DOCUMENTS._read_usual(raw, digest_of_bytes(raw)) == record.entry
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = raw[:at] + data.draw(st.sampled_from([b"0", b"9", b"g", b'"', b" ", b"", b"A"])) + raw[at + 1 :]
    entry = TRACE_DOCUMENTS._read_usual(changed, digest_of_bytes(changed))
    if entry is not None:
        assert entry == ExecutionLogEntry.from_body_bytes(changed)
        assert entry.written() == (changed, digest_of_bytes(changed))


def test_a_call_carries_the_request_out_to_the_letter() -> None:
    request = action_request(1, arguments={"amount": 12.5, "é": ["x"]})
    decision = supervisor_decision(request)
    call = ToolCall.carrying_out(
        request,
        tool_call_id=tool_call_id(1),
        supervisor_decision_digest=decision.digest(),
        tool_definition_digest=request.tool_definition_digest,
        on_unknown_outcome="redispatch",
        reconcile_tool=None,
        prepared_at=time_at(3),
    )
    assert call == tool_call(1, request, decision, prepared_at=time_at(3), tool_call_id=tool_call_id(1))
    assert ToolCall.from_bytes(call.to_bytes()) == call
    assert call.payload_digest == request.payload_digest == payload_digest("crm", "create_ticket", request.arguments)


def test_an_effect_of_an_answer_reads_back() -> None:
    request = action_request(1)
    call = tool_call(1, request, supervisor_decision(request))
    attempts = Attempts()
    attempts.begin(time_at(4))
    answered = Answered("SUCCESS", JsonOutput(encoding="json", value={"b": 1.0, "a": None}))
    attempts.end(time_at(5), answered)
    effect = effect_of_answer(call, answered, attempts, time_at(6))
    again = ToolEffect.from_bytes(effect.to_bytes())
    assert again == effect
    assert [attempt.result for attempt in again.attempts] == ["answered"]


@given(traces())
def test_an_entry_is_planned_as_its_model_writes_it(records: list[Any]) -> None:
    head = Head.unborn(TRACE)
    for n, record in enumerate(records):
        planned, head, is_admitted = plan_next(
            head, record.artifact, identity=record.entry.trace_id, executor_id=EXECUTOR, recorded_at=time_at(n)
        )
        body = ExecutionLogEntry.from_body_bytes(planned.entry).to_json()
        body.pop("entry_digest")
        assert planned == (canonical_bytes(body), canonical_bytes(record.artifact.to_json()))
        assert planned.entry == record.entry.body_bytes()
        assert head == head_of(fold(records[: n + 1]))
        assert is_admitted


@given(traces())
def test_the_state_of_the_documents_is_that_of_the_log(records: list[Any]) -> None:
    """At every cut: what a checkpoint says is what folding says, and what the schema admits."""
    execution, executor = fresh_execution(records[0].artifact)
    assert execution.state is None
    for n, record in enumerate(records):
        executor.advance(execution, record.artifact)
        execution.owned.head, execution.updated_at = head_of(fold(records[: n + 1])), record.entry.recorded_at
        state = execution.state
        assert state == fold(records[: n + 1])
        assert state is not None
        assert state.write() == state.to_bytes() == canonical_bytes(state.to_json())
        assert ExecutionState.from_bytes(state.write()) == state


def fresh_execution(request: ArtifactDocument) -> tuple[TraceExecution, TraceExecutor]:
    assert isinstance(request, ActionRequest)
    unused: Any = None
    executor = TraceExecutor(Ports(unused, unused, unused, unused, unused, unused, unused, unused, SystemClock()))
    owned = OwnedStream(executor.stream_ports, request.trace_id, executor_id=EXECUTOR, head=Head.unborn(TRACE))
    return TraceExecution(models.TraceId(request.trace_id), request, owned=owned), executor


def test_what_an_execution_cannot_append_is_named_as_in_replay() -> None:
    request = action_request(1)
    decision = supervisor_decision(request)
    call = tool_call(1, request, decision)
    other = tool_call(1, action_request(1, arguments={"title": "another"}), decision)
    effect = tool_effect(call)
    execution, executor = fresh_execution(request)
    with pytest.raises(InvalidTransition):
        executor.advance(execution, decision.model_copy(update={"action_request_digest": None}))
    for admitted, refused, error in (
        (request, supervisor_decision(action_request(1, intent="another")), ChecksumMismatch),
        (decision, other, ChecksumMismatch),
        (call, effect.model_copy(update={"tool_call_id": tool_call_id(2)}), ChecksumMismatch),
        (effect, effect.model_copy(update={"tool_call_digest": effect.digest()}), InvalidTransition),
    ):
        executor.advance(execution, admitted)
        before = execution.owned.head, len(execution.owned.pending)
        with pytest.raises(error):
            executor.advance(execution, refused)
        assert (execution.owned.head, len(execution.owned.pending)) == before


def test_a_decision_of_known_fields_is_the_validated_one() -> None:
    request = action_request(1)
    execution, executor = fresh_execution(request)
    made = executor.decision(execution, "APPROVE", models.DecidedBy(type="policy", id="policy"), None, rationale=None)
    said = made.decided_at
    by = {"type": "policy", "id": "policy"}
    assert made == supervisor_decision(request, decided_by=by, decided_at=said, policy_ids=[])
    assert made.to_bytes() == canonical_bytes(made.to_json())
    assert type(made).from_bytes(made.to_bytes()) == made


def test_a_changed_copy_has_bytes_of_its_own() -> None:
    request = action_request(1)
    before = request.to_bytes(), request.digest(), request.payload_digest
    changed = request.model_copy(update={"arguments": {"other": 1}})
    assert changed.to_bytes() == canonical_bytes(changed.to_json()) != before[0]
    assert changed.payload_digest != before[2]
    assert (request.to_bytes(), request.digest(), request.payload_digest) == before
    records = executing_trace(1)
    entry = records[0].entry
    assert entry.model_copy(update={"recorded_at": time_at(99)}).body_bytes() != entry.body_bytes()


def test_equality_is_that_of_the_fields() -> None:
    one, other = action_request(1), action_request(1)
    one.digest()
    assert one == other
    assert one.__dict__ == other.__dict__
    state = fold(completed_trace(1))
    assert state == fold(records_of(*(record.artifact for record in completed_trace(1) if record.artifact is not None)))


def test_a_pin_is_written_as_its_json_is() -> None:
    pin = ToolPin(
        system_id="default",
        recorded_at=time_at(1),
        recorded_by="gateway",
        server_id="crm",
        tool_name="t",
        change="pinned",
        definition_digest=digest_of({}),
        definition={"\U0001f600": 1, "\uffff": 0.5, "maximum": 1e21},
    )
    assert pin.to_bytes() == canonical_bytes(pin.to_json())
    assert pin.digest() == digest_of_bytes(pin.to_bytes())


def test_every_document_model_was_looked_at() -> None:
    """Models with foreign values need an example above; a new model shows up here."""
    known = {*ARTIFACT_MODELS.values(), *SYSTEM_MODELS.values(), ExecutionLogEntry, ExecutionState}
    known |= {ExecutionCheckpoint, models.ArtifactDocument, models._Asking, LogEntry}
    for model in subclasses_of(Document) - known:
        assert not model._foreign, model
