"""Recovery vectors: what a trace found in the middle calls for. Checkpoint vectors: which snapshots may be trusted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

from vectors.changes import (
    dropped_fields,
    flipped_fields,
    misspelled_fields,
    nulled_fields,
    other_members,
    replaced,
    unknown_fields,
)
from vectors.documents import (
    EXECUTOR_ID,
    KEY,
    OTHER_DIGEST,
    OTHER_TOOL_CALL_ID,
    OTHER_TRACE_ID,
    PATH_TO,
    TOOL_CALL_ID,
    Json,
    append_step,
    checkpoint_of,
    digest,
    log_of,
    log_to,
    read_request,
    seal,
    state_after,
    time_at,
)
from vectors.logs import CHECKSUM, GAP, SCHEMA, TRANSITION

RECOVERY_FAILED: Final = "STATE_RECOVERY_FAILED"

# ARCHITECTURE.md, section 3: what is done depends on the state alone. EXECUTING is made concrete by the claim.
_ACTION: Final = {
    "PENDING": "ask_supervisor",
    "AUTHORIZED": "append_tool_call",
    "COMPLETED": "return_result",
    "FAILED": "return_result",
    "DENIED": "return_result",
}


def recovery_vectors() -> Iterator[Json]:
    for kind, request, key in (("write", None, KEY), ("read_without_key", read_request(), None)):
        for state in PATH_TO:
            records = log_to(state, request)
            claimed = records[-1]["entry"]["artifact_digest"] if len(records) == 4 and key else None
            expect: Json = {"ok": True, "state": state, "action": _ACTION.get(state, "dispatch")}
            if state == "EXECUTING":  # I3: again, and with the same ids
                expect |= {"tool_call_id": TOOL_CALL_ID, "idempotency_key": key}
            name = f"recover_{kind}_{state.lower()}"
            yield {"name": name, "expect": expect, "claim_effect": claimed, "records": records}

    running, whole = log_to("EXECUTING"), log_to("COMPLETED")
    effect = whole[3]["entry"]["artifact_digest"]
    # I2: the claim says the tool has answered, the log does not. To send again might do it twice; to go on would
    # put into the log what it never saw.
    yield _unrecovered("claim_has_an_effect_that_the_log_lacks", RECOVERY_FAILED, running, 3, claim_effect=effect)
    yield _unrecovered("claim_has_an_unknown_effect", RECOVERY_FAILED, running, 3, claim_effect=OTHER_DIGEST)
    for place, record in enumerate(whole, start=1):
        gone = [*whole[: place - 1], {**record, "artifact": None}]
        name = f"payload_of_the_{record['entry']['artifact_type']}_is_missing"
        yield _unrecovered(name, RECOVERY_FAILED, gone, place)
    lost = [*whole[:2], {**whole[2], "artifact": None}]
    lost[2]["entry"] = seal({**lost[2]["entry"], "prev_entry_digest": OTHER_DIGEST})
    yield _unrecovered("broken_link_speaks_before_a_missing_payload", CHECKSUM, lost, 3)
    jumped = append_step(log_to("PENDING"), "tool_call", to_state="EXECUTING")
    jumped[1]["artifact"] = None
    yield _unrecovered("unauthorized_call_speaks_before_a_missing_payload", TRANSITION, jumped, 2)

    # A log that does not hold is no ground to dispatch on, whatever state it seems to be in.
    yield _unrecovered("recover_log_without_its_decision", GAP, [running[0], running[2]], 2)
    damaged = {**running[2], "artifact": {**running[2]["artifact"], "tool_call_id": OTHER_TOOL_CALL_ID}}
    yield _unrecovered("recover_log_with_another_tool_call_id", CHECKSUM, [*running[:2], damaged], 3)
    yield _unrecovered("recover_log_called_without_authorization", TRANSITION, append_step(running[:1], "tool_call"), 2)
    keyless = {**running[0]["artifact"], "idempotency_key": None}
    unkeyed = [{"entry": seal({**running[0]["entry"], "artifact_digest": digest(keyless)}), "artifact": keyless}]
    yield _unrecovered("recover_write_without_key", SCHEMA, unkeyed, 1)


def checkpoint_vectors() -> Iterator[Json]:
    yield from _sound_checkpoints()
    yield from _changed_checkpoints()
    yield from _misplaced_checkpoints()
    yield from _wrong_tails()


def _sound_checkpoints() -> Iterator[Json]:
    for kind, request in (("write", None), ("read_without_key", read_request())):
        for state in PATH_TO:
            records = log_to(state, request)
            for cut in range(1, len(records) + 1):
                tail = records[cut:]
                # Shorter paths are cut where longer ones are; each cut of each end is still one vector.
                name = f"checkpoint_{kind}_{state.lower()}" + (f"_cut_after_{cut}" if tail else "")
                yield _folded(name, records[:cut], tail)
    records = log_to("EXECUTING")
    later = checkpoint_of(_state(records), created_at=time_at(9000))
    # I4: the digest is over checkpoint_state alone; when the snapshot was taken is nothing that recovery relies on.
    yield _folded("checkpoint_taken_at_another_time", records, [], checkpoint=later)


def _changed_checkpoints() -> Iterator[Json]:
    for state in PATH_TO:
        records = log_to(state)
        folded, entry = _state(records), records[-1]["entry"]
        for change in itertools.chain(flipped_fields(folded), other_members(folded)):
            checkpoint = checkpoint_of(folded, checkpoint_state=change.document)
            name = f"{state.lower()}_checkpoint_state_{change.name}"
            yield _untrusted(name, CHECKSUM if change.fits else SCHEMA, checkpoint, entry)

    records = log_to("EXECUTING")
    folded, entry = _state(records), records[-1]["entry"]
    unfit = (misspelled_fields, nulled_fields, dropped_fields, unknown_fields)
    for change in itertools.chain.from_iterable(changes(folded) for changes in unfit):
        checkpoint = _rehashed(checkpoint_of(folded, checkpoint_state=change.document))
        yield _untrusted(f"checkpoint_state_{change.name}", SCHEMA, checkpoint, entry)
    for field in ("schema_id", "schema_version"):
        # A reader that fills in what is not said would hash it to the digest and believe it.
        unsaid = {key: value for key, value in folded.items() if key != field}
        checkpoint = checkpoint_of(folded, checkpoint_state=unsaid)
        yield _untrusted(f"checkpoint_state_without_{field}_under_its_digest", SCHEMA, checkpoint, entry)
    # What a state cannot have behind it yet, or must have.
    ahead = {
        "PENDING": "supervisor_decision_digest",
        "AUTHORIZED": "tool_call_digest",
        "EXECUTING": "tool_effect_digest",
    }
    for state, field in ahead.items():
        early = _state(log_to(state))
        checkpoint = _rehashed(checkpoint_of(early, checkpoint_state={**early, field: OTHER_DIGEST}))
        yield _untrusted(f"{state.lower()}_checkpoint_with_a_{field}", SCHEMA, checkpoint, log_to(state)[-1]["entry"])
    done = _rehashed(checkpoint_of(folded, checkpoint_state={**folded, "state": "COMPLETED"}))
    yield _untrusted("checkpoint_completed_without_an_effect", SCHEMA, done, entry)

    whole = checkpoint_of(folded)
    for change in flipped_fields({**whole, "checkpoint_state": {}}):
        checkpoint = {**change.document, "checkpoint_state": folded}
        if change.name != "created_at_flipped":  # outside the digest, see above
            yield _untrusted(f"checkpoint_{change.name}", CHECKSUM if change.fits else SCHEMA, checkpoint, entry)
    for field in whole:
        without = {key: value for key, value in whole.items() if key != field}
        yield _untrusted(f"checkpoint_without_{field}", SCHEMA, without, entry)
        yield _untrusted(f"checkpoint_{field}_null", SCHEMA, {**whole, field: None}, entry)
    upper = {**whole, "checkpoint_digest": whole["checkpoint_digest"].upper()}
    yield _untrusted("checkpoint_digest_in_upper_case", SCHEMA, upper, entry)
    yield _untrusted("checkpoint_unknown_field", SCHEMA, {**whole, "extra": 1}, entry)
    yield _untrusted(
        "checkpoint_digest_of_the_whole_checkpoint", CHECKSUM, {**whole, "checkpoint_digest": digest(whole)}, entry
    )


def _misplaced_checkpoints() -> Iterator[Json]:
    for state in PATH_TO:
        records = log_to(state)
        checkpoint = checkpoint_of(_state(records))
        yield _untrusted(f"{state.lower()}_checkpoint_without_its_entry", CHECKSUM, checkpoint, None)
        replaced_entry = seal({**records[-1]["entry"], "recorded_at": time_at(9000)})
        yield _untrusted(f"{state.lower()}_checkpoint_on_a_rewritten_entry", CHECKSUM, checkpoint, replaced_entry)
    records = log_to("EXECUTING")
    checkpoint, entry = checkpoint_of(_state(records)), records[-1]["entry"]
    yield _untrusted("checkpoint_on_the_entry_before", CHECKSUM, checkpoint, records[1]["entry"])
    other = log_of(PATH_TO["EXECUTING"], trace_id=OTHER_TRACE_ID)
    theirs = checkpoint_of(_state(other))
    yield _untrusted("checkpoint_of_another_trace_on_our_entry", CHECKSUM, theirs, entry)
    # The digest fits: only the names tell.
    yield _untrusted("checkpoint_with_another_traces_state", CHECKSUM, {**theirs, "trace_id": entry["trace_id"]}, entry)
    yield _untrusted(
        "checkpoint_relabelled_to_another_trace", CHECKSUM, {**checkpoint, "trace_id": OTHER_TRACE_ID}, entry
    )
    forged = _rehashed(replaced(checkpoint, ("checkpoint_state", "entry_digest"), OTHER_DIGEST))
    yield _untrusted("checkpoint_rehashed_over_an_unknown_entry", CHECKSUM, forged, entry)
    # Sealed again by the forger, and on the right entry, which says otherwise.
    forgeries: tuple[tuple[str, str, Any], ...] = (
        ("AUTHORIZED", "state", "DENIED"),
        ("COMPLETED", "state", "FAILED"),
        ("AUTHORIZED", "sequence_number", 5),
        ("AUTHORIZED", "updated_at", time_at(9000)),
        ("PENDING", "action_request_digest", OTHER_DIGEST),
        ("AUTHORIZED", "supervisor_decision_digest", OTHER_DIGEST),
        ("EXECUTING", "tool_call_digest", OTHER_DIGEST),
        ("FAILED", "tool_effect_digest", OTHER_DIGEST),
    )
    for state, field, value in forgeries:
        records = log_to(state)
        forged = _rehashed(replaced(checkpoint_of(_state(records)), ("checkpoint_state", field), value))
        yield _untrusted(f"{state.lower()}_checkpoint_forged_{field}", CHECKSUM, forged, records[-1]["entry"])


def _wrong_tails() -> Iterator[Json]:
    """A sound or well-forged checkpoint, and a tail that does not follow from it."""
    whole = log_to("COMPLETED")
    authorized, running = whole[:2], whole[:3]
    yield _refused_tail("tail_with_a_gap", GAP, authorized, [whole[3]])
    yield _refused_tail("tail_repeats_the_checkpoints_entry", GAP, authorized, [whole[1]])
    unlinked = append_step(append_step(whole[:1], "approval", executor_id=EXECUTOR_ID[:-1] + "1"), "tool_call")
    yield _refused_tail("tail_of_another_branch", CHECKSUM, authorized, unlinked[2:])
    other = log_of(PATH_TO["COMPLETED"], trace_id=OTHER_TRACE_ID)
    yield _refused_tail("tail_of_another_trace", SCHEMA, authorized, other[2:3], documents_valid=True)
    for state in ("COMPLETED", "FAILED", "DENIED"):
        ended = log_to(state)
        yield _refused_tail(f"tail_after_{state.lower()}", TRANSITION, ended, append_step(ended, "tool_call")[-1:])
    yield _refused_tail("tail_asks_again", TRANSITION, authorized, append_step(authorized, "action_request")[-1:])

    # The forger sealed the snapshot again, so it is sound in itself; what the log goes on to say gives it away.
    call, effect = whole[2:3], whole[3:]
    forgeries: tuple[tuple[str, list[Json], Any, list[Json], str], ...] = (
        ("payload_digest", authorized, OTHER_DIGEST, call, CHECKSUM),
        ("tool_class", authorized, "read", call, CHECKSUM),
        ("idempotency_key", authorized, "another key", call, CHECKSUM),
        ("tool_call_id", running, OTHER_TOOL_CALL_ID, effect, CHECKSUM),
    )
    for field, records, value, tail, code in forgeries:
        forged = _rehashed(replaced(checkpoint_of(_state(records)), ("checkpoint_state", field), value))
        yield _refused_tail(f"tail_betrays_a_forged_{field}", code, records, tail, checkpoint=forged)


def _state(records: list[Json]) -> Json:
    state = state_after(records)
    if state is None:
        raise ValueError("a checkpoint stands on an entry")
    return state


def _rehashed(checkpoint: Json) -> Json:
    try:
        return {**checkpoint, "checkpoint_digest": digest(checkpoint["checkpoint_state"])}
    except ValueError:  # no canonical form: an integer beyond 2^53
        return checkpoint


def _unrecovered(name: str, code: str, records: list[Json], at: int, *, claim_effect: str | None = None) -> Json:
    return {"name": name, "expect": {"error": code, "at": at}, "claim_effect": claim_effect, "records": records}


def _untrusted(name: str, code: str, checkpoint: Json, entry: Json | None) -> Json:
    return {"name": name, "expect": {"error": code, "at": 0}, "checkpoint": checkpoint, "entry": entry, "tail": []}


def _folded(name: str, records: list[Json], tail: list[Json], *, checkpoint: Json | None = None) -> Json:
    state = _state([*records, *tail])
    return {
        "name": name,
        "expect": {"ok": True, "state": state["state"], "execution_state": state},
        "checkpoint": checkpoint_of(_state(records)) if checkpoint is None else checkpoint,
        "entry": records[-1]["entry"],
        "tail": tail,
    }


def _refused_tail(
    name: str,
    code: str,
    records: list[Json],
    tail: list[Json],
    *,
    checkpoint: Json | None = None,
    documents_valid: bool = False,
) -> Json:
    expect: Json = {"error": code, "at": 1}
    if documents_valid:
        expect["documents_valid"] = True
    sound = checkpoint_of(_state(records)) if checkpoint is None else checkpoint
    return {"name": name, "expect": expect, "checkpoint": sound, "entry": records[-1]["entry"], "tail": tail}
