"""Programs made by chance do the same on a real gateway and on the one in memory: results, journals, state, effects.

A seed makes a program. A failure names it; `TGA_PROGRAMS=17,18` runs those alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.runs.world import RunsWorld, worlds
from tests.sampling import IS_SOAK, number, seed, share
from tests.sdk.random_programs import POLICY, Maker, bank, performing
from tests.sdk.workers import memory_working, sdk_working
from tga_sdk import AsyncClient, TgaError
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


def programs() -> list[int]:
    chosen = os.environ.get("TGA_PROGRAMS")
    if chosen:
        return [int(one) for one in chosen.split(",")]
    first = 0 if seed() is None else number("programs") % 100_000
    return list(range(first, first + (400 if IS_SOAK else share(60, 10))))


@dataclass
class Found:
    state: str
    output: Any
    error: Any
    document: Any
    journal: dict[str, list[Any]]
    charges: Counter[str]


class Side:
    """One of the two gateways. `name` begins the ids of its runs; both are of the same length."""

    def __init__(self, name: str, client: AsyncClient, person: AsyncClient, wire: Wire) -> None:
        self.name = name
        self.client = client
        self.person = person
        self.wire = wire

    async def run(self, number: int) -> Found:
        maker = Maker(number)
        tree, run_id = maker.program(), f"{self.name}-{number}"
        await self.client.start(performing, tree, run_id=run_id)
        runs = {run_id}
        sent: set[tuple[str, str]] = set()
        while not (run := await self.client.status(run_id)).has_ended:
            runs |= {one.run_id for one in await self.client.list(prefix="child-")} if "child" in str(tree) else set()
            for one in runs:
                await self._attend(one, maker, sent)
            await asyncio.sleep(0.1)
        document = (await self.wire.ask("GET", f"/v1/runs/{run_id}/state"))["state"]
        output = await self.client.result(run_id) if run.status == "completed" else None
        return Found(run.status, output, run.error, document, await self._journal(run_id), Counter())

    async def _attend(self, run_id: str, maker: Maker, sent: set[tuple[str, str]]) -> None:
        """Whatever this run waits for, and a person is to say."""
        for awaited in (await self.client.status(run_id)).awaits:
            name, path = awaited["name"], awaited["path"]
            if (run_id, path) in sent:
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

    async def _journal(self, run_id: str) -> dict[str, list[Any]]:
        """By address, in its order there: between branches the order is chance."""
        found: defaultdict[str, list[Any]] = defaultdict(list)
        after = 0
        while True:
            page = await self.wire.ask("GET", f"/v1/runs/{run_id}/checkpoints?after_seq={after}&limit=1000")
            if not page["items"]:
                break
            for record in page["items"]:
                after = record["sequence_number"]
                if "path" in record:
                    found[record["path"]].append(_compared(record))
        return dict(sorted(found.items()))


def _compared(record: dict[str, Any]) -> dict[str, Any]:
    said = {"type": record["artifact_type"], **{name: record.get(name) for name in _COMPARED}}
    value = record.get("value")
    said["value"] = None if value is None else value if value["tier"] in ("inline", "event") else value["tier"]
    if said["kind"] == "now":
        said["value"] = "now"
    said["joined"] = record.get("joined")
    said["logs"] = [line["text"] for line in record.get("logs") or ()]
    request = record.get("request") or {}
    said["request"] = {
        one: request.get(one) for one in ("idempotency_key", "retries", "message", "answer_schema", "default")
    }
    return said


def normalised(found: Found, side: str) -> Any:
    text = json.dumps(found.__dict__, ensure_ascii=False, sort_keys=True)
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


async def test_programs_made_by_chance_do_the_same_on_both(world: RunsWorld) -> None:
    config = world.config(lease_ms=60_000)
    (world.place / "random.cedar").write_text(POLICY)
    config.write_text(config.read_text().replace("policy.cedar", "random.cedar"))
    gateway = await world.gateway(config=config)
    memory = MemoryGateway(tools=bank(), lease_ms=60_000)
    numbers = programs()
    print("programs", numbers)
    keys = world.keys
    async with (
        asyncio.timeout(PATIENCE_S * (5 if IS_SOAK else 1)),
        sdk_working(world, gateway.url, procedures=[performing]),
        AsyncClient(gateway.url, keys["agent"]) as agent,
        AsyncClient(gateway.url, keys["supervisor"]) as person,
        memory_working(memory, performing) as client,
    ):
        real_wire, memory_wire = (
            Wire(gateway.url, keys["admin"]),
            Wire(memory.url, memory.key, transport=memory.transport),
        )
        real = Side("real", agent, person, real_wire)
        other = Side("memo", client, client, memory_wire)
        seen: Counter[tuple[str, str | None]] = Counter()
        at_once = asyncio.Semaphore(8)

        async def both(number: int) -> None:
            async with at_once:
                found, ours = await asyncio.gather(real.run(number), other.run(number))
            found.charges = Counter(world.executions(f"real-{number}"))
            effects = [effect for effect in memory.effects if effect.run_id == f"memo-{number}"]
            ours.charges = Counter(str(one.key) for one in effects if one.tool == "bank.charge" and not one.error)
            expected, got = normalised(found, "real"), normalised(ours, "memo")
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
    if len(numbers) >= ENOUGH:  # chance makes all of it
        assert {kind for kind, _ in seen} >= KINDS
        assert {outcome for _, outcome in seen} >= {None, "OK", "ERROR", "RETRY", "TIMEOUT"}
    await gateway.kill()
