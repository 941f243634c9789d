"""Submitted programs on a whole gateway, which executes them itself: for bench.lua.

Callers start runs over HTTP, each the next one when its last has ended. That it has is asked of the database: whoever
asked the gateway would be measured, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import asyncpg

from app.postgres.database import EMBEDDED_DATABASE
from bench.http_runs import PlainClient
from bench.measure import Server
from bench.served import CONFIG, answering

LOOK_S: Final = 0.004
PAYING: Final = """
main = procedure "main" { run = function() return tool.crm.create_ticket{title = "It does not work."} end }
"""
STEPPING: Final = """
main = procedure "main" { input = {steps = {type = "integer"}}, run = function()
    local total = 0
    for number = 1, input.steps do
        total = total + checkpoint(function() return {number = number, text = string.rep("x", 180)} end).number
    end
    return {total = total}
end }
"""


def cpu_of(pid: int) -> float:
    """CPU seconds of a process: to the nanosecond where the kernel tells it so, else to the hundredth of a second."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    facts = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")


class Used(NamedTuple):
    """CPU seconds of all threads of the gateway, of its Lua processes, and of PostgreSQL."""

    gateway: float
    children: float
    database: float

    @classmethod
    def by(cls, pid: int, server: Server) -> Used:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = sum(cpu_of(int(thread)) for thread in os.listdir(f"/proc/{pid}/task"))
        return cls(threads, sum(cpu_of(int(child)) for child in children), server.cpu_s())

    def since(self, before: Used, count: int) -> str:
        """Microseconds for one of so many."""
        parts = (
            f"{name} {(after - was) / count * 1e6:,.0f}" for name, after, was in zip(_NAMES, self, before, strict=True)
        )
        return f"us of CPU: {', '.join(parts)}"


_NAMES: Final = ("gateway", "Lua", "PostgreSQL")


class Ends:
    """Tells when runs have ended."""

    def __init__(self, session: asyncpg.Connection) -> None:
        self._session = session
        self._waiting: dict[str, asyncio.Future[str]] = {}

    async def of(self, run_id: str) -> None:
        stream = f"run:{run_id}"
        self._waiting[stream] = asyncio.get_running_loop().create_future()
        state = await self._waiting[stream]
        if state != "COMPLETED":
            raise RuntimeError(f"run {run_id}: expected COMPLETED, found {state}")

    async def look(self) -> None:
        while True:
            if self._waiting:
                ended = await self._session.fetch(
                    "SELECT stream, state FROM tga.heads WHERE stream = ANY($1) AND NOT is_open", list(self._waiting)
                )
                for row in ended:
                    self._waiting.pop(row["stream"]).set_result(row["state"])
            await asyncio.sleep(LOOK_S)


class Caller:
    """Starts runs at one gateway, so many at once."""

    def __init__(self, port: int, key: str, ends: Ends) -> None:
        self._port = port
        self._key = key
        self._ends = ends

    async def submit(self, name: str, source: str) -> None:
        client = await PlainClient.open(self._port, self._key)
        await client.ask("/v1/procedures", {"name": name, "language": "lua", "source": source})
        client.close()

    async def runs(self, name: str, given: Any, count: int, at_once: int) -> float:
        """Seconds for all of them."""
        clients = [await PlainClient.open(self._port, self._key) for _ in range(at_once)]
        numbers = itertools.count()

        async def work(client: PlainClient) -> None:
            while next(numbers) < count:
                started = await client.ask("/v1/runs", {"procedure": name, "input": given})
                await self._ends.of(started["run_id"])

        began = time.perf_counter()
        await asyncio.gather(*(work(client) for client in clients))
        taken = time.perf_counter() - began
        for client in clients:
            client.close()
        return taken


async def measure_hosted(server: Server, *, runs: int, checkpoints: int) -> AsyncIterator[str]:
    """A line for each of: runs with a tool call, 1 and 32 at once; a run of so many live checkpoints."""
    home = server.embedded.data_dir.parents[1]
    with answering("tool", home) as (tool, _):
        (home / "tga.toml").write_text(CONFIG.format(tool=tool))
        with answering("gateway", home) as (url, pid):
            session = await asyncpg.connect(server.embedded.url("postgres", EMBEDDED_DATABASE))
            ends = Ends(session)
            looking = asyncio.create_task(ends.look())
            try:
                key = (home / "admin.key").read_text("ascii").strip()
                caller = Caller(int(url.rpartition(":")[2].rstrip("/")), key, ends)
                await caller.submit("paying", PAYING)
                await caller.submit("stepping", STEPPING)
                await caller.runs("paying", None, 32, 32)  # starts the children, fills the caches
                for at_once in (1, 32):
                    count = runs if at_once > 1 else max(1, runs // 8)
                    before = Used.by(pid, server)
                    taken = await caller.runs("paying", None, count, at_once)
                    used = Used.by(pid, server).since(before, count)
                    rate = f"{at_once} at once: {count / taken:,.0f} a second"
                    yield f"Runs with one tool call each, {rate}; a run, {used}"
                before = Used.by(pid, server)
                await caller.runs("stepping", {"steps": checkpoints}, 1, 1)
                yield f"A live checkpoint on the gateway, {Used.by(pid, server).since(before, checkpoints)}"
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
                await session.close()
