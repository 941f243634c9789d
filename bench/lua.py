"""Lua procedures: `python -m bench.lua [--quick]`.

1. How long a fresh Lua state takes, with the pool's spare ones.
2. Microseconds of CPU (the worker's process and its Lua process together) for a checkpoint that is live, and for one
   that is replayed. The gateway is a process of its own, and its time is not counted.
3. A run of 20,000 checkpoints: its first and its last cost the same within 10 %, live and in the replay.
4. Runs a second, 32 at once, with one tool call each.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import time
from typing import Any, Final

from rich.console import Console

from app.lua.driver import LuaProcedure, lua_procedure
from app.lua.execution import Execution
from app.lua.limits import Limits
from app.lua.options import LuaOptions
from app.lua.pool import Chunk, Pool
from app.lua.programs import Source, declared
from bench.measure import arguments_of
from bench.workers import serving
from tests.runs.world import Caller, RunsWorld, new_id
from tga_sdk import guard

FLAT_WITHIN: Final = 0.10
LIMITS: Final = Limits(attempt_cpu_s=600.0)
STEPS: Final = """
main = procedure "main" { input = {steps = {type = "integer"}}, run = function()
    local total = 0
    for number = 1, input.steps do
        total = total + checkpoint(function() return {number = number, text = string.rep("x", 180)} end).number
    end
    signal("go")
    return total
end }
"""
PAYING: Final = """
main = procedure "main" { run = function() return tool.bank.charge{amount = 1} end }
"""


class Marks:
    """Where the CPU time of both processes stood after so many operations of the program."""

    def __init__(self, pool: Pool, every: int) -> None:
        self._pool = pool
        self._every = every
        self._count = 0
        self.cpu: dict[int, float] = {}

    def note(self) -> None:
        if self._count % self._every == 0:
            with guard.off():
                self.cpu[self._count] = cpu_s(self._pool)
        self._count += 1

    def between(self, first: int, last: int) -> float:
        return (self.cpu[last] - self.cpu[first]) / (last - first) * 1e6


def cpu_s(pool: Pool) -> float:
    """CPU seconds of this process and of the pool's children."""
    whole = time.process_time()
    for child in pool._children:
        if child is not None and not child.is_gone:
            with open(f"/proc/{child.pid}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
            whole += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return whole


async def program_of(pool: Pool, name: str, text: str) -> LuaProcedure:
    source = Source(f"{name}.lua", text, {})
    return lua_procedure(source, await declared(pool, source), pool, options=LuaOptions(limits=LIMITS))


async def measure_start(pool: Pool, count: int) -> tuple[float, float]:
    """Milliseconds until a state is there: the median, and the worst of ten."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        state = await pool.state([Chunk("main.lua", STEPS)], seed=bytes(32), is_strict=False)
        taken.append((time.perf_counter() - began) * 1000)
        await state.close()
        await asyncio.sleep(0.02)  # the child makes its next spare ones
    return statistics.median(taken), sorted(taken)[int(len(taken) * 0.9)]


async def measure_long(world: RunsWorld, url: str, pool: Pool, count: int) -> tuple[Marks, Marks]:
    """One long run, live and replayed by the next worker."""
    program = await program_of(pool, "steps", STEPS)
    run_id = new_id()
    found: list[Marks] = []
    reply = Execution._reply

    async def noting(self: Execution, thread: int, request: Any) -> Any:
        if thread == 0:
            found[-1].note()
        return await reply(self, thread, request)

    setattr(Execution, "_reply", noting)  # noqa: B010
    try:
        async with Caller(world, url) as caller:
            for how in ("SUSPENDED", "COMPLETED"):
                found.append(Marks(pool, count // 10))
                gc.collect()
                async with serving(world, url, [program]) as worker:
                    if how == "SUSPENDED":
                        await caller.start("steps", {"steps": count}, run_id)
                    else:
                        await caller.signal(run_id, "go", 1, f"{run_id}-go")
                    await worker.ended(run_id, how)
    finally:
        setattr(Execution, "_reply", reply)  # noqa: B010
    return found[0], found[1]


async def measure_runs(world: RunsWorld, url: str, pool: Pool, count: int) -> float:
    """Runs a second, 32 at once."""
    program = await program_of(pool, "paying", PAYING)
    async with Caller(world, url) as caller, serving(world, url, [program]) as worker:
        await caller.start("paying", None, warm := new_id())
        await worker.ended(warm, "COMPLETED")
        slots = asyncio.Semaphore(32)

        async def one() -> None:
            async with slots:
                await caller.start("paying", None, run_id := new_id())
                await worker.ended(run_id, "COMPLETED")

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(count)))
        return count / (time.perf_counter() - began)


async def bench(world: RunsWorld, console: Console, *, is_quick: bool) -> None:
    starts, long, runs = (10, 100, 32) if is_quick else (200, 20_000, 640)
    gateway = await world.gateway(config=world.config(lease_ms=30_000))
    async with Pool(LIMITS, children=1) as pool:
        median, worst = await measure_start(pool, starts)
        console.print(f"A fresh Lua state: {median:.2f} ms, the worst of ten {worst:.2f} ms.")
        live, replayed = await measure_long(world, gateway.url, pool, long)
        tenth = long // 10
        for name, found in (("live", live), ("replayed", replayed)):
            first, last = found.between(tenth, 2 * tenth), found.between(long - tenth, long)
            change = last / first - 1 if first else 0.0
            verdict = "flat" if change <= FLAT_WITHIN else f"NOT flat within {FLAT_WITHIN:.0%}"
            console.print(
                f"{name}: a checkpoint takes {found.between(0, long):,.0f} us of CPU; {tenth:,} to {2 * tenth:,} take "
                f"{first:,.0f} each, the last {tenth:,} {last:,.0f} ({change:+.0%}: {verdict})"
            )
        rate = await measure_runs(world, gateway.url, pool, runs)
        console.print(f"Runs with one tool call each, 32 at once: {rate:,.0f} a second.")
    await gateway.kill()


def main() -> None:
    given = arguments_of("lua", __doc__).parse_args()
    world = RunsWorld().start()
    try:
        asyncio.run(bench(world, Console(width=150), is_quick=given.quick))
    finally:
        world.stop()


if __name__ == "__main__":
    main()
