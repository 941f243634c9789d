"""Log vectors with several defects in one record: the first check in the contract's order speaks.

Expected codes follow from that order (ARCHITECTURE.md section 6), never from running an implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final

from vectors.documents import (
    OTHER_DIGEST,
    OTHER_TOOL_CALL_ID,
    OTHER_TRACE_ID,
    Json,
    action_request,
    append,
    append_step,
    log_to,
    supervisor_decision,
    tool_call,
    tool_effect,
)
from vectors.logs import CHECKSUM, GAP, SCHEMA, TRANSITION, bound_by, refused, sound

# The contract's order, and one defect of each kind in a tool call that is sound but for it.
ORDER_OF_CHECKS: Final = (
    ("schema", SCHEMA),
    ("sequence", GAP),
    ("chain", CHECKSUM),
    ("transition", TRANSITION),
    ("binding", CHECKSUM),
)
ONE_DEFECT: Final[dict[str, Json]] = {
    "schema": {"recorded_at": "yesterday"},
    "sequence": {"sequence_number": 9},
    "chain": {"prev_entry_digest": OTHER_DIGEST},
    "transition": {"to_state": "COMPLETED"},
}


def _defective(kinds: Iterable[str]) -> list[Json]:
    base = log_to("AUTHORIZED")
    call = tool_call(OTHER_DIGEST if "binding" in kinds else bound_by(base), action_request())
    changes = {field: value for kind in kinds for field, value in ONE_DEFECT.get(kind, {}).items()}
    to_state = changes.pop("to_state", "EXECUTING")
    return append(base, call, "tool_call", to_state, **changes)


def precedences() -> Iterator[Json]:
    """Every combination of defects in one record, from none to all: the first in the contract's order speaks."""
    yield sound("nothing_wrong", _defective(()))
    for count in range(1, len(ORDER_OF_CHECKS) + 1):
        for defects in itertools.combinations(ORDER_OF_CHECKS, count):
            kinds = [kind for kind, _ in defects]
            name = "_and_".join(kinds) + "_wrong_together" if count > 1 else f"{kinds[0]}_wrong_alone"
            yield refused(name, defects[0][1], _defective(kinds))
    base = log_to("AUTHORIZED")
    numbered = append_step(base, "tool_call", sequence_number=9)
    numbered[2]["entry"]["entry_digest"] = OTHER_DIGEST
    yield refused("gap_speaks_before_the_entry_digest", GAP, numbered)
    damaged = append_step(base, "success")
    damaged[2]["entry"]["entry_digest"] = OTHER_DIGEST
    yield refused("entry_digest_speaks_before_the_transition", CHECKSUM, damaged)
    another = append_step(base, "success", artifact_digest=OTHER_DIGEST)
    yield refused("artifact_digest_speaks_before_the_transition", CHECKSUM, another)
    keyless = {**tool_call(bound_by(base), action_request()), "idempotency_key": None}
    yield refused(
        "artifact_schema_speaks_before_the_gap",
        SCHEMA,
        append(base, keyless, "tool_call", "EXECUTING", sequence_number=9),
    )
    elsewhere = append_step(base, "tool_call", sequence_number=9, trace_id=OTHER_TRACE_ID)
    yield refused("another_trace_speaks_before_the_gap", SCHEMA, elsewhere, documents_valid=True)


def transitions_before_bindings() -> Iterator[Json]:
    """Each way in which a transition is wrong, beside each thing that an artifact binds to; and each binding alone."""
    decided, running = log_to("AUTHORIZED"), log_to("EXECUTING")
    asked = running[0]["entry"]["artifact_digest"]
    late = supervisor_decision(asked)
    yield refused("late_decision_that_names_its_request", TRANSITION, append_late(running, late))
    finished = log_to("COMPLETED")
    yield refused("late_decision_on_a_finished_trace", TRANSITION, append_late(finished, late))
    again = tool_effect(running[2]["entry"]["artifact_digest"])
    yield refused("second_effect_of_its_call", TRANSITION, append(finished, again, "tool_effect", "COMPLETED"))

    call = tool_call(bound_by(decided), action_request())
    effect = tool_effect(bound_by(running))
    unbound: dict[str, tuple[list[Json], Json, str]] = {
        "call_of_another_decision": (decided, {**call, "supervisor_decision_digest": OTHER_DIGEST}, "EXECUTING"),
        "call_of_another_trace": (decided, {**call, "trace_id": OTHER_TRACE_ID}, "EXECUTING"),
        "call_nobody_asked_for": (decided, {**call, "arguments": {}}, "EXECUTING"),
        "effect_of_another_document": (running, {**effect, "tool_call_digest": OTHER_DIGEST}, "COMPLETED"),
        "effect_of_another_trace": (running, {**effect, "trace_id": OTHER_TRACE_ID}, "COMPLETED"),
        "effect_of_another_call": (running, {**effect, "tool_call_id": OTHER_TOOL_CALL_ID}, "COMPLETED"),
    }
    for name, (records, artifact, to_state) in unbound.items():
        of = artifact["schema_id"].rpartition("/")[2]
        named: Json = {"trace_id": records[0]["entry"]["trace_id"]}
        yield refused(f"{name}_alone", CHECKSUM, append(records, artifact, of, to_state, **named))
        wrong_ways: dict[str, tuple[list[Json], Json]] = {
            "out_of_another_state": (records, {"from_state": "PENDING", "to_state": to_state}),
            "into_another_state": (records, {"to_state": "DENIED"}),
            "in_another_state": (log_to("DENIED"), {"to_state": to_state}),
        }
        for way, (before, changes) in wrong_ways.items():
            changed = append(before, artifact, of, **{**named, **changes})
            yield refused(f"{name}_{way}", TRANSITION, changed)


def append_late(records: list[Json], decision: Json) -> list[Json]:
    return append(records, decision, "supervisor_decision", "AUTHORIZED")


def precedence_vectors() -> Iterator[Json]:
    yield from precedences()
    yield from transitions_before_bindings()
