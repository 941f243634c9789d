"""Log vectors: sound logs, and logs with a defect that names them.

Expected codes follow from the contract's precedence (schema, sequence, chain and digest, transition,
binding) and from the kind of change made, never from running an implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from vectors.changes import (
    Change,
    dropped_fields,
    flipped_fields,
    misspelled_fields,
    nulled_fields,
    other_members,
    resealed_digest,
    unknown_fields,
)
from vectors.documents import (
    ALLOWED,
    FAILED_BY_ANSWER,
    GENESIS,
    OTHER_DIGEST,
    OTHER_EXECUTOR_ID,
    OTHER_TOOL_CALL_ID,
    OTHER_TRACE_ID,
    PATH_TO,
    STATES,
    STEP_LEADS_TO,
    STEPS,
    Json,
    action_request,
    append,
    append_step,
    log_of,
    log_to,
    read_request,
    seal,
    state_after,
    supervisor_decision,
    time_at,
    tool_call,
    tool_effect,
)

SCHEMA: Final = "SCHEMA_VIOLATION"
GAP: Final = "STATE_SEQUENCE_GAP"
CHECKSUM: Final = "STATE_CHECKSUM_MISMATCH"
TRANSITION: Final = "STATE_INVALID_TRANSITION"

UNICODE_ARGUMENTS: Final[Json] = {
    # By UTF-16 code units, as RFC 8785 sorts, the surrogates of the emoji stand before U+FB33; by code points after.
    "\ufb33": "Dalet with dagesh",
    "\U0001f600": "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u20ac": "€",
    "ö": "composed, and o\u0308 not",
    "": "an empty name",
    "1": "one",
    "\r": "carriage return",
    "controls": "\b\t\n\f\r\x01\x1f\x7f\x80\u2028",
    "escapes": '"quoted" \\ and / not escaped',
    "nested": [{"b": [], "a": {}}, [None, True, False]],
}
FLOAT_ARGUMENTS: Final[Json] = {
    "whole": 1.0,
    "negative_zero": -0.0,
    "tenth": 0.1,
    "sum": 0.30000000000000004,
    "smallest": 5e-324,
    "largest": 1.7976931348623157e308,
    "last_without_exponent": 1e-6,
    "first_with_exponent": 1e-7,
    "large_exponent": 1e21,
    "digits_and_exponent": -1.2345678901234567e-10,
    "many_digits": 333333333.3333333,
    "largest_integer": 9007199254740991,
    "smallest_integer": -9007199254740991,
}
TRACEPARENT: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
RUN: Final[Json] = {
    "run_id": "onboard-7",
    "procedure": "onboard",
    "version": "1.0.0",
    "path": "3",
    "attempt": 2,
    "worker": "host-1",
}
BASE64_OUTPUT: Final[Json] = {"encoding": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}

ORDER: Json = {"action": "redispatch", "resolved_by": "operator", "rationale": "", "resolved_at": time_at(9000)}


def sound(name: str, records: list[Json]) -> Json:
    state = state_after(records)
    expect = {"ok": True, "state": state and state["state"], "execution_state": state}
    return {"name": name, "expect": expect, "records": records}


def refused(name: str, code: str, records: list[Json], *, at: int | None = None, documents_valid: bool = False) -> Json:
    expect: Json = {"error": code, "at": len(records) if at is None else at}
    if documents_valid:
        expect["documents_valid"] = True
    return {"name": name, "expect": expect, "records": records}


def sound_logs() -> Iterator[Json]:
    yield sound("no_entries_yet", [])
    for state in PATH_TO:
        yield sound(f"write_{state.lower()}", log_to(state))
    for state in PATH_TO:
        yield sound(f"read_without_key_{state.lower()}", log_to(state, read_request()))
    yield sound("read_with_key_completed", log_to("COMPLETED", read_request(idempotency_key="k")))
    yield sound("unicode_arguments", log_to("COMPLETED", action_request(arguments=UNICODE_ARGUMENTS)))
    yield sound("float_arguments", log_to("COMPLETED", action_request(arguments=FLOAT_ARGUMENTS)))
    longest = read_request(
        server_id="s" * 128, tool_name="~" * 128, idempotency_key="~" + " " * 253 + "~", intent="\U0001f600" * 4096
    )
    yield sound("longest_names_key_and_text", log_to("EXECUTING", longest))

    for roles in ([], ["agent", "worker"]):
        known = action_request(principal={**action_request()["principal"], "roles": roles}, traceparent=TRACEPARENT)
        yield sound(f"roles_{len(roles)}_and_trace_context_known", log_to("COMPLETED", known))

    of_run = action_request(idempotency_key="run:onboard-7/3", run=RUN)
    yield sound("call_of_a_run", log_to("COMPLETED", of_run))
    elsewhere = {**RUN, "run_id": "acme/onboard:2026-01-01T00:00:00.000Z", "path": "3:2.1", "attempt": 1_000_000}
    yield sound("call_in_a_branch_of_a_run_of_another_tenant", log_to("COMPLETED", {**of_run, "run": elsewhere}))

    asked = log_to("PENDING")
    bound = asked[0]["entry"]["artifact_digest"]
    for who in ("person", "expiry", "withdrawal"):
        denial = supervisor_decision(bound, decision="DENY", decided_by={"type": who, "id": "someone"}, signature=None)
        yield sound(f"denied_by_{who}", append(asked, denial, "supervisor_decision", "DENIED"))
    bare = supervisor_decision(bound, policy_digest=None, policy_ids=[], rationale=None, signature=None)
    yield sound("approved_without_policy_or_signature", append(asked, bare, "supervisor_decision", "AUTHORIZED"))

    for how, named in (("hold", None), ("reconcile", "find_invoice")):
        call = tool_call(bound_by(log_to("AUTHORIZED")), action_request(), on_unknown_outcome=how, reconcile_tool=named)
        yield sound(f"tool_call_to_{how}", append(log_to("AUTHORIZED"), call, "tool_call", "EXECUTING"))

    running = log_to("EXECUTING")
    error = {"code": "outcome_unknown", "message": ""}
    for basis in ("unknown", "not_sent", "reconciliation"):
        effect = tool_effect(bound_by(running), outcome="FAILURE", basis=basis, output=None, error=error, attempts=[])
        yield sound(f"failed_by_{basis}", append(running, effect, "tool_effect", "FAILED"))
    resolved = tool_effect(
        bound_by(running),
        outcome="FAILURE",
        basis="resolution",
        output=None,
        error=error,
        resolution={**ORDER, "action": "failed"},
    )
    yield sound("failed_by_resolution", append(running, resolved, "tool_effect", "FAILED"))
    ordered = tool_effect(bound_by(running), resolution=ORDER)
    yield sound("completed_after_an_order_to_send_again", append(running, ordered, "tool_effect", "COMPLETED"))
    effect = tool_effect(bound_by(running), output=BASE64_OUTPUT)
    yield sound("completed_with_bytes", append(running, effect, "tool_effect", "COMPLETED"))
    yield sound("continued_by_another_executor", append_step(running, "success", executor_id=OTHER_EXECUTOR_ID))


def forbidden_transitions() -> Iterator[Json]:
    """Every State x Artifact pair that the table does not hold, each correctly numbered, linked, bound and sealed."""
    for state, step in itertools.product(STATES, STEPS):
        if (state, step) not in ALLOWED:
            yield refused(f"{step}_in_{state.lower()}", TRANSITION, append_step(log_to(state), step))
    for state, step in ALLOWED:
        for claimed in STATES:
            if claimed != STEP_LEADS_TO[step]:
                name = f"{step}_in_{state.lower()}_claims_to_lead_to_{claimed.lower()}"
                yield refused(name, TRANSITION, append_step(log_to(state), step, to_state=claimed))
            if claimed != state:
                name = f"{step}_in_{state.lower()}_claims_to_come_from_{claimed.lower()}"
                yield refused(name, TRANSITION, append_step(log_to(state), step, from_state=claimed))
    for claimed in STATES[1:]:
        yield refused(f"birth_into_{claimed.lower()}", TRANSITION, append_step([], "action_request", to_state=claimed))
        yield refused(
            f"birth_out_of_{claimed.lower()}", TRANSITION, append_step([], "action_request", from_state=claimed)
        )
    # Their bindings cannot hold either, without an artifact before them; the transition speaks before those.
    for step in STEPS[1:]:
        yield refused(f"{step}_before_any_request", TRANSITION, append_step([], step))


def broken_orders() -> Iterator[Json]:
    whole = log_to("COMPLETED")
    one, two, three, four = whole
    yield refused("starts_at_2", GAP, append_step([], "action_request", sequence_number=2))
    yield refused("first_entry_missing", GAP, [two, three, four], at=1)
    yield refused("second_entry_missing", GAP, [one, three, four], at=2)
    yield refused("third_entry_missing", GAP, [one, two, four], at=3)
    yield refused("first_entry_repeated", GAP, [one, one], at=2)
    yield refused("last_entry_repeated", GAP, [*whole, four], at=5)
    yield refused("second_and_third_swapped", GAP, [one, three, two, four], at=2)
    yield refused("in_reverse", GAP, [four, three, two, one], at=1)
    yield refused("gap_of_one", GAP, append_step([one], "approval", sequence_number=3))
    yield refused("number_of_the_entry_before", GAP, append_step([one], "approval", sequence_number=1))
    yield refused("largest_number", GAP, append_step([one], "approval", sequence_number=2**53 - 1))

    yield refused(
        "first_entry_links_to_something", CHECKSUM, append_step([], "action_request", prev_entry_digest=OTHER_DIGEST)
    )
    yield refused("second_entry_links_to_nothing", CHECKSUM, append_step([one], "approval", prev_entry_digest=GENESIS))
    skipped = append_step([one, two], "tool_call", prev_entry_digest=one["entry"]["entry_digest"])
    yield refused("entry_links_past_its_predecessor", CHECKSUM, skipped)
    itself = append_step([one], "approval", prev_entry_digest=two["entry"]["entry_digest"])
    yield refused("entry_links_to_the_one_it_replaces", CHECKSUM, itself)
    # What an editor of the log would do: change an entry, seal it again, and leave the ones after it alone.
    rewritten = append_step([one], "approval", executor_id=OTHER_EXECUTOR_ID)
    yield refused("second_entry_rewritten_and_sealed_again", CHECKSUM, [*rewritten, three, four], at=3)
    denied = append_step([one], "denial")
    yield refused("approval_replaced_by_a_denial", CHECKSUM, [*denied, three, four], at=3)
    renumbered = [one, {**three, "entry": seal({**three["entry"], "sequence_number": 2})}]
    yield refused("decision_cut_out_and_renumbered", CHECKSUM, renumbered)
    yield refused("decision_cut_out_and_all_linked_again", TRANSITION, append_step([one], "tool_call"))


def foreign_records() -> Iterator[Json]:
    """Documents that are sound in themselves and stand in the wrong place."""
    whole, other = log_to("COMPLETED"), log_of(PATH_TO["COMPLETED"], trace_id=OTHER_TRACE_ID)
    for place in (2, 3, 4):
        name = f"{whole[place - 1]['entry']['artifact_type']}_of_another_trace"
        spliced = [*whole[: place - 1], other[place - 1]]
        yield refused(f"entry_and_{name}", SCHEMA, spliced, documents_valid=True)
        artifact = {**whole[place - 1]["artifact"], "trace_id": OTHER_TRACE_ID}
        yield refused(name, CHECKSUM, _with_artifact(whole[:place], artifact))
        entry = seal({**whole[place - 1]["entry"], "trace_id": OTHER_TRACE_ID})
        relabelled = [*whole[: place - 1], {**whole[place - 1], "entry": entry}]
        yield refused(f"entry_{place}_renamed_to_another_trace", SCHEMA, relabelled, documents_valid=True)
    yield refused("action_request_of_another_trace", CHECKSUM, _with_artifact(whole[:1], other[0]["artifact"]))

    binds = {2: "action_request_digest", 3: "supervisor_decision_digest", 4: "tool_call_digest"}
    for place, field in binds.items():
        record = whole[place - 1]
        for what, bound in (("unknown", OTHER_DIGEST), ("first", whole[0]["entry"]["artifact_digest"])):
            if bound != record["artifact"][field]:
                name = f"{record['entry']['artifact_type']}_bound_to_the_{what}_document"
                yield refused(name, CHECKSUM, _with_artifact(whole[:place], {**record["artifact"], field: bound}))
        missing = {**record, "entry": seal({**record["entry"], "artifact_digest": OTHER_DIGEST})}
        name = f"entry_commits_to_another_document_than_its_{record['entry']['artifact_type']}"
        yield refused(name, CHECKSUM, [*whole[: place - 1], missing])
        before = whole[place - 2]["artifact"]
        yield refused(
            f"entry_{place}_with_the_artifact_before_it", SCHEMA, [*whole[: place - 1], {**record, "artifact": before}]
        )

    call = whole[2]["artifact"]
    unasked: dict[str, Json] = {
        "other_arguments": {"arguments": {**call["arguments"], "amount_cents": 999999}},
        "more_arguments": {"arguments": {**call["arguments"], "more": 1}},
        "no_arguments": {"arguments": {}},
        "another_server": {"server_id": "elsewhere"},
        "another_tool": {"tool_name": "refund_invoice"},
        "another_class": {"tool_class": "read"},
        "another_key": {"idempotency_key": "another key"},
        "no_key_and_read_class": {"tool_class": "read", "idempotency_key": None},
    }
    for name, change in unasked.items():
        yield refused(f"tool_call_not_asked_for_with_{name}", CHECKSUM, _with_artifact(whole[:3], {**call, **change}))
    added = {**log_to("EXECUTING", read_request())[2]["artifact"], "idempotency_key": "a key"}
    yield refused(
        "tool_call_with_a_key_that_was_not_asked_for",
        CHECKSUM,
        _with_artifact(log_to("EXECUTING", read_request()), added),
    )
    effect = {**whole[3]["artifact"], "tool_call_id": OTHER_TOOL_CALL_ID}
    yield refused("tool_effect_of_another_tool_call", CHECKSUM, _with_artifact(whole, effect))


def changed_entries() -> Iterator[Json]:
    whole = log_to("COMPLETED")
    for place, record in enumerate(whole, start=1):
        before = whole[: place - 1]
        for change in itertools.chain(flipped_fields(record["entry"]), other_members(record["entry"])):
            # The digest is left as it was: this is what a damaged byte looks like.
            code = CHECKSUM if change.fits else SCHEMA
            if change.name == "sequence_number_flipped":
                code = GAP
            is_other_trace = change.name == "trace_id_flipped" and place > 1
            records = [*before, {**record, "entry": change.document}]
            yield refused(
                f"entry_{place}_{change.name}",
                SCHEMA if is_other_trace else code,
                records,
                documents_valid=is_other_trace,
            )
    record = whole[1]
    for change in itertools.chain(_unfit(record["entry"]), nulled_fields(record["entry"])):
        entry = change.document
        if "entry_digest" in change.name or resealed_digest(entry) is None:
            records = [whole[0], {**record, "entry": entry}]
        else:
            # Sealed again where that is possible, so that nothing but the schema can object.
            records = [whole[0], {**record, "entry": seal(entry)}]
        yield refused(f"entry_{change.name}", SCHEMA, records)
    for wrong in ("action_request", "tool_call", "tool_effect"):
        entry = seal({**record["entry"], "artifact_type": wrong})
        yield refused(f"entry_calls_its_decision_{wrong}", SCHEMA, [whole[0], {**record, "entry": entry}])
    entry = seal({**record["entry"], "schema_id": "tga/v1/execution_state"})
    yield refused("entry_with_another_schema_id", SCHEMA, [whole[0], {**record, "entry": entry}])
    entry = seal({**whole[0]["entry"], "sequence_number": 0})
    yield refused("entry_numbered_from_0", SCHEMA, [{**whole[0], "entry": entry}])


def changed_artifacts() -> Iterator[Json]:
    running = log_to("EXECUTING")
    success, failure = log_to("COMPLETED"), log_to("FAILED")
    with_bytes = append(running, tool_effect(bound_by(running), output=BASE64_OUTPUT), "tool_effect", "COMPLETED")
    for place in (1, 2, 3):
        yield from _changed_artifact(success[place - 1]["entry"]["artifact_type"], success[:place])
    yield from _changed_artifact("tool_effect", success)
    asking = tool_call(bound_by(running[:2]), action_request(), on_unknown_outcome="reconcile", reconcile_tool="find")
    reconciling = append(running[:2], asking, "tool_call", "EXECUTING")
    # Only the fields that the documents above leave null, or fill in another way.
    others = (
        ("failed_tool_effect", failure, ("output", "error", "outcome")),
        ("tool_effect_with_bytes", with_bytes, ("output",)),
        ("reconciling_tool_call", reconciling, ("reconcile_tool",)),
    )
    for title, records, fields in others:
        for vector in _changed_artifact(title, records):
            if any(f"_{field}" in vector["name"].removeprefix(title) for field in fields):
                yield vector

    request, decision, call = (record["artifact"] for record in running)
    rules: dict[str, tuple[int, Json]] = {
        "write_request_without_key": (1, {**request, "idempotency_key": None}),
        "write_call_without_key": (3, {**call, "idempotency_key": None}),
        "read_request_turned_write_without_key": (1, read_request(tool_class="write")),
        "request_with_arguments_in_a_list": (1, {**request, "arguments": []}),
        "request_with_a_text_too_long": (1, {**request, "intent": "i" * 4097}),
        "request_of_unknown_class": (1, {**request, "tool_class": "admin"}),
        "approval_by_expiry": (2, {**decision, "decided_by": {"type": "expiry", "id": "clock"}}),
        "approval_by_withdrawal": (2, {**decision, "decided_by": {"type": "withdrawal", "id": "agent-7"}}),
        "decision_with_an_unknown_verdict": (2, {**decision, "decision": "MAYBE"}),
        "decision_with_65_policies": (2, {**decision, "policy_ids": ["p"] * 65}),
        "call_to_reconcile_with_nothing_to_ask": (3, {**call, "on_unknown_outcome": "reconcile"}),
        "call_to_hold_with_something_to_ask": (3, {**call, "on_unknown_outcome": "hold", "reconcile_tool": "find"}),
    }
    # What is not known is left out; null would be a second spelling of the same.
    for name, parent in (
        ("null", None),
        ("of_version_ff", f"ff{TRACEPARENT[2:]}"),
        ("in_upper_case", TRACEPARENT.upper()),
    ):
        rules[f"request_with_a_traceparent_{name}"] = (1, {**request, "traceparent": parent})
    of_runs: dict[str, Json] = {
        "with_a_space_in_its_id": {"run_id": "onboard 7"},
        "of_two_slashes": {"run_id": "acme/crm/onboard-7"},
        "at_no_address": {"path": "0"},
        "at_a_branch": {"path": "3:2"},
        "at_attempt_0": {"attempt": 0},
        "with_its_lease": {"lease": "secret"},
        "without_its_path": {"path": None},
    }
    for name, changes in of_runs.items():
        rules[f"request_of_a_run_{name}"] = (1, {**request, "run": {**RUN, **changes}})
    rules["request_with_a_run_null"] = (1, {**request, "run": None})
    for name, roles in (("null", None), ("unknown", ["root"]), ("of_seven", ["agent"] * 7)):
        rules[f"request_with_roles_{name}"] = (1, {**request, "principal": {**request["principal"], "roles": roles}})
    effect = success[3]["artifact"]
    rules |= {
        "success_with_an_error": (4, {**effect, "error": FAILED_BY_ANSWER["error"]}),
        "failure_without_an_error": (4, {**effect, "outcome": "FAILURE"}),
        "success_of_an_unknown_outcome": (4, {**effect, "basis": "unknown"}),
        "success_of_what_was_not_sent": (4, {**effect, "basis": "not_sent"}),
        "resolution_by_nobody": (4, {**effect, "basis": "resolution"}),
        "resolution_that_is_no_verdict": (4, {**effect, "basis": "resolution", "resolution": ORDER}),
        "failure_that_was_resolved_as_success": (
            4,
            {**effect, **FAILED_BY_ANSWER, "basis": "resolution", "resolution": {**ORDER, "action": "succeeded"}},
        ),
        "verdict_that_is_not_the_basis": (4, {**effect, "resolution": {**ORDER, "action": "succeeded"}}),
        "key_with_a_space_at_its_end": (1, {**success[0]["artifact"], "idempotency_key": "a key "}),
        "key_with_a_space_before_it": (1, {**success[0]["artifact"], "idempotency_key": " a key"}),
        "effect_with_101_attempts": (4, {**effect, "attempts": effect["attempts"] * 101}),
        "effect_with_attempt_0": (4, {**effect, "attempts": [{**effect["attempts"][0], "attempt": 0}]}),
        "effect_with_output_of_unknown_encoding": (4, {**effect, "output": {"encoding": "xml", "value": 1}}),
        "effect_with_a_number_for_truth": (4, {**effect, "output": {**FAILED_BY_ANSWER["output"], "truncated": 1}}),
    }
    # Under the digest of the document with `true`: a reader that takes 1 for it would find nothing wrong.
    damaged = {**failure[3]["artifact"], "output": {**FAILED_BY_ANSWER["output"], "truncated": 1}}
    records = [*failure[:3], {**failure[3], "artifact": damaged}]
    yield refused("effect_with_a_number_for_truth_under_its_digest", SCHEMA, records)
    for name, (place, artifact) in rules.items():
        yield refused(name, SCHEMA, _with_artifact(success[:place], artifact))


def bound_by(records: list[Json]) -> str:
    """What the next artifact must name."""
    return str(records[-1]["entry"]["artifact_digest"])


def _with_artifact(records: list[Json], artifact: Json) -> list[Json]:
    """The log with another last artifact that its entry commits to: only the artifact can be wrong."""
    entry = records[-1]["entry"]
    committed = resealed_digest(artifact) or entry["artifact_digest"]
    return [*records[:-1], {"entry": seal({**entry, "artifact_digest": committed}), "artifact": artifact}]


def _unfit(document: Json) -> Iterator[Change]:
    """Changes that the schema must refuse; a flipped byte is another matter, for it leaves digests alone."""
    return itertools.chain(misspelled_fields(document), dropped_fields(document), unknown_fields(document))


def _changed_artifact(title: str, records: list[Json]) -> Iterator[Json]:
    """Each field of the last artifact changed: damaged under its digest, or unfit under a digest of its own."""
    artifact = records[-1]["artifact"]
    damaged = itertools.chain(flipped_fields(artifact), other_members(artifact), nulled_fields(artifact))
    for change in damaged:
        if change.fits or change.name.endswith("_flipped"):
            code = CHECKSUM if change.fits else SCHEMA
            yield refused(f"{title}_{change.name}", code, [*records[:-1], {**records[-1], "artifact": change.document}])
    for change in _unfit(artifact):
        yield refused(f"{title}_{change.name}", SCHEMA, _with_artifact(records, change.document))


LOG_PARTS: Final = (
    sound_logs,
    forbidden_transitions,
    broken_orders,
    foreign_records,
    changed_entries,
    changed_artifacts,
)


def log_vectors() -> Iterator[Json]:
    for part in LOG_PARTS:
        yield from part()
