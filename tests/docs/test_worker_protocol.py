"""docs/worker-protocol.md says what is true: its messages are the gateway's own, its digest is what workers compute."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import rfc8785
from pydantic import BaseModel

from app.domain.runs.documents import RunAnswer, RunPolicy
from app.domain.runs.engine import messages
from app.domain.runs.procedures import ProcedureSaid
from app.domain.tga.documents import Base64Output, DigestOutput, JsonOutput
from tests.runs.worker import input_digest

TEXT = (Path(__file__).parents[2] / "docs" / "worker-protocol.md").read_text()
BLOCKS = re.findall(r"^```json (\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def message_of(name: str) -> Any:
    elsewhere: dict[str, Any] = {"ProcedureSaid": ProcedureSaid, "RunAnswer": RunAnswer}
    return elsewhere[name] if name in elsewhere else getattr(messages, name)


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_a_message_is_what_the_gateway_takes_or_answers(name: str, block: str) -> None:
    said, message = json.loads(block), message_of(name)
    if name == "RunAnswer":  # what the artifact says, with its place in the journal, and the tool's output
        JsonOutput.model_validate(said.pop("joined"), strict=True)
        for place in ("sequence_number", "artifact_type", "artifact_digest", "recorded_at"):
            said.pop(place)
        said |= {"schema_id": "tga/v1/run_answer", "schema_version": "1.0"}
    if issubclass(message, BaseModel):
        message.model_validate(said, strict=True)
        return
    told = {"traceparent"} if name == "LeasedRun" else set()  # of no run's record: it follows from the run's id
    kept = {"effects"} if name == "PutAnswer" else set()  # they stand in `news`, as `joined`
    assert set(said) == {one.name for one in fields(message)} - kept | told
    if name == "LeasedRun":
        RunPolicy.model_validate(said["policy"])


def test_every_message_has_an_example() -> None:
    shown = {name for name, _ in BLOCKS}
    whole = json.dumps([json.loads(block) for name, block in BLOCKS if name == "PutRequest"])
    assert {"ProcedureSaid", "LeaseRequest", "LeasedRun", "PutRequest", "PutAnswer", "BeatRequest"} <= shown
    for kind in ("checkpoint", "ask", "sleep", "signal", "step", "tool", "suspend"):
        assert f'"type": "{kind}"' in whole
    for then in ("child", "complete", "fail", "diverge", "release"):
        assert f"Then{then.capitalize()}" in shown


def test_the_digest_is_what_a_worker_computes() -> None:
    match = re.search(r"^```text digest\n(.*)\n([0-9a-f]{64})\n```$", TEXT, re.MULTILINE)
    assert match is not None
    written, digest = match.groups()
    salt = bytes.fromhex("00112233445566778899aabbccddeeff")
    given, around = json.loads(written)
    assert rfc8785.dumps([given, around]).decode() == written
    assert input_digest(salt, given, around) == digest


def test_directives_reasons_and_types_are_all_told() -> None:
    for word in ("CONTINUE", "SUSPENDED", "DONE", "STOP", "LEASE_LOST", "CANCELLED", "ENDED"):
        assert f"`{word}`" in TEXT
    for then in ("tool", "child", "suspend", "complete", "fail", "diverge", "release"):
        assert f"| `{then}` |" in TEXT


def test_what_is_joined_to_an_answer_is_told_by_every_encoding() -> None:
    """Who writes a worker from the page alone reads the output of a tool where it stands."""
    for output in (JsonOutput, Base64Output, DigestOutput):
        encoding = get_args(output.model_fields["encoding"].annotation)[0]
        told = re.search(rf'`\{{"encoding": "{encoding}"((?:, "\w+")*)\}}`', TEXT)
        assert told is not None, encoding
        assert set(re.findall(r'"(\w+)"', told[1])) | {"encoding"} == set(output.model_fields)
