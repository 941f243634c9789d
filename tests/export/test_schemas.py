"""A bundle's schemas are the verifier's own, or it is a finding: nobody is judged by rules that they brought along."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.cli.bundle_files import own_schemas
from app.core.canonical import canonical_bytes
from app.core.note import VerifierKey
from app.domain.log.bundle import MANIFEST, SCHEMAS
from app.domain.tga.documents import SupervisorDecision
from tests.export.by_hand import write_by_hand
from tests.export.changing import refit
from tests.export.world import TOOL, copied, judge, judge_alone
from tests.traces import completed_trace, trace_id

KEY = Ed25519PrivateKey.generate()
VERIFIER = VerifierKey("example.org/schemas", KEY.public_key().public_bytes_raw())
DECISION = SCHEMAS + "supervisor_decision.schema.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schemas") / "bundle"
    write_by_hand(folder, KEY, VERIFIER, traces=2)
    assert judge(folder, VERIFIER).is_sound
    assert judge_alone(folder, VERIFIER).is_sound
    return folder


def permit(folder: Path) -> None:
    (folder / DECISION).write_text(json.dumps({"$id": "urn:tga:schema:v1:supervisor_decision", "type": "object"}))
    refit(folder, DECISION)


def with_pattern(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        schema = json.loads((folder / DECISION).read_text())
        schema["$defs"]["name"]["pattern"] = pattern
        (folder / DECISION).write_text(json.dumps(schema))
        refit(folder, DECISION)

    return change


def respell(folder: Path) -> None:
    """The same schema, written in another way."""
    (folder / DECISION).write_text(json.dumps(json.loads((folder / DECISION).read_text())))
    refit(folder, DECISION)


def remove(folder: Path) -> None:
    (folder / DECISION).unlink()
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"][DECISION]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def add(folder: Path) -> None:
    (folder / SCHEMAS / "permission.schema.json").write_text("{}")
    refit(folder, SCHEMAS + "permission.schema.json")


def exchange(folder: Path) -> None:
    other = SCHEMAS + "tool_call.schema.json"
    one, two = (folder / DECISION).read_bytes(), (folder / other).read_bytes()
    (folder / DECISION).write_bytes(two)
    (folder / other).write_bytes(one)
    refit(folder, DECISION, other)


CHANGES = {
    "permissive": permit,
    "a_pattern_that_never_ends": with_pattern(r"^(([!-~]+)+)+$X"),
    "spelled_otherwise": respell,
    "one_removed": remove,
    "one_added": add,
    "two_exchanged": exchange,
}


@pytest.mark.parametrize("name", CHANGES)
def test_schemas_that_are_not_the_verifier_s_are_a_finding(whole: Path, tmp_path: Path, name: str) -> None:
    folder = copied(whole, tmp_path / "bundle")
    CHANGES[name](folder)
    for verdict in (judge(folder, VERIFIER), judge_alone(folder, VERIFIER)):
        assert verdict.findings
        assert set(verdict.codes) == {"BUNDLE_INVALID"}


def test_a_pattern_that_never_ends_takes_no_time(whole: Path, tmp_path: Path) -> None:
    """As an auditor runs it, with five seconds of processor time and no more."""
    folder = copied(whole, tmp_path / "bundle")
    with_pattern(r"^(([!-~]+)+)+$X")(folder)
    ended = subprocess.run(
        [sys.executable, "-I", str(TOOL), str(folder), VERIFIER.to_text(), "--json"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (5, 5)),
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    assert json.loads(ended.stdout)["sound"] is False


@pytest.mark.parametrize("is_permitted", [False, True], ids=["own_schemas", "permissive_schemas"])
def test_a_decision_by_a_god_is_never_sound(tmp_path: Path, is_permitted: bool) -> None:
    """Covered, chained and signed by the log's own key: only the schema knows that there is no such thing."""
    records = completed_trace(1)
    decision = records[1].artifact
    assert isinstance(decision, SupervisorDecision)
    god = canonical_bytes({**decision.to_json(), "decided_by": {"type": "god", "id": "god"}})
    folder = tmp_path / "bundle"
    write_by_hand(folder, KEY, VERIFIER, traces=2, artifacts={(f"trace:{trace_id(1)}", 2): god})
    if is_permitted:
        permit(folder)
    ours, theirs = judge(folder, VERIFIER), judge_alone(folder, VERIFIER)
    assert ("SCHEMA_VIOLATION", f"trace:{trace_id(1)}", 2) in ours.findings
    if is_permitted:
        assert theirs.codes == ["BUNDLE_INVALID"]
    else:
        assert theirs.findings == ours.findings


def test_the_verifier_s_own_patterns_take_linear_time() -> None:
    """Strings that make a pattern try every way: the longest that fit no line, many times over."""
    patterns = {found for raw in own_schemas().values() for found in _patterns(json.loads(raw))}
    assert len(patterns) > 5
    for pattern in patterns:
        for text in ("a" * 500_000 + "\n", "a:" * 250_000 + " ", "0" * 500_000, "-0" * 250_000, "! " * 250_000 + "\t"):
            began = time.process_time()
            re.search(re.sub(r"\$$", r"\\Z", pattern), text)
            assert time.process_time() - began < 1, pattern


def _patterns(schema: Any) -> Iterator[str]:
    for name, rule in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if name == "pattern" and isinstance(rule, str):
            yield rule
        elif isinstance(rule, dict | list):
            yield from _patterns(rule)


def test_the_stand_alone_verifier_is_one_short_file_that_begins_with_its_theory() -> None:
    text = TOOL.read_text()
    assert text.count("\n") < 750
    theory = text.split('"""')[1]
    assert "Theory." in theory
    assert all(f"\n {step}. " in theory for step in range(1, 8))
    assert "Left to `tga verify" in theory
    assert not re.search(r"^(from|import) app\b", text, re.MULTILINE)
