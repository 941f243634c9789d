"""The SDK's worker: `python -m bench.sdk [--quick] [--dbos PYTHON]`.

1. Microseconds of the worker's CPU for a step that is live, alone and with 32 runs at once, and for one that is
   replayed. The gateway is a process of its own, and its time is not counted.
2. A run of 20,000 steps: its first and its last steps cost the same within 10 %, and the worker's memory is flat, live
   and in the replay.
3. With `--dbos PYTHON`, an interpreter whose environment has DBOS: a workflow of as many steps there, in the same run.
   DBOS has its database in the worker's process; ours speaks HTTP to the gateway.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import asyncpg
from rich.console import Console
from rich.table import Table

from bench.measure import arguments_of
from bench.workers import serving
from tests.runs.world import Caller, RunsWorld, new_id
from tga_sdk import Context, guard, procedure

FLAT_WITHIN: Final = 0.10
PARTS: Final = 10  # of a tenth of the long run, each measured by itself
TEXT: Final = "x" * 180


@dataclass
class Marks:
    """What the program notes on its way: where the process's CPU time and memory stood after so many steps."""

    cpu: dict[int, float] = field(default_factory=dict)
    memory: dict[int, float] = field(default_factory=dict)

    def note(self, step: int) -> None:
        with guard.off():
            self.cpu[step] = time.process_time()
            self.memory[step] = resident_mib()

    def between(self, first: int, last: int) -> float:
        return (self.cpu[last] - self.cpu[first]) / (last - first) * 1e6

    def median_between(self, first: int, last: int) -> float:
        """Of the parts between: what else the machine does meanwhile slows some of them down."""
        noted = [step for step in sorted(self.cpu) if first <= step <= last]
        return statistics.median(self.between(*pair) for pair in pairwise(noted))


marks = Marks()


def numbered(number: int) -> dict[str, Any]:
    return {"number": number, "text": TEXT}


@procedure(name="bench-steps")
async def steps(ctx: Context[Any], input: dict[str, Any]) -> int:  # noqa: A002
    """So many steps; it notes the time after every `every`, then waits for a signal, so that it can be replayed."""

    async def add(number: int) -> dict[str, Any]:
        return numbered(number)

    total = 0
    for number in range(input["steps"]):
        if number % input["every"] == 0:
            marks.note(number)
        total += (await ctx.step("add", add, number))["number"]
    marks.note(input["steps"])
    if input["waits"]:
        await ctx.signal("go")
    return total


def resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure_at_once(world: RunsWorld, url: str, runs: int, count: int) -> float:
    """Microseconds a step with so many runs at once."""
    async with Caller(world, url) as caller, serving(world, url, [steps]) as worker:
        await caller.start("bench-steps", {"steps": 20, "every": 1_000, "waits": False}, warm := new_id())
        await worker.ended(warm, "COMPLETED")
        began = time.process_time()
        ids = [new_id() for _ in range(runs)]
        for run_id in ids:
            await caller.start("bench-steps", {"steps": count, "every": count, "waits": False}, run_id)
        for run_id in ids:
            await worker.ended(run_id, "COMPLETED")
        return (time.process_time() - began) / (runs * count) * 1e6


async def measure_long(world: RunsWorld, url: str, count: int) -> tuple[Marks, Marks]:
    """One long run, live and replayed by the next worker."""
    global marks
    live = marks = Marks()
    given = {"steps": count, "every": count // (10 * PARTS), "waits": True}
    run_id = new_id()
    gc.collect()
    async with Caller(world, url) as caller:
        async with serving(world, url, [steps]) as worker:
            await caller.start("bench-steps", given, run_id)
            await worker.ended(run_id, "SUSPENDED")
        replayed = marks = Marks()
        gc.collect()
        async with serving(world, url, [steps]) as worker:
            await caller.signal(run_id, "go", 1, f"{run_id}-go")
            await worker.ended(run_id, "COMPLETED")
    return live, replayed


async def measure_dbos(world: RunsWorld, python: str, count: int) -> tuple[float, float]:
    """Microseconds of its process for a step, and steps a second; on the same server, in a database of its own."""
    root = await asyncpg.connect(world.postgres.url())
    await root.execute("CREATE DATABASE dbos_sdk_bench")
    await root.close()
    script = Path(__file__).parent / "peers" / "dbos_steps.py"
    url = world.postgres.url(database="dbos_sdk_bench")
    command = [python, str(script), url, str(count)]
    said = await asyncio.to_thread(subprocess.check_output, command, text=True)
    cpu, rate = said.split()[-2:]
    return float(cpu), float(rate)


async def bench(world: RunsWorld, console: Console, *, is_quick: bool, dbos: str | None) -> None:
    count, long, rounds = (40, 200, 1) if is_quick else (1_000, 20_000, 3)
    gateway = await world.gateway(config=world.config(lease_ms=30_000))
    table = Table(title="CPU of the worker, microseconds a step")
    for name in ("", "of rounds", "median"):
        table.add_column(name, justify="left" if not name else "right")
    medians: dict[str, float] = {}

    def row(name: str, found: list[float]) -> None:
        medians[name] = statistics.median(found)
        table.add_row(name, ", ".join(f"{one:,.0f}" for one in found), f"{medians[name]:,.0f}")

    alone, crowded, theirs = [], [], []
    for number in range(1, rounds + 1):
        alone.append(await measure_at_once(world, gateway.url, 1, count))
        crowded.append(await measure_at_once(world, gateway.url, 32, max(count // 10, 5)))
        console.print(f"round {number} of {rounds}: {alone[-1]:,.0f} us alone, {crowded[-1]:,.0f} us of 32 runs")
    console.print(f"a run of {long:,} steps, one commit each, one after the other ...")
    row("live, one run", alone)
    row("live, 32 runs", crowded)
    began = time.monotonic()
    live, replayed = await measure_long(world, gateway.url, long)
    console.print(f"... and its replay: {time.monotonic() - began:,.0f} s in all")
    row(f"replayed, of {long:,}", [replayed.between(0, long)])
    if dbos is not None:
        theirs.append(await measure_dbos(world, dbos, count))
        row("DBOS, one workflow", [one for one, _ in theirs])
    console.print(table)
    if dbos is not None:
        ratio = medians["live, one run"] / medians["DBOS, one workflow"]
        console.print(f"A live step takes {ratio:.2f} of the CPU of one on DBOS.")
    tenth = long // 10
    for name, found in (("live", live), ("replayed", replayed)):
        first, last = found.median_between(tenth, 2 * tenth), found.median_between(long - tenth, long)
        change = last / first - 1
        verdict = "flat" if change <= FLAT_WITHIN else f"NOT flat within {FLAT_WITHIN:.0%}"
        console.print(
            f"{name}: steps {tenth:,} to {2 * tenth:,} take {first:,.0f} us each, the last {tenth:,} {last:,.0f} "
            f"({change:+.0%}: {verdict}); memory {found.memory[tenth]:.1f} MiB, then {found.memory[long]:.1f}"
        )
    await gateway.kill()


def main() -> None:
    parser = arguments_of("sdk", __doc__)
    parser.add_argument("--dbos", metavar="PYTHON", help="an interpreter that has DBOS, to compare with")
    given = parser.parse_args()
    world = RunsWorld().start()
    try:
        asyncio.run(bench(world, Console(width=150), is_quick=given.quick, dbos=given.dbos))
    finally:
        world.stop()


if __name__ == "__main__":
    main()
