"""The stand-alone verifier names the same check as everyone else when several fail: it is put to the golden vectors."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any

from app.core.canonical import canonical_bytes
from app.core.digest import digest_of
from tests.conformance.test_vectors import DOCUMENT, SCHEMAS
from tests.export.world import load_tool


def judged_alone(tool: Any, schemas: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The refusal, in the words of a vector's `expect`."""
    offered = {"schemas": schemas, "complete": True, "tenant": None, "counts": Counter()}
    wanted = inspect.signature(tool.Streams).parameters
    streams = tool.Streams(**{name: offered[name] for name in wanted})
    stream = f"trace:{records[0]['entry']['trace_id']}"
    for place, record in enumerate(records, start=1):
        body = {name: value for name, value in record["entry"].items() if name != "entry_digest"}
        try:
            streams.append(stream, body["sequence_number"], canonical_bytes(body), canonical_bytes(record["artifact"]))
        except tool.Wrong as wrong:
            return {"error": wrong.code, "at": place}
    return None


def test_it_refuses_every_vector_with_its_code() -> None:
    """But for those of schemas, which the bundle's tests have, and where bytes and digest differ: stored bytes that do
    not hash to their digest are not read (ADR 2), and an entry's digest is not in a bundle at all."""
    tool = load_tool()
    schemas = {path.name.partition(".")[0]: json.loads(path.read_text()) for path in Path(SCHEMAS).glob("*.json")}
    checked = 0
    for vector in DOCUMENT["log_vectors"]:
        expect, records = vector["expect"], vector["records"]
        if expect.get("error", "SCHEMA_VIOLATION") == "SCHEMA_VIOLATION":
            continue
        last = records[expect["at"] - 1]
        body = {name: value for name, value in last["entry"].items() if name != "entry_digest"}
        is_hashed = last["entry"]["entry_digest"] == digest_of(body)
        if is_hashed and last["entry"]["artifact_digest"] == digest_of(last["artifact"]):
            assert judged_alone(tool, schemas, records) == expect, vector["name"]
            checked += 1
    assert checked > 150
