"""Whoever does not hear an answer asks again, there or on another gateway: nothing is done twice, and the answer is the
same. Every route by which something is done about runs is repeated here; the OpenAPI document says which there are."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from typing import Any

import pytest

from app.domain.runs.engine.messages import PutRequest
from tests.runs.programs import PROGRAMS
from tests.runs.worker import Attempt, Client, Refused, Worker, inline, program_digest
from tests.runs.world import Caller, RunsWorld, new_id, until

PREFIXES = ("/v1/runs", "/v1/worker", "/v1/blobs", "/v1/procedures", "/v1/schedules", "/v1/triggers")
# They only read: whoever repeats one changes nothing.
READS = {
    "GET /v1/runs",
    "GET /v1/runs/{run_id}",
    "GET /v1/runs/{run_id}/state",
    "GET /v1/runs/{run_id}/entries",
    "GET /v1/runs/{run_id}/events",
    "GET /v1/runs/{run_id}/receipt",
    "GET /v1/runs/{run_id}/verification",
    "GET /v1/runs/{run_id}/checkpoints/{path}",
    "GET /v1/procedures",
    "GET /v1/procedures/{name}",
    "GET /v1/schedules",
    "GET /v1/schedules/{name}",
    "HEAD /v1/blobs/{sha256}",
}
ERROR = {"type": "E", "message": "broken", "retryable": False}
STEP: dict[str, Any] = {
    "type": "checkpoint",
    "kind": "step",
    "name": "s",
    "input_digest": "a" * 64,
    "outcome": "OK",
    "value": inline(1),
    "started_at": "2026-01-01T00:00:00.000Z",
    "duration_ms": 1,
}
CALL: dict[str, Any] = {
    "input_digest": "a" * 64,
    "server_id": "bank",
    "tool_name": "charge",
    "arguments": {"amount": 3},
}
ASKED = {"form": "approve", "message": "Pay?", "answer_schema": {"type": "boolean"}}


class Repeating:
    """Sends each request twice to one gateway, and then to the other; remembers the route, and what came `then`."""

    def __init__(self, world: RunsWorld, urls: tuple[str, str], document: dict[str, Any]) -> None:
        self._world = world
        self._at = (urls[0], urls[0], urls[1])
        self.routes = {
            f"{method.upper()} {path}"
            for path, methods in document["paths"].items()
            if path.startswith(PREFIXES)
            for method in methods
        }
        told = PutRequest.model_json_schema()["properties"]
        self.thens = set(_types(told["then"])) | {"nothing"}
        self.puts = set(_types(told["puts"]["items"]))
        self.sent: set[str] = set()
        self.sent_thens: set[str] = set()
        self.sent_puts: set[str] = set()

    def note(self, method: str, path: str) -> None:
        (route,) = [one for one in self.routes if one.startswith(f"{method} ") and _fits(one, path)]
        self.sent.add(route)

    async def send(
        self, sender: Client, method: str, path: str, body: Any = None, *, statuses: tuple[int, ...] = (200,)
    ) -> list[Any]:
        self.note(method, path)
        sent = [await sender.once(method, path, body, url=url) for url in self._at]
        assert [status for status, _ in sent] == [*(statuses * 3)[:3]], sent
        return [answer for _, answer in sent]

    async def put(self, client: Client, attempt: Attempt, after: int, **body: Any) -> tuple[Any, int]:
        """The answer, which is the same three times, and how many entries it has left."""
        self.sent_thens.add(body.get("then", {"type": "nothing"})["type"])
        self.sent_puts |= {put["type"] for put in body.get("puts", ())}
        whole = {"lease": attempt.lease, "attempt": attempt.number, "after_seq": after, **body}
        before = len(await self._world.journal(attempt.run_id))
        answers = await self.send(client, "POST", f"/v1/runs/{attempt.run_id}/checkpoints", whole)
        told = [(one["directive"], one["sequence_number"], one["news"]) for one in answers]
        assert told[0] == told[1] == told[2], told
        return answers[0], len(await self._world.journal(attempt.run_id)) - before


def _types(schema: dict[str, Any]) -> list[str]:
    """The types that an object may have."""
    found = [schema, *schema.get("anyOf", ())]
    return [name for one in found for name in one.get("discriminator", {}).get("mapping", {})]


def _fits(route: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route.partition(" ")[2]), path) is not None


@pytest.fixture(scope="module")
def urls(world: RunsWorld) -> tuple[str, str]:
    async def opened() -> tuple[str, str]:
        config = world.config(lease_ms=60_000)
        return (await world.gateway(config=config)).url, (await world.gateway(config=config)).url

    return asyncio.run(opened())


async def test_every_route_repeated_on_another_gateway_is_the_same_and_nothing_is_done_twice(
    world: RunsWorld, urls: tuple[str, str]
) -> None:
    async with (
        world.client("worker", *urls) as client,
        world.client("admin", *urls) as operator,
        Caller(world, *urls) as caller,
    ):
        _, document = await client.once("GET", "/openapi.json")
        repeating = Repeating(world, urls, document)
        worker = Worker(client, {"asks": PROGRAMS["asks"]}, new_id("worker"))
        await worker.register()
        await repeat_what_starts_runs(world, repeating, client, caller)
        await repeat_the_life_of_a_run(world, repeating, worker, caller)
        await repeat_ends(world, repeating, worker, caller, operator)
        await repeat_leases(world, repeating, worker, caller)
        await repeat_blobs(repeating, urls, client)
        assert repeating.sent | READS == repeating.routes
        assert repeating.sent & READS == set()
        assert repeating.sent_thens == repeating.thens
        assert repeating.sent_puts == repeating.puts
    await world.verify_all_is_well()


async def repeat_what_starts_runs(world: RunsWorld, repeating: Repeating, client: Client, caller: Caller) -> None:
    """Procedures, schedules and events."""
    procedure, event = new_id("procedure"), new_id("event")
    said = {"name": procedure, "program_digest": "b" * 64, "triggers": [{"event": event}]}
    told = await repeating.send(client, "POST", "/v1/procedures", said)
    assert [one["is_new"] for one in told] == [True, False, False]
    where = f"/v1/schedules/{new_id('schedule')}"
    wanted = {"procedure": procedure, "spec": {"type": "cron", "expression": "0 0 29 2 *", "time_zone": "UTC"}}
    told = await repeating.send(caller.agent, "PUT", where, wanted)
    assert told[0] == told[1] == told[2]
    told = await repeating.send(caller.agent, "DELETE", where, statuses=(200, 404, 404))
    assert told[1]["code"] == told[2]["code"] == "SCHEDULE_NOT_FOUND"
    told = await repeating.send(caller.agent, "POST", f"/v1/triggers/{event}", {"event_id": "one", "payload": 1})
    assert [one["runs"][0]["is_new"] for one in told] == [True, False, False]
    (run_id,) = {one["runs"][0]["run_id"] for one in told}
    rows = await world.fetch("SELECT count(*) FROM tga.runs WHERE procedure = $1", procedure)
    assert rows[0][0] == 1
    told = await repeating.send(caller.agent, "POST", f"/v1/runs/{run_id}/cancel", {})
    assert {one["state"] for one in told} == {"CANCELLED"}
    assert types_of(await world.journal(run_id)) == {"run_start": 1, "run_end": 1}


async def repeat_the_life_of_a_run(world: RunsWorld, repeating: Repeating, worker: Worker, caller: Caller) -> None:
    """Its start, its puts of every kind, what others tell it, its end."""
    run_id, client = new_id(), worker.client
    said = {"procedure": "asks", "input": {"n": 1}, "run_id": run_id}
    started = await repeating.send(caller.agent, "POST", "/v1/runs", said)
    assert [one["replayed"] for one in started] == [False, True, True]
    with pytest.raises(Refused, match="RUN_ID_TAKEN"):
        await caller.start("asks", {"n": 2}, run_id)
    attempt = await leased(worker, run_id)
    where = f"/v1/runs/{run_id}"
    _, added = await repeating.put(client, attempt, 2, puts=[{**STEP, "path": "1"}, {**STEP, "path": "2"}])
    assert added == 2
    call = {"type": "tool", "path": "4", **CALL}
    answer, added = await repeating.put(client, attempt, 4, puts=[{**STEP, "path": "3"}], then=call)
    assert (added, answer["news"][-1]["outcome"]) == (3, "OK")
    named = {"name": "c", "input_digest": "a" * 64}
    child = {"type": "child", **named, "path": "5:1.1", "procedure": "asks", "input": inline(None)}
    answer, added = await repeating.put(client, attempt, 7, then=child)
    assert added == 1
    beat = {"worker": worker.worker_id, "name": "w", "runs": [{"run_id": run_id, "lease": attempt.lease}]}
    for path in ("/v1/worker/heartbeat", f"{where}/heartbeat"):
        beats = await repeating.send(client, "POST", path, beat)
        assert beats[0] == beats[1] == beats[2]
    waits = [
        {"type": "signal", **named, "name": "n", "path": "5:3.1"},
        {"type": "sleep", **named, "path": "5:4.1", "wakes_at": "2999-01-01T00:00:00.000Z"},
        {"type": "step", **named, "path": "5:5.1"},
        {"type": "ask", **named, "path": "5:2.1", "request": ASKED},
    ]
    answer, added = await repeating.put(client, attempt, 8, puts=waits, then={"type": "suspend", "awaits": ["5:2.1"]})
    assert (added, answer["directive"]) == (5, "SUSPENDED")
    await repeating.send(caller.agent, "POST", f"{where}/signals", {"name": "n", "value": 1, "signal_id": "one"})
    await repeating.send(caller.person, "POST", f"{where}/signals", {"path": "5:2.1", "answer": True})
    assert not await caller.answer(run_id, "5:2.1", False), "another answer comes too late"
    journal = await world.journal(run_id)
    assert types_of(journal)["run_signal"] == 1
    assert [one["path"] for one in journal if one["artifact_type"] == "run_answer"] == ["4", "5:3.1", "5:2.1"]
    attempt = await leased(worker, run_id)
    number = attempt.leased["sequence_number"]
    done = {"type": "complete", "output": inline("end"), "positions": 4}
    answer, added = await repeating.put(client, attempt, number, then=done)
    assert (added, answer["directive"]) == (1, "DONE")
    beat["runs"] = [{"run_id": run_id, "lease": attempt.lease}]
    beats = await repeating.send(client, "POST", "/v1/worker/heartbeat", beat)
    assert {one["runs"][0]["directive"] for one in beats} == {"STOP"}
    pages = await repeating.send(client, "GET", f"{where}/checkpoints")
    assert pages[0] == pages[1] == pages[2]

    async def is_cancelled() -> bool:
        rows = await world.fetch("SELECT state FROM tga.runs WHERE parent = $1", f"run:{run_id}")
        return [row["state"] for row in rows] == ["CANCELLED"]

    await until(is_cancelled)  # the child: nobody waits for it any more
    assert list(world.executions(run_id).values()) == [1]


async def repeat_ends(world: RunsWorld, repeating: Repeating, worker: Worker, caller: Caller, operator: Client) -> None:
    """One run that is released, fails, is retried, diverges, is resumed, forked, cancelled and erased."""
    run_id, client = new_id(), worker.client
    where = f"/v1/runs/{run_id}"
    await caller.start("asks", None, run_id)
    attempt = await leased(worker, run_id)
    answer, added = await repeating.put(client, attempt, 2, then={"type": "release"})
    assert (added, answer["directive"]) == (1, "DONE")
    attempt = await leased(worker, run_id)
    failed = {**STEP, "path": "1", "outcome": "ERROR", "value": None, "error": ERROR}
    answer, added = await repeating.put(client, attempt, 4, puts=[failed], then={"type": "fail", "error": ERROR})
    assert (added, answer["directive"]) == (2, "DONE")
    told = await repeating.send(caller.agent, "POST", f"{where}/retry", {"rationale": "again"})
    assert {one["state"] for one in told} == {"SCHEDULED"}
    attempt = await leased(worker, run_id)
    (again,) = await repeat_once(caller.agent, repeating, f"{where}/retry", {"rationale": "again"})
    assert again["state"] == "RUNNING", "somebody works on it already"
    with pytest.raises(Refused, match="RUN_ENDED"):
        await caller.agent.ask("POST", f"{where}/retry", {"rationale": "another one's"})
    divergence = {"path": "1", "recorded": "step plan", "performed": "step pay", "source": "a.py:3"}
    number = attempt.leased["sequence_number"]
    answer, added = await repeating.put(client, attempt, number, then={"type": "diverge", "divergence": divergence})
    assert (added, answer["directive"]) == (1, "DONE")
    accepts = {"version": "1", "program_digest": program_digest("asks")}
    told = await repeating.send(operator, "POST", f"{where}/retry", {"rationale": "fine", "accepts": accepts})
    assert {one["state"] for one in told} == {"SCHEDULED"}
    assert types_of(await world.journal(run_id))["run_resumption"] == 2
    forked = new_id("fork")
    told = await repeating.send(caller.agent, "POST", f"{where}/fork", {"run_id": forked})
    assert [one["replayed"] for one in told] == [False, True, True]
    attempt = await leased(worker, run_id)  # the source goes on: a repeat is still this fork
    (again,) = await repeat_once(caller.agent, repeating, f"{where}/fork", {"run_id": forked})
    assert again["replayed"]
    with pytest.raises(Refused, match="RUN_ID_TAKEN"):
        await caller.agent.ask("POST", f"{where}/fork", {"run_id": forked, "at": 1})
    for ended in (run_id, forked):
        told = await repeating.send(caller.agent, "POST", f"/v1/runs/{ended}/cancel", {"rationale": "enough"})
        assert {one["state"] for one in told} == {"CANCELLED"}
        kinds = [(one["artifact_type"], one.get("outcome")) for one in await world.journal(ended)]
        assert kinds.count(("run_end", "CANCELLED")) == 1
    told = await repeating.send(operator, "DELETE", where)
    assert [one["is_new"] for one in told] == [True, False, False]


async def repeat_once(sender: Client, repeating: Repeating, path: str, body: Any) -> list[Any]:
    status, answer = await sender.once("POST", path, body, url=repeating._at[2])
    assert status == 200, answer
    return [answer]


async def repeat_leases(world: RunsWorld, repeating: Repeating, worker: Worker, caller: Caller) -> None:
    """Each is answered with other runs; those of an answer that was lost come back by heartbeat (test_engine)."""
    started = {new_id() for _ in range(2)}
    for run_id in started:
        await caller.start("asks", None, run_id)
    asked = {"worker": worker.worker_id, "name": "w", "procedures": worker.offered(), "slots": 1, "wait_ms": 0}
    told = await repeating.send(worker.client, "POST", "/v1/worker/lease", asked)
    given = [run["run_id"] for one in told for run in one["runs"]]
    assert sorted(given) == sorted(started)
    for run_id in started:
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})


async def repeat_blobs(repeating: Repeating, urls: tuple[str, str], client: Client) -> None:
    content = new_id("bytes").encode()
    where = f"/v1/blobs/{hashlib.sha256(content).hexdigest()}"
    for method, sent, statuses in (("PUT", content, [201, 200, 200]), ("GET", None, [200, 200, 200])):
        repeating.note(method, where)
        told = [await client.raw(method, where, sent, url=url) for url in (urls[0], urls[0], urls[1])]
        assert [status for status, _ in told] == statuses, told
        assert len({answer for _, answer in told}) == 1
    assert told[0][1] == content


async def leased(worker: Worker, run_id: str) -> Attempt:
    while True:
        for attempt in await worker.lease(slots=1):
            if attempt.run_id == run_id:
                return attempt


def types_of(journal: list[dict[str, Any]]) -> Counter[str]:
    return Counter(one["artifact_type"] for one in journal)
