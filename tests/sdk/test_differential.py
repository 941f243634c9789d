"""Programs made by chance do the same on a real gateway and on the one in memory: results, journals, state, effects,
and those of their children; also when their worker is lost on the way.

A seed makes a program. A failure names it; `TGA_PROGRAMS=17,18` runs those alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.runs.world import RunsWorld, worlds
from tests.sampling import IS_SOAK, number, seed, share
from tests.sdk.random_programs import POLICY, Maker, bank, performing
from tests.sdk.workers import memory_working, sdk_working
from tga_sdk import AsyncClient, TgaError, Worker
from tga_sdk.attempt import Over
from tga_sdk.testing import MemoryGateway
from tga_sdk.wire import Wire

PATIENCE_S = 1_200
ENOUGH = 60
KINDS = {"step", "tool", "ask", "sleep", "signal", "gather", "call", "child", "checkpoint", "now", "emit", "patched"}
PROGRAMMING_ERRORS = {"TypeError", "AttributeError", "KeyError", "NameError", "IndexError"}  # of these tests themselves
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_MADE = re.compile(r"ch_\w+|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|child-[0-9a-f]{32}")
_COMPARED = ("kind", "name", "outcome", "error", "resume", "inner", "state_change", "try_number")


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


def programs(*, crashes: bool) -> list[int]:
    chosen = os.environ.get("TGA_PROGRAMS")
    if chosen:
        return [int(one) for one in chosen.split(",")]
    first = 0 if seed() is None else number("programs") % 100_000
    return list(range(first, first + (400 if IS_SOAK else share(20, 4) if crashes else share(60, 10))))


@dataclass
class Found:
    state: str
    output: Any
    error: Any
    document: Any
    journal: dict[str, list[Any]]
    charges: Counter[str]
    children: dict[str, dict[str, Any]]  # by the address of the operation that started it


class Side:
    """One of the two gateways. `name` begins the ids of its runs; both are of the same length."""

    def __init__(
        self, name: str, client: AsyncClient, person: AsyncClient, wire: Wire, *, crashes: bool = False
    ) -> None:
        self.name = name
        self.client = client
        self.person = person
        self.wire = wire
        self.crashes = crashes

    async def run(self, number: int) -> Found:
        maker = Maker(number, crashes=self.crashes)
        tree, run_id = maker.program(), f"{self.name}-{number}"
        await self.client.start(performing, tree, run_id=run_id)
        runs = {run_id}
        sent: set[tuple[str, str]] = set()
        while not (await self.client.status(run_id)).has_ended:
            if "child" in str(tree) or "left" in str(tree):
                runs |= {one.run_id for one in await self.client.list(prefix="child-")}
            tried = await self._tried_again(run_id) if maker.asked_when_retried else set()
            for one in runs:
                await self._attend(one, maker, sent, maker.asked_when_retried - tried)
            await asyncio.sleep(0.1)
        return await self._found(run_id)

    async def _found(self, run_id: str) -> Found:
        run = await self.client.wait(run_id)  # a child that was left behind is cancelled, a little later
        document = (await self.wire.ask("GET", f"/v1/runs/{run_id}/state"))["state"]
        output = await self.client.result(run_id) if run.status == "completed" else None
        journal, started = await self._journal(run_id)
        children = {path: (await self._found(one)).__dict__ for path, one in started.items()}
        if run.status == "cancelled":  # how far a child had come when the end of its parent cancelled it is chance
            journal = {}
        return Found(run.status, output, run.error, document, journal, Counter(), children)

    async def _tried_again(self, run_id: str) -> set[str]:
        """The names of the operations of which a try has failed."""
        journal, _ = await self._journal(run_id)
        records = itertools.chain.from_iterable(journal.values())
        return {record["name"] for record in records if record["outcome"] == "RETRY"}

    async def _attend(
        self, run_id: str, maker: Maker, sent: set[tuple[str, str]], not_yet: Collection[str] = ()
    ) -> None:
        """Whatever this run waits for, and a person is to say; but for these."""
        for awaited in (await self.client.status(run_id)).awaits:
            name, path = awaited["name"], awaited["path"]
            if (run_id, path) in sent or name in not_yet:
                continue
            try:
                if awaited["kind"] == "signal" and name in maker.signals:
                    await self.client.signal(run_id, name, maker.signals[name], signal_id=f"{run_id}-{path}")
                elif awaited["kind"] == "ask" and name in maker.answers:
                    await self.person.answer(run_id, path, maker.answers[name])
                else:
                    continue
            except TgaError as error:
                if error.code not in ("RUN_ENDED", "RUN_ANSWER_UNASKED"):
                    raise
            sent.add((run_id, path))

    async def _journal(self, run_id: str) -> tuple[dict[str, list[Any]], dict[str, str]]:
        """By address, in its order there: between branches the order is chance. And the children that it started."""
        found: defaultdict[str, list[Any]] = defaultdict(list)
        children: dict[str, str] = {}
        after = 0
        while True:
            page = await self.wire.ask("GET", f"/v1/runs/{run_id}/checkpoints?after_seq={after}&limit=1000")
            if not page["items"]:
                break
            for record in page["items"]:
                after = record["sequence_number"]
                if "path" in record:
                    found[record["path"]].append(_compared(record))
                if record["artifact_type"] == "run_intent" and record["kind"] == "child":
                    child = record["request"]["child_run_id"]
                    if child is not None:  # else its start was refused
                        children[f"{record['path']} try {record['try_number']}"] = child.rpartition("/")[2]
        return dict(sorted(found.items())), children


class Losing(httpx2.AsyncBaseTransport):
    """Loses runs at boundaries: of each run, the worker's attempt ends before a request is sent, or after it was
    carried out and before the answer is heard, without a word to the gateway. It is leased anew after its silence."""

    def __init__(
        self, inner: httpx2.AsyncBaseTransport, boundaries: Callable[[str], Collection[tuple[int, str]]]
    ) -> None:
        self._inner = inner
        self._boundaries = boundaries
        self._requests: Counter[str] = Counter()
        self.worker: Worker | None = None
        self.lost: Counter[str] = Counter()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if request.method != "POST" or not path.endswith("/checkpoints"):
            return await self._inner.handle_async_request(request)
        run_id = path.split("/")[3]
        number, self._requests[run_id] = self._requests[run_id], self._requests[run_id] + 1
        if (number, "before") in self._boundaries(run_id):
            self._lose(run_id, "before")
        answer = await self._inner.handle_async_request(request)
        if (number, "after") in self._boundaries(run_id):
            self._lose(run_id, "after")
        return answer

    def _lose(self, run_id: str, when: str) -> None:
        assert self.worker is not None
        for task, attempt in self.worker._running.items():
            if attempt.run_id == run_id and attempt.over is None:
                self.lost[when] += 1
                attempt.over = Over("LOST BY THE TEST")
                task.cancel()
                raise asyncio.CancelledError

    async def aclose(self) -> None:
        await self._inner.aclose()


def boundaries(run_id: str) -> Collection[tuple[int, str]]:
    """Two of the first requests of each run; other ones of each program."""
    chance = random.Random(run_id.partition("-")[2] if run_id.startswith(("loss", "memo")) else 1)
    return {(chance.randrange(3), chance.choice(["before", "after"])), (3 + chance.randrange(3), "after")}


def _compared(record: dict[str, Any]) -> dict[str, Any]:
    said = {"type": record["artifact_type"], **{name: record.get(name) for name in _COMPARED}}
    value, joined = record.get("value"), record.get("joined")
    said["value"] = None if value is None else value if value["tier"] in ("inline", "event") else value["tier"]
    if said["kind"] == "now":
        said["value"] = "now"
    # What a tool or a child answered. The digest of a blob differs with the ids that are in it.
    said["joined"] = "artifact" if isinstance(joined, dict) and joined.get("tier") == "artifact" else joined
    said["logs"] = [line["text"] for line in record.get("logs") or ()]
    request = record.get("request") or {}
    said["request"] = {
        one: request.get(one) for one in ("idempotency_key", "retries", "message", "answer_schema", "default")
    }
    return said


def normalised(found: Found, side: str) -> Any:
    text = json.dumps(found.__dict__, ensure_ascii=False, sort_keys=True, default=lambda found: found.__dict__)
    text = re.sub(r'"balance": \d+', '"balance": 0', text)  # of all programs together
    text = re.sub(r" \(expected (?:one of|a configured tool) [^\"]*\)", "", text)  # which tools there are
    return json.loads(_MADE.sub("MADE", _TIME.sub("TIME", text.replace(f"{side}-", "side-"))))


def difference(expected: Any, got: Any, at: str = "") -> str:
    """Where they first differ."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for name in [*expected, *(one for one in got if one not in expected)]:
            if expected.get(name) != got.get(name):
                return difference(expected.get(name), got.get(name), f"{at}/{name}")
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for place, (one, other) in enumerate(zip(expected, got, strict=True)):
            if one != other:
                return difference(one, other, f"{at}/{place}")
    return f"at {at} the real one has {expected!r}, the one in memory {got!r}"[:2_000]


@contextlib.asynccontextmanager
async def losing(url: str, key: str, inner: httpx2.AsyncBaseTransport) -> AsyncIterator[Losing]:
    """A worker that loses runs, until the block ends."""
    transport, ready = Losing(inner, boundaries), asyncio.Event()
    transport.worker = Worker(url, key, [performing], transport=transport, on_ready=ready.set)
    for clock in ("now", "pause"):
        if hasattr(inner, clock):
            setattr(transport, clock, getattr(inner, clock))
    task = asyncio.create_task(transport.worker.run(signals=False))
    await asyncio.wait({task, waiting := asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        yield transport
    finally:
        transport.worker.stop()
        await task


CRASHES = pytest.param(True, id="crashes", marks=pytest.mark.one_in(3))  # it waits for leases to end


@pytest.mark.parametrize("crashes", [pytest.param(False, id="calm"), CRASHES])
async def test_programs_made_by_chance_do_the_same_on_both(world: RunsWorld, crashes: bool) -> None:
    # A lost run is leased anew after two thirds of this. A run that a slow machine loses besides is no difference.
    lease_ms = 3_000 if crashes else 60_000
    config = world.config(lease_ms=lease_ms)
    (world.place / "random.cedar").write_text(POLICY)
    config.write_text(config.read_text().replace("policy.cedar", "random.cedar"))
    gateway = await world.gateway(config=config)
    memory = MemoryGateway(tools=bank(), lease_ms=lease_ms)
    numbers = programs(crashes=crashes)
    print("programs", numbers)
    keys = world.keys
    real_worker: contextlib.AbstractAsyncContextManager[Any] = sdk_working(world, gateway.url, procedures=[performing])
    memory_worker: contextlib.AbstractAsyncContextManager[Any] = memory_working(memory, performing)
    if crashes:
        real_worker = losing(gateway.url, keys["worker"], httpx2.AsyncHTTPTransport())
        memory_worker = losing(memory.url, memory.key, memory.transport)
    async with (
        asyncio.timeout(PATIENCE_S * (5 if IS_SOAK else 1)),
        real_worker as real_losing,
        AsyncClient(gateway.url, keys["agent"]) as agent,
        AsyncClient(gateway.url, keys["supervisor"]) as person,
        memory_worker as memory_losing,
        AsyncClient(memory.url, memory.key, transport=memory.transport) as client,
    ):
        real_wire, memory_wire = (
            Wire(gateway.url, keys["admin"]),
            Wire(memory.url, memory.key, transport=memory.transport),
        )
        real = Side("loss" if crashes else "real", agent, person, real_wire, crashes=crashes)
        other = Side("memo", client, client, memory_wire, crashes=crashes)
        seen: Counter[tuple[str, str | None]] = Counter()
        at_once = asyncio.Semaphore(8)

        async def both(number: int) -> None:
            async with at_once:
                found, ours = await asyncio.gather(real.run(number), other.run(number))
            found.charges = Counter(world.executions(f"{real.name}-{number}"))
            effects = [effect for effect in memory.effects if effect.run_id == f"memo-{number}"]
            ours.charges = Counter(str(one.key) for one in effects if one.tool == "bank.charge" and not one.error)
            expected, got = normalised(found, real.name), normalised(ours, other.name)
            assert got == expected, f"program {number} (TGA_PROGRAMS={number}): {difference(expected, got)}"
            assert (found.error or {}).get("type") not in PROGRAMMING_ERRORS, found.error
            for record in itertools.chain.from_iterable(found.journal.values()):
                seen[record["kind"] or "answer", record["outcome"]] += 1

        try:
            await asyncio.gather(*(both(number) for number in numbers))
        finally:
            await real_wire.close()
            await memory_wire.close()
    memory.close()
    print(dict(seen))
    if crashes:
        print("lost", real_losing.lost, memory_losing.lost)
        assert all(losing.lost[when] for losing in (real_losing, memory_losing) for when in ("before", "after"))
    if len(numbers) >= ENOUGH and not crashes:  # chance makes all of it
        assert {kind for kind, _ in seen} >= KINDS
        assert {outcome for _, outcome in seen} >= {None, "OK", "ERROR", "RETRY", "TIMEOUT"}
    await gateway.kill()
