"""A run from its start to its end, through a real gateway, PostgreSQL and a tool server, with a worker of no SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runs.world import Caller, RunsWorld, new_id, working, worlds


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


RESULT = {
    "results": [
        "begun",
        ["first", ["amount", "charge_id"]],
        [["amount", "charge_id"], True, "slept"],
        "once",
        "again",
        "gone",
        ["amount", "charge_id"],
    ],
    "log": ["first", "outer", "a", "b", "c"],
    "given": {"user": 7},
}


async def test_a_program_with_everything_in_it_ends_with_its_result(world: RunsWorld) -> None:
    gateway = await world.gateway()
    run_id = new_id()
    async with working(world, gateway.url) as worker, Caller(world, gateway.url) as caller:
        await caller.start("everything", {"user": 7}, run_id)
        seen = await caller.see_through(run_id)
    assert seen["state"] == "COMPLETED"
    assert seen["output"]["value"] == RESULT
    bodies = [path for run, path, _ in worker.bodies if run == run_id]
    assert sorted(set(bodies) - {"5"}) == sorted(path for path in bodies if path != "5"), "a recorded body ran again"
    assert list(world.executions(run_id).values()) == [1, 1]
    await world.verify_all_is_well()
    await gateway.kill()
