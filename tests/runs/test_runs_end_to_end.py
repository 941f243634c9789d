"""A run from its start to its end, through a real gateway, PostgreSQL and a tool server, with a worker of no SDK."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import time
from dataclasses import fields
from statistics import median
from typing import Any

import pytest

from app.domain.runs.engine.messages import LeasedRun
from tests.conftest import IS_SOAK
from tests.runs.programs import PROGRAMS
from tests.runs.restoring import tga
from tests.runs.worker import Attempt, Refused, Worker, inline
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, until, working

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


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> GatewayProcess:
    return asyncio.run(world.gateway(config=world.config(lease_ms=2_000)))


def of(journal: list[dict[str, Any]], artifact_type: str) -> list[dict[str, Any]]:
    return [one for one in journal if one["artifact_type"] == artifact_type]


async def test_replay_executes_nothing_recorded(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Cached results are returned, and the first operation that has not ended executes."""
    run_id = new_id()
    async with Caller(world, gateway.url) as caller:
        async with working(world, gateway.url) as first:
            await caller.start("asks", None, run_id)
            await until(lambda: first.ended == [(run_id, "SUSPENDED")])
        assert await caller.answer(run_id, "2", True)
        async with working(world, gateway.url) as second:
            seen = await caller.see_through(run_id)
    assert seen["output"]["value"] == ["before", True, "after"]
    assert [path for _, path, _ in first.bodies] == ["1"]
    assert [path for _, path, _ in second.bodies] == ["3"]


async def test_a_waiting_run_holds_nothing(world: RunsWorld, gateway: GatewayProcess) -> None:
    """No owner, no worker, nothing due; and any worker resumes it."""
    run_id = new_id()
    async with Caller(world, gateway.url) as caller:
        async with working(world, gateway.url) as first:
            await caller.start("asks", None, run_id)
            await until(lambda: first.ended == [(run_id, "SUSPENDED")])
        rows = await world.fetch(
            "SELECT h.owner, h.state, h.waiting, r.worker, r.due_at FROM tga.heads h"
            " JOIN tga.runs r ON r.stream_no = h.stream_no WHERE h.stream = $1",
            f"run:{run_id}",
        )
        assert tuple(rows[0]) == (None, "WAITING", "person", None, None)
        await caller.answer(run_id, "2", True)
        async with working(world, gateway.url):
            await caller.see_through(run_id)


async def test_any_worker_resumes(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Each wait ends on another worker; together they come to the one result."""
    run_id = new_id()
    two = working(world, gateway.url), working(world, gateway.url)
    async with Caller(world, gateway.url) as caller, two[0], two[1]:
        await caller.start("everything", {"user": 7}, run_id)
        seen = await caller.see_through(run_id)
    assert seen["output"]["value"] == RESULT
    assert seen["attempt"] > 1


async def test_unknown_run(world: RunsWorld, gateway: GatewayProcess) -> None:
    async with world.client("worker", gateway.url) as client:
        body = {"lease": "x" * 32, "attempt": 1, "after_seq": 0}
        for method, path, sent in (
            ("POST", "/v1/runs/nobody/checkpoints", body),
            ("GET", "/v1/runs/nobody/checkpoints", None),
        ):
            status, problem = await client.once(method, path, sent)
            assert (status, problem["code"]) == (404, "RUN_NOT_FOUND")


async def test_identical_calls_have_their_own_addresses(world: RunsWorld, gateway: GatewayProcess) -> None:
    """A loop that calls one tool with the same arguments: each call is made, once, under a key of its own."""
    run_id = new_id()
    async with working(world, gateway.url), Caller(world, gateway.url) as caller:
        await caller.start("calls", {"count": 4}, run_id)
        seen = await caller.see_through(run_id)
    assert len(seen["output"]["value"]) == 4
    assert world.executions(run_id) == {f"run:{run_id}/{number}": 1 for number in range(1, 5)}


async def test_crash_inside_outer_hands_it_no_inner_value(world: RunsWorld, gateway: GatewayProcess) -> None:
    """The outer step runs again after a crash inside it, and gets its own inner results, not one of them as its own."""
    run_id = new_id()
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, new_id("worker"))
        await worker.register()
        await caller.start("everything", {"user": 7}, run_id)
        (attempt,) = await worker.lease()
        await until_put(attempt, "2.1")
        released = {"lease": attempt.lease, "attempt": 1, "after_seq": 4, "then": {"type": "release"}}
        await client.ask("POST", f"/v1/runs/{run_id}/checkpoints", released)
        async with working(world, gateway.url):
            seen = await caller.see_through(run_id)
    assert seen["output"]["value"] == RESULT
    outer = [one for one in of(await world.journal(run_id), "run_checkpoint") if one["path"] == "2"]
    assert [one["value"]["value"] for one in outer] == [["first", ["amount", "charge_id"]]]


async def until_put(attempt: Attempt, path: str) -> None:
    """Perform the program until this address is recorded, then leave it as a worker that is lost."""
    put, is_recorded = attempt.put, asyncio.Event()

    async def put_and_stay(puts: list[dict[str, Any]], *more: Any, **named: Any) -> Any:
        answer = await put(puts, *more, **named)
        if any(one["path"] == path for one in puts):
            is_recorded.set()
            await asyncio.Event().wait()  # the worker comes no further
        return answer

    attempt.put = put_and_stay  # type: ignore[method-assign]
    performing = asyncio.create_task(attempt.perform())
    await until(is_recorded.is_set)
    performing.cancel()
    await asyncio.gather(performing, return_exceptions=True)


async def test_lease_carries_a_count(world: RunsWorld, gateway: GatewayProcess) -> None:
    """The lease says how many records there are, and carries none of them."""
    run_id = new_id()
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, new_id("worker"))
        await worker.register()
        await caller.start("steps", {"count": 3}, run_id)
        (attempt,) = await worker.lease()
        assert attempt.leased["sequence_number"] == 2
        assert set(attempt.leased) == {one.name for one in fields(LeasedRun)} | {"traceparent"}
        await worker.perform(attempt)
        assert (await caller.look(run_id))["state"] == "COMPLETED"


TIERS = ("inline", "artifact", "secret", "event", "transient")
CELLS = [(tier, resume) for tier in TIERS for resume in ("snapshot", "recompute")]


@pytest.mark.parametrize(("tier", "resume"), CELLS)
async def test_cell(world: RunsWorld, gateway: GatewayProcess, tier: str, resume: str) -> None:
    """What a step's value is after a replay, for each tier and resume; nothing transient is skipped."""
    run_id = new_id()
    if (tier, resume) == ("transient", "snapshot"):
        await refuses_transient_snapshot(world, gateway, run_id)
        return
    async with Caller(world, gateway.url) as caller:
        async with working(world, gateway.url) as first:
            await caller.start("cell", {"tier": tier, "resume": resume}, run_id)
            await until(lambda: first.ended == [(run_id, "SUSPENDED")])
        await caller.answer(run_id, "2", True)
        async with working(world, gateway.url) as second:
            seen = await caller.see_through(run_id)
    assert seen["output"]["value"] == [None if tier == "event" else "value", True]
    assert [path for _, path, _ in second.bodies] == []  # nothing is put again
    (recorded,) = of(await world.journal(run_id), "run_checkpoint")
    kept = recorded["value"]
    if tier in ("artifact", "secret"):
        assert kept["tier"] == tier
        assert kept["ref"]["size_bytes"] > 0
        assert "value" not in kept
    else:
        assert kept == ({"tier": tier} if tier == "transient" else {"tier": tier, "value": "value"})


async def refuses_transient_snapshot(world: RunsWorld, gateway: GatewayProcess, run_id: str) -> None:
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, new_id("worker"))
        await worker.register()
        await caller.start("cell", {"tier": "transient", "resume": "snapshot"}, run_id)
        (attempt,) = await worker.lease()
        with pytest.raises(Refused, match="RUN_TIER_INVALID"):
            await worker.perform(attempt)
        assert of(await world.journal(run_id), "run_checkpoint") == []
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})


async def _shown_by_the_command(world: RunsWorld, gateway: GatewayProcess, run_id: str) -> None:
    """The last thousand, unless all are asked for; who reads three lines gets them, and that is no error."""
    told = await tga(world, "run", "show", run_id, url=gateway.url)
    assert (told.code, "(the last 1,000 of 20,002 entries" in told.stdout) == (0, True), told.stderr
    assert told.stdout.count(" step s ") == 1_000
    arguments = [sys.executable, "-m", "app.main", "run", "show", run_id, "--limit", "1000000"]
    environment = {**os.environ, "TGA_URL": gateway.url, "TGA_API_KEY": world.keys["admin"]}
    piped = f'{shlex.join(arguments)} | head -n 3; echo "exit ${{PIPESTATUS[0]}}"'
    shown = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", piped], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stderr == ""
    assert shown.stdout.splitlines()[3:] == ["exit 0"]
    measured = (
        f"import resource, subprocess, sys; subprocess.run({arguments!r}, stdout=subprocess.DEVNULL, check=True);"
    )
    measured += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
    used = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", measured], env=environment, capture_output=True, text=True, check=True
    )
    print(f"`tga run show` of all took {used.stdout.strip()} MiB")
    assert int(used.stdout) < 400


async def test_a_signal_does_not_have_the_journal_read(world: RunsWorld) -> None:
    """Whoever sends many of them would have it read for each."""
    gateway, run_id = await world.gateway(), new_id()
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        await Worker(client, PROGRAMS, new_id("worker")).register()
        await caller.start("asks", None, run_id)
        before = gateway.places["load_records"]
        for number in range(3):
            said = {"name": "paid", "value": number}
            told = await caller.agent.ask("POST", f"/v1/runs/{run_id}/signals", said)
            assert (told["sequence_number"], told["steps"]) == (number + 2, [])
        assert gateway.places["load_records"] == before
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})
    await gateway.kill()


@pytest.mark.skipif(not IS_SOAK, reason="20,000 checkpoints: in soak")
async def test_pages_of_20000(world: RunsWorld) -> None:
    """The journal is read in pages, whole and in its order; what puts and pages took at either end is printed."""
    gateway = await world.gateway(config=world.config(lease_ms=600_000))
    run_id, puts_s, pages_s = new_id(), [], []
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, new_id("worker"))
        await worker.register()
        await caller.start("steps", {"count": 20_000}, run_id)
        (attempt,) = await worker.lease()
        step = {"type": "checkpoint", "kind": "step", "name": "s", "input_digest": "a" * 64, "outcome": "OK"}
        step |= {"started_at": "2026-01-01T00:00:00.000Z"}
        number = 2
        for first in range(1, 20_001, 50):
            puts = [{**step, "path": str(at), "value": inline(at), "duration_ms": 0} for at in range(first, first + 50)]
            body = {"lease": attempt.lease, "attempt": 1, "after_seq": number, "puts": puts}
            began = time.monotonic()
            answer = await client.ask("POST", f"/v1/runs/{run_id}/checkpoints", body)
            puts_s.append(time.monotonic() - began)
            assert answer["directive"] == "CONTINUE", answer
            number = answer["sequence_number"]
        read, after = 0, 0
        began = time.monotonic()
        while page := (await client.ask("GET", f"/v1/runs/{run_id}/checkpoints?after_seq={after}"))["items"]:
            pages_s.append(time.monotonic() - began)
            assert len(page) <= 1_000
            assert page[0]["sequence_number"] == after + 1
            read, after = read + len(page), page[-1]["sequence_number"]
            began = time.monotonic()
        assert read == 20_002
        before = gateway.places["load_records"]
        head = await caller.agent.ask("GET", f"/v1/runs/{run_id}?steps=0")
        assert (head["steps"], head["steps_left_out"], head["sequence_number"]) == ([], True, 20_002)
        assert gateway.places["load_records"] == before, "the head alone was asked for"
        few = await caller.agent.ask("GET", f"/v1/runs/{run_id}?steps=3")
        assert [one["path"] for one in few["steps"]] == ["19998", "19999", "20000"]
        await _shown_by_the_command(world, gateway, run_id)
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})
    await gateway.kill()
    print(f"50 puts: {median(puts_s[:50]):.3f} s first, {median(puts_s[-50:]):.3f} s last", end="; ")
    print(f"{len(pages_s)} pages in {sum(pages_s):.2f} s", end=", ")
    print(f"{median(pages_s[:5]):.3f} s first, {median(pages_s[-6:-1]):.3f} s last")
