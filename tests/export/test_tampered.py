"""Whatever is changed in a bundle, with its manifest made to fit, is found; and both verifiers say the same of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.canonical import canonical_bytes
from app.core.digest import digest_of_bytes
from app.core.note import VerifierKey
from app.domain.log.bundle import ENTRIES, HEADS, KEYS, FileFacts, Filter
from tests.export.by_hand import write_by_hand
from tests.export.changing import change_line, change_manifest, lines_of, refit, write_lines
from tests.export.handmade_ledger import LOG_KEY, VERIFIER, Ledger, key_document
from tests.export.world import Finding, Verdict, World, copied, judge, judge_alone, small_ledger
from tests.traces import action_request, completed_trace, records_of, supervisor_decision, trace_id

Change = Callable[[Path], None]
OTHER_ROOT = f"\n{'A' * 43}=\n"


def _edited(text: str, **fields: Any) -> str:
    return canonical_bytes({**json.loads(text), **fields}).decode()


def _place(folder: Path, artifact_type: str, *, skip: int = 0) -> int:
    """The line of the n-th entry that commits to such an artifact and has it."""
    wanted = f'"artifact_type":"{artifact_type}"'
    found = [i for i, line in enumerate(lines_of(folder, ENTRIES)) if wanted in line["entry"] and line["artifact"]]
    return found[skip]


def edit_entry(artifact_type: str, **fields: Any) -> Change:
    return lambda folder: void(_edit(folder, _place(folder, artifact_type), "entry", fields))


def edit_artifact(artifact_type: str, **fields: Any) -> Change:
    """The entry is made to commit to it: only what the artifact says is wrong, and the tree."""

    def change(folder: Path) -> None:
        place = _place(folder, artifact_type)
        line = _edit(folder, place, "artifact", fields)
        digest = digest_of_bytes(line["artifact"].encode())
        _edit(folder, place, "entry", {"artifact_digest": digest})

    return change


def _edit(folder: Path, place: int, field: str, fields: dict[str, Any]) -> dict[str, Any]:
    return change_line(folder, ENTRIES, place, lambda line: _edited(line[field], **fields), field=field)


def change_lines(name: str, change: Callable[[list[dict[str, Any]]], object]) -> Change:
    def changed(folder: Path) -> None:
        lines = lines_of(folder, name)
        change(lines)
        write_lines(folder, name, lines)

    return changed


def set_field(name: str, place: int, field: str, value: Any) -> Change:
    return lambda folder: void(change_line(folder, name, place, lambda _: value, field=field))


def void(_: object) -> None:
    return None


def replace_text(name: str, old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
        refit(folder, name)

    return change


def _swap(lines: list[dict[str, Any]]) -> None:
    lines[4], lines[5] = lines[5], lines[4]


def _erase_without_saying(folder: Path) -> None:
    stream = lines_of(folder, ENTRIES)[_place(folder, "tool_effect")]["stream"]
    lines = lines_of(folder, ENTRIES)
    for line in lines:
        if line["stream"] == stream:
            line["artifact"] = None
    write_lines(folder, ENTRIES, lines)


def _name_a_file_outside(folder: Path) -> None:
    """One that is there, and is what the manifest says."""
    (folder.parent / "outside.json").write_text("{}")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    change_manifest(folder, files={**files, "../outside.json": asdict(FileFacts.of(b"{}"))})


# By name: what is done to a complete bundle, and the codes that are found.
COMPLETE: dict[str, tuple[Change, set[str]]] = {
    "entry_changed": (
        edit_entry("tool_call", recorded_at="2026-01-01T00:00:09.000Z"),
        {"PROOF_INVALID", "STATE_CHECKSUM_MISMATCH"},
    ),
    "entry_not_canonical": (
        lambda folder: void(change_line(folder, ENTRIES, 5, lambda line: line["entry"] + " ", field="entry")),
        {"SCHEMA_VIOLATION", "PROOF_INVALID"},
    ),
    "entry_repeats_a_key": (
        lambda folder: void(
            change_line(folder, ENTRIES, 5, lambda line: '{"a":1,"a":1,' + line["entry"][1:], field="entry")
        ),
        {"INPUT_MALFORMED", "PROOF_INVALID"},
    ),
    "entry_with_an_unsafe_number": (
        edit_entry("tool_call", sequence_number=0),
        {"SCHEMA_VIOLATION", "PROOF_INVALID"},
    ),
    "entry_of_another_stream": (
        edit_entry("tool_call", trace_id="01980000-0000-7000-8000-000000000000"),
        {"SCHEMA_VIOLATION", "PROOF_INVALID"},
    ),
    "entry_skips_a_number": (edit_entry("tool_call", sequence_number=7), {"STATE_SEQUENCE_GAP", "PROOF_INVALID"}),
    "entry_links_elsewhere": (
        edit_entry("tool_call", prev_entry_digest="ab" * 32),
        {"STATE_CHECKSUM_MISMATCH", "PROOF_INVALID"},
    ),
    "entry_takes_another_transition": (
        edit_entry("tool_call", to_state="COMPLETED"),
        {"STATE_INVALID_TRANSITION", "PROOF_INVALID"},
    ),
    "artifact_changed": (
        lambda folder: void(_edit(folder, _place(folder, "tool_effect"), "artifact", {"outcome": "FAILURE"})),
        {"STATE_CHECKSUM_MISMATCH"},
    ),
    "artifact_of_another_call": (
        edit_artifact("tool_call", arguments={"title": "another"}),
        {"STATE_CHECKSUM_MISMATCH", "PROOF_INVALID"},
    ),
    "artifact_bound_elsewhere": (
        edit_artifact("tool_effect", tool_call_digest="cd" * 32),
        {"STATE_CHECKSUM_MISMATCH", "PROOF_INVALID"},
    ),
    "artifact_does_not_fit_its_schema": (
        edit_artifact("tool_effect", outcome="MAYBE"),
        {"SCHEMA_VIOLATION", "PROOF_INVALID"},
    ),
    "artifact_breaks_a_rule_between_fields": (
        edit_artifact("tool_effect", error={"code": "x", "message": "y"}),
        {"SCHEMA_VIOLATION", "PROOF_INVALID"},
    ),
    "a_key_under_another_name": (
        edit_artifact("signing_key", key_id="ed25519:0000000000000000"),
        {"STATE_CHECKSUM_MISMATCH", "SIGNATURE_INVALID", "PROOF_INVALID", "STATE_RECOVERY_FAILED"},
    ),
    "an_erasure_of_something_else": (
        edit_artifact("erasure", last_sequence_number=2),
        {"STATE_RECOVERY_FAILED", "PROOF_INVALID"},
    ),
    "an_erasure_of_other_payloads": (
        edit_artifact("erasure", artifact_digests=["ab" * 32]),
        {"STATE_RECOVERY_FAILED", "PROOF_INVALID"},
    ),
    "an_erasure_of_nothing": (
        edit_artifact("erasure", erased_stream="trace:nothing"),
        {"STATE_RECOVERY_FAILED", "PROOF_INVALID"},
    ),
    "payloads_missing": (_erase_without_saying, {"STATE_RECOVERY_FAILED"}),
    "a_line_removed": (
        change_lines(ENTRIES, lambda lines: lines.pop(9)),
        {"STATE_SEQUENCE_GAP"},
    ),
    "the_tail_removed": (change_lines(ENTRIES, lambda lines: lines.pop()), {"STATE_SEQUENCE_GAP"}),
    "a_line_twice": (change_lines(ENTRIES, lambda lines: lines.insert(9, lines[9])), {"STATE_SEQUENCE_GAP"}),
    "lines_swapped": (change_lines(ENTRIES, _swap), {"STATE_SEQUENCE_GAP"}),
    "a_line_of_another_kind": (set_field(ENTRIES, 9, "stream", "run:1"), {"SCHEMA_VIOLATION", "STATE_SEQUENCE_GAP"}),
    "a_trace_after_the_head": (set_field(ENTRIES, -1, "leaf_index", None), {"STATE_SEQUENCE_GAP"}),
    "a_line_that_is_no_json": (
        replace_text(ENTRIES, '{"leaf_index":', '{"leaf_index"'),
        {"BUNDLE_INVALID", "STATE_SEQUENCE_GAP"},
    ),
    **{
        f"a_leaf_index_that_is_{name}": (
            set_field(ENTRIES, 1, "leaf_index", value),
            {"BUNDLE_INVALID", "STATE_SEQUENCE_GAP", "STATE_RECOVERY_FAILED"},
        )
        for name, value in {"true": True, "a_float": 1.0, "a_string": "1", "negative": -1, "a_list": [1]}.items()
    },
    **{
        f"a_sequence_number_that_is_{name}": (
            set_field(ENTRIES, 0, "sequence_number", value),
            {"BUNDLE_INVALID", "STATE_SEQUENCE_GAP", "STATE_RECOVERY_FAILED"},
        )
        for name, value in {"true": True, "a_float": 1.0, "a_string": "1", "nothing": 0}.items()
    },
    "an_older_head_with_another_root": (
        lambda folder: void(
            change_line(
                folder, HEADS, 0, lambda line: re.sub(r"\n.{43}=\n", f"\n{'A' * 43}=\n", line["note"]), field="note"
            )
        ),
        {"NOTE_INVALID"},
    ),
    "the_last_head_removed": (change_lines(HEADS, lambda lines: lines.pop()), {"BUNDLE_INVALID"}),
    "the_heads_swapped": (change_lines(HEADS, lambda lines: lines.reverse()), {"BUNDLE_INVALID"}),
    "a_signature_changed": (
        lambda folder: void(
            change_line(folder, HEADS, 1, lambda line: line["note"][:-12] + "AAAAAAA" + line["note"][-5:], field="note")
        ),
        {"NOTE_INVALID"},
    ),
    "the_tree_claimed_smaller": (
        lambda folder: change_manifest(folder, tree={"size": 5, "root": "A" * 43 + "="}),
        {"BUNDLE_INVALID", "STATE_SEQUENCE_GAP"},
    ),
    "another_origin": (lambda folder: change_manifest(folder, origin="example.org/other"), {"BUNDLE_INVALID"}),
    "another_format": (lambda folder: change_manifest(folder, format="tga-bundle/2"), {"BUNDLE_INVALID"}),
    "a_way_out_of_the_folder": (_name_a_file_outside, {"BUNDLE_INVALID"}),
    "no_manifest": (lambda folder: (folder / "manifest.json").unlink(), {"BUNDLE_INVALID"}),
    "a_file_changed_after_the_export": (
        lambda folder: void((folder / KEYS).write_text((folder / KEYS).read_text() + " ")),
        {"BUNDLE_INVALID"},
    ),
    "entries_changed_after_the_export": (
        lambda folder: void((folder / ENTRIES).write_text((folder / ENTRIES).read_text().replace(":", ": ", 1))),
        {"BUNDLE_INVALID"},
    ),
}
PARTIAL: dict[str, tuple[Change, set[str]]] = {
    "entry_changed": COMPLETE["entry_changed"],
    "a_proof_of_another_entry": (
        lambda folder: void(
            change_line(folder, ENTRIES, 3, lambda _: lines_of(folder, ENTRIES)[8]["proof"], field="proof")
        ),
        {"PROOF_INVALID"},
    ),
    "a_proof_too_short": (
        lambda folder: void(change_line(folder, ENTRIES, 3, lambda line: line["proof"][:-1], field="proof")),
        {"PROOF_INVALID"},
    ),
    "no_proof": (change_lines(ENTRIES, lambda lines: lines[3].pop("proof")), {"PROOF_INVALID"}),
    "a_leaf_beyond_the_tree": (set_field(ENTRIES, -1, "leaf_index", 10_000), {"PROOF_INVALID"}),
    "lines_swapped": (change_lines(ENTRIES, _swap), {"STATE_SEQUENCE_GAP"}),
    "heads_without_proof": (change_lines(HEADS, lambda lines: lines[1].pop("proof")), {"PROOF_INVALID"}),
    "a_consistency_proof_too_short": (set_field(HEADS, 1, "proof", []), {"PROOF_INVALID"}),
    "a_consistency_proof_of_another_tree": (
        lambda folder: void(
            change_line(folder, HEADS, 1, lambda line: ["A" * 43 + "=", *line["proof"][1:]], field="proof")
        ),
        {"PROOF_INVALID"},
    ),
}


# No entry rests on an older head than the last: tools/verify.py says that it does not look at them.
LEFT_TO_THE_COMMAND = {
    "an_older_head_with_another_root",
    "heads_without_proof",
    "a_consistency_proof_too_short",
    "a_consistency_proof_of_another_tree",
}


async def _exported(world: World, tmp_path: Path, wanted: Filter) -> Path:
    await small_ledger(world)
    await world.export(tmp_path / "whole", wanted)
    assert judge(tmp_path / "whole", world.verifier_key).findings == []
    return tmp_path / "whole"


async def test_whatever_is_changed_in_a_complete_bundle_is_found_by_both(world: World, tmp_path: Path) -> None:
    whole = await _exported(world, tmp_path, Filter())
    _drill(COMPLETE, whole, world, tmp_path)


async def test_whatever_is_changed_in_a_partial_bundle_is_found_by_both(world: World, tmp_path: Path) -> None:
    whole = await _exported(world, tmp_path, Filter(tenant="default"))
    _drill(PARTIAL, whole, world, tmp_path)


def _comparable(verdict: Verdict, whole: Path) -> list[Finding]:
    """In a complete bundle a wrong root is of no entry in particular: one names the last before the head, one none."""
    is_complete = json.loads((whole / "manifest.json").read_text())["complete"]
    rooted = ("PROOF_INVALID", "LOG_FORKED") if is_complete else ()
    found = [(code, None, None) if code in rooted else (code, stream, n) for code, stream, n in verdict.findings]
    return sorted(found, key=str)


def _drill(changes: dict[str, tuple[Change, set[str]]], whole: Path, world: World, tmp_path: Path) -> None:
    wrong = []
    for name, (change, codes) in changes.items():
        folder = copied(whole, tmp_path / name)
        change(folder)
        ours, theirs = judge(folder, world.verifier_key), judge_alone(folder, world.verifier_key)
        is_found = bool(ours.codes) and set(ours.codes) <= codes
        expected = _comparable(ours, whole) if name not in LEFT_TO_THE_COMMAND else []
        if not is_found or expected != _comparable(theirs, whole) or ours.after_head != theirs.after_head:
            wrong.append((name, ours.findings, theirs.findings))
    assert wrong == []


async def test_a_decision_that_nobody_signed_is_found(world: World, tmp_path: Path) -> None:
    """Before it is a leaf, so that tree and chain are right and only the signature is not."""
    await world.announce()
    other = World(world.database, world.sessions, world.store, world.keys, person=Ed25519PrivateKey.generate())
    await world.append(other.signed_trace(3))  # a key that no system stream announced
    mallory = world.signed_trace(6)
    await world.append(mallory)
    await world.sequence()
    await world.export(tmp_path / "bundle")
    found = judge(tmp_path / "bundle", world.verifier_key)
    assert found.findings == [("SIGNATURE_INVALID", f"trace:{trace_id(3)}", 2)]
    assert judge_alone(tmp_path / "bundle", world.verifier_key).findings == found.findings


async def test_the_bundle_s_own_key_counts_for_nothing(world: World, tmp_path: Path) -> None:
    await small_ledger(world)
    await world.export(tmp_path / "bundle")
    stranger = World(world.database, world.sessions, world.store, tmp_path / "strangers-keys").verifier_key
    assert judge(tmp_path / "bundle", stranger).codes == ["NOTE_INVALID"]
    assert judge_alone(tmp_path / "bundle", stranger).codes == ["NOTE_INVALID"]


async def test_a_decision_with_a_signature_over_something_else_is_found(world: World, tmp_path: Path) -> None:
    await world.announce()
    request = action_request(3)
    decision = world.signed(supervisor_decision(request, decided_by={"type": "person", "id": "alice"}))
    changed = decision.model_copy(update={"rationale": "what alice never said"})
    await world.append(records_of(request, changed))
    await world.sequence()
    await world.export(tmp_path / "bundle")
    found = judge(tmp_path / "bundle", world.verifier_key)
    assert found.findings == [("SIGNATURE_INVALID", f"trace:{trace_id(3)}", 2)]
    assert judge_alone(tmp_path / "bundle", world.verifier_key).findings == found.findings


async def test_a_key_of_another_principal_signs_for_nobody_else(world: World, tmp_path: Path) -> None:
    await world.announce()
    request = action_request(3)
    decision = world.signed(supervisor_decision(request, decided_by={"type": "person", "id": "bob"}))
    await world.append(records_of(request, decision))
    await world.sequence()
    await world.export(tmp_path / "bundle")
    found = judge(tmp_path / "bundle", world.verifier_key)
    assert found.findings == [("SIGNATURE_INVALID", f"trace:{trace_id(3)}", 2)]
    assert judge_alone(tmp_path / "bundle", world.verifier_key).findings == found.findings


async def test_a_payload_that_was_erased_may_not_stand(world: World, tmp_path: Path) -> None:
    await world.announce()
    await world.fill(3, 1)
    await world.sequence()
    await world.export(tmp_path / "before")
    await world.erase(3)
    await world.sequence()
    await world.export(tmp_path / "after")
    assert judge(tmp_path / "after", world.verifier_key).findings == []
    known = {line["leaf_index"]: line["artifact"] for line in lines_of(tmp_path / "before", ENTRIES)}
    lines = lines_of(tmp_path / "after", ENTRIES)
    for line in lines:
        line["artifact"] = line["artifact"] or known[line["leaf_index"]]
    write_lines(tmp_path / "after", ENTRIES, lines)
    found = judge(tmp_path / "after", world.verifier_key)
    assert [(code, stream) for code, stream, _ in found.findings] == [("STATE_RECOVERY_FAILED", "system:default")]
    assert judge_alone(tmp_path / "after", world.verifier_key).findings == found.findings


def test_a_second_call_with_the_key_of_an_erased_trace_is_found(tmp_path: Path) -> None:
    """The erasure says which key it was."""
    made = Ledger()
    made.system(key_document(LOG_KEY, None))
    first, second = (completed_trace(n, idempotency_key="one-key") for n in (1, 2))
    made.traces(first)
    made.erase(1)
    made.sign()
    for is_second in (False, True):
        folder = tmp_path / str(is_second)
        if is_second:
            made.traces(second)
            made.sign()
        for name, raw in made.bundle().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(raw)
        found = [("STATE_RECOVERY_FAILED", "system:default", 2), ("STATE_RECOVERY_FAILED", f"trace:{trace_id(1)}", 4)]
        for verdict in (judge(folder, VERIFIER), judge_alone(folder, VERIFIER)):
            assert verdict.findings == (found if is_second else [])


def test_two_traces_that_made_a_call_with_one_key_are_found(tmp_path: Path) -> None:
    """The database would not let them; a bundle might."""
    key = Ed25519PrivateKey.generate()
    verifier = VerifierKey("example.org/twice", key.public_key().public_bytes_raw())
    write_by_hand(tmp_path / "bundle", key, verifier, traces=3, idempotency_key="one-key")
    found = judge(tmp_path / "bundle", verifier)
    assert found.findings == [("STATE_RECOVERY_FAILED", f"trace:{trace_id(n)}", 3) for n in (1, 2)]
    assert judge_alone(tmp_path / "bundle", verifier).findings == found.findings
