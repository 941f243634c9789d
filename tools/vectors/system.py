"""System vectors: streams of pins, keys, policies, erasures and procedures; sound ones, and each defect by its name.

A system stream has one state, so no transition can be wrong that fits the schemas. What can be: documents, order,
links, digests, and a key or policy that stands under another's name.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, Final

from vectors.changes import (
    dropped_fields,
    flipped_fields,
    misspelled_fields,
    nulled_fields,
    other_members,
    resealed_digest,
    unknown_fields,
)
from vectors.documents import (
    EXECUTOR_ID,
    GENESIS,
    OTHER_DIGEST,
    OTHER_EXECUTOR_ID,
    TRACE_ID,
    Json,
    digest,
    seal,
    time_at,
)
from vectors.logs import CHECKSUM, GAP, SCHEMA, UNICODE_ARGUMENTS

TENANT: Final = "default"
OTHER_TENANT: Final = "other"
POLICY: Final = "permit(principal, action, resource);\n// “quoted” \\ and \t tabbed\n"
Step = tuple[str, Json]


def key_of(number: int) -> tuple[str, str]:
    """The id and the base64 of a made-up public key; nothing is signed here."""
    public = hashlib.sha256(f"public key {number}".encode()).digest()
    return f"ed25519:{hashlib.sha256(public).hexdigest()[:16]}", base64.b64encode(public).decode()


def _said(schema: str, **fields: Any) -> Json:
    return {
        "schema_id": f"tga/v1/{schema}",
        "schema_version": "1.0",
        "system_id": TENANT,
        "recorded_at": time_at(1000),
        "recorded_by": "gateway",
        **fields,
    }


def tool_pin(**changes: Any) -> Step:
    definition = {"name": "pay_invoice", "input_schema": {"type": "object"}}
    pin: Json = {"server_id": "billing", "tool_name": "pay_invoice", "change": "pinned"}
    pin |= {"definition_digest": digest(definition), "definition": definition}
    return "tool_pin", _said("tool_pin", **{**pin, **changes})


def signing_key(number: int = 1, **changes: Any) -> Step:
    key_id, public_key = key_of(number)
    key: Json = {"change": "announced", "key_id": key_id, "algorithm": "Ed25519", "public_key": public_key}
    return "signing_key", _said("signing_key", **{**key, "principal_id": "ada", **changes})


def policy_set(text: str = POLICY, **changes: Any) -> Step:
    policy = {"policy_digest": hashlib.sha256(text.encode()).hexdigest(), "text": text}
    return "policy_set", _said("policy_set", **{**policy, **changes})


def erasure(**changes: Any) -> Step:
    erased: Json = {"erased_stream": f"trace:{TRACE_ID}", "last_sequence_number": 2}
    erased |= {"last_entry_digest": OTHER_DIGEST, "artifact_digests": [digest("one"), digest("two")]}
    key = {"server_id": "billing", "tool_name": "pay_invoice", "idempotency_key": "invoice-1"}
    erased |= {"claim": {"key_digest": digest(key), "payload_commitment": digest("salt and payload")}}
    return "erasure", _said("erasure", **{**erased, "rationale": "Asked for.", **changes})


def log_epoch(epoch: int = 2, **changes: Any) -> Step:
    origin, root = "example.org/log" + (f"/epoch-{epoch - 1}" if epoch > 2 else ""), hashlib.sha256(b"a tree").digest()
    note = f"{origin}\n9\n{base64.b64encode(root).decode()}\n\n— {origin} {base64.b64encode(bytes(68)).decode()}\n"
    former: Json = {"origin": origin, "size": 9, "root": root.hex(), "note": note, **changes.pop("former", {})}
    said: Json = {"epoch": epoch, "origin": f"example.org/log/epoch-{epoch}", "former": former, "kept_size": 7}
    return "log_epoch", _said("log_epoch", **{**said, "leaves_lost": 2, "rationale": "The disk was lost.", **changes})


def procedure(version: str = "1.0.0", program: str = "program 1", **changes: Any) -> Step:
    """Registered; `program` is what its digest is of."""
    policy: Json = {"timeout_ms": 60_000, "checkpoint_timeout_ms": None, "park_after": 5, "retention": "keep"}
    policy["retry"] = {"retries": 2, "first_ms": 1_000, "max_ms": 60_000}
    said: Json = {"name": "onboard", "version": version, "program_digest": digest(program), "language": "python"}
    said |= {"description": "Onboards a customer.", "input_schema": {"type": "object"}, "output_schema": None}
    said |= {"state_schema": None, "policy": policy, "triggers": [{"event": "customer.signed"}], "tags": ["crm"]}
    return "procedure_registration", _said("procedure_registration", **{**said, "recorded_by": "worker-1", **changes})


def program_source(**changes: Any) -> Json:
    file: Json = {"name": "prices.json", "sha256": OTHER_DIGEST, "size_bytes": 2, **changes}
    return {"sha256": OTHER_DIGEST, "size_bytes": 12, "files": [file]}


def schedule(name: str = "nightly", **changes: Any) -> Step:
    said: Json = {"name": name, "procedure": "onboard", "version": None, "input": {"day": 1}, "missed": "one"}
    said |= {"spec": {"type": "cron", "expression": "30 2 * * 1-5", "time_zone": "Europe/Berlin"}}
    said |= {"principal": {"principal_id": "agent-7", "tenant": TENANT}}
    return "schedule", _said("schedule", **{**said, "recorded_by": "agent-7", **changes})


def schedule_removal(name: str = "nightly", **changes: Any) -> Step:
    return "schedule_removal", _said("schedule_removal", **{"name": name, "recorded_by": "olga", **changes})


def append(records: list[Json], step: Step, **entry_changes: Any) -> list[Json]:
    """The stream with one more record, linked and sealed as its fields, changed ones too, demand."""
    artifact_type, artifact = step
    entry = {
        "schema_id": "tga/v1/system_log_entry",
        "schema_version": "1.0",
        "system_id": TENANT,
        "sequence_number": len(records) + 1,
        "prev_entry_digest": records[-1]["entry"]["entry_digest"] if records else GENESIS,
        "from_state": "OPEN",
        "to_state": "OPEN",
        "artifact_type": artifact_type,
        "artifact_digest": digest(artifact),
        "executor_id": EXECUTOR_ID,
        "recorded_at": time_at(1000 * (len(records) + 1) + 1),
        **entry_changes,
    }
    return [*records, {"entry": seal(entry), "artifact": artifact}]


def stream_of(*steps: Step) -> list[Json]:
    records: list[Json] = []
    for step in steps:
        records = append(records, step)
    return records


def whole_stream() -> list[Json]:
    return stream_of(signing_key(principal_id=None), policy_set(), tool_pin(), erasure())


def sound(
    name: str,
    records: list[Json],
    pins: list[Json],
    keys: list[Json],
    policy: str | None,
    procedures: dict[str, list[Step]] | None = None,
    schedules: dict[str, int] | None = None,
) -> Json:
    """`pins`, `keys`, `policy`, `procedures` (by name, the newest last) and `schedules` (by name, the entry that says
    what each is) are what counts after the last record, told by whoever made the vector."""
    programs = {
        known_as: [{field: step[1][field] for field in ("version", "program_digest")} for step in steps]
        for known_as, steps in (procedures or {}).items()
    }
    state: Json = {"pins": pins, "keys": keys, "policy_digest": policy, "procedures": programs}
    state["schedules"] = schedules or {}
    return {"name": f"system_{name}", "expect": {"ok": True, "system_state": state}, "records": records}


def refused(name: str, code: str, records: list[Json], *, at: int | None = None, documents_valid: bool = False) -> Json:
    expect: Json = {"error": code, "at": len(records) if at is None else at}
    if documents_valid:
        expect["documents_valid"] = True
    return {"name": f"system_{name}", "expect": expect, "records": records}


def _pin(definition: object, quarantined: list[object], tool: str = "pay_invoice") -> Json:
    refused_since = sorted(digest(one) for one in quarantined)
    return {
        "server_id": "billing",
        "tool_name": tool,
        "definition_digest": digest(definition),
        "quarantined_digests": refused_since,
    }


def _key(number: int, principal_id: str | None, *, is_retired: bool = False) -> Json:
    return {"key_id": key_of(number)[0], "principal_id": principal_id, "is_retired": is_retired}


def sound_streams() -> Iterator[Json]:
    first = tool_pin()[1]["definition"]
    changed = {**first, "description": "now with another text"}
    again = {**first, "description": "and another"}
    policy = str(policy_set()[1]["policy_digest"])

    def seen(change: str, definition: Json) -> Step:
        return tool_pin(change=change, definition=definition, definition_digest=digest(definition))

    yield sound("no_entries_yet", [], [], [], None)
    for step in (tool_pin(), signing_key(), policy_set(), erasure(), log_epoch(), procedure(), schedule()):
        pins = [_pin(first, [])] if step[0] == "tool_pin" else []
        keys = [_key(1, "ada")] if step[0] == "signing_key" else []
        decides = policy if step[0] == "policy_set" else None
        procedures = {"onboard": [step]} if step[0] == "procedure_registration" else None
        schedules = {"nightly": 1} if step[0] == "schedule" else None
        yield sound(f"begins_with_{step[0]}", stream_of(step), pins, keys, decides, procedures, schedules)
    yield sound("of_every_kind", whole_stream(), [_pin(first, [])], [_key(1, None)], policy)
    quarantined = stream_of(seen("pinned", first), seen("quarantined", changed), seen("quarantined", again))
    yield sound("tool_changed_twice", quarantined, [_pin(first, [changed, again])], [], None)
    yield sound("change_accepted", append(quarantined, seen("accepted", changed)), [_pin(changed, [])], [], None)
    taken_back = append(append(quarantined, seen("accepted", changed)), seen("quarantined", first))
    yield sound("first_definition_back_after_another_was_accepted", taken_back, [_pin(changed, [first])], [], None)
    other = tool_pin(tool_name="a_tool")
    yield sound("two_tools", stream_of(tool_pin(), other), [_pin(first, [], "a_tool"), _pin(first, [])], [], None)
    yield sound("accepted_unseen", stream_of(seen("accepted", changed)), [_pin(changed, [])], [], None)
    yield sound(
        "unicode_definition", stream_of(seen("pinned", UNICODE_ARGUMENTS)), [_pin(UNICODE_ARGUMENTS, [])], [], None
    )
    retired = stream_of(signing_key(1), signing_key(2, principal_id="bob"), signing_key(1, change="retired"))
    both = [_key(1, "ada", is_retired=True), _key(2, "bob")]
    yield sound("key_retired", retired, [], sorted(both, key=lambda key: str(key["key_id"])), None)
    back = append(retired, signing_key(1))
    both = [_key(1, "ada"), _key(2, "bob")]
    yield sound("key_announced_again", back, [], sorted(both, key=lambda key: str(key["key_id"])), None)
    empty = hashlib.sha256(b"").hexdigest()
    yield sound("policy_replaced_by_an_empty_one", stream_of(policy_set(), policy_set("")), [], [], empty)
    yield sound("erasure_of_nothing_named", stream_of(erasure(artifact_digests=[], rationale="")), [], [], None)
    yield sound("erasure_of_a_stream_without_claim", stream_of(erasure(claim=None)), [], [], None)
    submitted = procedure(language="lua", program_source=program_source())
    yield sound("procedure_that_was_submitted", stream_of(submitted), [], [], None, {"onboard": [submitted]})
    folded: Json = {"artifact_digests": [], "payloads_digest": OTHER_DIGEST}
    yield sound("erasure_of_a_long_stream", stream_of(erasure(**folded)), [], [], None)
    yield sound("log_that_began_anew_twice", stream_of(log_epoch(), policy_set(), log_epoch(3)), [], [], policy)
    yield from sound_procedures()
    moved = append(stream_of(policy_set()), erasure(), executor_id=OTHER_EXECUTOR_ID)
    yield sound("continued_by_another_gateway", moved, [], [], policy)


def sound_procedures() -> Iterator[Json]:
    first, second, patched = procedure(), procedure("1.1.0", "program 2"), procedure("1.0.0", "program 3")
    retagged, other = procedure(tags=[]), procedure(name="refund")
    told: dict[str, tuple[list[Step], dict[str, list[Step]]]] = {
        "procedure_of_two_versions": ([first, second], {"onboard": [first, second]}),
        "procedure_whose_program_changed_in_its_version": ([first, patched], {"onboard": [first, patched]}),
        "procedure_said_anew_is_the_newest": ([first, second, retagged], {"onboard": [second, retagged]}),
        "two_procedures": ([first, other], {"onboard": [first], "refund": [other]}),
    }
    for name, (steps, procedures) in told.items():
        yield sound(name, stream_of(*steps), [], [], None, procedures)
    hourly = schedule("hourly", spec={"type": "interval", "every_ms": 3_600_000}, input=None, version="1.0.0")
    of_schedules: dict[str, tuple[list[Step], dict[str, int]]] = {
        "schedule_made_anew": ([schedule(), schedule(missed="all")], {"nightly": 2}),
        "two_schedules": ([schedule(), hourly], {"nightly": 1, "hourly": 2}),
        "schedule_removed": ([schedule(), hourly, schedule_removal()], {"hourly": 2}),
        "schedule_removed_and_made_again": ([schedule(), schedule_removal(), schedule()], {"nightly": 3}),
        "removal_of_no_schedule": ([schedule_removal(), hourly], {"hourly": 2}),
    }
    for name, (steps, standing) in of_schedules.items():
        yield sound(name, stream_of(*steps), [], [], None, None, standing)


def broken_orders() -> Iterator[Json]:
    whole = whole_stream()
    one, two, three, four = whole
    yield refused("starts_at_2", GAP, append([], tool_pin(), sequence_number=2))
    yield refused("first_entry_missing", GAP, [two, three, four], at=1)
    yield refused("second_entry_missing", GAP, [one, three, four], at=2)
    yield refused("last_entry_repeated", GAP, [*whole, four], at=5)
    yield refused("second_and_third_swapped", GAP, [one, three, two, four], at=2)
    yield refused("first_entry_links_to_something", CHECKSUM, append([], tool_pin(), prev_entry_digest=OTHER_DIGEST))
    yield refused("second_entry_links_to_nothing", CHECKSUM, append([one], policy_set(), prev_entry_digest=GENESIS))
    past = append([one, two], tool_pin(), prev_entry_digest=one["entry"]["entry_digest"])
    yield refused("entry_links_past_its_predecessor", CHECKSUM, past)
    rewritten = append([one], policy_set("forbid(principal, action, resource);"))
    yield refused("policy_rewritten_and_sealed_again", CHECKSUM, [*rewritten, three, four], at=3)
    yield refused(
        "erasure_cut_out_in_the_middle", GAP, [one, two, three, *append(whole, tool_pin(tool_name="later"))[4:]], at=4
    )


def foreign_records() -> Iterator[Json]:
    whole = whole_stream()
    for place, record in enumerate(whole, start=1):
        kind = record["entry"]["artifact_type"]
        elsewhere = {**record["artifact"], "system_id": OTHER_TENANT}
        yield refused(f"{kind}_of_another_tenant", CHECKSUM, append(whole[: place - 1], (kind, elsewhere)))
        commits = {**record, "entry": seal({**record["entry"], "artifact_digest": OTHER_DIGEST})}
        yield refused(f"entry_commits_to_another_{kind}", CHECKSUM, [*whole[: place - 1], commits])
        other = "erasure" if kind != "erasure" else "tool_pin"
        misnamed = {**record, "entry": seal({**record["entry"], "artifact_type": other})}
        yield refused(f"entry_calls_its_{kind}_{other}", SCHEMA, [*whole[: place - 1], misnamed])
        gone = {**record, "artifact": None}
        yield refused(f"{kind}_gone", CHECKSUM, [*whole[: place - 1], gone])
        if place > 1:
            entry = seal({**record["entry"], "system_id": OTHER_TENANT})
            moved = [*whole[: place - 1], {**record, "entry": entry}]
            yield refused(f"entry_{place}_renamed_to_another_tenant", SCHEMA, moved, documents_valid=True)
    for what in ("execution_log_entry", "tool_pin"):
        entry = seal({**whole[0]["entry"], "schema_id": f"tga/v1/{what}"})
        yield refused(f"entry_says_it_is_a_{what}", SCHEMA, [{**whole[0], "entry": entry}])
    entry = seal({**whole[0]["entry"], "artifact_type": "action_request"})
    yield refused("entry_of_a_traces_artifact", SCHEMA, [{**whole[0], "entry": entry}])
    for field in ("from_state", "to_state"):
        entry = seal({**whole[0]["entry"], field: "PENDING"})
        yield refused(f"entry_{field}_pending", SCHEMA, [{**whole[0], "entry": entry}])


def wrong_names() -> Iterator[Json]:
    """Sound in form, sealed and linked, but the name is not what it names."""
    yield refused("key_under_another_keys_id", CHECKSUM, stream_of(signing_key(key_id=key_of(2)[0])))
    yield refused("another_key_under_the_id", CHECKSUM, stream_of(signing_key(public_key=key_of(2)[1])))
    yield refused("key_under_a_free_name", CHECKSUM, stream_of(signing_key(key_id="adas-key")))
    swapped = stream_of(signing_key(1), signing_key(1, public_key=key_of(2)[1]))
    yield refused("key_replaced_under_its_id", CHECKSUM, swapped)
    yield refused("policy_under_another_digest", CHECKSUM, stream_of(policy_set(policy_digest=OTHER_DIGEST)))
    text = POLICY.replace("permit", "forbid")
    yield refused(
        "policy_text_not_of_its_digest",
        CHECKSUM,
        stream_of(policy_set(text=POLICY, policy_digest=hashlib.sha256(text.encode()).hexdigest())),
    )


def false_epochs() -> Iterator[Json]:
    """Well written, and not what the former log was."""
    wrong: dict[str, list[Step]] = {
        "epoch_that_counts_wrong": [log_epoch(leaves_lost=1)],
        "epoch_of_another_root_than_its_note": [log_epoch(former={"root": OTHER_DIGEST})],
        "epoch_of_another_size_than_its_note": [log_epoch(former={"size": 8}, leaves_lost=1)],
        "epoch_three_without_the_second": [log_epoch(3)],
        "epoch_told_twice": [log_epoch(), log_epoch()],
        "epoch_after_another_log": [log_epoch(origin="example.com/other/epoch-2"), log_epoch(3)],
    }
    for name, steps in wrong.items():
        yield refused(name, CHECKSUM, stream_of(*steps), at=len(steps))


def changed_documents() -> Iterator[Json]:
    documents = (
        signing_key(),
        policy_set(),
        tool_pin(),
        erasure(),
        log_epoch(),
        procedure(),
        schedule(),
        schedule_removal(),
    )
    for kind, artifact in documents:
        records = stream_of((kind, artifact))
        for change in itertools.chain(flipped_fields(artifact), other_members(artifact)):
            code = CHECKSUM if change.fits else SCHEMA
            yield refused(f"{kind}_{change.name}", code, [{**records[0], "artifact": change.document}])
        unfit = itertools.chain(
            misspelled_fields(artifact), dropped_fields(artifact), unknown_fields(artifact), nulled_fields(artifact)
        )
        for change in unfit:
            # Null says: it is a gateway's own key, the erased stream has no claim, every input is taken, or none given.
            if change.fits or change.name in ("principal_id_null", "claim_null", "input_schema_null", "input_null"):
                continue
            # Sealed again where that is possible, so that nothing but the schema can object.
            committed = resealed_digest(change.document) or records[0]["entry"]["artifact_digest"]
            entry = seal({**records[0]["entry"], "artifact_digest": committed})
            yield refused(f"{kind}_{change.name}", SCHEMA, [{"entry": entry, "artifact": change.document}])
    rules: dict[str, Step] = {
        "erasure_with_a_fold_that_is_null": erasure(payloads_digest=None),
        "pin_of_an_unknown_change": tool_pin(change="trusted"),
        "pin_with_its_definition_in_a_list": tool_pin(definition=[]),
        "key_of_another_algorithm": signing_key(algorithm="RSA"),
        "key_in_hex": signing_key(public_key="0" * 64),
        "key_without_padding": signing_key(public_key="A" * 43),
        "key_with_a_final_newline": signing_key(public_key="A" * 43 + "=\n"),
        "erasure_of_a_stream_without_kind": erasure(erased_stream=TRACE_ID),
        "erasure_of_a_kind_alone": erasure(erased_stream="trace:"),
        "erasure_of_entry_0": erasure(last_sequence_number=0),
        "erasure_of_1001_payloads": erasure(artifact_digests=[OTHER_DIGEST] * 1001),
        "erasure_with_a_claim_of_a_key_in_clear": erasure(claim={"key_digest": "invoice-1"}),
        "erasure_with_a_claim_without_its_payload": erasure(claim={"key_digest": OTHER_DIGEST}),
        "erasure_with_the_claims_salt": erasure(
            claim={"key_digest": OTHER_DIGEST, "payload_commitment": OTHER_DIGEST, "salt": OTHER_DIGEST}
        ),
        "procedure_with_a_source_that_is_null": procedure(program_source=None),
        "procedure_with_a_source_without_its_files": procedure(
            language="lua", program_source={"sha256": OTHER_DIGEST, "size_bytes": 12}
        ),
        "procedure_with_a_file_of_an_absolute_path": procedure(
            language="lua", program_source=program_source(name="/etc/passwd")
        ),
        "procedure_with_a_colon_in_its_name": procedure(name="crm:onboard"),
        "procedure_with_too_long_a_name": procedure(name="n" * 64),
        "procedure_in_a_language_of_two_words": procedure(language="visual basic"),
        "procedure_whose_input_schema_is_a_list": procedure(input_schema=[]),
        "procedure_with_too_many_triggers": procedure(triggers=[{"event": f"event-{n}"} for n in range(17)]),
        "procedure_with_too_many_tags": procedure(tags=[f"tag-{n}" for n in range(17)]),
        "schedule_of_a_cron_without_a_zone": schedule(spec={"type": "cron", "expression": "0 0 * * *"}),
        "schedule_of_an_interval_below_a_second": schedule(spec={"type": "interval", "every_ms": 999}),
        "schedule_of_both_kinds": schedule(spec={**schedule()[1]["spec"], "every_ms": 60_000}),
        "schedule_of_an_unknown_kind": schedule(spec={"type": "sun", "every_ms": 60_000}),
        "schedule_that_misses_some": schedule(missed="some"),
        "schedule_with_a_colon_in_its_name": schedule("nightly:1"),
        "epoch_that_is_the_first": log_epoch(1),
        "epoch_of_an_origin_with_a_plus": log_epoch(origin="example.org/log+2"),
        "epoch_with_too_long_a_note": log_epoch(former={"note": "n" * 8193}),
        "epoch_that_lost_less_than_nothing": log_epoch(leaves_lost=-1),
        "erasure_with_too_long_a_reason": erasure(rationale="r" * 4097),
    }
    for name, step in rules.items():
        yield refused(name, SCHEMA, stream_of(step))


def changed_entries() -> Iterator[Json]:
    whole = whole_stream()[:2]
    record = whole[1]
    for change in flipped_fields(record["entry"]):
        code = CHECKSUM if change.fits else SCHEMA
        if change.name == "sequence_number_flipped":
            code = GAP
        is_other = change.name == "system_id_flipped"
        records = [whole[0], {**record, "entry": change.document}]
        yield refused(f"entry_{change.name}", SCHEMA if is_other else code, records, documents_valid=is_other)
    entry = record["entry"]
    for change in itertools.chain(
        misspelled_fields(entry), dropped_fields(entry), unknown_fields(entry), nulled_fields(entry)
    ):
        resealed = change.document
        if "entry_digest" not in change.name and resealed_digest(change.document) is not None:
            resealed = seal(change.document)
        yield refused(f"entry_{change.name}", SCHEMA, [whole[0], {**record, "entry": resealed}])
    yield refused("entry_numbered_from_0", SCHEMA, append([], tool_pin(), sequence_number=0))


def system_vectors() -> Iterator[Json]:
    orders = (sound_streams, broken_orders, foreign_records, wrong_names, false_epochs)
    for part in (*orders, changed_documents, changed_entries):
        yield from part()
