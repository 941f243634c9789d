"""Whether a gateway grows while it works: `python -m bench.soak [--minutes 60] [--rate 40] [--quick]`.

One gateway process as `tga serve` runs it, with PostgreSQL and a tool server of its own, at a steady low rate: fresh
calls, repeats of finished ones, calls that wait for a person and are withdrawn, and runs with a tool call and a step.
Every few seconds it is asked (`/metrics`) for its memory, descriptors and tasks, and PostgreSQL for its sessions. Of
each the slope over the last two thirds is told, in units an hour. Caches fill at first, up to their bounds: 32,768 keys
that were answered, 1,024 answers and 2,048 runs of some 15 KB each. A short soak ends before they are full.

Ends with 1 if descriptors, tasks or sessions grow, or memory by more than a tenth of itself in an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.measure import arguments_of, own_folder, run_on_fast_loop
from tests.load.world import World
from tga_sdk import Context, Worker, procedure

MINUTES: Final = 60.0
RATE: Final = 40.0
SAMPLES: Final = 120
REST_S: Final = 0.5
MEASURES: Final = {  # name in the table, metric, by how much it is divided
    "memory MB": ("process_resident_memory_bytes", 1e6),
    "descriptors": ("process_open_fds", 1),
    "tasks": ("tga_event_loop_tasks", 1),
}
SESSIONS: Final = "sessions"
_SESSIONS: Final = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'tga' AND pid <> pg_backend_pid()"


@procedure(name="soak")
async def soak(ctx: Context[None], input: int) -> int:  # noqa: A002
    await ctx.tool("bank", "charge", {"amount": 1})
    return await ctx.step("double", lambda: input * 2)


class NotNow(Exception):
    """The gateway, or the machine, has too much to do: 429 or 503."""


@dataclass
class Growth:
    """What was seen, by name: (seconds, value)."""

    seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, at_s: float, value: float) -> None:
        self.seen.setdefault(name, []).append((at_s, value))

    def count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    def settled(self, name: str) -> list[tuple[float, float]]:
        found = self.seen[name]
        return found[len(found) // 3 :]

    def slope_an_hour(self, name: str) -> float:
        """By least squares, over the last two thirds."""
        times, values = zip(*self.settled(name), strict=True)
        if len(times) < 2 or times[0] == times[-1]:
            return 0.0
        return statistics.linear_regression(times, values).slope * 3600

    def findings(self) -> list[str]:
        found = []
        for name in self.seen:
            values = [value for _, value in self.settled(name)]
            half = len(values) // 2
            rises = statistics.median(values[half:]) - statistics.median(values[:half])
            # A few more or fewer are at work at any moment; in memory, what the allocator keeps.
            slack = 0.02 * statistics.median(values) if name == "memory MB" else 3
            slope, allowed = self.slope_an_hour(name), 0.1 * statistics.median(values)
            if rises > slack and slope > allowed:
                found.append(f"{name} grow by {slope:.1f} an hour, from {values[0]:.1f} to {values[-1]:.1f}")
        return found

    def table(self) -> Table:
        table = Table(title="One gateway at a steady rate")
        for heading in ("", "at first", *(f"{tenth}0 %" for tenth in range(1, 11)), "slope an hour"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, found in self.seen.items():
            figures = [found[0][1]]
            for tenth in range(10):
                part = found[len(found) * tenth // 10 : len(found) * (tenth + 1) // 10] or found[-1:]
                figures.append(statistics.median(value for _, value in part))
            table.add_row(name, *(f"{figure:,.1f}" for figure in figures), f"{self.slope_an_hour(name):+,.1f}")
        return table


class Clients:
    """What is asked of the gateway, all over the same few connections."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str, growth: Growth) -> None:
        self._http = http
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._growth = growth
        self._numbers = itertools.count(1)
        self._keys: list[str] = []
        self._chance = random.Random(17)

    async def ask(self, method: str, path: str, body: Any = None, *, statuses: Sequence[int] = (200,)) -> Any:
        async with self._http.request(method, self._url + path, json=body, headers=self._headers) as answer:
            text = await answer.text()
            if answer.status in (429, 503):
                raise NotNow
            if answer.status not in statuses:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]}")
            return text if path == "/metrics" else await answer.json()

    async def act(self) -> None:
        try:
            await self._act()
        except NotNow:
            self._growth.count("requests that were told to come again")

    async def _act(self) -> None:
        number, chance = next(self._numbers), self._chance.random()
        call = {"server_id": "bank", "tool_name": "charge", "arguments": {"amount": 1}}
        if chance < 0.5 or not self._keys:
            key = f"soak-{number}"
            await self.ask("POST", "/v1/tool-calls", {**call, "idempotency_key": key})
            self._keys = [*self._keys[-2_000:], key]
            self._growth.count("fresh calls")
        elif chance < 0.8:
            key = self._chance.choice(self._keys)
            await self.ask("POST", "/v1/tool-calls", {**call, "idempotency_key": key})
            self._growth.count("repeats")
        elif chance < 0.85:
            waiting = {**call, "tool_name": "refund", "idempotency_key": f"refund-{number}"}
            held = await self.ask("POST", "/v1/tool-calls", waiting, statuses=(202,))
            await self.ask("POST", f"/v1/traces/{held['trace_id']}/withdraw", {}, statuses=(200, 409))
            self._growth.count("withdrawn calls")
        else:
            started = {"procedure": "soak", "input": number, "run_id": f"soak-{number}"}
            await self.ask("POST", "/v1/runs", started, statuses=(200, 201, 202))
            self._growth.count("runs")

    async def sample(self, at_s: float) -> None:
        shown = await self.ask("GET", "/metrics")
        for name, (metric, divided) in MEASURES.items():
            found = re.search(rf"^{metric}(?:{{[^}}]*}})? (\S+)$", shown, re.MULTILINE)
            if found is not None:
                self._growth.add(name, at_s, float(found[1]) / divided)


async def run_soak(world: World, *, seconds: float, rate: float, samples: int) -> Growth:
    growth, began = Growth(), time.monotonic()
    (_, _, agent), (_, _, worker) = await world.create_keys([("soaker", "agent,auditor"), ("worker", "worker")])
    connector = aiohttp.TCPConnector(limit=16)
    ready = asyncio.Event()
    hands = Worker(world.url, worker, [soak], on_ready=ready.set)
    working = asyncio.create_task(hands.run(signals=False))
    try:
        async with aiohttp.ClientSession(connector=connector) as http:
            await ready.wait()
            clients = Clients(http, world.url, agent, growth)
            under_way: set[asyncio.Task[None]] = set()
            next_sample = 0.0
            while (now := time.monotonic() - began) < seconds:
                if now >= next_sample:
                    # At rest: what is under way at a moment depends on the machine's load, not on a leak.
                    await asyncio.gather(*under_way)
                    under_way.clear()
                    await asyncio.sleep(REST_S)
                    with contextlib.suppress(NotNow):
                        await clients.sample(now)
                    growth.add(SESSIONS, now, float(await asyncio.to_thread(_sessions, world)))
                    next_sample += seconds / samples
                if len(under_way) < 64:
                    under_way.add(asyncio.create_task(clients.act()))
                for task in [task for task in under_way if task.done()]:
                    under_way.discard(task)
                    task.result()
                await asyncio.sleep(1 / rate)
            await asyncio.gather(*under_way)
    finally:
        hands.stop()
        hands.stop()
        await working
    return growth


def _sessions(world: World) -> int:
    return int(world.database.fetch(_SESSIONS)[0][0])


def main() -> None:
    parser = arguments_of("soak", __doc__)
    parser.add_argument("--minutes", type=float, help=f"how long (default {MINUTES:g})")
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second (default %(default)g)")
    given = parser.parse_args()
    seconds = 60 * given.minutes if given.minutes else 6.0 if given.quick else 60 * MINUTES
    console = Console(width=None if Console().is_terminal else 120)
    with own_folder("tga-soak-") as home:
        world = World(home)
        try:
            world.open()
            growth = run_on_fast_loop(
                run_soak(world, seconds=seconds, rate=given.rate, samples=12 if given.quick else SAMPLES)
            )
        finally:
            world.close()
    done = ", ".join(f"{count:,} {what}" for what, count in growth.done.items())
    console.print(f"{seconds / 60:g} minutes at {given.rate:g} a second: {done}", markup=False)
    console.print(growth.table())
    findings = [] if given.quick else growth.findings()
    for finding in findings:
        console.print(f"GROWS: {finding}", markup=False)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
