"""Runs from the outside: both clients, a real gateway, the tests' own worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from tests.patience import HANG_S
from tests.runs.world import new_id, working
from tests.sdk.gateways import KINDS, Gateways, Subject, subject
from tga_sdk import AsyncClient, Context, Worker, errors, procedure
from tga_sdk.client import runs


@pytest.fixture(params=KINDS, ids=["sync", "async"])
async def agent(request: pytest.FixtureRequest, gateways: Gateways) -> AsyncIterator[Subject]:
    async with subject(request.param, gateways.url, gateways.world.keys["agent"]) as made:
        yield made


@pytest.fixture
async def root(gateways: Gateways) -> AsyncIterator[Subject]:
    async with subject(AsyncClient, gateways.url, gateways.world.keys["admin"]) as made:
        yield made


@dataclass(frozen=True)
class Program:
    name: str
    version: str = "1"


class Amount(BaseModel):
    amount: int


@procedure(name="growing", version="7")
async def growing(ctx: Context[None], input: Amount) -> list[str]:
    return ["x" * input.amount] * 3


async def raised(kind: type[errors.TgaError], calling: Any) -> Any:
    with pytest.raises(kind) as caught:
        await calling
    assert type(caught.value) is kind
    return caught.value


async def until_status(agent: Subject, run_id: str, status: str) -> Any:
    async with asyncio.timeout(HANG_S):
        while (run := await agent.status(run_id)).status != status:
            await asyncio.sleep(0.02)
        return run


async def test_a_run_is_started_once_through_lost_answers_and_its_result_has_its_type(
    agent: Subject, gateways: Gateways
) -> None:
    async with working(gateways.world, gateways.direct_url):
        run_id = new_id()
        gateways.relay.lose(2)
        run = await agent.start(Program("paying"), Amount(amount=3), run_id)
        assert (run.run_id, run.procedure) == (run_id, "paying")
        assert await agent.result(run_id, list[str], timeout=HANG_S) == ["amount", "charge_id"]
        ended = await agent.wait(run_id, timeout=HANG_S)
        assert [step["kind"] for step in ended.steps] == ["tool", "step"]
        head = await agent.status(run_id, steps=0)
        assert (head.steps, head.output, head.sequence_number) == ([], ended.output, ended.sequence_number)
        again = await agent.start("paying", {"amount": 3}, run_id)
        assert (again.replayed, again.status) == (True, "completed")
        taken = await raised(errors.RunIdTaken, agent.start("paying", {"amount": 4}, run_id))
        assert (taken.run_id, taken.retryable) == (run_id, False)
        wrong = await raised(errors.ValueInvalid, agent.result(run_id, dict[str, int], timeout=HANG_S))
        assert "output" in str(wrong)
    assert sum(gateways.world.executions(run_id).values()) == 1


async def test_waiting_for_a_run_outlasts_the_gateway(agent: Subject, gateways: Gateways) -> None:
    run = await agent.start("paying", {"amount": 1})
    waiting = asyncio.create_task(agent.result(run.run_id, timeout=HANG_S))
    watching = asyncio.create_task(agent.followed("watch", run.run_id))
    await gateways.restart()
    async with working(gateways.world, gateways.direct_url):
        assert await asyncio.wait_for(waiting, HANG_S) == ["amount", "charge_id"]
        seen = await asyncio.wait_for(watching, HANG_S)
    assert [entry.sequence_number for entry in seen] == list(range(1, len(seen) + 1))
    assert (seen[0].kind, seen[-1].kind, seen[-1].state) == ("run_start", "run_end", "COMPLETED")
    records = await agent.checkpoints(run.run_id)
    assert [record["artifact_type"] for record in records][-1] == "run_end"
    assert [record["artifact_type"] for record in await agent.checkpoint(run.run_id, "2")] == ["run_checkpoint"]


async def test_questions_are_answered_and_signals_sent(agent: Subject, root: Subject, gateways: Gateways) -> None:
    async with working(gateways.world, gateways.direct_url):
        run_id = new_id()
        await agent.start("everything", {"x": 1}, run_id)
        await until_status(agent, run_id, "waiting_for_human")
        (question,) = [item for item in await root.approvals() if item.run_id == run_id]
        assert question.kind == "run"
        forbidden = await raised(errors.Forbidden, agent.answer(question, answer=True))
        assert forbidden.run_id == run_id
        gateways.relay.lose(1)
        await root.answer(question, answer=True)
        await until_status(agent, run_id, "waiting")
        unfinished = await raised(errors.RunUnfinished, agent.wait(run_id, timeout=0.05))
        assert (unfinished.run_id, unfinished.status, unfinished.retryable) == (run_id, "waiting", True)
        gateways.relay.lose(1)
        await agent.signal(run_id, "go", "gone")
        done = await agent.result(run_id, timeout=HANG_S)
        assert done["given"] == {"x": 1}
        assert (await agent.state(run_id)).state["log"] == done["log"]
        assert (await agent.state(run_id, at=1)).state == {}
        forked = await agent.fork(run_id, at=2, new_id=f"{run_id}-fork")
        assert forked.run_id == f"{run_id}-fork"
        assert (await agent.cancel(forked.run_id, rationale="enough")).status == "cancelled"
        cancelled = await raised(errors.RunFailed, agent.result(forked.run_id))
        assert (cancelled.status, "enough" in str(cancelled)) == ("cancelled", True)
        listed = await agent.list(prefix=run_id, limit=10)
        assert {item.run_id for item in listed} >= {run_id, forked.run_id}
        assert await root.delete(forked.run_id) is True
        assert await root.delete(forked.run_id) is False


async def test_what_is_not_there_or_not_asked_is_said(agent: Subject, gateways: Gateways) -> None:
    missing = await raised(errors.NotFound, agent.status("no-such-run"))
    assert (missing.code, missing.run_id) == ("RUN_NOT_FOUND", "no-such-run")
    nobody = await raised(errors.NotFound, agent.start("nobody-has-this", {}))
    assert (nobody.code, str(nobody.run_id)[:4]) == ("PROCEDURE_NOT_FOUND", "run-")
    await raised(errors.ValueNotSerializable, agent.start("paying", {"what": object()}))
    triggered = await agent.trigger("nothing.listens", "evt-1", {"x": 1})
    assert triggered.runs == []
    for odd in ("..", "", "a/../b", "\ud800"):
        await _refused(agent.status(odd))


async def _refused(calling: Any) -> None:
    with pytest.raises(errors.TgaError):
        await calling


async def test_a_failed_run_is_retried(agent: Subject, root: Subject, gateways: Gateways) -> None:
    run = await agent.start("paying", {"amount": 13})
    async with working(gateways.world, gateways.direct_url):
        ended = await agent.wait(run.run_id, timeout=HANG_S)
        assert ended.status == "failed"
        failed = await raised(errors.RunFailed, agent.result(run.run_id))
        assert failed.error["type"]
        first = await asyncio.wait_for(agent.followed("watch", run.run_id), HANG_S)
        assert (first[-1].kind, first[-1].state) == ("run_end", "FAILED")
        assert await agent.followed("watch", run.run_id, after=first[-1].sequence_number) == []
        gateways.relay.lose(1)
        going_on = await root.retry(run.run_id, rationale="again")
        assert going_on.run_id == run.run_id
        assert (await agent.wait(run.run_id, timeout=HANG_S)).status == "failed"
        both = await asyncio.wait_for(agent.followed("watch", run.run_id), HANG_S)  # the first failure is history
        ends = [one.state for one in both if one.kind == "run_end"]
        # A third, where the retry whose answer was lost came again after the second failure.
        assert ends in (["FAILED"] * 2, ["FAILED"] * 3)
        ending = asyncio.create_task(agent.followed("watch", run.run_id, until="end"))
        await agent.cancel(run.run_id, rationale="enough")
        assert [one.state for one in await asyncio.wait_for(ending, HANG_S)][-1] == "CANCELLED"


async def test_who_waits_for_a_run_asks_seldom(agent: Subject, gateways: Gateways) -> None:
    """The gateway tells when it is over. Who looked from time to time, here without pauses, would look meanwhile."""
    asked: list[str] = []
    url = agent.client._url

    def counted(path: str) -> str:
        asked.append(path)
        return url(path)

    run = await agent.start("paying", {"amount": 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent.client, "_url", counted)
        patch.setattr(runs, "_WATCHED", HANG_S * 10)
        for pause in ("_LOOKS_FIRST", "_LOOKS_LAST", "_LOOKS_SHARE"):
            patch.setattr(runs, pause, 0.0)
        waiting = asyncio.create_task(agent.wait(run.run_id, timeout=HANG_S))
        async with asyncio.timeout(HANG_S):
            while not any(path.endswith("/events") for path in asked):
                await asyncio.sleep(0.01)
        before = len(asked)
        async with AsyncClient(gateways.url, gateways.world.keys["agent"]) as other:
            for _ in range(30):
                await other.status(run.run_id)
        assert len(asked) == before
        async with working(gateways.world, gateways.direct_url):
            assert (await waiting).status == "completed"
    assert len(asked) <= before + 3


async def test_a_procedure_is_started_as_it_is_and_an_output_too_large_for_the_journal_comes_back(
    agent: Subject, gateways: Gateways
) -> None:
    worker = Worker(gateways.direct_url, gateways.world.keys["worker"], [growing])
    working_on = asyncio.create_task(worker.run(signals=False))
    try:
        async with asyncio.timeout(HANG_S):
            while not await _is_registered(agent):
                await asyncio.sleep(0.02)
        small = await agent.start(growing, Amount(amount=1))
        assert (small.procedure, small.version) == ("growing", "7")
        assert await agent.result(small.run_id, list[str], timeout=HANG_S) == ["x"] * 3
        large = await agent.start(growing, Amount(amount=200_000))
        gateways.relay.lose(1)
        assert await agent.result(large.run_id, list[str], timeout=HANG_S) == ["x" * 200_000] * 3
        assert (await agent.status(large.run_id)).output["tier"] == "artifact"
    finally:
        worker.stop()
        await asyncio.wait_for(working_on, HANG_S)


async def _is_registered(agent: Subject) -> bool:
    try:
        await agent.start(growing, Amount(amount=1), "growing-registered")
    except errors.NotFound as error:
        return error.code != "PROCEDURE_NOT_FOUND"
    return True
