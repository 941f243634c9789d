"""The gateway in memory answers as the real one: the same requests to both, and the same answers.

What the real gateway answered stands in recorded/, a file a scenario. One test asks a real gateway again and compares,
the other asks the one in memory. `TGA_RECORD=1` writes the files anew.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.world import RunsWorld, worlds
from tests.sdk.scenarios import LEASES_ARE_SHORT, SCENARIOS
from tests.sdk.transcripts import PRINCIPALS, Driver, Scenario, normalised
from tga_sdk.testing import MemoryGateway, Tool, ToolFailed

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


def bank() -> dict[str, Any]:
    """The tools of the tests' bank, as functions."""
    numbers = itertools.count(1)

    def charge(amount: int) -> dict[str, Any]:
        return {"charge_id": f"ch_{next(numbers)}", "amount": amount}

    def fail() -> None:
        said = {"error": "this tool always fails"}
        raise ToolFailed("the server answered 422 Unprocessable Entity", code="HTTP_422", output=said)

    def balance() -> dict[str, Any]:
        return {"balance": 0}

    return {
        "bank.charge": charge,
        "bank.fail": Tool(fail, read_only=True),
        "bank.balance": Tool(balance, read_only=True),
    }


async def transcript_of(scenario: Scenario, driver: Driver) -> list[Any]:
    async with driver:
        await scenario(driver)
    return normalised(driver.notes)


def lease_ms_of(scenario: Scenario) -> int:
    return 1_000 if scenario in LEASES_ARE_SHORT else 30_000


def recorded(scenario: Scenario) -> list[Any]:
    found: list[Any] = json.loads((RECORDED / f"{scenario.__name__}.json").read_text())
    return found


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for at, (ours, real) in enumerate(itertools.zip_longest(found, expected)):
        assert ours == real, f"answer {at + 1}"


@pytest.mark.parametrize("scenario", [*SCENARIOS, *LEASES_ARE_SHORT], ids=lambda scenario: scenario.__name__)
async def test_the_gateway_in_memory_answers_as_is_recorded(scenario: Scenario) -> None:
    memory = MemoryGateway(tools=bank(), lease_ms=lease_ms_of(scenario))
    found = await transcript_of(scenario, Driver(memory.url, PRINCIPALS, memory.transport, move=memory.clock.move_ms))
    assert_same(found, recorded(scenario))


async def test_the_real_gateway_answers_as_is_recorded(world: RunsWorld) -> None:
    """Scenarios at the same time, each with runs, procedures and a worker of its own."""
    for together in (SCENARIOS, LEASES_ARE_SHORT):
        gateway = await world.gateway(config=world.config(lease_ms=lease_ms_of(together[0])))
        drivers = [Driver(gateway.url, world.keys, worker=f"worker-{one.__name__}") for one in together]
        found = await asyncio.gather(*(transcript_of(*pair) for pair in zip(together, drivers, strict=True)))
        await gateway.kill()
        for scenario, transcript in zip(together, found, strict=True):
            if os.environ.get("TGA_RECORD"):
                RECORDED.mkdir(exist_ok=True)
                lines = ",\n".join(json.dumps(note, ensure_ascii=False) for note in transcript)
                (RECORDED / f"{scenario.__name__}.json").write_text(f"[\n{lines}\n]\n")
            assert_same(transcript, recorded(scenario))
