"""Golden journals and run_twice: a program that does something else than it did is found before it is deployed.

The files in golden/ are read by tests/runs/test_golden_journals.py, too: the gateway's own fold must take every record.
`python -m tests.sdk.test_replays` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sdk import procedures_under_test as under_test
from tests.sdk.procedures_under_test import Order
from tests.sdk.test_crash_everywhere import SOUND
from tga_sdk.testing import NotTheSame, record_golden, replay_golden, replay_golden_async, run_twice

GOLDEN = Path(__file__).parent / "golden"
REPLAYED = ["steps", "tools", "waits", "branches", "family", "once", "draws", "fails", "large"]


@pytest.mark.parametrize("name", REPLAYED)
async def test_a_golden_journal_is_replayed(name: str) -> None:
    procedure, _, options = SOUND[name]
    found = await replay_golden_async(procedure, GOLDEN / f"{name}.json", also=options.get("also", ()))
    assert found.state == ("FAILED" if name == "fails" else "COMPLETED")


def test_a_golden_journal_of_another_program_diverges() -> None:
    path = GOLDEN / "renamed.json"
    assert replay_golden(under_test.before_the_deploy, path).state == "COMPLETED"
    told = r"DIVERGED: at 2 \(.*under_test.py:\d+\) the journal has tool bank.charge, .* performs tool bank.slow"
    with pytest.raises(NotTheSame, match=told):
        replay_golden(under_test.after_the_deploy, path)


def test_a_program_that_performs_more_than_is_recorded_is_found(tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "renamed.json").read_text())
    golden["records"] = [one for one in golden["records"] if one.get("path") != "2"]
    golden["records"][-1]["positions"] = 1
    (tmp_path / "cut.json").write_text(json.dumps(golden))
    with pytest.raises(NotTheSame, match=r"it performs tool 'bank.charge' at 2, which is not recorded"):
        replay_golden(under_test.before_the_deploy, tmp_path / "cut.json")


def test_run_twice_finds_nothing_in_a_sound_procedure() -> None:
    assert run_twice(under_test.tools, Order(amount=4), tools=under_test.TOOLS).state == "COMPLETED"
    assert run_twice(under_test.draws, tools=under_test.TOOLS).state == "COMPLETED"


@pytest.mark.parametrize(
    ("procedure", "told"),
    [
        (under_test.clocked, "the journal has tool bank.charge with another input"),
        (under_test.chanced, "the result is"),
        (under_test.sets, "with PYTHONHASHSEED=.*, in another process"),
    ],
    ids=["clocked", "chanced", "sets"],
)
def test_run_twice(procedure: Any, told: str) -> None:
    with pytest.raises(NotTheSame, match=told):
        run_twice(procedure, tools=under_test.TOOLS, hash_seeds=["1", "2", "3"])


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in REPLAYED:
        procedure, given, options = SOUND[name]
        record_golden(procedure, given, GOLDEN / f"{name}.json", tools=under_test.TOOLS, **options)
    record_golden(under_test.before_the_deploy, Order(amount=7), GOLDEN / "renamed.json", tools=under_test.TOOLS)


if __name__ == "__main__":
    main()
