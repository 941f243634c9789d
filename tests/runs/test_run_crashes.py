"""Kill the worker, the gateway or the database's session at every boundary of a run: the run ends by itself with the
result that it has without a crash, each effect is once in the bank's own book, and the ledger verifies.

Sampled with a seed that is printed; all in soak. TGA_SEED repeats a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tests.runs.processes import Fault
from tests.runs.programs import PROGRAMS
from tests.runs.test_runs_end_to_end import RESULT
from tests.runs.worker import Worker
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, sampled, until, working

# Every commit that the program `everything` makes, in words; and what else a gateway passes on its way.
COMMITS = [
    "run_start",
    "run_start+run_attempt.LEASED",
    "run_attempt.LEASED",
    "run_checkpoint.step",
    "run_intent.tool+trace",
    "run_answer.tool+trace",
    "run_intent.ask",
    "run_intent.sleep",
    "run_suspension",
    "run_answer.person",
    "run_answer.timer",
    "run_checkpoint.gather",
    "run_intent.step",
    "run_intent.signal",
    "run_signal+run_answer.signal",
    "run_intent.child+run_start",
    "run_answer.child",
    "run_end.COMPLETED",
]
KILLED = [Fault(f"commit:{what}", mode) for what in COMMITS for mode in ("kill_before", "kill_after")]
BROKEN = [Fault(f"commit:{what}", mode) for what in COMMITS for mode in ("db_rolled_back", "db_unknown")]
OTHERS = [
    Fault(place, mode, 2 if place == "hold_due" else 0)  # it looks for what is due before it listens, too
    for place in ("hold_ready", "hold_due", "load_records", "announce", "dispatch", "store_blob")
    for mode in ("kill_before", "kill_after")
]
KEPT: tuple[str, Any, list[int]] = ("kept", ["value", True, "value"], [])  # a program with artifacts
# What is recorded of attempts that do not end well: of a worker that is lost, that gives its run back, that comes back.
# Telling a parent is `run_answer.child` above.
OF_ATTEMPTS = [
    Fault(f"commit:run_attempt.{change}", mode)
    for change in ("LOST", "RELEASED", "FENCED")
    for mode in ("kill_before", "kill_after", "db_rolled_back", "db_unknown")
]
# What time and people decide of a run: its deadline, a failure, its retry, its end, a fork of it (the third start).
OF_DECISIONS = [
    Fault(f"commit:{what}", mode, after)
    for what, after in (("run_end.FAILED", 0), ("run_resumption", 0), ("run_start", 2), ("run_end.CANCELLED", 0))
    for mode in ("kill_before", "kill_after", "db_rolled_back", "db_unknown")
]
ROUTES = [
    "POST /v1/runs",
    "POST /v1/worker/lease",
    "GET /v1/runs/{run_id}/checkpoints",
    "POST /v1/runs/{run_id}/checkpoints",
    "POST /v1/runs/{run_id}/signals",
]
UNANSWERED = [Fault(f"answer:{route}", mode) for route in ROUTES for mode in ("kill_before", "lost")]
WORKERS = [
    (name, number)
    for name in ("lease", "page", "put", "tool", "ask", "sleep", "suspend", "intent", "signal", "child", "complete")
    for number in (0,)
]
WORKER_CUTS = [(f"{name}.{when}", number) for name, number in WORKERS for when in ("before", "answered")]
WORKER_CUTS += [("body.before", 0), ("body.done", 0), ("body.before", 3), ("body.done", 3), ("put.answered", 2)]


Survives = Callable[[RunsWorld, GatewayProcess, Fault], Awaitable[bool]]


def verify_result(seen: dict[str, Any]) -> None:
    assert seen["state"] == "COMPLETED", seen
    assert seen["output"]["value"] == RESULT


async def survives(world: RunsWorld, spare: GatewayProcess, fault: Fault) -> bool:
    """Whether the fault came. The spare gateway sleeps until the other one is gone, and does none of its work."""
    run_id = new_id()
    program, result, effects = ("everything", RESULT, [1, 1]) if fault.place != "store_blob" else KEPT
    async with beside(world, spare, fault, run_id) as (gateway, urls):
        async with Caller(world, *urls) as caller, contextlib.AsyncExitStack() as stack:
            if "run_start+" in fault.place:  # a worker that waits gets the run with its start
                worker = await stack.enter_async_context(working(world, *urls))
                await until(lambda: worker.client.boundaries.passed == ["lease.before"])
            await caller.start(program, {"user": 7}, run_id)
            if "run_start+" not in fault.place:
                await stack.enter_async_context(working(world, *urls))
            if fault.place == "hold_due":  # the run asks a person, and is not answered before
                await until(lambda: gateway.has_said("fired"))
            seen = await caller.see_through(run_id)
        assert seen["state"] == "COMPLETED", seen
        assert seen["output"]["value"] == result
    assert sorted(world.executions(run_id).values()) == effects, world.executions(run_id)
    return gateway.has_said("fired")


async def survives_an_attempt(world: RunsWorld, spare: GatewayProcess, fault: Fault) -> bool:
    """A worker that gives its run back, or is silent for too long, and then comes back or does not."""
    run_id = new_id()
    async with beside(world, spare, fault, run_id) as (gateway, urls):
        async with Caller(world, *urls) as caller, world.client("worker", *urls) as client:
            worker = Worker(client, PROGRAMS, new_id("worker"))
            await caller.start("fenced", None, run_id)
            (old,) = await worker.lease()
            body = {"lease": old.lease, "attempt": 1, "after_seq": 2, "then": {"type": "release"}}
            if fault.place.endswith("RELEASED"):
                told = await client.ask("POST", f"/v1/runs/{run_id}/checkpoints", body)
                assert told["directive"] == "DONE"
            elif fault.place.endswith("FENCED"):

                async def is_lost() -> bool:
                    return any(one.get("change") == "LOST" for one in await world.journal(run_id))

                await until(is_lost)
                for _ in range(2):
                    told = await client.ask("POST", f"/v1/runs/{run_id}/checkpoints", body)
                    assert (told["directive"], told["reason"]) == ("STOP", "LEASE_LOST")
            async with working(world, *urls):
                seen = await caller.see_through(run_id)
        assert seen["output"]["value"] == ["first", "once", ["amount", "charge_id"]]
        journal = [one for one in await world.journal(run_id) if one["artifact_type"] == "run_attempt"]
        changes = [(one["change"], one["attempt"]) for one in journal]
        assert changes.count((fault.place.rpartition(".")[2], 1)) == 1, changes
    assert list(world.executions(run_id).values()) == [1]
    return gateway.has_said("fired")


async def survives_a_decision(world: RunsWorld, spare: GatewayProcess, fault: Fault) -> bool:
    """A run that its deadline ends, and that is cancelled; one that fails, is retried, is forked where it had failed,
    and whose past stays what it was."""
    late, run_id, fork_id = new_id("late"), new_id(), new_id("fork")
    async with beside(world, spare, fault, run_id) as (gateway, urls):
        async with Caller(world, *urls) as caller:
            await caller.start("asks", None, late, policy={"timeout_ms": 200})
            await caller.start("breaks", None, run_id)
            async with working(world, *urls):
                assert (await rested(caller, late))["error"]["type"] == "RUN_TIMED_OUT"
                failed = await rested(caller, run_id)
                assert failed["state"] == "FAILED"
            past = await states_of(caller, run_id, failed["sequence_number"])
            await caller.agent.ask("POST", f"/v1/runs/{run_id}/retry", {"rationale": "mended"})
            fork = {"at": failed["sequence_number"], "run_id": fork_id}
            await caller.agent.ask("POST", f"/v1/runs/{run_id}/fork", fork)
            async with working(world, *urls):
                seen = [await rested(caller, one) for one in (run_id, fork_id)]
            assert seen[0]["output"]["value"] == ["begun", "mended", "end"]
            assert (seen[1]["state"], seen[1]["error"]) == ("FAILED", failed["error"]), (
                "its past is that of the failure"
            )
            assert await states_of(caller, run_id, failed["sequence_number"]) == past
            cancelled = await caller.agent.ask("POST", f"/v1/runs/{late}/cancel", {})
            assert cancelled["state"] == "CANCELLED"
        ends = [one["outcome"] for one in await world.journal(run_id) if one["artifact_type"] == "run_end"]
        assert ends == ["FAILED", "COMPLETED"]
    return gateway.has_said("fired")


async def rested(caller: Caller, run_id: str) -> dict[str, Any]:
    """The run, once it has ended or failed."""
    seen: dict[str, Any] = {}

    async def rests() -> bool:
        seen.update(await caller.look(run_id))
        return seen["state"] in ("COMPLETED", "FAILED")

    await until(rests)
    return seen


async def states_of(caller: Caller, run_id: str, last: int) -> list[Any]:
    """The program's state after each entry of its past."""
    looks = [await caller.agent.ask("GET", f"/v1/runs/{run_id}/state?at={at}") for at in range(1, last + 1)]
    return [one["state"] for one in looks]


@contextlib.asynccontextmanager
async def beside(
    world: RunsWorld, spare: GatewayProcess, fault: Fault, run_id: str
) -> AsyncIterator[tuple[GatewayProcess, tuple[str, ...]]]:
    """A gateway with this fault, and where to ask; the spare one sleeps until it is gone."""
    spare.signal(signal.SIGSTOP)
    gateway = await world.gateway(fault=fault)

    async def wake() -> None:
        await until(lambda: not gateway.is_alive())
        spare.signal(signal.SIGCONT)

    waking = asyncio.create_task(wake())
    # Where the gateway lives on, whoever is refused asks it again: the other one is asleep.
    urls = (gateway.url, spare.url) if fault.mode.startswith("kill") else (gateway.url,)
    try:
        yield gateway, urls
    except BaseException:
        print(fault, gateway.said()[-5:], gateway.log()[-3000:], await world.journal(run_id))
        raise
    finally:
        waking.cancel()
        spare.signal(signal.SIGCONT)
        await gateway.kill()


async def survive_all(world: RunsWorld, faults: list[Fault], survives: Survives = survives) -> None:
    spare = await world.gateway()
    async with working(world, spare.url):
        pass  # its programs are registered
    fired = [await survives(world, spare, fault) for fault in faults]
    missed = [fault for fault, came in zip(faults, fired, strict=True) if not came]
    assert missed == [], "a boundary that is not passed tests nothing"
    await world.verify_all_is_well()
    await spare.kill()


async def test_the_commits_of_a_run_are_those_that_are_tested(world: RunsWorld) -> None:
    gateway = await world.gateway()
    run_id = new_id()
    async with working(world, gateway.url), Caller(world, gateway.url) as caller:
        await caller.start("everything", {"user": 7}, run_id)
        verify_result(await caller.see_through(run_id))
    passed = {place.removeprefix("commit:") for place in gateway.places if place.startswith("commit:")}
    assert passed <= {*COMMITS}, passed
    await gateway.kill()


async def test_a_gateway_killed_at_any_commit(world: RunsWorld) -> None:
    await survive_all(world, sampled(KILLED, 2, is_soak=IS_SOAK))


async def test_a_database_session_ended_at_any_commit(world: RunsWorld) -> None:
    await survive_all(world, sampled(BROKEN, 1, is_soak=IS_SOAK))


async def test_a_gateway_killed_at_any_other_boundary(world: RunsWorld) -> None:
    await survive_all(world, sampled(OTHERS, 1, is_soak=IS_SOAK))


async def test_a_gateway_killed_while_it_records_what_became_of_an_attempt(world: RunsWorld) -> None:
    await survive_all(world, sampled(OF_ATTEMPTS, 1, is_soak=IS_SOAK), survives_an_attempt)


@pytest.mark.one_in(2)
async def test_a_gateway_killed_while_time_or_a_person_decides(world: RunsWorld) -> None:
    await survive_all(world, sampled(OF_DECISIONS, 1, is_soak=IS_SOAK), survives_a_decision)


async def test_an_answer_lost_on_any_route(world: RunsWorld) -> None:
    await survive_all(world, sampled(UNANSWERED, 1, is_soak=IS_SOAK))


async def test_a_worker_killed_at_any_boundary(world: RunsWorld) -> None:
    gateway = await world.gateway(config=world.config(lease_ms=500))
    async with working(world, gateway.url):
        pass  # its programs are registered
    for cut in sampled(WORKER_CUTS, 2, is_soak=IS_SOAK):
        await survives_without(world, gateway, cut)
    await world.verify_all_is_well()
    await gateway.kill()


async def survives_without(world: RunsWorld, gateway: GatewayProcess, cut: tuple[str, int]) -> None:
    run_id = new_id()
    async with Caller(world, gateway.url) as caller:
        await caller.start("everything", {"user": 7}, run_id)
        dying = await world.worker(gateway.url, die_at=cut)
        seeing = asyncio.create_task(caller.see_through(run_id))
        try:
            await until(lambda: not dying.is_alive() or seeing.done())
            assert not dying.is_alive(), f"{cut} was not passed"
            async with working(world, gateway.url):
                verify_result(await seeing)
        except BaseException:
            print(cut, dying.log()[-2000:], gateway.log()[-2000:], await world.journal(run_id))
            raise
    assert sorted(world.executions(run_id).values()) == [1, 1], cut


async def test_all_sessions_of_the_database_ended_again_and_again(world: RunsWorld) -> None:
    gateway = await world.gateway()
    chance = random.Random(7)
    run_id = new_id()
    async with working(world, gateway.url), Caller(world, gateway.url) as caller:
        await caller.start("everything", {"user": 7}, run_id)
        seeing = asyncio.create_task(caller.see_through(run_id))
        for _ in range(3):
            await asyncio.sleep(chance.random() / 5)
            await asyncio.to_thread(world.database.end_all_sessions)
        verify_result(await seeing)
    assert sorted(world.executions(run_id).values()) == [1, 1]
    await world.verify_all_is_well()
    await gateway.kill()
