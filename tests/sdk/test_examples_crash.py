"""Every example with a crash at every boundary of its run: the same result, and each effect once."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tga_sdk.procedures import procedure_of
from tga_sdk.testing import ScriptedPeople, ToolFailed, crash_everywhere_async, needs_approval

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARE = 0.3  # of the boundaries, outside of soak


def example(name: str) -> Any:
    """The example's module, as a worker loads it."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def charge(amount: int) -> dict[str, Any]:
    return {"charge_id": f"ch_{amount}", "amount": amount}


def refund(amount: int) -> dict[str, Any]:
    return {"refund_id": f"rf_{amount}", "amount": amount}


def fail(status: int) -> None:
    raise ToolFailed(f"the bank says {status}")


def balance() -> dict[str, int]:
    return {"balance": 30}


TOOLS: dict[str, Any] = {
    "bank.charge": charge,
    "bank.refund": needs_approval(refund),
    "bank.fail": fail,
    "bank.balance": balance,
}
GIVEN: dict[str, tuple[str, Any, list[tuple[str, int]]]] = {
    "order": ("order", {"number": 7, "amount": 250}, [("charge", 250)]),
    "pipeline": ("pipeline", {"pages": 2}, []),
    "nightly": ("nightly", {"fee": 2}, [("charge", 2), ("balance", 0)]),
    "saga": (
        "trip",
        {"flight": 300, "hotel": 200},
        [("charge", 300), ("charge", 200), ("refund", 200), ("refund", 300)],
    ),
    "invoices": ("month", [120, 80], []),
    "research_agent": ("research", "What is tea?", [("charge", 5)]),
}


@pytest.mark.parametrize("name", GIVEN)
async def test_a_crash_anywhere_makes_no_difference(name: str) -> None:
    attribute, given, expected = GIVEN[name]
    seed = int(os.environ.get("TGA_SEED") or random.randrange(1_000_000))
    print(f"TGA_SEED={seed}")
    chance = random.Random(seed)
    tried = await crash_everywhere_async(
        procedure_of(getattr(example(name), attribute)),  # the gateway in memory has no schedules
        given,
        tools=TOOLS,
        people=lambda: ScriptedPeople({"approve": True}).decide("bank.refund", approve=True),
        ignore=lambda boundary: not IS_SOAK and chance.random() > SHARE,
        result=(lambda output: None) if name == "nightly" else None,  # its report says the day
    )
    assert tried.calm.state == "COMPLETED", tried.calm.error
    assert tried.boundaries
    done = [(one.tool.rpartition(".")[2], one.arguments.get("amount", 0)) for one in tried.calm.effects]
    assert [one for one in done if one[0] != "fail"] == expected
