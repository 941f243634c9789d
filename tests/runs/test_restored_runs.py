"""A database with open runs is backed up, goes on, is lost, and its backup is restored: into another database, and into
another cluster. Real processes and the operator's own commands.

What was recorded after the backup is gone: the runs stand where they stood, and go on from there. Calls that were made
after it are made again with the same keys, so the tool server executes none twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from app.keys.log_signer import LogSigner
from app.postgres.embedded.server import EmbeddedPostgres
from tests.runs.programs import PROGRAMS
from tests.runs.restoring import place_to_restore, restored, tga, verified_alone
from tests.runs.test_runs_end_to_end import RESULT
from tests.runs.worker import Attempt, Client, Worker, inline
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, until, working

LEASE_MS = 20_000
WHY = "the disk was lost on Tuesday; Monday's backup is all there is"
CALL = {"server_id": "bank", "tool_name": "charge", "arguments": {"amount": 7}, "wait_ms": 10_000}


@pytest.fixture(params=["another database", "another cluster"])
def cluster(world: RunsWorld, request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    world.renew()
    with place_to_restore(world, request.param) as opened:
        yield opened


class Before:
    """Runs in every state that lasts, and what became of them after the backup, before the database was lost."""

    def __init__(self, world: RunsWorld, gateway: GatewayProcess, caller: Caller) -> None:
        self.world, self.gateway, self.caller = world, gateway, caller
        self.asking, self.answered, self.sleeping = new_id("asking"), new_id("answered"), new_id("sleeping")
        self.kept, self.whole, self.signalled = new_id("kept"), new_id("whole"), new_id("signalled")
        self.unbegun, self.held = new_id("unbegun"), new_id("held")

    @property
    def results(self) -> dict[str, Any]:
        """What each has returned in the end, whatever happened in between."""
        asked = ["before", True, "after"]
        return {
            **dict.fromkeys((self.asking, self.answered), asked),
            **dict.fromkeys((self.whole, self.signalled), RESULT),
            self.sleeping: "after",
            self.kept: ["value", True, "value"],
            self.unbegun: [0, 1],
            self.held: [["amount", "charge_id"]],
        }

    async def rests(self, run_id: str, kind: str) -> None:
        """Until the run waits for this, and for nothing else."""

        async def waits() -> bool:
            seen = await self.caller.look(run_id)
            return seen["state"] == "WAITING" and [one["kind"] for one in seen["awaits"]] == [kind]

        await until(waits)

    async def fill(self) -> None:
        world, caller, urls = self.world, self.caller, (self.gateway.url,)
        others = {name: program for name, program in PROGRAMS.items() if name not in ("paying", "calls", "steps")}
        async with working(world, *urls):
            pass  # all programs are registered
        async with world.client("worker", *urls) as client:
            worker = Worker(client, others, new_id("worker"))
            work = asyncio.create_task(worker.work())
            for run_id in (self.asking, self.answered):
                await caller.start("asks", None, run_id)
            await caller.start("sleeps", 4_000, self.sleeping)
            await caller.start("kept", None, self.kept)
            for run_id in (self.whole, self.signalled):
                await caller.start("everything", {"user": 7}, run_id)
            for run_id in (self.asking, self.answered, self.kept):
                await self.rests(run_id, "ask")
            await self.rests(self.sleeping, "sleep")
            for run_id in (self.whole, self.signalled):
                await self.rests(run_id, "ask")
                await caller.answer(run_id, "3:2.1", True)
                await self.rests(run_id, "signal")
            await caller.signal(self.whole, "go", "gone", "go-1")  # its child has no worker: it is SCHEDULED
            await self.rests(self.whole, "child")
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        every = {"procedure": "paying", "input": {"amount": 5}, "spec": {"type": "interval", "every_ms": 1_000}}
        await caller.agent.ask("PUT", "/v1/schedules/every", every)
        await caller.start("steps", {"count": 2}, self.unbegun)
        await caller.start("calls", {"count": 1}, self.held)

    async def go_on(self) -> None:
        """After the backup: all of it is lost with the database, and none of its effects."""
        world, caller, urls = self.world, self.caller, (self.gateway.url,)
        assert await caller.answer(self.answered, "2", False)
        async with working(world, *urls):
            for run_id in (self.answered, self.signalled, self.whole, self.unbegun):
                await caller.see_through(run_id)


async def said_of_log(gateway: GatewayProcess) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{gateway.url}/readyz") as answer:
        said = await answer.json()
        return str(said.get("log") or said.get("code"))


async def put(client: Client, attempt: Attempt, after_seq: int, **more: Any) -> dict[str, Any]:
    said = {"lease": attempt.lease, "attempt": attempt.number, "after_seq": after_seq, **more}
    return dict(await client.ask("POST", f"/v1/runs/{attempt.run_id}/checkpoints", said))


@pytest.mark.one_in(6)
async def test_open_runs_go_on_from_an_old_backup(world: RunsWorld, cluster: EmbeddedPostgres, tmp_path: Path) -> None:
    config = world.config(lease_ms=LEASE_MS)
    gateway = await world.gateway(config=config)
    key, backup, keys = tmp_path / "log.pub", tmp_path / "monday.backup", world.place / "keys"
    call = {"type": "tool", "path": "1", "input_digest": "b" * 64, **CALL}
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        before = Before(world, gateway, caller)
        await before.fill()
        old = Worker(client, {"calls": PROGRAMS["calls"]}, new_id("old"))
        (held,) = await old.lease()
        told = await tga(world, "db", "backup", str(backup))
        assert told.code == 0, told
        at_backup = (await caller.look(held.run_id))["sequence_number"]
        done = await put(client, held, at_backup, then=call)
        assert done["directive"] == "CONTINUE", done
        await before.go_on()
        before_loss = world.all_executions()

        async def is_signed() -> bool:
            sizes = "SELECT (SELECT max(size) FROM tga.tree_heads) = (SELECT count(*) FROM tga.entries) AS is_all"
            return bool((await world.fetch(sizes))[0]["is_all"])

        await until(is_signed)
    key.write_text(LogSigner.open(keys, environment={}).verifier_key.to_text())
    await gateway.kill()

    world.database = await restored(world, backup, cluster)
    gateway = await world.gateway(config=config)
    async with Caller(world, gateway.url) as caller, world.client("worker", gateway.url) as client:
        seen = await caller.look(held.run_id)
        assert (seen["state"], seen["attempt"], seen["sequence_number"]) == ("RUNNING", 1, at_backup)
        # The worker of the former life comes back with a lease that this database knows, too.
        step = {"type": "step", "path": "2", "name": "after", "input_digest": "c" * 64}
        for after_seq, body in (
            (done["sequence_number"], {"puts": [step]}),
            (at_backup, {"then": call}),
            (at_backup, {"then": {"type": "complete", "output": inline(1), "positions": 0}}),
        ):
            stopped = await put(client, held, after_seq, **body)
            assert (stopped["directive"], stopped["reason"]) == ("STOP", "LEASE_LOST"), body
        said = {"run_id": held.run_id, "lease": held.lease}
        beat = {"worker": old.worker_id, "name": old.name, "runs": [said]}
        (stopped,) = (await client.ask("POST", "/v1/worker/heartbeat", beat))["runs"]
        assert (stopped["directive"], stopped["reason"]) == ("STOP", "LEASE_LOST")
        assert (await caller.look(held.run_id))["sequence_number"] == at_backup, "something was stored"
        await _go_on_in_a_new_epoch(world, gateway)
        await _rebuilt_twice(world, [before.asking, before.answered, before.kept, before.whole, before.signalled])
        async with working(world, gateway.url):
            seen = {run_id: await caller.see_through(run_id) for run_id in before.results}
            assert {run_id: one["output"] and one["output"]["value"] for run_id, one in seen.items()} == before.results
            await caller.agent.ask("DELETE", "/v1/schedules/every")
            await until(lambda: _nothing_is_ready(world))
        assert not await caller.answer(before.answered, "2", False), "a question was answered twice"
    assert before_loss.keys() <= world.all_executions().keys()
    await world.verify_all_is_well()
    told = await tga(world, "verify", "--all")
    assert (told.code, "The log began anew: epoch 2" in told.stdout) == (0, True), told
    told = await tga(world, "export", str(tmp_path / "bundle"), url=gateway.url)
    assert told.code == 0, told
    assert (await verified_alone(tmp_path / "bundle", key))["sound"] is True
    await gateway.kill()


async def _go_on_in_a_new_epoch(world: RunsWorld, gateway: GatewayProcess) -> None:
    """The signer refuses a history that lacks what it has signed, until an operator says that it is lost."""

    async def says(expected: str) -> bool:
        return await said_of_log(gateway) == expected

    await until(lambda: says("LOG_FORKED"))
    told = await tga(world, "doctor", url=gateway.url)
    assert "log's memory: log.head is of" in told.stdout, told
    told = await tga(world, "log", "new-epoch", "-r", WHY, "--yes")
    assert (told.code, "Epoch 2 has begun" in told.stdout) == (0, True), told
    await until(lambda: says("ok"))


async def _nothing_is_ready(world: RunsWorld) -> bool:
    return not await world.fetch("SELECT FROM tga.runs WHERE state IN ('SCHEDULED', 'RUNNING')")


async def _rebuilt_twice(world: RunsWorld, run_ids: list[str]) -> None:
    """Folding the rows of these runs anew says the same, however often."""
    rows = (
        "SELECT h.stream, r.state, r.attempt, r.worker, r.parent, r.deadline_at FROM tga.runs r"
        " JOIN tga.heads h USING (stream_no) WHERE h.stream = ANY ($1) ORDER BY h.stream"
    )
    found = []
    for _ in range(2):
        told = await tga(world, "db", "rebuild")
        assert told.code == 0, told
        found.append([dict(row) for row in await world.fetch(rows, [f"run:{run_id}" for run_id in run_ids])])
    assert len(found[0]) == len(run_ids)
    assert found[0] == found[1]
