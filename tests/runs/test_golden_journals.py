"""Golden journals, which the SDK replays (tests/sdk/golden), are such as the gateway would have written: its own
documents take every record, and its fold comes to the same state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.domain.runs.documents import RUN_MODELS
from app.domain.runs.replay import Run
from tests.runs.journal import advance
from tests.traces import EXECUTOR

GOLDEN = Path(__file__).parent.parent / "sdk" / "golden"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_the_gateway_folds_a_golden_journal(path: Path) -> None:
    golden = json.loads(path.read_text())
    run: Run | None = None
    for record in golden["records"]:
        kind, recorded_at = record.pop("artifact_type"), record.pop("recorded_at")
        artifact = RUN_MODELS[kind].made_of(record)
        _, run = advance(run, artifact, executor_id=EXECUTOR, recorded_at=recorded_at)
    assert run is not None
    assert run.head.state in ("COMPLETED", "FAILED")
    assert run.state == golden["state"]


def test_there_are_golden_journals() -> None:
    assert len(list(GOLDEN.glob("*.json"))) >= 10
