"""docs/worker-protocol.md says what is true: its messages are the gateway's own, its digest is what workers compute."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from pydantic import BaseModel

from app.domain.runs.documents import RunPolicy
from app.domain.runs.engine import messages
from app.domain.runs.procedures import ProcedureSaid
from tests.runs.worker import input_digest

TEXT = (Path(__file__).parents[2] / "docs" / "worker-protocol.md").read_text()
BLOCKS = re.findall(r"^```json (\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def message_of(name: str) -> Any:
    return ProcedureSaid if name == "ProcedureSaid" else getattr(messages, name)


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_a_message_is_what_the_gateway_takes_or_answers(name: str, block: str) -> None:
    said, message = json.loads(block), message_of(name)
    if issubclass(message, BaseModel):
        message.model_validate(said, strict=True)
        return
    told = {"traceparent"} if name == "LeasedRun" else set()  # of no run's record: it follows from the run's id
    assert set(said) == {one.name for one in fields(message)} | told
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
