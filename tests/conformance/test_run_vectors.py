"""The vectors of runs: the gateway's walk over them, the schemas, and the stand-alone verifier, each by itself."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from app.cli.bundle_files import DiskMemory
from app.core.canonical import canonical_bytes
from app.core.errors import BY_CODE
from app.domain.ledger.checks import Report
from app.domain.log.bundle import EntryLine
from app.domain.log.shares import forks_in
from app.domain.log.streams import BundleWalk
from app.domain.runs.transitions import RUN
from app.domain.runs.verification import stream_checks
from tests.conformance.test_vectors import VECTORS_FILE, check_vectors, fits

Json = dict[str, Any]
FILE = VECTORS_FILE.with_name("run_vectors.json")
DOCUMENT: Json = json.loads(FILE.read_text("utf-8"))
VECTORS: list[Json] = DOCUMENT["run_vectors"]
_ENTRY = {"run": "run_log_entry", "trace": "execution_log_entry", "system": "system_log_entry"}


def lines_of(vector: Json) -> list[EntryLine]:
    lines = []
    for index, record in enumerate(vector["records"]):
        body = {name: value for name, value in record["entry"].items() if name != "entry_digest"}
        lines.append(
            EntryLine(
                index,
                record["stream"],
                record["entry"]["sequence_number"],
                canonical_bytes(body),
                canonical_bytes(record["artifact"]),
            )
        )
    return lines


def judged(vector: Json) -> Json:
    """What the walk over a complete bundle says, in the words of a vector's `expect`."""
    kinds, lines = stream_checks(), lines_of(vector)
    places: dict[tuple[str, int], int] = {}
    with DiskMemory(kinds) as memory:
        walk = BundleWalk(kinds, Report(), memory, complete=True)
        for fork in forks_in((line.to_line() for line in lines), kinds):
            walk.note_origin(fork.origin)
        for place, line in enumerate(lines, start=1):
            places.setdefault((line.stream, line.sequence_number), place)
            for error in walk.judge(line):
                return {"error": error.code, "at": place}
        for error in walk.end_covered():
            return {"error": error.code, "at": places[str(error.stream), error.sequence_number or 0]}
        return {"ok": True, "states": {stream: at.head.state for stream, at in memory.all()}}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["name"]))
def test_a_journal_is_sound_or_refused_where_its_defect_is(vector: Json) -> None:
    assert judged(vector) == vector["expect"]


def test_the_schemas_refuse_exactly_what_violates_them() -> None:
    for vector in VECTORS:
        expect, records = vector["expect"], vector["records"]
        for place, record in enumerate(records, start=1):
            entry, artifact = record["entry"], record["artifact"]
            is_fit = fits(_ENTRY[record["stream"].partition(":")[0]], entry) and fits(entry["artifact_type"], artifact)
            if place == expect.get("at") and expect.get("error") == "SCHEMA_VIOLATION":
                # Some is beyond schemas: how deep an address may be, and whether an entry is of its stream.
                beyond = vector["name"] in ("too_deep", "too_many_branches", "entry_of_another_run")
                assert is_fit == beyond, vector["name"]
            elif place < expect.get("at", len(records) + 1):
                assert is_fit, vector["name"]


def test_every_transition_is_taken_and_every_other_one_tried() -> None:
    taken, tried = set(), set()
    for vector in VECTORS:
        states: dict[str, str] = {}
        for place, record in enumerate(vector["records"], start=1):
            entry, stream = record["entry"], record["stream"]
            if not stream.startswith("run:"):
                continue
            field = RUN.rule_of[entry["artifact_type"]].verdict_field
            verdict = "" if field is None else str(record["artifact"].get(field))
            step = (states.get(stream, RUN.birth_state), entry["artifact_type"], verdict, stream not in states)
            states[stream] = entry["to_state"]
            if place != vector["expect"].get("at"):
                taken.add((*step, entry["to_state"]))
            elif vector["expect"]["error"] == "STATE_INVALID_TRANSITION":
                tried.add(step)
    assert taken == {(*step, to_state) for step, to_state in RUN.next_state.items()}
    verdicts = {(step[1], step[2]) for step in RUN.next_state if not step[3]} | {("run_start", "")}
    everything = {(state, *of, False) for state in RUN.states for of in verdicts}
    assert everything - RUN.next_state.keys() <= tried


def test_the_header_counts_and_names_are_unique() -> None:
    found = Counter("negative" if "error" in vector["expect"] else "positive" for vector in VECTORS)
    assert dict(found) == DOCUMENT["counts"]
    assert found["negative"] > found["positive"]
    assert len({vector["name"] for vector in VECTORS}) == len(VECTORS)
    assert {vector["expect"]["error"] for vector in VECTORS if "error" in vector["expect"]} <= BY_CODE.keys()


def test_the_stand_alone_verifier_names_every_damaged_vector(tmp_path: Path) -> None:
    shutil.copy(VECTORS_FILE, tmp_path)
    document = json.loads(FILE.read_text("utf-8"))
    damaged = {vector["name"]: vector for vector in document["run_vectors"]}
    damaged["gap"]["expect"]["error"] = "RUN_POSITION_TAKEN"
    damaged["unasked_answer"]["expect"]["at"] = 1
    damaged["small"]["expect"]["states"]["run:r"] = "FAILED"
    damaged["tool_with_its_trace"]["records"][-1]["artifact"]["value"]["tool_effect_digest"] = "0" * 64
    (tmp_path / FILE.name).write_text(json.dumps(document), "utf-8")
    done = check_vectors(tmp_path / VECTORS_FILE.name, tmp_path)
    assert done.returncode == 1
    *lines, summary = done.stdout.splitlines()
    assert summary.endswith(" 4 failed")
    assert [line.split(": ")[1] for line in lines] == ["small", "tool_with_its_trace", "gap", "unasked_answer"]
