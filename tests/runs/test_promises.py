"""What runs promise, by the names that the design gave the tests; and that none of these names is without its test.

Through one real gateway, with workers in this process or in their own.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.runs.programs import PROGRAMS
from tests.runs.worker import Attempt, Client, Refused, Worker, program_digest
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, until, working

HERE = """
test_every_operation_leaves_one test_replay_executes_nothing_recorded test_state_is_durable_with_its_checkpoint
test_a_waiting_run_holds_nothing test_any_worker_resumes test_identical_calls_have_their_own_addresses
test_crash_inside_outer_hands_it_no_inner_value test_ask_durable test_ask_first_wins test_ask_default test_ask_open
test_listing_order_status_prefix test_start_id test_start_input test_status_words test_checkpoint_document
test_retry_reopens_the_failed_step test_followers_and_feed_see_each test_silence_new_attempt
test_silence_heartbeat_does_not_help test_deadline test_lease_carries_a_count test_unknown_run
test_old_attempt_is_stopped_with_200 test_pages_of_20000 test_logs_stand_with_their_checkpoint
test_refused_puts_are_recorded test_transient_snapshot_is_refused test_cell test_auto_goes_to_artifact
test_state_at_every_position test_fork_proves_origin_source_unchanged
"""
# They stand with the SDK (its flows, agents, guard and testing), and with metrics.
ELSEWHERE = """
test_wrong_field_is_named test_sub_procedure_is_one_result test_checkpoint_goes_on test_guard_line test_guard_strict
test_run_twice test_flow_resumes_at_stage test_stage_says_where test_run_shows_each_step
test_event_payload_is_first_state test_retention_kept test_retention_failures_kept test_retention_chain_stays
test_retry_zero_is_never test_key_is_stable test_recorded_turns_are_not_paid_again test_step_helpers
test_flows_do_not_mix test_plain_function_becomes_durable test_stop_passes_except_exception test_defaults
test_event_is_never_a_value test_unserialisable_says_what_to_do test_metrics
"""


def test_every_promise_has_its_test() -> None:
    here, elsewhere = set(HERE.split()), set(ELSEWHERE.split())
    assert len(here | elsewhere) == len(here) + len(elsewhere) == 56, "the names of the design's table"
    assert here - names_in(Path(__file__).parent) == set()
    assert elsewhere - names_in(Path(__file__).parents[1]) == set()


def names_in(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.rglob("test_*.py"):
        found |= set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE))
    return found


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> GatewayProcess:
    return asyncio.run(world.gateway(config=world.config(lease_ms=60_000)))


async def leased(worker: Worker, run_id: str) -> Attempt:
    while True:
        for attempt in await worker.lease(slots=1):
            if attempt.run_id == run_id:
                return attempt


async def put(client: Client, attempt: Attempt, *puts: Any, after: int = 2, **more: Any) -> Any:
    body = {"lease": attempt.lease, "attempt": attempt.number, "after_seq": after, "puts": puts, **more}
    return await client.ask("POST", f"/v1/runs/{attempt.run_id}/checkpoints", body)


def step(path: str, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {
        "type": "checkpoint",
        "path": path,
        "kind": "step",
        "name": "s",
        "input_digest": "a" * 64,
        "outcome": "OK",
    }
    said |= {"value": {"tier": "inline", "value": 1}, "started_at": "2026-01-01T00:00:00.000Z", "duration_ms": 7}
    return {**said, **more}


async def test_every_operation_leaves_one(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Steps, tools, questions, sleeps, signals, children and gathers: each has one end in the journal."""
    run_id = new_id()
    async with working(world, gateway.url), Caller(world, gateway.url) as caller:
        await caller.start("everything", {"user": 7}, run_id)
        await caller.see_through(run_id)
    ends = Counter(
        one["path"] for one in await world.journal(run_id) if one["artifact_type"] in ("run_checkpoint", "run_answer")
    )
    inner = ["2.1", "2.2", "3:1.1", "3:1.2", "3:2.1", "3:2.2", "3:3.1", "3:3.2"]
    assert ends == dict.fromkeys(["1", "2", "3", "4", "5", "6", "7", *inner], 1)


async def test_state_is_durable_with_its_checkpoint(world: RunsWorld, gateway: GatewayProcess) -> None:
    """What the gateway has acknowledged another one knows, when this one is gone."""
    run_id = new_id()
    other = await world.gateway(config=world.config(lease_ms=60_000))
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, new_id("worker"))
        await worker.register()
        await caller.start("steps", {"count": 9}, run_id)
        attempt = await leased(worker, run_id)
        for number in (1, 2, 3):
            change = [{"op": "set", "at": f"/n{number}", "to": number}]
            await put(client, attempt, step(str(number), state_change=change), after=number + 1)
            status, told = await caller.agent.once("GET", f"/v1/runs/{run_id}/state", url=other.url)
            assert (status, told["state"][f"n{number}"]) == (200, number)
        # Time travel: the state after every entry, from the record alone.
        states = [(await caller.agent.ask("GET", f"/v1/runs/{run_id}/state?at={at}"))["state"] for at in range(1, 6)]
        assert states == [{}, {}, {"n1": 1}, {"n1": 1, "n2": 2}, {"n1": 1, "n2": 2, "n3": 3}]
        # A fork goes on from there, and changes nothing of its source.
        before = await world.journal(run_id)
        forked = await caller.agent.ask("POST", f"/v1/runs/{run_id}/fork", {"at": 4, "run_id": f"{run_id}-f"})
        assert (forked["state"], await world.journal(run_id)) == ("SCHEDULED", before)
        told = await caller.agent.ask("GET", f"/v1/runs/{run_id}-f/state")
        assert told["state"] == {"n1": 1, "n2": 2}
        for ended in (run_id, f"{run_id}-f"):
            await caller.agent.ask("POST", f"/v1/runs/{ended}/cancel", {})
    await other.kill()


async def test_logs_stand_with_their_checkpoint(world: RunsWorld, gateway: GatewayProcess) -> None:
    run_id, line = new_id(), {"at": "2026-01-01T00:00:00.000Z", "level": "info", "text": "halfway"}
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, new_id("worker"))
        await worker.register()
        await caller.start("steps", {"count": 1}, run_id)
        attempt = await leased(worker, run_id)
        await put(client, attempt, step("1", logs=[line]))
        (record,) = (await caller.agent.ask("GET", f"/v1/runs/{run_id}/checkpoints/1"))["items"]
        assert record["logs"] == [line]
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})


async def test_checkpoint_document(world: RunsWorld, gateway: GatewayProcess) -> None:
    """All that a checkpoint says, as it was put."""
    run_id, put_step = new_id(), step("1", source="onboard.py:12", inner=0, try_number=1, resume="snapshot")
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, new_id("worker"))
        await worker.register()
        await caller.start("steps", {"count": 1}, run_id)
        attempt = await leased(worker, run_id)
        await put(client, attempt, put_step)
        (record,) = (await caller.agent.ask("GET", f"/v1/runs/{run_id}/checkpoints/1"))["items"]
        said = {name: value for name, value in put_step.items() if name != "type"}
        assert said.items() <= record.items()
        assert {
            "attempt": 1,
            "run_id": run_id,
            "sequence_number": 3,
            "error": None,
            "logs": [],
        }.items() <= record.items()
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})


async def test_ask_durable(world: RunsWorld, gateway: GatewayProcess) -> None:
    """The question stands before its worker leaves; the worker and the gateway are gone, and it is answered."""
    run_id = new_id()
    dying = await world.gateway()
    async with Caller(world, dying.url, gateway.url) as caller:
        async with working(world, dying.url) as worker:
            await caller.start("asks", None, run_id)
            await until(lambda: (run_id, "SUSPENDED") in worker.ended)
        await dying.kill()
        assert await caller.answer(run_id, "2", True)
        async with working(world, gateway.url):
            assert (await caller.see_through(run_id))["output"]["value"] == ["before", True, "after"]


async def test_ask_open(world: RunsWorld, gateway: GatewayProcess) -> None:
    """An answer of the wrong type is refused, and the question stays open."""
    run_id = new_id()
    async with working(world, gateway.url) as worker, Caller(world, gateway.url) as caller:
        await caller.start("asks", None, run_id)
        await until(lambda: (run_id, "SUSPENDED") in worker.ended)
        with pytest.raises(Refused, match="RUN_ANSWER_INVALID"):
            await caller.answer(run_id, "2", "perhaps")
        assert [one["path"] for one in (await caller.look(run_id))["awaits"]] == ["2"]
        assert await caller.answer(run_id, "2", True)
        await caller.see_through(run_id)


async def test_start_id(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Given, or made by the gateway."""
    async with working(world, gateway.url), Caller(world, gateway.url) as caller:
        given = new_id()
        assert (await caller.start("steps", {"count": 0}, given))["run_id"] == given
        made = await caller.agent.ask("POST", "/v1/runs", {"procedure": "steps", "input": {"count": 0}})
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f-]{21}", made["run_id"])
        for run_id in (given, made["run_id"]):
            await caller.see_through(run_id)


async def test_start_input(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Held against the procedure's schema; nothing is started with a wrong one."""
    name = new_id("typed")
    schema = {"type": "object", "properties": {"user": {"type": "integer"}}, "required": ["user"]}
    async with world.client("worker", gateway.url) as client, Caller(world, gateway.url) as caller:
        said = {"name": name, "program_digest": program_digest(name), "input_schema": schema}
        await client.ask("POST", "/v1/procedures", said)
        with pytest.raises(Refused, match="user"):
            await caller.start(name, {"user": "seven"}, f"{name}-1")
        with pytest.raises(Refused, match="RUN_NOT_FOUND"):
            await caller.look(f"{name}-1")
        assert (await caller.start(name, {"user": 7}, f"{name}-2"))["state"] == "SCHEDULED"
        await caller.agent.ask("POST", f"/v1/runs/{name}-2/cancel", {})


async def test_status_words(world: RunsWorld, gateway: GatewayProcess) -> None:
    run_id, words = new_id(), []
    async with Caller(world, gateway.url) as caller:
        words.append((await caller.start("asks", None, run_id))["status"])
        async with working(world, gateway.url) as worker:
            await until(lambda: (run_id, "SUSPENDED") in worker.ended)
            words.append((await caller.look(run_id))["status"])
            words.append((await caller.see_through(run_id))["status"])
            broken = new_id()
            await caller.start("breaks", None, broken)
            words.append((await caller.see_through(broken))["status"])
        words.append((await caller.agent.ask("POST", f"/v1/runs/{broken}/cancel", {}))["status"])
    assert words == ["running", "waiting_for_human", "completed", "failed", "cancelled"]


async def test_retry_reopens_the_failed_step(world: RunsWorld, gateway: GatewayProcess) -> None:
    """By a worker process: what was recorded stays, and the step that failed is performed again."""
    run_id = new_id()
    async with Caller(world, gateway.url) as caller:
        async with working(world, gateway.url):
            pass  # its programs are registered
        process = await world.worker(gateway.url)
        await caller.start("breaks", None, run_id)
        assert (await caller.see_through(run_id))["state"] == "FAILED"
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/retry", {"rationale": "the order is there"})
        assert (await caller.see_through(run_id))["output"]["value"] == ["begun", "mended", "end"]
        await process.kill()
    ends = [one for one in await world.journal(run_id) if one["artifact_type"] == "run_checkpoint"]
    tries = [(one["path"], one["try_number"], one["outcome"]) for one in ends]
    assert tries == [("1", 1, "OK"), ("2", 1, "ERROR"), ("2", 2, "OK"), ("3", 1, "OK")]


async def test_silence_new_attempt(world: RunsWorld, gateway: GatewayProcess) -> None:
    """A worker process that hangs in a body, with a lease that has long to go: another one gets the run."""
    run_id = new_id()
    async with Caller(world, gateway.url) as caller:
        await caller.start("steps", {"count": 2}, run_id, policy={"checkpoint_timeout_ms": 300})
        hanging = await world.worker(gateway.url, stop_at=("body.before", 0))
        await until(hanging.is_stopped)
        async with working(world, gateway.url):
            seen = await caller.see_through(run_id)
        await hanging.kill()
    assert (seen["output"]["value"], seen["attempt"]) == ([0, 1], 2)


async def test_silence_heartbeat_does_not_help(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Only progress does."""
    run_id = new_id()
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, new_id("worker"))
        await worker.register()
        await caller.start("steps", {"count": 1}, run_id, policy={"checkpoint_timeout_ms": 300})
        attempt = await leased(worker, run_id)
        worker.holding[run_id] = attempt

        async def is_lost() -> bool:
            await worker.beat()
            return attempt.stopped == "STOP LEASE_LOST"

        await until(is_lost)
        assert [one["reason"] for one in await world.journal(run_id) if one.get("change") == "LOST"] == [
            "no checkpoint came for 300 ms"
        ]
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})


async def test_deadline(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Of the whole run, whoever works on it or does not."""
    run_id = new_id()
    async with working(world, gateway.url) as worker, Caller(world, gateway.url) as caller:
        await caller.start("asks", None, run_id, policy={"timeout_ms": 500})
        await until(lambda: (run_id, "SUSPENDED") in worker.ended)

        async def has_failed() -> bool:
            return bool((await caller.look(run_id))["state"] == "FAILED")

        await until(has_failed)
        assert (await caller.look(run_id))["error"]["type"] == "RUN_TIMED_OUT"


async def test_refused_puts_are_recorded(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Once for each attempt; nothing of what was put is."""
    run_id = new_id()
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        worker = Worker(client, PROGRAMS, new_id("worker"))
        await worker.register()
        await caller.start("steps", {"count": 1}, run_id)
        attempt = await leased(worker, run_id)
        await put(client, attempt, then={"type": "release"})
        for _ in range(2):
            assert (await put(client, attempt, step("1")))["directive"] == "STOP"
        changes = [one.get("change") for one in await world.journal(run_id)]
        assert changes == [None, "LEASED", "RELEASED", "FENCED"]
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})


async def test_auto_goes_to_artifact(world: RunsWorld, gateway: GatewayProcess) -> None:
    """An input that is too large for the journal is a full reference in it, and its bytes are a blob."""
    run_id, given = new_id(), {"text": "x" * 40_000}
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        told = await caller.start("asks", given, run_id)
        ref = told["input"]["ref"]
        assert (told["input"]["tier"], ref["size_bytes"] > 40_000, ref["serializer"]) == ("artifact", True, "json")
        status, content = await client.raw("GET", f"/v1/blobs/{ref['sha256']}")
        assert (status, len(content)) == (200, ref["size_bytes"])
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})
