"""The public conformance suite against /mcp/fixture: its own tools in an upstream, and the gateway in between."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.world import World
from tests.mcp.conformance.suite import Checks, checks_of, doorman, installed
from tests.mcp.served import LEGACY, MODERN, mcp_world

EXPECTED = Path(__file__).parent / "expected_failures.toml"
TASKS = ["tasks-capability-negotiation", "tasks-dispatch-and-envelope", "tasks-lifecycle", "tasks-request-headers"]
TASKS += ["tasks-request-state-removal", "tasks-wire-fields"]
RUNS: list[tuple[str, tuple[str, ...]]] = [(LEGACY, ("--suite", "all")), (MODERN, ("--suite", "all"))]
RUNS += [(MODERN, ("--scenario", scenario, "--force")) for scenario in TASKS]
# So many scenarios there are at least: a run that found none would hold every line.
SCENARIOS_MIN = {LEGACY: 30, MODERN: 38}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    installed()
    with mcp_world("[mcp]\ntask_after_ms = 300\n") as made:
        made.start()
        yield made


def expected(version: str, scenarios: set[str]) -> set[str]:
    listed = [line for entry in tomllib.loads(EXPECTED.read_text())["expected"] for line in entry["checks"]]
    assert len(listed) == len(set(listed))
    return {line for line in listed if line.split()[0] == version and line.split()[1] in scenarios}


def failing(version: str, found: dict[str, Checks]) -> dict[str, str]:
    return {
        f"{version} {scenario} {check}": message
        for scenario, checks in found.items()
        for check, (status, message) in checks.items()
        if status == "FAILURE"
    }


@pytest.mark.parametrize(("version", "options"), RUNS, ids=lambda value: "-".join(value) if value else "")
@pytest.mark.one_in(2)
async def test_what_the_suite_finds_wrong_is_what_is_listed_with_a_reason(
    world: World, tmp_path: Path, version: str, options: tuple[str, ...]
) -> None:
    async with doorman(world.url, str(world.admin_key())) as url:
        found = await checks_of(f"{url}/mcp/fixture", version, tmp_path, *options)
    if "--suite" in options:
        assert len(found) >= SCENARIOS_MIN[version], sorted(found)
    wrong = failing(version, found)
    assert set(wrong) == expected(version, set(found)), wrong
    assert any(status == "SUCCESS" for checks in found.values() for status, _ in checks.values())
