"""When several checks fail, the same one speaks first in Python and in the append function.

One defect of every kind is made in a record, then every two and every three of them together, at every place of a
trace. Python's judge (`verify_link`) and the append function are asked separately, and must name the same check.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from app.core.canonical import canonical_bytes
from app.core.digest import digest_of_bytes
from app.core.errors import SchemaViolation, TgaError
from app.domain.ledger.plans import Plan, PlannedEntry
from app.domain.tga.documents import ARTIFACT_MODELS, ExecutionLogEntry
from app.domain.tga.replay import LogRecord, fold, head_of, verify_next
from app.postgres.ledger import PostgresLedger
from tests.conformance.test_vectors import DOCUMENT
from tests.invariants.plans import planned
from tests.traces import (
    EXECUTOR,
    action_request,
    completed_trace,
    executing_trace,
    records_of,
    supervisor_decision,
    trace_id,
)

Json = dict[str, Any]
OTHER_DIGEST = "f" * 64
STREAM = f"trace:{trace_id(1)}"
BINDS_FIELD = {2: "action_request_digest", 3: "supervisor_decision_digest", 4: "tool_call_digest"}
# The contract's order: ARCHITECTURE.md section 6.
ORDER = ("schema", "sequence", "chain", "transition", "binding")
CODE = {
    "schema": "SCHEMA_VIOLATION",
    "sequence": "STATE_SEQUENCE_GAP",
    "chain": "STATE_CHECKSUM_MISMATCH",
    "transition": "STATE_INVALID_TRANSITION",
    "binding": "STATE_CHECKSUM_MISMATCH",
}


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong with a record. `what` is how the append function words it."""

    name: str
    check: str
    what: str
    make: Callable[[Json, Json, int], None]  # entry, artifact, place
    changes_artifact: bool = False


def _set(**fields: Any) -> Callable[[Json, Json, int], None]:
    return lambda entry, artifact, place: entry.update(fields)


DEFECTS = (
    Defect("entry schema", "schema", "the entry has another schema", _set(schema_id="tga/v1/tool_call")),
    Defect("number that is none", "schema", "the sequence number is no number", _set(sequence_number="1")),
    Defect("another stream", "schema", "the entry names another stream", _set(trace_id=trace_id(2))),
    Defect(
        "artifact schema",
        "schema",
        "the artifact has another schema",
        lambda entry, artifact, place: artifact.update(schema_id="tga/v1/tool_pin"),
        changes_artifact=True,
    ),
    Defect("gap", "sequence", "the entry is not the next of its stream", _set(sequence_number=9)),
    Defect(
        "repeat",
        "sequence",
        "the entry is not the next of its stream",
        lambda entry, artifact, place: entry.update(sequence_number=place - 1),
    ),
    Defect("link", "chain", "the entry does not link to the one before it", _set(prev_entry_digest=OTHER_DIGEST)),
    Defect(
        "artifact digest",
        "chain",
        "the artifact is not the one that the entry commits to",
        _set(artifact_digest=OTHER_DIGEST),
    ),
    Defect("to state", "transition", "the state does not admit this artifact", _set(to_state="DENIED")),
    Defect("from state", "transition", "the state does not admit this artifact", _set(from_state="COMPLETED")),
    Defect(
        "artifact of another stream",
        "binding",
        "the artifact names another stream",
        lambda entry, artifact, place: artifact.update(trace_id=trace_id(2)),
        changes_artifact=True,
    ),
    Defect(
        "binding",
        "binding",
        "the artifact does not bind to the one before it",
        lambda entry, artifact, place: artifact.update({BINDS_FIELD[place]: OTHER_DIGEST}),
        changes_artifact=True,
    ),
)


def broken(record: LogRecord, place: int, defects: Iterable[Defect]) -> PlannedEntry:
    """The record with these defects and no other: what an artifact's change does to digests is made good."""
    assert record.artifact is not None
    entry, artifact = json.loads(record.entry.body_bytes()), json.loads(record.artifact.to_bytes())
    for defect in defects:
        if defect.changes_artifact:
            defect.make(entry, artifact, place)
    entry["artifact_digest"] = digest_of_bytes(canonical_bytes(artifact))
    for defect in defects:
        if not defect.changes_artifact:
            defect.make(entry, artifact, place)
    return PlannedEntry(canonical_bytes(entry), canonical_bytes(artifact))


def judged_here(before: list[LogRecord], put: PlannedEntry, *, stream: str = STREAM) -> str:
    """The code of the check that speaks first in Python."""
    try:
        entry = ExecutionLogEntry.from_body_bytes(put.entry)
        artifact = ARTIFACT_MODELS[entry.artifact_type].from_bytes(put.artifact)
        if f"trace:{entry.trace_id}" != stream:
            raise SchemaViolation("the entry is of another stream")
        verify_next(head_of(fold(before)), LogRecord(entry, artifact))
    except TgaError as error:
        return error.code
    return "admitted"


async def judged_there(ledger: PostgresLedger, entries: list[PlannedEntry]) -> tuple[str, str]:
    """The code and the words of the check that speaks first in the append function."""
    (error,) = await ledger.commit_batch([Plan(STREAM, EXECUTOR, None, entries)])
    return ("admitted", "") if error is None else (error.code, error.what)


def combinations(place: int) -> list[tuple[Defect, ...]]:
    """Every one, two and three defects that can stand in one record."""
    needs_one_before = ("binding", "repeat")
    possible = [d for d in DEFECTS if place > 1 or d.name not in needs_one_before]
    found = [c for count in (1, 2, 3) for c in itertools.combinations(possible, count)]
    exclusive = [{"number that is none", "gap"}, {"number that is none", "repeat"}, {"gap", "repeat"}]
    return [c for c in found if not any(pair <= {d.name for d in c} for pair in exclusive)]


@pytest.mark.parametrize("place", [1, 2, 3, 4])
async def test_of_several_defects_the_same_one_is_named_in_python_and_in_the_database(
    ledger: PostgresLedger, place: int
) -> None:
    whole = completed_trace(1)
    before, record = whole[: place - 1], whole[place - 1]
    if before:
        await ledger.commit(Plan(STREAM, EXECUTOR, EXECUTOR, [planned(one) for one in before]))
    different = []
    for defects in combinations(place):
        put = broken(record, place, defects)
        first = min(defects, key=lambda defect: ORDER.index(defect.check))
        here, (there, words) = judged_here(before, put), await judged_there(ledger, [put])
        says_first = words in {d.what for d in defects if d.check == first.check}
        if not here == there == CODE[first.check] or not says_first:
            different.append(f"{[d.name for d in defects]}: Python {here}, database {there} ({words})")
    assert different == []
    # The record itself, in which nothing is wrong, is admitted by both: it was the defects that were refused.
    assert judged_here(before, broken(record, place, ())) == "admitted"
    assert await judged_there(ledger, [broken(record, place, ())]) == ("admitted", "")


async def test_a_defect_behind_sound_entries_of_the_same_plan_is_named_by_the_same_check(
    ledger: PostgresLedger,
) -> None:
    """The head of the second entry is the first one of the plan, not a row: bindings and states come from there."""
    whole = completed_trace(1)
    for place in (2, 3, 4):
        sound = [planned(one) for one in whole[: place - 1]]
        for defects in itertools.combinations([d for d in DEFECTS if d.check in ORDER[2:]], 2):
            put = broken(whole[place - 1], place, defects)
            first = min(defects, key=lambda defect: ORDER.index(defect.check))
            assert (await judged_there(ledger, [*sound, put]))[0] == CODE[first.check], defects
            assert judged_here(whole[: place - 1], put) == CODE[first.check]


@pytest.mark.parametrize("maker", [executing_trace, completed_trace])
async def test_a_decision_that_names_its_request_and_comes_too_late_is_an_invalid_transition(
    ledger: PostgresLedger, maker: Callable[[int], list[LogRecord]]
) -> None:
    records = maker(1)
    await ledger.commit(Plan(STREAM, EXECUTOR, None, [planned(one) for one in records]))
    request = action_request(1)
    decision = records_of(request, supervisor_decision(request))[1]
    last = records[-1].entry
    entry = json.loads(decision.entry.body_bytes())
    entry |= {"sequence_number": last.sequence_number + 1, "prev_entry_digest": last.entry_digest}
    for from_state in ("PENDING", last.to_state):
        assert decision.artifact is not None
        put = PlannedEntry(canonical_bytes({**entry, "from_state": from_state}), decision.artifact.to_bytes())
        assert judged_here(records, put) == "STATE_INVALID_TRANSITION"
        assert (await judged_there(ledger, [put]))[0] == "STATE_INVALID_TRANSITION"


async def test_the_append_function_refuses_every_vector_with_its_code(ledger: PostgresLedger) -> None:
    """Every log vector that is about more than a schema, as far as the append function can judge it: it is given no
    entry digest, and what a call or an effect is about beside its binding is Python's to compare."""
    checked = 0
    for number, vector in enumerate(DOCUMENT["log_vectors"]):
        expect, records = vector["expect"], vector["records"]
        if expect.get("error", "SCHEMA_VIOLATION") == "SCHEMA_VIOLATION":
            continue
        prefix, (entry, artifact) = records[: expect["at"] - 1], records[expect["at"] - 1].values()
        here = ExecutionLogEntry.from_json(entry)
        if here.entry_digest != here.link().computed_digest:
            continue
        before = [
            LogRecord(
                ExecutionLogEntry.from_json(r["entry"]),
                ARTIFACT_MODELS[r["entry"]["artifact_type"]].from_json(r["artifact"]),
            )
            for r in prefix
        ]
        put = PlannedEntry(here.body_bytes(), canonical_bytes(artifact))
        if (code := judged_here(before, put, stream=f"trace:{entry['trace_id']}")) == "admitted":
            continue
        assert code == expect["error"], vector["name"]
        stream = f"trace:{entry['trace_id']}"
        (refused,) = await ledger.commit_batch(
            [Plan(stream, EXECUTOR, None, [*(planned(record) for record in before), put])]
        )
        assert refused is not None, (number, vector["name"])
        assert (refused.code, refused.sequence_number) == (expect["error"], expect["at"]), vector["name"]
        checked += 1
    assert checked > 200
