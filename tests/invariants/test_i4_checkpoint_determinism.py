"""I4: a checkpoint and the tail after it give what the whole log gives, at every cut; a changed one is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.canonical import canonical_bytes
from app.core.digest import digest_of, digest_of_bytes
from app.core.errors import ChecksumMismatch, InputMalformed, SchemaViolation
from app.domain.tga.documents import ExecutionLogEntry
from app.domain.tga.execution_state import ExecutionCheckpoint, ExecutionState
from app.domain.tga.replay import LogRecord, fold, head_of, record_from_bytes, verify_checkpoint
from tests.traces import PATHS, completed_trace, time_at, trace_id, traces

steady = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
every_path = pytest.mark.parametrize("path", sorted(PATHS))
REFUSED = (ChecksumMismatch, SchemaViolation)


def stored(record: LogRecord) -> LogRecord:
    """The record after a stay in the database."""
    assert record.artifact is not None
    raw = record.entry.body_bytes()
    return record_from_bytes(raw, record.artifact.to_bytes(), entry_digest=digest_of_bytes(raw))


def checkpoint_after(records: list[LogRecord]) -> ExecutionCheckpoint:
    """A checkpoint of these records after a stay in the database, verified as a load verifies it."""
    state = fold(records)
    assert state is not None
    raw = ExecutionCheckpoint.of(state, created_at=time_at(50)).to_bytes()
    checkpoint = ExecutionCheckpoint.from_bytes(raw)
    assert checkpoint.to_bytes() == raw
    verify_checkpoint(checkpoint, entry=records[-1].entry)
    return checkpoint


def assert_every_cut_gives_the_same(records: list[LogRecord]) -> None:
    whole = fold(records)
    assert whole is not None
    for cut in range(1, len(records) + 1):
        checkpoint = checkpoint_after(records[:cut])
        resumed = fold(records[cut:], start=checkpoint.checkpoint_state)
        assert resumed == whole
        assert resumed.to_bytes() == whole.to_bytes()
        assert head_of(resumed) == head_of(whole)


@every_path
def test_every_path_folds_alike_from_every_checkpoint(path: str) -> None:
    assert_every_cut_gives_the_same(PATHS[path](1))


@steady
@given(traces())
def test_any_trace_folds_alike_from_every_checkpoint_and_from_storage(records: list[LogRecord]) -> None:
    assert_every_cut_gives_the_same(records)
    assert [stored(record) for record in records] == records
    assert_every_cut_gives_the_same([stored(record) for record in records])


@every_path
def test_checkpoints_of_checkpoints_lead_to_the_same_state(path: str) -> None:
    state: ExecutionState | None = None
    records = PATHS[path](1)
    for record in records:
        state = fold([record], start=state)
        assert state is not None
        state = ExecutionCheckpoint.from_bytes(
            ExecutionCheckpoint.of(state, created_at=time_at(50)).to_bytes()
        ).checkpoint_state
    assert state == fold(records)


@every_path
def test_the_same_log_gives_the_same_checkpoint_digest(path: str) -> None:
    digests = {checkpoint_after(PATHS[path](1)).checkpoint_digest for _ in range(3)}
    assert len(digests) == 1
    later = ExecutionCheckpoint.of(checkpoint_after(PATHS[path](1)).checkpoint_state, created_at=time_at(99))
    assert {later.checkpoint_digest} == digests


# A changed checkpoint


def load_bytes(raw: bytes, *, entry: ExecutionLogEntry) -> None:
    verify_checkpoint(ExecutionCheckpoint.from_bytes(raw), entry=entry)


def load(document: dict[str, Any], *, entry: ExecutionLogEntry) -> None:
    load_bytes(canonical_bytes(document), entry=entry)


def well_formed_others(field: str, value: Any) -> list[Any]:
    """Values that the schema admits in the field's place, so that only the digest can tell."""
    if field == "state":
        return [name for name in PATHS if name != value]
    if field == "tool_class":
        return ["read" if value == "write" else "write"]
    if field.endswith("_digest"):
        return ["e" * 64, None]
    if field in ("trace_id", "tool_call_id"):
        return [trace_id(77), None]
    if field == "updated_at":
        return ["2027-01-01T00:00:00.000Z"]
    if field == "sequence_number":
        return [value + 1, value - 1, 2**53 - 1]
    return ["other"]


@every_path
def test_a_checkpoint_with_any_changed_field_in_its_state_is_refused(path: str) -> None:
    records = PATHS[path](1)
    document = checkpoint_after(records).to_json()
    entry = records[-1].entry
    load(document, entry=entry)
    state = document["checkpoint_state"]
    assert isinstance(state, dict)
    for field, value in state.items():
        junk: list[Any] = [None, "", 0, [], {}, True, str(value) + "\n", str(value)[:-1]]
        for other in (*well_formed_others(field, value), *junk):
            if other == value and type(other) is type(value):
                continue
            changed: Any = copy.deepcopy(document)
            changed["checkpoint_state"][field] = other
            with pytest.raises(REFUSED):
                load(changed, entry=entry)
        without: Any = copy.deepcopy(document)
        del without["checkpoint_state"][field]
        with pytest.raises(SchemaViolation):
            load(without, entry=entry)
    added: Any = copy.deepcopy(document)
    added["checkpoint_state"]["extra"] = None
    with pytest.raises(SchemaViolation):
        load(added, entry=entry)


@pytest.mark.parametrize("field", ["trace_id", "sequence_number", "entry_digest", "updated_at", "state", "artifact"])
@every_path
def test_a_changed_state_with_a_digest_to_match_still_must_say_what_its_entry_says(path: str, field: str) -> None:
    """Whoever can recompute the digest must also forge the entry. What earlier entries said is beyond this check."""
    records = PATHS[path](1)
    document: Any = checkpoint_after(records).to_json()
    state = document["checkpoint_state"]
    if field == "artifact":
        behind = ("tool_effect_digest", "tool_call_digest", "supervisor_decision_digest", "action_request_digest")
        field = next(name for name in behind if state[name] is not None)
    state[field] = well_formed_others(field, state[field])[0]
    if field == "state":
        # The neighbour that has the same digests behind it, where there is one: only the entry tells them apart.
        twins = {"AUTHORIZED": "DENIED", "DENIED": "AUTHORIZED", "COMPLETED": "FAILED", "FAILED": "COMPLETED"}
        state[field] = twins.get(path, "COMPLETED")
    document["trace_id"] = state["trace_id"]
    document["checkpoint_digest"] = digest_of(state)
    with pytest.raises(SchemaViolation if field == "state" and path in ("PENDING", "EXECUTING") else ChecksumMismatch):
        load(document, entry=records[-1].entry)


def test_a_checkpoint_without_its_entry_is_refused() -> None:
    with pytest.raises(ChecksumMismatch):
        verify_checkpoint(checkpoint_after(completed_trace(1)), entry=None)


def test_another_traces_state_under_this_traces_name_is_refused() -> None:
    records = completed_trace(1)
    document: Any = checkpoint_after(records).to_json()
    document["trace_id"] = trace_id(2)
    with pytest.raises(ChecksumMismatch):
        load(document, entry=records[-1].entry)


@pytest.mark.parametrize("digest", ["e" * 64, "0" * 64, "E" * 64, "", None])
def test_a_changed_digest_is_refused(digest: Any) -> None:
    records = completed_trace(1)
    document: Any = checkpoint_after(records).to_json()
    document["checkpoint_digest"] = digest
    with pytest.raises(REFUSED):
        load(document, entry=records[-1].entry)


@steady
@given(path=st.sampled_from(sorted(PATHS)), data=st.data())
def test_a_flipped_bit_anywhere_in_the_stored_state_is_refused(path: str, data: st.DataObject) -> None:
    records = PATHS[path](1)
    raw = bytearray(checkpoint_after(records).to_bytes())
    start = raw.index(b'"checkpoint_state":')
    end = raw.index(b',"created_at"')
    raw[data.draw(st.integers(start, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((*REFUSED, InputMalformed)):
        load_bytes(bytes(raw), entry=records[-1].entry)


def test_another_spelling_of_the_same_checkpoint_is_refused() -> None:
    checkpoint = checkpoint_after(completed_trace(1))
    with pytest.raises(SchemaViolation):
        ExecutionCheckpoint.from_bytes(json.dumps(checkpoint.to_json()).encode())


def test_a_state_that_the_tail_does_not_follow_is_refused() -> None:
    one, other = completed_trace(1), completed_trace(1, arguments={"title": "another"})
    for cut in range(1, len(one)):
        with pytest.raises(ChecksumMismatch):
            fold(other[cut:], start=checkpoint_after(one[:cut]).checkpoint_state)
