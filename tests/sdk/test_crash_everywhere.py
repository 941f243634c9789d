"""crash_everywhere: the SDK survives it over procedures of every sort, and it finds what is planted."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tests.sdk import procedures_under_test as under_test
from tests.sdk.procedures_under_test import Order
from tga_sdk.testing import Boundary, CrashFound, ScriptedPeople, crash_everywhere, crash_everywhere_async

SHARE = 0.35  # of the boundaries, outside of soak
SOUND: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "steps": (under_test.steps, Order(amount=4, items=["a", "b"]), {}),
    "tools": (under_test.tools, Order(amount=4), {}),
    "waits": (under_test.waits, None, {"people": under_test.people}),
    "branches": (under_test.branches, None, {"people": lambda: ScriptedPeople().answer("ship", True, after=30)}),
    "family": (under_test.family, Order(amount=5), {"also": [under_test.kid]}),
    "once": (under_test.once, None, {}),
    "draws": (under_test.draws, None, {}),
    "fails": (under_test.fails, None, {}),
    "large": (under_test.large, None, {}),
}
RESULTS: dict[str, Any] = {
    "steps": {"log": ["outer", "A", "B", "end"], "total": 5},
    "tools": [{"amount": 4}, {"amount": 4}, 3, "MCP_TOOL_ERROR", "TOOL_NOT_FOUND"],
    "waits": [True, "blue", 3, "TIMEOUT", False, 5],
    "branches": [True, {"amount": 1}, "slept", ["asked", "paid", "slept"]],
    "family": [10, 10, 2, 4],
    "once": "told computed",
    "draws": [True, True, 36, True],
    "large": 50_005,
}


def seed() -> int:
    chosen = int(os.environ.get("TGA_SEED") or random.randrange(1_000_000))
    print(f"TGA_SEED={chosen}")
    return chosen


@pytest.mark.parametrize("name", SOUND)
async def test_no_crash_changes_a_sound_procedure(name: str) -> None:
    procedure, given, options = SOUND[name]
    chance = random.Random(seed())
    options["ignore"] = lambda boundary: not IS_SOAK and chance.random() > SHARE
    tried = await crash_everywhere_async(procedure, given, tools=under_test.TOOLS, **options)
    if name == "fails":
        assert tried.calm.state == "FAILED"
    else:
        assert tried.calm.output["value"] == RESULTS[name]
    if IS_SOAK:
        assert {boundary.fault for boundary in tried.boundaries} >= {"before", "after", "lost", "stop"}


def ignored(boundary: Boundary) -> bool:
    """Before anything is recorded a crash only has the run begin anew."""
    return boundary.fault in ("before", "lost") or (boundary.what == "the lease of the run" and boundary.number == 0)


@pytest.mark.parametrize(
    ("procedure", "told"),
    [
        (under_test.clocked, "ended DIVERGED: at 1 .* the journal has tool bank.charge with another input"),
        (under_test.counted, "ended DIVERGED: at 1 "),
        (under_test.chanced, "the result is"),
        (under_test.swallowing, "went on after it was told to stop"),
    ],
    ids=["clocked", "counted", "chanced", "swallowing"],
)
def test_a_mistake_is_found_with_its_boundary(procedure: Any, told: str) -> None:
    with pytest.raises(CrashFound, match=told) as found:
        crash_everywhere(procedure, tools=under_test.TOOLS, ignore=ignored)
    assert str(found.value.boundary) in str(found.value)
    assert found.value.boundary.what.startswith(("the put of", "step", "the lease"))


def test_a_body_that_is_not_idempotent_is_found_by_what_is_observed() -> None:
    with pytest.raises(CrashFound, match=r"observed: \['mail', 'mail'\] instead of \['mail'\]") as found:
        crash_everywhere(under_test.mailing, observe=under_test.SENT.copy, reset=under_test.SENT.clear)
    assert found.value.boundary.fault == "body.after"


def test_a_question_that_nobody_answers_is_told() -> None:
    with pytest.raises(AssertionError, match="waits for ask 'ship', and nobody answers"):
        crash_everywhere(under_test.waits)
