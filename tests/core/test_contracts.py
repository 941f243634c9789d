"""Models and JSON Schemas say the same of every document: valid, and invalid by one change."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import random
import re
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import annotated_types
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, StringConstraints
from referencing import Registry, Resource

from app.core.canonical import JsonValue, canonical_bytes, parse_json
from app.core.digest import digest_of, digest_of_bytes
from app.core.errors import InputMalformed, InputTooLarge, SchemaViolation
from app.domain.identity import Principal
from app.domain.ledger.documents import Document
from app.domain.runs.documents import (
    RUN_MODELS,
    Resolved,
    RunAnswer,
    RunAttempt,
    RunCheckpoint,
    RunDocument,
    RunEnd,
    RunIntent,
    RunLogEntry,
    RunStart,
)
from app.domain.runs.requests import REQUEST_OF_KIND
from app.domain.system.documents import (
    SYSTEM,
    SYSTEM_MODELS,
    CronSpec,
    ErasedClaim,
    Erasure,
    EventTrigger,
    FormerLog,
    IntervalSpec,
    LogEpoch,
    PolicySet,
    ProcedurePolicy,
    ProcedureRegistration,
    RetryPolicy,
    Schedule,
    ScheduleRemoval,
    SigningKey,
    SystemDocument,
    SystemLogEntry,
    ToolPin,
)
from app.domain.system.log import SystemState, plan_system
from app.domain.tga.documents import (
    ActionRequest,
    DigestOutput,
    ExecutionLogEntry,
    SupervisorDecision,
    ToolCall,
    ToolEffect,
)
from app.domain.tga.execution_state import ExecutionCheckpoint, ExecutionState
from app.domain.tga.replay import LogRecord, fold
from tests import sampling
from tests.conftest import IS_SOAK
from tests.runs import journal
from tests.traces import (
    EXECUTOR,
    action_request,
    argument_values,
    completed_trace,
    denied_trace,
    failed_trace,
    records_of,
    supervisor_decision,
    time_at,
    tool_call,
    tool_effect,
)

SCHEMA_FOLDER: Final = Path(__file__).parents[2] / "schemas" / "tga" / "v1"
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    path.name.removesuffix(".schema.json"): json.loads(path.read_text("utf-8"))
    for path in sorted(SCHEMA_FOLDER.glob("*.schema.json"))
}
MODELS: Final[dict[str, type[Document]]] = {
    "action_request": ActionRequest,
    "supervisor_decision": SupervisorDecision,
    "tool_call": ToolCall,
    "tool_effect": ToolEffect,
    "execution_log_entry": ExecutionLogEntry,
    "execution_state": ExecutionState,
    "execution_checkpoint": ExecutionCheckpoint,
    "system_log_entry": SystemLogEntry,
    "tool_pin": ToolPin,
    "signing_key": SigningKey,
    "policy_set": PolicySet,
    "erasure": Erasure,
    "log_epoch": LogEpoch,
    "procedure_registration": ProcedureRegistration,
    "schedule": Schedule,
    "schedule_removal": ScheduleRemoval,
    "run_log_entry": RunLogEntry,
    **RUN_MODELS,
}
_NO_RESOURCES: Registry[Any] = Registry()
REGISTRY: Final = _NO_RESOURCES.with_resources(
    [(schema["$id"], Resource.from_contents(schema)) for schema in SCHEMAS.values()]
)
VALIDATORS: Final = {name: Draft202012Validator(schema, registry=REGISTRY) for name, schema in SCHEMAS.items()}
OPEN_OBJECTS: Final = {"arguments", "value", "definition", "answer_schema", "to", "json_schema", "input"}
# Fields that came after the first stores were written: left out when they are not known.
MAY_BE_LEFT_OUT: Final = {
    "roles",
    "traceparent",
    "run",
    "waits_until",
    "payloads_digest",
    "program_source",
    "strict_determinism",
    "callback",
}
# Those that another document states, null or not.
MAY_BE_LEFT_OUT_OF: Final = {"run_intent": {"source"}}

every_document = pytest.mark.parametrize("name", sorted(MODELS))
steady = settings(
    deadline=None,
    max_examples=sampling.share(25, 8),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
thorough = settings(steady, max_examples=sampling.share(100, 30))


def left_out_of(name: str) -> set[str]:
    return MAY_BE_LEFT_OUT | MAY_BE_LEFT_OUT_OF.get(name, set())


def model_accepts(name: str, raw: bytes) -> bool:
    try:
        MODELS[name].from_bytes(raw)
    except SchemaViolation:
        return False
    return True


def schema_accepts(name: str, value: JsonValue) -> bool:
    return bool(VALIDATORS[name].is_valid(value))


def complaints(name: str, value: JsonValue) -> list[str]:
    return [f"{error.json_path}: {error.message[:200]}" for error in VALIDATORS[name].iter_errors(value)]


# From the schemas to the models


def resolved(name: str, schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The schema that a $ref stands for, and the file that it is in."""
    reference = schema.get("$ref")
    if reference is None:
        return name, schema
    if reference.startswith("#/$defs/"):
        return resolved(name, SCHEMAS[name]["$defs"][reference.removeprefix("#/$defs/")])
    other = reference.removeprefix("urn:tga:schema:v1:")
    return other, SCHEMAS[other]


@functools.cache
def any_match(pattern: str, chars_max: int) -> st.SearchStrategy[str]:
    return st.from_regex(pattern, fullmatch=True).filter(lambda text: len(text) <= chars_max)


@functools.cache
def known_match(pattern: str, chars_max: int) -> st.SearchStrategy[str]:
    """A few strings per pattern: many times faster, where the change matters and not what is changed."""
    samples = (
        *("0" * 64, "0123456789abcdef" * 4),
        *("00000000-0000-7000-8000-000000000000", "0198c0de-ffff-7abc-bfff-0123456789ab"),
        *("2026-01-31T23:59:59.999Z", "0000-12-01T00:00:00.000Z"),
        *("a", "!~", "crm/create.ticket", "x" * chars_max, "a key with spaces", "A" * 86 + "==", "A" * 43 + "="),
        *("3", "3.1", "3:2.1", "/a/-", "", "run-7", "https://a.example/b?c=d"),
        *("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "trace:00000000-0000-7000-8000-000000000000"),
    )
    return st.sampled_from([text for text in samples if re.fullmatch(pattern, text) and len(text) <= chars_max])


class FromSchema:
    """Strategies for the keywords that our schemas use; any other keyword is an error here."""

    def __init__(self, matches: Callable[[str, int], st.SearchStrategy[str]]) -> None:
        self.matches = matches

    def values(
        self, name: str, schema: dict[str, Any] | bool, *, also: dict[str, Any] | None = None
    ) -> st.SearchStrategy[Any]:
        """Values that fit `schema` and, where given, the condition `also`."""
        if schema is True:
            return argument_values()
        assert isinstance(schema, dict)
        name, schema = resolved(name, schema)
        also = also or {}
        if "const" in also:
            return st.just(also["const"])
        if "anyOf" in schema:
            choices = [resolved(name, choice) for choice in schema["anyOf"]]
            kept = [self.values(n, s) for n, s in choices if also.get("type", s["type"]) == s["type"]]
            return st.one_of(kept).filter(Draft202012Validator(also).is_valid)
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        return self.of_type(schema["type"], name, schema)

    def of_type(self, kind: str, name: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if kind == "object":
            return self.objects(name, schema) if "properties" in schema else open_objects()
        if kind == "array":
            return st.lists(self.values(name, schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
        if kind == "integer":
            return st.integers(min_value=schema["minimum"], max_value=schema["maximum"])
        if kind == "null":
            return st.none()
        if kind == "boolean":
            return st.booleans()
        assert kind == "string", kind
        if "pattern" not in schema:
            return free_text()
        return self.matches(schema["pattern"].removeprefix("^").removesuffix("$"), schema["maxLength"])

    def objects(self, name: str, schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        members = {key: self.values(name, member) for key, member in schema["properties"].items()}
        optional = {key: members.pop(key) for key in schema["properties"].keys() & left_out_of(name)}
        made = st.fixed_dictionaries(members, optional=optional)
        return made.flatmap(lambda document: self.ruled(name, schema, document))

    def ruled(self, name: str, schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        """The document, with what the conditions of the schema ask for drawn again."""
        known, redrawn = dict(document), dict[str, st.SearchStrategy[Any]]()
        for rule in reversed(schema.get("allOf", [])):  # a later rule decides what an earlier one asks about
            holds = Draft202012Validator(rule["if"]).is_valid(known)
            for key, also in rule.get("then" if holds else "else", {"properties": {}})["properties"].items():
                if not Draft202012Validator(also).is_valid(known[key]):
                    redrawn[key] = self.values(name, schema["properties"][key], also=also)
                    known[key] = also.get("const", known[key])
        return st.fixed_dictionaries(redrawn).map(lambda drawn: {**document, **drawn})


def open_objects() -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.text("aé\n", max_size=3), argument_values(), max_size=3)


def free_text() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)


@functools.cache
def documents(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return FromSchema(any_match).values(name, SCHEMAS[name])


@functools.cache
def known_documents(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return FromSchema(known_match).values(name, SCHEMAS[name])


# From the models to the schemas


def values_for(annotation: Any, constraints: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values of a field, from its annotation: what the model says it admits, read independently of the schemas."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        inner, *more = get_args(annotation)
        return values_for(inner, (*more, *constraints))
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_for(choice) for choice in get_args(annotation)])
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin is list:
        least = next((c.min_length for c in bounds_of(constraints) if isinstance(c, annotated_types.MinLen)), 0)
        return st.lists(values_for(get_args(annotation)[0]), min_size=least, max_size=3)
    if origin is dict:
        return open_objects()
    if annotation is types.NoneType:
        return st.none()
    if annotation is Any:
        return argument_values()
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        bounds = bounds_of(constraints)
        low = next(c.ge for c in bounds if isinstance(c, annotated_types.Ge))
        high = next(c.le for c in bounds if isinstance(c, annotated_types.Le))
        return st.integers(min_value=low, max_value=high)  # type: ignore[arg-type]
    if annotation is str:
        return _strings_for(next(c for c in constraints if isinstance(c, StringConstraints)))
    assert issubclass(annotation, BaseModel), annotation
    return fields_for(annotation)


def bounds_of(constraints: tuple[Any, ...]) -> list[Any]:
    return [bound for c in constraints for bound in (getattr(c, "metadata", None) or [c])]


def _strings_for(constraint: StringConstraints) -> st.SearchStrategy[str]:
    longest = constraint.max_length or 4096
    if constraint.pattern is None:
        return free_text()
    assert isinstance(constraint.pattern, str)
    pattern = constraint.pattern.removeprefix("^").removesuffix("$")
    return any_match(pattern, longest)


@st.composite
def fields_for(draw: st.DrawFn, model: type[BaseModel]) -> dict[str, Any]:
    fields = {}
    for key, field in model.model_fields.items():
        fields[key] = draw(values_for(field.annotation, tuple(field.metadata)))
        if key in left_out_of(getattr(model, "artifact_type", "")) and fields[key] is None:
            del fields[key]
    if fields.get("tool_class") == "write":
        fields["idempotency_key"] = fields["idempotency_key"] or "key"
    if model is SupervisorDecision and fields["decided_by"]["type"] in ("expiry", "withdrawal"):
        fields["decision"] = "DENY"
    if model is ToolCall:
        fields["reconcile_tool"] = "ask" if fields["on_unknown_outcome"] == "reconcile" else None
    if model is ToolEffect:
        if fields["basis"] in ("unknown", "not_sent"):
            fields["outcome"] = "FAILURE"
        action = {"SUCCESS": "succeeded", "FAILURE": "failed"}[fields["outcome"]]
        verdict = {"action": action, "resolved_by": "op", "rationale": "", "resolved_at": fields["recorded_at"]}
        fields["resolution"] = verdict if fields["basis"] == "resolution" else None
        fields["error"] = {"code": "c", "message": "m"} if fields["outcome"] == "FAILURE" else None
    if model is DigestOutput:
        fields["truncated"] = True
    if model is ExecutionState:
        _fit_digests_to_state(fields)
    if model is RunIntent:
        fields["request"] = draw(fields_for(REQUEST_OF_KIND[fields["kind"]]))
    _fit_run(model, fields)
    return fields


_INLINE: Final = {"tier": "inline", "value": 1}
_WRONG: Final = {"type": "ValueError", "message": "m", "retryable": False}


def _fit_run(model: type[BaseModel], fields: dict[str, Any]) -> None:
    """Restated from RUNS.md: what must be there together, and what must not."""
    if model is RunStart:
        trigger, parent = fields["trigger"]["type"], {"run_id": "r", "path": "1", "intent_digest": "0" * 64}
        fork = {"run_id": "r", "sequence_number": 1, "entry_digest": "0" * 64, "state_change": []}
        fields["parent"] = parent if trigger == "child" else None
        fields["forked_from"] = fork if trigger == "fork" else None
    if model is RunAttempt:
        fields["error"] = _WRONG if fields["change"] == "FAILED" else None
    if model in (RunCheckpoint, RunAnswer, Resolved):
        is_ok = fields["outcome"] == "OK"
        fields["value"] = _INLINE if is_ok else None
        fields["error"] = None if is_ok else _WRONG
    if model is RunCheckpoint and (fields["outcome"] != "OK" or fields["resume"] == "recompute"):
        fields["state_change"] = []
    if model is RunEnd:
        is_completed = fields["outcome"] == "COMPLETED"
        fields["output"] = _INLINE if is_completed else None
        fields["error"] = None if is_completed else _WRONG
        fields["positions"] = 1 if is_completed else fields["positions"]
        divergence = {"path": "1", "recorded": "step a", "performed": "step b", "source": None}
        fields["divergence"] = divergence if fields["outcome"] == "DIVERGED" else None


def _fit_digests_to_state(fields: dict[str, Any]) -> None:
    """Restated from the specification: a decision, a call and an effect leave their digests behind."""
    passed = {"PENDING": 0, "AUTHORIZED": 1, "DENIED": 1, "EXECUTING": 2, "COMPLETED": 3, "FAILED": 3}[fields["state"]]
    fields["supervisor_decision_digest"] = "1" * 64 if passed >= 1 else None
    fields["tool_call_digest"] = "2" * 64 if passed >= 2 else None
    fields["tool_call_id"] = "00000000-0000-7000-8000-000000000000" if passed >= 2 else None
    fields["tool_effect_digest"] = "3" * 64 if passed >= 3 else None


# One change

OTHER_VALUES: Final[tuple[Any, ...]] = (None, True, False, 0, 1, -1, 1.5, "", "x", "1", [], {}, [None], {"a": 1}, ["x"])
OTHER_CHARACTERS: Final = " \n\r\t\x0b\x1f\x7f\x85éÅA0af/g~!+=-:.TZzÿ٣０\u00a0\u2028\ufeff😀"
OTHER_LENGTHS: Final = (
    *(0, 1, 35, 36, 37, 43, 44, 45, 63, 64, 65, 100, 101, 128, 129, 255, 256, 4096, 4097),
    *(262_144, 262_145, 349_528, 349_529),
)
# Whatever stands alone between quotes in a schema: what its enums admit, and more.
WORDS: Final = {
    name: sorted(set(re.findall(r'"([A-Za-z0-9_/.]+)"(?=[,\]}])', json.dumps(schema))))
    for name, schema in SCHEMAS.items()
}
ENUM_VALUES: Final = sorted(set().union(*WORDS.values()))
WORDS_SAMPLED: Final = 12


def steps_into(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document but its root."""
    members: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield (*path, key)
        yield from steps_into(member, (*path, key))


def changed_strings(text: str) -> st.SearchStrategy[Any]:
    places = st.integers(min_value=0, max_value=max(len(text) - 1, 0))
    characters = st.sampled_from(OTHER_CHARACTERS)
    return st.one_of(
        st.just(text + "\n"),
        characters.map(lambda c: text + c),
        characters.map(lambda c: c + text),
        st.builds(lambda i, c: text[:i] + c + text[i + 1 :], places, characters),
        places.map(lambda i: text[:i] + text[i + 1 :]),
        st.sampled_from((text.upper(), text.lower(), text.strip(), text[::-1], f" {text}")),
        st.builds(
            lambda c, n: c * n, st.sampled_from((text[:1] or "a", "a", "0", "é", "😀")), st.sampled_from(OTHER_LENGTHS)
        ),
        st.sampled_from(OTHER_LENGTHS).map(lambda n: (text or "a").ljust(n, (text or "a")[0])[:n]),
        st.sampled_from(ENUM_VALUES),
        st.sampled_from(OTHER_VALUES),
    )


def changed_values(value: Any) -> st.SearchStrategy[Any]:
    others = st.sampled_from(OTHER_VALUES)
    if isinstance(value, str):
        return changed_strings(value)
    if isinstance(value, bool) or value is None:
        return others | st.sampled_from(
            ("0" * 64, "00000000-0000-7000-8000-000000000000", "2026-01-01T00:00:00.000Z", "a")
        )
    if isinstance(value, int):
        near = (value - 1, value + 1, value + 0.5, float(value), -value, str(value), 0, 1, 1000, 1001, 2**53 - 1)
        return others | st.sampled_from(near)
    if isinstance(value, list):
        item = value[:1] or ["a"]
        return others | st.sampled_from((0, 1, 64, 65, 100, 101, 1000, 1001)).map(lambda n: item * n)
    return others


@st.composite
def changed_documents(draw: st.DrawFn, name: str) -> tuple[str, dict[str, Any]]:
    """A valid document with one change, and what was done to it."""
    document: dict[str, Any] = copy.deepcopy(draw(known_documents(name)))
    top = [(key,) for key in document]
    # Half of the changes at the top, so that large arguments do not draw all of them.
    path = draw(st.sampled_from(top) | st.sampled_from(list(steps_into(document))))
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    kind = draw(st.sampled_from(("change", "change", "change", "drop", "add", "null", "exchange")))
    if kind == "drop":
        del parent[path[-1]]
    elif kind == "add":
        target: Any = parent[path[-1]] if isinstance(parent[path[-1]], dict) else parent
        extra = draw(st.sampled_from(("extra", "", "é", f"{path[-1]} ", "trace_id", "schema_id", "value")))
        if isinstance(target, dict):
            target[extra] = draw(st.sampled_from(OTHER_VALUES))
        else:
            target.append(draw(st.sampled_from(OTHER_VALUES)))
    elif kind == "null":
        parent[path[-1]] = None
    elif kind == "exchange":
        taken = draw(st.sampled_from(list(steps_into(document))))
        source: Any = document
        for step in taken:
            source = source[step]
        parent[path[-1]] = copy.deepcopy(source)
    else:
        parent[path[-1]] = draw(changed_values(parent[path[-1]]))
    return f"{kind} {path}", document


# The guarantees


def test_there_is_one_model_for_every_schema() -> None:
    assert sorted(SCHEMAS) == sorted(MODELS)


@every_document
def test_every_schema_is_a_valid_2020_12_schema_and_says_which_document_it_is(name: str) -> None:
    schema = SCHEMAS[name]
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert schema["$id"] == f"urn:tga:schema:v1:{name}"
    assert schema["properties"]["schema_id"] == {"const": f"tga/v1/{name}"}
    assert schema["properties"]["schema_version"] == {"const": "1.0"}
    assert MODELS[name].model_fields["schema_id"].default == f"tga/v1/{name}"


def objects_in(schema: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema that describes an object, with the name it stands under; conditions describe none."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and key not in ("then", "else"):
            yield key, schema
        for step, member in schema.items():
            if step not in ("if", "then", "else", "not"):
                yield from objects_in(member, step)
    elif isinstance(schema, list):
        for member in schema:
            yield from objects_in(member, key)


@every_document
def test_every_object_is_closed_and_all_its_fields_are_required(name: str) -> None:
    described = list(objects_in(SCHEMAS[name]))
    assert described
    for key, schema in described:
        if "properties" not in schema:
            assert key in OPEN_OBJECTS
            continue
        assert schema["additionalProperties"] is False, key
        assert sorted(schema["required"]) == sorted(schema["properties"].keys() - left_out_of(name)), key


@every_document
def test_every_value_but_arguments_and_output_is_described(name: str) -> None:
    for _, schema in objects_in(SCHEMAS[name]):
        for key, member in schema.get("properties", {}).items():
            assert key in OPEN_OBJECTS or (isinstance(member, dict) and member), key


@every_document
@steady
@given(data=st.data())
def test_what_the_schema_admits_the_model_admits(name: str, data: st.DataObject) -> None:
    raw = canonical_bytes(data.draw(documents(name)))
    assert complaints(name, parse_json(raw)) == []
    assert MODELS[name].from_bytes(raw).to_bytes() == raw


@every_document
@steady
@given(data=st.data())
def test_what_the_model_admits_the_schema_admits(name: str, data: st.DataObject) -> None:
    document = MODELS[name].model_validate(data.draw(fields_for(MODELS[name])))
    raw = document.to_bytes()
    assert complaints(name, parse_json(raw)) == []
    assert MODELS[name].from_bytes(raw) == document


@every_document
@thorough
@given(data=st.data())
def test_after_any_one_change_both_say_the_same(name: str, data: st.DataObject) -> None:
    what, document = data.draw(changed_documents(name))
    try:
        raw = canonical_bytes(document)
    except (InputMalformed, InputTooLarge):
        event("refused before either is asked")
        return
    value = parse_json(raw, bytes_max=len(raw))
    by_schema = schema_accepts(name, value)
    event("accepted" if by_schema else "rejected")
    assert model_accepts(name, raw) == by_schema, (what, complaints(name, value))


@every_document
@pytest.mark.parametrize("value", [None, True, 0, 1.5, "", [], [{}], {}])
def test_what_is_no_document_at_all_is_a_schema_violation(name: str, value: JsonValue) -> None:
    assert not schema_accepts(name, value)
    with pytest.raises(SchemaViolation):
        MODELS[name].from_json(value)


def test_the_sample_traces_fit_their_schemas() -> None:
    for record in (*completed_trace(1), *failed_trace(2), *denied_trace(3)):
        assert complaints("execution_log_entry", record.entry.to_json()) == []
        assert record.artifact is not None
        assert complaints(record.artifact.artifact_type, record.artifact.to_json()) == []


# What a round of one-change examples found or could miss by chance: named, so that it is always asked.


def checkpoint_json() -> dict[str, Any]:
    state = {
        "schema_id": "tga/v1/execution_state",
        "schema_version": "1.0",
        "trace_id": "00000000-0000-7000-8000-000000000000",
        "state": "PENDING",
        "sequence_number": 1,
        "entry_digest": "1" * 64,
        "updated_at": "2026-01-01T00:00:00.000Z",
        "server_id": "s",
        "tool_name": "t",
        "tool_class": "read",
        "idempotency_key": None,
        "payload_digest": "2" * 64,
        "action_request_digest": "3" * 64,
        "supervisor_decision_digest": None,
        "tool_call_digest": None,
        "tool_call_id": None,
        "tool_effect_digest": None,
    }
    return {
        "schema_id": "tga/v1/execution_checkpoint",
        "schema_version": "1.0",
        "trace_id": state["trace_id"],
        "created_at": "2026-01-01T00:00:00.000Z",
        "checkpoint_state": state,
        "checkpoint_digest": "4" * 64,
    }


@pytest.mark.parametrize("field", sorted(checkpoint_json()["checkpoint_state"]))
def test_a_checkpoint_whose_state_lacks_a_field_is_refused_by_both(field: str) -> None:
    document = checkpoint_json()
    assert model_accepts("execution_checkpoint", canonical_bytes(document))
    assert schema_accepts("execution_checkpoint", document)
    del document["checkpoint_state"][field]
    assert not schema_accepts("execution_checkpoint", document)
    assert not model_accepts("execution_checkpoint", canonical_bytes(document))


EFFECT: Final[dict[str, Any]] = {
    "schema_id": "tga/v1/tool_effect",
    "schema_version": "1.0",
    "trace_id": "00000000-0000-7000-8000-000000000000",
    "tool_call_id": "00000000-0000-7000-8000-000000000000",
    "tool_call_digest": "1" * 64,
    "outcome": "SUCCESS",
    "basis": "answer",
    "output": None,
    "error": None,
    "attempts": [],
    "resolution": None,
    "recorded_at": "2026-01-01T00:00:00.000Z",
}
DIGEST_OUTPUT: Final[dict[str, Any]] = {"encoding": "digest", "sha256": "1" * 64, "size_bytes": 0, "truncated": True}


@pytest.mark.parametrize(
    ("output", "is_valid"),
    [
        (None, True),
        ({"encoding": "json", "value": None}, True),
        ({"encoding": "json", "value": {"any": [1, 2.5]}}, True),
        ({"encoding": "json"}, False),
        ({"encoding": "base64", "media_type": "text/plain", "data": "x" * 349_528}, True),
        ({"encoding": "base64", "media_type": "text/plain", "data": "x" * 349_529}, False),
        (DIGEST_OUTPUT, True),
        ({**DIGEST_OUTPUT, "truncated": 1}, False),
        ({**DIGEST_OUTPUT, "truncated": False}, False),
        ({**DIGEST_OUTPUT, "size_bytes": True}, False),
        ({**DIGEST_OUTPUT, "size_bytes": 1.5}, False),
        ({**DIGEST_OUTPUT, "size_bytes": -1}, False),
        ({**DIGEST_OUTPUT, "encoding": "DIGEST"}, False),
        ({**DIGEST_OUTPUT, "encoding": ["digest"]}, False),
        ({**DIGEST_OUTPUT, "encoding": {}}, False),
        ({**DIGEST_OUTPUT, "encoding": None}, False),
        ({}, False),
        ([], False),
    ],
    ids=lambda value: str(value)[:60],
)
def test_each_kind_of_output_is_judged_alike(output: Any, *, is_valid: bool) -> None:
    document = {**EFFECT, "output": output}
    assert schema_accepts("tool_effect", document) is is_valid
    assert model_accepts("tool_effect", canonical_bytes(document)) is is_valid


@pytest.mark.parametrize("basis", ["answer", "reconciliation", "resolution", "unknown", "not_sent"])
@pytest.mark.parametrize("action", [None, "redispatch", "succeeded", "failed"])
def test_an_operators_verdict_is_the_basis_resolution_always_and_only(basis: str, action: str | None) -> None:
    word = {"action": action, "resolved_by": "operator", "rationale": "", "resolved_at": EFFECT["recorded_at"]}
    failure: dict[str, Any] = {"outcome": "FAILURE", "error": {"code": "c", "message": ""}}
    ended = {} if action == "succeeded" and basis == "resolution" else failure
    document = {**EFFECT, **ended, "basis": basis, "resolution": None if action is None else word}
    is_valid = (basis == "resolution") == (action in ("succeeded", "failed"))
    assert schema_accepts("tool_effect", document) is is_valid
    assert model_accepts("tool_effect", canonical_bytes(document)) is is_valid


@pytest.mark.parametrize(("items", "is_valid"), [(100, True), (101, False)])
def test_a_hundred_attempts_and_no_more(items: int, *, is_valid: bool) -> None:
    attempt = {"attempt": 1000, "started_at": EFFECT["recorded_at"], "ended_at": None, "result": "answered"}
    document = {**EFFECT, "attempts": [attempt] * items}
    assert schema_accepts("tool_effect", document) is is_valid
    assert model_accepts("tool_effect", canonical_bytes(document)) is is_valid


@pytest.mark.parametrize("field", ["trace_id", "tool_call_digest", "recorded_at"])
@pytest.mark.parametrize("ending", ["\n", "\r", "\u2028", "\x85", " ", "\n\n"])
def test_a_line_end_after_a_pattern_is_no_match_in_either_engine(field: str, ending: str) -> None:
    document = {**EFFECT, field: EFFECT[field] + ending}
    assert not schema_accepts("tool_effect", document)
    assert not model_accepts("tool_effect", canonical_bytes(document))


# Without chance: every place of full documents with every change, and every combination that a rule speaks of


def full_documents() -> dict[str, list[dict[str, Any]]]:
    """For each schema, documents in which nothing optional is missing, in each of its kinds."""
    digest, later = "5" * 64, time_at(5)
    principal = {"principal_id": "agent-1", "tenant": "default", "roles": ["agent", "worker"]}
    request = action_request(
        1,
        expires_at=later,
        tool_definition_digest=digest,
        intent="because",
        principal=principal,
        traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        run={"run_id": "r", "procedure": "p", "version": "1", "path": "3:2.1", "attempt": 1, "worker": "w"},
    )
    signature = {"algorithm": "Ed25519", "key_id": "key", "value": "A" * 86 + "=="}
    decision = supervisor_decision(request, policy_digest=digest, rationale="fine", signature=signature)
    call = tool_call(1, request, decision, on_unknown_outcome="reconcile", reconcile_tool="find_ticket")
    word = {"action": "succeeded", "resolved_by": "operator", "rationale": "seen", "resolved_at": later}
    base64 = {"encoding": "base64", "media_type": "text/plain", "data": "YQ=="}
    effects = [
        tool_effect(call),
        tool_effect(call, output=base64, basis="resolution", resolution=word),
        tool_effect(call, output=DIGEST_OUTPUT, resolution={**word, "action": "redispatch"}),
        tool_effect(call, outcome="FAILURE"),
    ]
    records = records_of(request, decision, call, effects[0])
    state = fold(records)
    assert state is not None
    return {
        "action_request": [request.to_json()],
        "supervisor_decision": [decision.to_json()],
        "tool_call": [call.to_json()],
        "tool_effect": [effect.to_json() for effect in effects],
        "execution_log_entry": [records[-1].entry.to_json()],
        "execution_state": [state.to_json()],
        "execution_checkpoint": [ExecutionCheckpoint.of(state, created_at=later).to_json()],
        **full_system_documents(),
        **full_run_documents(),
    }


def full_run_documents() -> dict[str, list[dict[str, Any]]]:
    from_blob = {
        "tier": "artifact",
        "ref": {"sha256": "5" * 64, "size_bytes": 9, "media_type": "text/plain", "serializer": "text"},
    }
    effect = {"tier": "effect", "trace_id": "0198c0de-ffff-7abc-bfff-0123456789ab", "tool_effect_digest": "5" * 64}
    changes = [{"op": "set", "at": "/a/-", "to": {"b": 1}}, {"op": "remove", "at": "/c"}]
    fork = {"run_id": "acme/s", "sequence_number": 7, "entry_digest": "5" * 64, "state_change": changes}
    parent = {"run_id": "p", "path": "3:2.1", "intent_digest": "5" * 64}
    line = {"level": "info", "text": "hello", "at": time_at(2)}
    resolved = {"path": "1", "outcome": "OK", "value": journal.inline(1), "error": None}
    documents: list[RunDocument] = [
        journal.start(trigger={"type": "child", "id": "p"}, parent=parent),
        journal.start(trigger={"type": "fork", "id": "s"}, forked_from=fork, input=from_blob),
        journal.attempt(1, "FAILED", reason="it raised", not_before=time_at(9)),
        *(journal.intent("3:2.1", kind, "name") for kind in journal.REQUESTS),
        journal.checkpoint("3.1", state_change=changes, logs=[line]),
        journal.checkpoint("3.1", resume="recompute", value={"tier": "transient"}),
        journal.checkpoint("3.1", value={"tier": "event", "value": [1]}),
        journal.checkpoint("3.1", outcome="ERROR"),
        journal.answer(
            "3.1", "5" * 64, value=effect, signature={"algorithm": "Ed25519", "key_id": "key", "value": "A" * 86 + "=="}
        ),
        journal.answer("3.1", "5" * 64, value={"tier": "run", "run_id": "child-1", "entry_digest": "5" * 64}),
        journal.answer("3.1", "5" * 64, outcome="TIMEOUT"),
        journal.escalation("3.1", "5" * 64, 2),
        journal.signal("paid", "s-1"),
        journal.suspension("1", "3:2.1"),
        journal.end("DIVERGED", positions=3),
        journal.end("COMPLETED"),
        journal.resumption(
            accepts={"version": "1.3.0", "program_digest": "5" * 64}, reopens=["3.1"], resolves=[resolved]
        ),
    ]
    full: dict[str, list[dict[str, Any]]] = {
        "run_log_entry": [journal.Journal().records[-1].entry.to_json()],
    }
    for document in documents:
        full.setdefault(document.artifact_type, []).append(document.to_json())
    return full


def full_system_documents() -> dict[str, list[dict[str, Any]]]:
    said: dict[str, Any] = {"system_id": "default", "recorded_at": time_at(5), "recorded_by": "gateway"}
    documents: list[SystemDocument] = [
        ToolPin(
            **said,
            server_id="crm",
            tool_name="create",
            change="pinned",
            definition_digest="5" * 64,
            definition={"any": [1, {}]},
        ),
        SigningKey(
            **said,
            change="announced",
            key_id="ed25519:0123456789abcdef",
            algorithm="Ed25519",
            public_key="A" * 43 + "=",
            principal_id="ada",
        ),
        PolicySet(**said, policy_digest="5" * 64, text="permit(principal, action, resource);"),
        Erasure(
            **said,
            erased_stream="trace:00000000-0000-7000-8000-000000000000",
            last_sequence_number=2,
            last_entry_digest="5" * 64,
            artifact_digests=["6" * 64, "7" * 64],
            claim=ErasedClaim(key_digest="8" * 64, payload_commitment="9" * 64),
            rationale="asked for by the person it is about",
        ),
        LogEpoch(
            **said,
            epoch=2,
            origin="example.org/log/epoch-2",
            former=FormerLog(origin="example.org/log", size=9, root="0" * 64, note="example.org/log\n9\n…"),
            kept_size=7,
            leaves_lost=2,
            rationale="the disk was lost",
        ),
        ProcedureRegistration(
            **said,
            name="onboard",
            version="1.0.0",
            program_digest="5" * 64,
            language="python",
            description="Onboards a customer.",
            input_schema={"type": "object"},
            output_schema={"type": ["object", "null"]},
            state_schema={"any": [1, {}]},
            policy=ProcedurePolicy(
                timeout_ms=60_000,
                checkpoint_timeout_ms=1_000,
                retry=RetryPolicy(retries=2, first_ms=100, max_ms=10_000),
                park_after=5,
                retention="keep",
            ),
            triggers=[EventTrigger(event="customer.signed")],
            tags=["crm"],
        ),
        *(
            Schedule(
                **said,
                name="nightly",
                procedure="onboard",
                version="1.0.0",
                input={"any": [1, {}]},
                spec=spec,
                missed="one",
                principal=Principal(principal_id="agent-1", tenant="default", roles=["agent"]),
            )
            for spec in (
                CronSpec(type="cron", expression="30 2 * * *", time_zone="Europe/Berlin"),
                IntervalSpec(type="interval", every_ms=60_000),
            )
        ),
        ScheduleRemoval(**said, name="nightly"),
    ]
    plan = plan_system(SystemState("default"), documents, executor_id=EXECUTOR, recorded_at=time_at(6))
    entries = [SystemLogEntry.from_body_bytes(planned.entry) for planned in plan.entries]
    return {
        "system_log_entry": [entries[-1].to_json()],
        **{
            kind: [document.to_json() for document in documents if document.artifact_type == kind]
            for kind in SYSTEM_MODELS
        },
    }


def changes_of(name: str, value: Any, chance: random.Random) -> Iterator[Any]:
    """Of the words of other schemas some, another choice in every run, or all; of everything else all."""
    yield from OTHER_VALUES
    if isinstance(value, str):
        yield from (f"{value}{character}" for character in OTHER_CHARACTERS)
        yield from (f"{character}{value[1:]}" for character in OTHER_CHARACTERS)
        yield from (value[:-1], value[1:], value.upper(), value.lower(), value[::-1])
        yield from ((value or "a")[0] * chars for chars in OTHER_LENGTHS)
        yield from WORDS[name]
        others = sorted(set(ENUM_VALUES) - set(WORDS[name]))
        yield from others if IS_SOAK else chance.sample(others, WORDS_SAMPLED)
    elif isinstance(value, int):
        yield from (value - 1, value + 1, value + 0.5, float(value), str(value), 1000, 1001, 2**53 - 1)
    elif isinstance(value, list):
        yield from ((value[:1] or ["a"]) * items for items in (1, 64, 65, 100, 101, 1000, 1001))
    elif isinstance(value, dict):
        yield {**value, "extra": None}


def assert_judged_alike(name: str, document: dict[str, Any], what: object) -> bool:
    raw = canonical_bytes(document)
    by_schema = schema_accepts(name, parse_json(raw, bytes_max=len(raw)))
    assert model_accepts(name, raw) == by_schema, what
    return by_schema


@every_document
def test_every_change_at_every_place_is_judged_alike(name: str) -> None:
    """`make soak` tries every word of every schema at every place, the suite a sample of both; TGA_SEED repeats one."""
    seed = int(os.environ.get("TGA_SEED", time.time_ns()))
    print(f"TGA_SEED={seed}")
    chance = random.Random(f"{seed}-{name}")
    for document in full_documents()[name]:
        assert assert_judged_alike(name, document, "unchanged")
        for path in steps_into(document):
            if not sampling.is_taken(f"{name} {path}", 3):
                continue
            changed = copy.deepcopy(document)
            parent: Any = changed
            for step in path[:-1]:
                parent = parent[step]
            original = parent[path[-1]]
            for other in changes_of(name, original, chance):
                parent[path[-1]] = other
                assert_judged_alike(name, changed, (path, str(other)[:80]))
            del parent[path[-1]]
            assert_judged_alike(name, changed, (path, "dropped"))


def combinations_of(name: str) -> Iterator[dict[str, Any]]:
    """Every enum value, and null or not, of every field that a rule of the schema speaks of."""
    schema, document = SCHEMAS[name], full_documents()[name][0]
    spoken_of = {
        key
        for rule in schema["allOf"]
        for part in rule.values()
        if isinstance(part, dict)
        for key in part["properties"]
    }
    samples: dict[str, list[Any]] = {
        "decided_by": [{"type": kind, "id": "x"} for kind in ("policy", "person", "expiry", "withdrawal")],
        "error": [None, journal.WRONG if name.startswith("run_") else {"code": "c", "message": ""}],
        "resolution": [
            None,
            *(
                {"action": action, "resolved_by": "x", "rationale": "", "resolved_at": time_at(5)}
                for action in ("redispatch", "succeeded", "failed")
            ),
        ],
    }
    for key in spoken_of - set(samples):
        _, member = resolved(name, schema["properties"][key])
        samples[key] = member["enum"] if "enum" in member else [None, document[key]]
    for values in itertools.product(*(samples[key] for key in sorted(spoken_of))):
        yield {**document, **dict(zip(sorted(spoken_of), values, strict=True))}


@pytest.mark.parametrize("name", sorted(name for name in SCHEMAS if "allOf" in SCHEMAS[name]))
def test_every_combination_that_a_rule_speaks_of_is_judged_alike(name: str) -> None:
    judged = [assert_judged_alike(name, document, document) for document in combinations_of(name)]
    assert any(judged)
    assert not all(judged)


@pytest.mark.parametrize(("items", "is_valid"), [(0, True), (1000, True), (1001, False)])
def test_an_erasure_names_a_thousand_payloads_and_no_more(items: int, *, is_valid: bool) -> None:
    document = {**full_system_documents()["erasure"][0], "artifact_digests": ["6" * 64] * items}
    assert assert_judged_alike("erasure", document, items) is is_valid


@pytest.mark.parametrize("ending", ["\n", "\r", "\u2028", "\x85", " "])
@pytest.mark.parametrize(("name", "field"), [("erasure", "erased_stream"), ("signing_key", "public_key")])
def test_a_line_end_after_a_system_pattern_is_no_match_in_either_engine(name: str, field: str, ending: str) -> None:
    document = full_system_documents()[name][0]
    assert not assert_judged_alike(name, {**document, field: document[field] + ending}, ending)
    assert not assert_judged_alike(name, {**document, field: document[field][:-1] + ending}, ending)


def test_every_artifact_of_a_system_stream_has_a_model_and_a_schema() -> None:
    assert SYSTEM_MODELS.keys() == SYSTEM.rule_of.keys()
    for artifact_type, rule in SYSTEM.rule_of.items():
        assert (
            rule.schema_id
            == f"tga/v1/{artifact_type}"
            == SYSTEM_MODELS[artifact_type].model_fields["schema_id"].default
        )
        assert artifact_type in SCHEMAS


def test_a_system_stream_never_ends() -> None:
    assert SYSTEM.states == ("OPEN",)
    assert SYSTEM.terminal_states == frozenset()


# Bytes and digests


@pytest.mark.parametrize("record", completed_trace(1), ids=lambda record: record.entry.artifact_type)
def test_what_a_document_writes_it_reads_again(record: LogRecord) -> None:
    entry, artifact = record.entry, record.artifact
    assert artifact is not None
    assert type(entry).from_bytes(entry.to_bytes()) == entry
    assert type(entry).from_body_bytes(entry.body_bytes()) == entry
    assert type(artifact).from_bytes(artifact.to_bytes()) == artifact
    assert artifact.digest() == digest_of(artifact.to_json())
    assert entry.digest() == entry.entry_digest == digest_of_bytes(entry.body_bytes())


def test_a_changed_copy_has_a_digest_of_its_own() -> None:
    entry, artifact = completed_trace(1)[0].entry, completed_trace(1)[0].artifact
    assert artifact is not None
    before = artifact.digest(), entry.digest()
    for deep in (False, True):
        other_artifact = artifact.model_copy(update={"server_id": "other"}, deep=deep)
        other_entry = entry.model_copy(update={"sequence_number": 2}, deep=deep)
        assert other_artifact.digest() == digest_of(other_artifact.to_json()) != before[0]
        assert other_entry.digest() == digest_of_bytes(other_entry.body_bytes()) != before[1]
    assert (artifact.digest(), entry.digest()) == before
