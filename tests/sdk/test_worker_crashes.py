"""A worker of the SDK is killed or stopped at every boundary of a run: the run has the result that it has without, each
effect is once in the bank's own book, no recorded body runs again, and the ledger verifies.

Sampled with a seed that is printed; all in soak. TGA_SEED repeats a sample.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tests.runs.world import Caller, GatewayProcess, Process, RunsWorld, new_id, sampled, until
from tests.sdk.programs import RESULT, STATE
from tests.sdk.workers import sdk_working

NAMES = ("lease", "page", "put", "tool", "child", "suspend", "complete", "blob")
CUTS = [(f"{name}.{when}", 0) for name in NAMES if name != "page" for when in ("before", "answered")]
CUTS += [(f"body.{when}", number) for when in ("before", "done") for number in range(10)]
CUTS += [(f"put.{when}", number) for when in ("before", "answered") for number in range(1, 12)]
CUTS += [("tool.answered", 1), ("suspend.before", 1), ("suspend.answered", 1)]


@pytest.fixture(autouse=True)
def no_process_stays(world: RunsWorld) -> Iterator[None]:
    yield
    world.kill_processes()


async def verify_result(world: RunsWorld, caller: Caller, seen: dict[str, Any]) -> None:
    run_id = seen["run_id"]
    assert seen["state"] == "COMPLETED", (seen, await world.journal(run_id))
    assert seen["output"]["value"] == RESULT
    state = await caller.agent.ask("GET", f"/v1/runs/{run_id}/state")
    assert state["state"] == STATE
    assert sorted(world.executions(run_id).values()) == [1, 1], world.executions(run_id)
    ended = Counter(
        one["path"]
        for one in await world.journal(run_id)
        if one["artifact_type"] == "run_checkpoint" and one["outcome"] != "RETRY"
    )
    assert set(ended.values()) == {1}, ended


async def survives(world: RunsWorld, gateway: GatewayProcess, cut: tuple[str, int]) -> None:
    run_id = new_id("sdk")
    async with Caller(world, gateway.url) as caller:
        dying = await world.sdk_worker(gateway.url, die_at=cut)
        if dying.is_alive():
            await caller.start("sdk-everything", {"user": 7}, run_id)
        else:  # it dies when it asks for runs for the first time
            async with sdk_working(world, gateway.url):
                await caller.start("sdk-everything", {"user": 7}, run_id)
        seeing = asyncio.create_task(caller.see_through(run_id))
        try:
            await until(lambda: not dying.is_alive() or seeing.done())
            assert not dying.is_alive(), f"{cut} was not passed"
            async with sdk_working(world, gateway.url):
                await verify_result(world, caller, await seeing)
        except BaseException:
            print(cut, dying.log()[-3000:], gateway.log()[-2000:], await world.journal(run_id))
            raise


async def test_a_run_without_a_crash(world: RunsWorld) -> None:
    gateway = await world.gateway()
    run_id = new_id("sdk")
    async with sdk_working(world, gateway.url), Caller(world, gateway.url) as caller:
        await caller.start("sdk-everything", {"user": 7}, run_id)
        await verify_result(world, caller, await caller.see_through(run_id))
        await caller.start("sdk-blocking", 2, blocked := new_id("sdk"))
        seen = await caller.see_through(blocked)
        assert (seen["state"], seen["output"]["value"]) == ("COMPLETED", 2 + 6 + 3 + 2), seen
    await world.verify_all_is_well()
    await gateway.kill()


async def test_a_worker_killed_at_any_boundary(world: RunsWorld) -> None:
    gateway = await world.gateway(config=world.config(lease_ms=2_000))
    async with sdk_working(world, gateway.url):
        pass  # its programs are registered
    for cut in sampled(CUTS, 3, is_soak=IS_SOAK):
        await survives(world, gateway, cut)
    await world.verify_all_is_well()
    await gateway.kill()


async def test_replay_executes_nothing_recorded(world: RunsWorld) -> None:
    """Two workers are killed one after the other; the bodies that the third runs are those not recorded before."""
    gateway = await world.gateway(config=world.config(lease_ms=5_000))
    run_id = new_id("sdk")
    async with Caller(world, gateway.url) as caller:
        first = await world.sdk_worker(gateway.url, die_at=("body.done", 3))
        await caller.start("sdk-steps", 8, run_id)
        await until(lambda: not first.is_alive())
        recorded = [one["path"] for one in await world.journal(run_id) if one["artifact_type"] == "run_checkpoint"]
        assert recorded == ["1", "2", "3"]
        second = await world.sdk_worker(gateway.url, die_at=("put.answered", 1))
        await until(lambda: not second.is_alive())
        third = await world.sdk_worker(gateway.url)
        seen = await caller.see_through(run_id)
        assert seen["output"]["value"] == sum(range(8))
    assert [bodies(first), bodies(second), bodies(third)] == [["1", "2", "3", "4"], ["4", "5"], ["6", "7", "8"]]
    await gateway.kill()


async def test_stop_passes_except_exception(world: RunsWorld) -> None:
    """A worker whose run was cancelled meanwhile gets STOP, through a program that catches every Exception."""
    gateway = await world.gateway(config=world.config(lease_ms=60_000))
    run_id = new_id("sdk")
    async with Caller(world, gateway.url) as caller:
        zombie = await world.sdk_worker(gateway.url, stop_at=("body.before", 3))
        await caller.start("sdk-stubborn", None, run_id)
        await until(zombie.is_stopped)
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {"rationale": "enough"})
        before = len(await world.journal(run_id))
        zombie.signal(signal.SIGCONT)
        await until(lambda: f"run {run_id}: attempt 1 ended: STOP" in zombie.log() or not zombie.is_alive())
        assert zombie.is_alive()
        assert len(await world.journal(run_id)) == before
    await gateway.kill()


async def test_a_zombie_runs_no_body_and_its_tool_call_does_not_leave(world: RunsWorld) -> None:
    gateway = await world.gateway(config=world.config(lease_ms=2_000))
    run_id = new_id("sdk")
    async with Caller(world, gateway.url) as caller:
        zombie = await world.sdk_worker(gateway.url, stop_at=("tool.before", 0))
        await caller.start("sdk-everything", {"user": 7}, run_id)
        await until(zombie.is_stopped)
        async with sdk_working(world, gateway.url):
            seeing = asyncio.create_task(caller.see_through(run_id))
            await until(lambda: sum(world.executions(run_id).values()) >= 1)
            had = bodies(zombie)
            zombie.signal(signal.SIGCONT)
            await until(lambda: f"run {run_id}: attempt 1 ended: STOP" in zombie.log())
            await zombie.kill()
            await verify_result(world, caller, await seeing)
        assert bodies(zombie) == had
    await world.verify_all_is_well()
    await gateway.kill()


async def test_branches_go_on_while_another_waits(world: RunsWorld) -> None:
    """Also after branches of their own have ended: only when nothing can go on the run is left."""
    gateway = await world.gateway()
    run_id = new_id("sdk")
    async with sdk_working(world, gateway.url), Caller(world, gateway.url) as caller:
        await caller.start("sdk-inner-gather", None, run_id)

        async def is_past() -> bool:
            return any(one.get("name") == "after" for one in await world.journal(run_id))

        await until(is_past)
        assert [one["kind"] for one in (await caller.look(run_id))["awaits"]] == ["ask"]
        assert (await caller.see_through(run_id))["output"]["value"] == [True, "after"]
    await gateway.kill()


async def test_a_run_that_is_taken_away_frees_its_slot_though_a_branch_waits(world: RunsWorld) -> None:
    gateway = await world.gateway()
    run_id = new_id("sdk")
    async with sdk_working(world, gateway.url, slots=1) as worker, Caller(world, gateway.url) as caller:
        await caller.start("sdk-half-waits", None, run_id)
        await until(lambda: len(worker._running) == 1)
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {"rationale": "enough"})
        await until(lambda: not worker._running)
        await caller.start("sdk-steps", 2, following := new_id("sdk"))
        assert (await caller.see_through(following))["output"]["value"] == 1
    await gateway.kill()


async def test_a_gateway_that_is_killed_is_outlived(world: RunsWorld) -> None:
    first = await world.gateway()
    second = await world.gateway()
    run_id = new_id("sdk")
    async with sdk_working(world, first.url, second.url), Caller(world, second.url) as caller:
        await caller.start("sdk-everything", {"user": 7}, run_id)
        await until(lambda: sum(world.executions(run_id).values()) >= 1)
        await first.kill()
        await verify_result(world, caller, await caller.see_through(run_id))
    await world.verify_all_is_well()
    await second.kill()


async def test_a_worker_that_is_asked_to_end_gives_its_runs_back(world: RunsWorld) -> None:
    """SIGTERM in the middle of a body: the body ends and is recorded, the run is released, another worker goes on."""
    gateway = await world.gateway(config=world.config(lease_ms=30_000))
    run_id = new_id("sdk")
    async with Caller(world, gateway.url) as caller:
        ending = await world.sdk_worker(gateway.url)
        await caller.start("sdk-steps", 300, run_id)
        await until(lambda: len(bodies(ending)) > 3)
        ending.signal(signal.SIGTERM)
        await until(lambda: not ending.is_alive())
        journal = await world.journal(run_id)
        assert [one["change"] for one in journal if one["artifact_type"] == "run_attempt"] == ["LEASED", "RELEASED"]
        recorded = [one["path"] for one in journal if one["artifact_type"] == "run_checkpoint"]
        assert recorded == bodies(ending)
        async with sdk_working(world, gateway.url):
            seen = await caller.see_through(run_id)
        assert seen["output"]["value"] == sum(range(300))
    await gateway.kill()


def bodies(worker: Process) -> list[str]:
    return [line["body"] for line in worker.said() if "body" in line]
