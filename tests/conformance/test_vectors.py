"""Every conformance vector, judged three times: by the JSON Schemas, by this implementation, and by a second one.

The vectors come of tools/generate.py; their expected codes were reasoned there, not recorded from this code.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from app.core.digest import Digest
from app.core.errors import BY_CODE, RecoveryFailed, TgaError
from app.domain.ledger.records import Record
from app.domain.system.documents import SYSTEM_MODELS, SystemLogEntry
from app.domain.system.log import SystemState, fold_next
from app.domain.tga.documents import ARTIFACT_MODELS, ExecutionLogEntry
from app.domain.tga.execution_state import ExecutionCheckpoint, ExecutionState
from app.domain.tga.replay import Dispatch, LogRecord, decide_next, fold, verify_checkpoint
from app.domain.tga.transitions import TRACE

ROOT = Path(__file__).resolve().parents[2]
VECTORS_FILE = ROOT / "test_vectors" / "tga" / "state_transition_vectors.json"
SCHEMAS = ROOT / "schemas" / "tga" / "v1"
DOCUMENT: dict[str, Any] = json.loads(VECTORS_FILE.read_text("utf-8"))
SECTIONS = ("log_vectors", "recovery_vectors", "checkpoint_vectors", "system_vectors")

Json = dict[str, Any]


def by_name(*sections: str, without: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """One test per vector, named as it is; `without` leaves out those that expect these codes, "" the sound ones."""
    everything = [vector for section in sections for vector in DOCUMENT[section]]
    vectors = [vector for vector in everything if vector["expect"].get("error", "") not in without]
    return pytest.mark.parametrize("vector", vectors, ids=[vector["name"] for vector in vectors])


@cache
def validators() -> dict[str, Draft202012Validator]:
    schemas = [json.loads(path.read_text("utf-8")) for path in sorted(SCHEMAS.glob("*.schema.json"))]
    resources: list[tuple[str, Resource[Any]]] = [(s["$id"], Resource.from_contents(s)) for s in schemas]
    registry: Registry[Any] = Registry().with_resources(resources)
    return {s["$id"].rpartition(":")[2]: Draft202012Validator(s, registry=registry) for s in schemas}


def fits(name: str, document: object) -> bool:
    return validators()[name].is_valid(document)


def record_fits(record: Json, *, of: str = "execution_log_entry") -> bool:
    entry, artifact = record["entry"], record["artifact"]
    return fits(of, entry) and (artifact is None or fits(entry["artifact_type"], artifact))


def load_record(record: Json) -> LogRecord:
    entry = ExecutionLogEntry.from_json(record["entry"])
    if record["artifact"] is None:
        return LogRecord(entry, None)
    return LogRecord(entry, ARTIFACT_MODELS[entry.artifact_type].from_json(record["artifact"]))


def judge_records(
    records: list[Json], state: ExecutionState | None = None
) -> tuple[ExecutionState | None, Json | None]:
    """The folded state, and the refusal if there is one, in the words of a vector's `expect`."""
    for place, record in enumerate(records, start=1):
        try:
            state = fold([load_record(record)], start=state)
        except TgaError as error:
            return state, {"error": error.code, "at": place}
    return state, None


def judge_checkpoint(vector: Json) -> tuple[ExecutionState | None, Json | None]:
    entry = vector["entry"]
    try:
        checkpoint = ExecutionCheckpoint.from_json(vector["checkpoint"])
        verify_checkpoint(checkpoint, entry=None if entry is None else ExecutionLogEntry.from_json(entry))
    except TgaError as error:
        return None, {"error": error.code, "at": 0}
    return judge_records(vector["tail"], checkpoint.checkpoint_state)


def judge_system(records: list[Json]) -> tuple[SystemState | None, Json | None]:
    state: SystemState | None = None
    for place, record in enumerate(records, start=1):
        try:
            entry = SystemLogEntry.from_json(record["entry"])
            artifact = record["artifact"]
            document = None if artifact is None else SYSTEM_MODELS[entry.artifact_type].from_json(artifact)
            state = fold_next(state or SystemState(entry.system_id), Record(entry, document))
        except TgaError as error:
            return state, {"error": error.code, "at": place}
    return state, None


def told(state: SystemState | None) -> Json:
    """What counts after a system stream's last entry, in the words of a vector's `expect`."""
    state = state or SystemState("none")
    return {
        "pins": [
            {
                "server_id": server_id,
                "tool_name": tool_name,
                "definition_digest": pin.definition_digest,
                "quarantined_digests": sorted(pin.quarantined_digests),
            }
            for (server_id, tool_name), pin in sorted(state.pins.items())
        ],
        "keys": [
            {"key_id": key_id, "principal_id": known.principal_id, "is_retired": known.is_retired}
            for key_id, known in sorted(state.keys.items())
        ],
        "policy_digest": state.policy_digest,
        "procedures": {
            name: [{"version": version, "program_digest": program} for version, program in programs]
            for name, programs in state.procedures.items()
        },
        "schedules": {name: schedule.sequence_number for name, schedule in state.schedules.items()},
    }


def expected_refusal(vector: Json) -> Json | None:
    expect = vector["expect"]
    return {"error": expect["error"], "at": expect["at"]} if "error" in expect else None


def decided_recovery(state: ExecutionState, *, claim_effect: str | None) -> Json:
    action = decide_next(state, claim_effect=None if claim_effect is None else Digest(claim_effect))
    if isinstance(action, Dispatch):
        return {"action": "dispatch", "tool_call_id": action.tool_call_id, "idempotency_key": action.idempotency_key}
    return {"action": action}


# --- the file itself ---


def test_negative_vectors_outnumber_positive_ones_as_the_header_counts() -> None:
    found = Counter("negative" if "error" in v["expect"] else "positive" for s in SECTIONS for v in DOCUMENT[s])
    assert dict(found) == DOCUMENT["counts"]
    assert found["negative"] > found["positive"]


def test_no_two_vectors_share_a_name() -> None:
    names = Counter(vector["name"] for section in SECTIONS for vector in DOCUMENT[section])
    assert [name for name, count in names.items() if count > 1] == []


def test_expected_codes_are_stable_codes() -> None:
    codes = {v["expect"]["error"] for s in SECTIONS for v in DOCUMENT[s] if "error" in v["expect"]}
    assert codes <= BY_CODE.keys()


def test_every_transition_of_the_table_is_taken_and_every_other_one_tried() -> None:
    """A transition added to the table without a vector is found here."""
    taken, tried = set(), set()
    for vector in DOCUMENT["log_vectors"]:
        if vector["expect"].get("error", "STATE_INVALID_TRANSITION") != "STATE_INVALID_TRANSITION":
            continue
        state = None
        for place, record in enumerate(vector["records"], start=1):
            entry, artifact = record["entry"], record["artifact"]
            verdict = artifact.get("decision") or artifact.get("outcome") or ""
            step = (state or TRACE.birth_state, entry["artifact_type"], verdict, state is None)
            if place == vector["expect"].get("at"):
                tried.add(step)
            else:
                taken.add((*step, entry["to_state"]))
            state = entry["to_state"]
    assert taken == {(*step, to_state) for step, to_state in TRACE.next_state.items()}
    verdicts = {"action_request": ("",), "supervisor_decision": ("APPROVE", "DENY"), "tool_call": ("",)}
    verdicts["tool_effect"] = ("SUCCESS", "FAILURE")
    pairs = {(state, of, by, False) for state in TRACE.states for of in verdicts for by in verdicts[of]}
    assert pairs - TRACE.next_state.keys() <= tried


# --- the schemas ---


@by_name("log_vectors", "recovery_vectors")
def test_the_schemas_refuse_exactly_the_records_that_violate_them(vector: Json) -> None:
    expect, records = vector["expect"], vector["records"]
    at = expect.get("at", len(records) + 1)
    assert all(record_fits(record) for record in records[: at - 1])
    if "error" in expect:
        is_fit = expect["error"] != "SCHEMA_VIOLATION" or expect.get("documents_valid", False)
        assert record_fits(records[at - 1]) is is_fit


@by_name("checkpoint_vectors")
def test_the_schemas_refuse_exactly_the_checkpoints_that_violate_them(vector: Json) -> None:
    expect = vector["expect"]
    is_unfit = (expect.get("error"), expect.get("at")) == ("SCHEMA_VIOLATION", 0)
    assert fits("execution_checkpoint", vector["checkpoint"]) is not is_unfit
    assert all(record_fits(record) for record in vector["tail"])
    assert vector["entry"] is None or fits("execution_log_entry", vector["entry"])


@by_name("system_vectors")
def test_the_schemas_refuse_exactly_the_system_records_that_violate_them(vector: Json) -> None:
    expect, records = vector["expect"], vector["records"]
    at = expect.get("at", len(records) + 1)
    assert all(record_fits(record, of="system_log_entry") for record in records[: at - 1])
    if "error" in expect:
        is_fit = expect["error"] != "SCHEMA_VIOLATION" or expect.get("documents_valid", False)
        assert record_fits(records[at - 1], of="system_log_entry") is is_fit


# --- this implementation ---


@by_name("log_vectors")
def test_a_log_folds_to_its_state_or_is_refused_where_its_defect_is(vector: Json) -> None:
    state, refusal = judge_records(vector["records"])
    assert refusal == expected_refusal(vector)
    if refusal is None:
        found = None if state is None else state.to_json()
        assert found == vector["expect"]["execution_state"]
        assert found is None or fits("execution_state", found)
        assert fold(load_record(record) for record in vector["records"]) == state


# An unfit document is no record, and need not have a number to name.
@by_name("log_vectors", without=("", "SCHEMA_VIOLATION"))
def test_fold_names_the_place_of_the_entry_it_refuses(vector: Json) -> None:
    expect = vector["expect"]
    entry = vector["records"][expect["at"] - 1]["entry"]
    with pytest.raises(BY_CODE[expect["error"]]) as caught:
        fold([load_record(record) for record in vector["records"]])
    assert caught.value.sequence_number == expect["at"]  # where it would stand, whatever number it claims
    assert caught.value.stream == f"trace:{entry['trace_id']}"


@by_name("recovery_vectors")
def test_recovery_dispatches_only_what_has_no_effect(vector: Json) -> None:
    state, refusal = judge_records(vector["records"])
    if refusal is None:
        assert state is not None
        try:
            decided = {"ok": True, "state": state.state}
            decided |= decided_recovery(state, claim_effect=vector["claim_effect"])
        except RecoveryFailed as error:
            refusal = {"error": error.code, "at": len(vector["records"])}
        else:
            assert decided == vector["expect"]
    assert refusal == expected_refusal(vector)


@by_name("checkpoint_vectors")
def test_a_checkpoint_with_its_tail_folds_as_the_whole_log_or_is_refused(vector: Json) -> None:
    state, refusal = judge_checkpoint(vector)
    assert refusal == expected_refusal(vector)
    if refusal is None:
        assert state is not None
        assert state.to_json() == vector["expect"]["execution_state"]


@by_name("system_vectors")
def test_a_system_stream_folds_to_what_counts_or_is_refused_where_its_defect_is(vector: Json) -> None:
    state, refusal = judge_system(vector["records"])
    assert refusal == expected_refusal(vector)
    if refusal is None:
        assert told(state) == vector["expect"]["system_state"]


# --- the second implementation ---


def check_vectors(vectors: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Isolated (-I) and without site-packages (-S), in a directory that holds nothing: only the stdlib is there."""
    script = ROOT / "tools" / "check_vectors.py"
    command = [sys.executable, "-I", "-S", str(script), str(vectors), "--schemas", str(SCHEMAS)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_a_second_implementation_agrees_on_every_vector(tmp_path: Path) -> None:
    done = check_vectors(VECTORS_FILE, tmp_path)
    total = sum(len(DOCUMENT[section]) for section in SECTIONS)
    total += len(json.loads(VECTORS_FILE.with_name("run_vectors.json").read_text("utf-8"))["run_vectors"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{total} passed, 0 failed\n"


def test_the_second_implementation_cannot_import_this_one(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", "import app"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "ModuleNotFoundError" in done.stderr


def _first(section: str, name: str, document: Json) -> Json:
    return next(vector for vector in document[section] if vector["name"] == name)


def _another_code(document: Json) -> str:
    _first("log_vectors", "gap_of_one", document)["expect"]["error"] = "STATE_CHECKSUM_MISMATCH"
    return "gap_of_one"


def _another_place(document: Json) -> str:
    _first("log_vectors", "second_entry_missing", document)["expect"]["at"] = 3
    return "second_entry_missing"


def _damaged_argument(document: Json) -> str:
    records = _first("log_vectors", "float_arguments", document)["records"]
    records[0]["artifact"]["arguments"]["tenth"] = 0.2
    return "float_arguments"


def _another_state(document: Json) -> str:
    _first("log_vectors", "write_failed", document)["expect"]["execution_state"]["tool_effect_digest"] = "0" * 64
    return "write_failed"


def _dispatch_in_spite_of_an_effect(document: Json) -> str:
    _first("recovery_vectors", "recover_write_executing", document)["claim_effect"] = "0" * 64
    return "recover_write_executing"


def _missing_entry(document: Json) -> str:
    _first("checkpoint_vectors", "checkpoint_write_executing", document)["entry"] = None
    return "checkpoint_write_executing"


def _another_key_retired(document: Json) -> str:
    _first("system_vectors", "system_key_retired", document)["expect"]["system_state"]["keys"][0]["is_retired"] ^= True
    return "system_key_retired"


def _renamed_policy(document: Json) -> str:
    _first("system_vectors", "system_begins_with_policy_set", document)["records"][0]["artifact"]["text"] += " "
    return "system_begins_with_policy_set"


def _vector_left_out(document: Json) -> str:
    del document["log_vectors"][-1]
    return "counts"


def test_the_second_implementation_names_every_damaged_vector(tmp_path: Path) -> None:
    damages = (
        _another_code,
        _another_place,
        _damaged_argument,
        _another_state,
        _dispatch_in_spite_of_an_effect,
        _missing_entry,
        _another_key_retired,
        _renamed_policy,
        _vector_left_out,
    )
    document = json.loads(VECTORS_FILE.read_text("utf-8"))
    names = [damage(document) for damage in damages]
    copy = tmp_path / "vectors.json"
    copy.write_text(json.dumps(document), "utf-8")
    done = check_vectors(copy, tmp_path)
    assert done.returncode == 1
    *lines, summary = done.stdout.splitlines()
    assert summary.endswith(f" {len(damages)} failed")
    assert sorted(name for name in names for line in lines if f"{name}:" in line) == sorted(names)


# --- the generator ---

GENERATED = (
    "app/postgres/expected_schema.json",
    "docs/errors.md",
    "docs/lint.md",
    "docs/lint-lua.md",
    "docs/metrics.md",
    "docs/state-machine-of-runs.md",
    "docs/state-machine.md",
    "test_vectors/tga/run_vectors.json",
    "test_vectors/tga/state_transition_vectors.json",
    "tools/verify.py",
)


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_no_generated_file_is_stale() -> None:
    done = generate("--check")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_check_names_each_stale_file_and_writes_nothing(tmp_path: Path) -> None:
    for name in GENERATED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert generate("--check", "--root", str(tmp_path)).returncode == 0
    for name in GENERATED:
        (tmp_path / name).unlink()
    # All but the first are missing now; the first differs by a byte at its end.
    changed = tmp_path / GENERATED[0]
    changed.write_bytes((ROOT / GENERATED[0]).read_bytes() + b"\n")
    done = generate("--check", "--root", str(tmp_path))
    assert done.returncode == 1
    assert [line.split()[1].rstrip(";") for line in done.stdout.splitlines()] == list(GENERATED)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [changed.name]


def test_generating_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    assert generate("--root", str(tmp_path)).returncode == 0
    for name in GENERATED:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes()
    assert generate("--root", str(tmp_path)).stdout == ""
