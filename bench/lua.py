"""Lua procedures: `python -m bench.lua [--quick]`.

1. How long a fresh Lua state takes, with the pool's spare ones.
2. The program alone: microseconds of CPU (of this process and of the Lua process together) for a checkpoint that is
   live, and for one that is replayed. The journal is a list in memory, so neither the gateway nor HTTP is in it.
3. A run of 20,000 checkpoints: its first tenths and its last ones cost the same within 10 %, live and in the replay.
4. The whole gateway as `tga serve` runs it, which executes submitted programs itself: runs a second, 1 and 32 at once,
   with one tool call each; CPU of the gateway, its Lua processes and PostgreSQL for a run, and for a live checkpoint.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import statistics
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rich.console import Console

from app.lua.driver import LuaProcedure, lua_procedure
from app.lua.execution import Execution
from app.lua.limits import Limits
from app.lua.options import LuaOptions
from app.lua.pool import Chunk, Pool
from app.lua.programs import Source, declared
from bench.lua_hosted import cpu_of, measure_hosted
from bench.measure import Server, arguments_of, run_bench
from tga_sdk import guard
from tga_sdk.attempt import Attempt, Host

FLAT_WITHIN: Final = 0.10
PARTS: Final = 10
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


class Answer(NamedTuple):
    status_code: int
    content: bytes


class Remembering:
    """A gateway of one run that remembers what is put, as bytes, and gives it back in pages; nothing else."""

    def __init__(self) -> None:
        self._records: list[bytes] = []

    @property
    def sequence_number(self) -> int:
        return len(self._records)

    async def send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> Answer:
        if method == "GET":
            found = re.search(r"after_seq=(\d+)", path)
            after = 0 if found is None else int(found[1])
            return Answer(200, b'{"items":[' + b",".join(self._records[after : after + 1000]) + b"]}")
        body = json.loads(content or b"{}")
        checkpoints = [put for put in body["puts"] if put["type"] == "checkpoint"]  # not the signal that it waits for
        for put in checkpoints:
            more = {"artifact_type": "run_checkpoint", "sequence_number": self.sequence_number + 1}
            self._records.append(json.dumps({**put, **more}).encode())
        directive = "CONTINUE" if body.get("then") is None else "SUSPENDED"
        stored = {"sequence_number": self.sequence_number, "news": list[Any]()}
        return Answer(200, json.dumps({"directive": directive, "reason": None, **stored}).encode())


class Marks:
    """Where the CPU time of both processes stood after so many operations of the program."""

    def __init__(self, pool: Pool, every: int) -> None:
        self._pool = pool
        self._every = every
        self._count = 0
        self._cpu: list[float] = []

    def note(self) -> None:
        if self._count % self._every == 0:
            with guard.off():
                self._cpu.append(cpu_s(self._pool))
        self._count += 1

    @property
    def parts_us(self) -> list[float]:
        """Microseconds for an operation, in each part of the run."""
        return [(after - before) / self._every * 1e6 for before, after in zip(self._cpu, self._cpu[1:], strict=False)]


def cpu_s(pool: Pool) -> float:
    """CPU seconds of this process and of the pool's children."""
    pids = [child.pid for child in pool._children if child is not None and not child.is_gone]
    return time.process_time() + sum(cpu_of(pid) for pid in pids if pid is not None)


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
        state.close()
        await asyncio.sleep(0.02)  # the child makes its next spare ones
    return statistics.median(taken), sorted(taken)[int(len(taken) * 0.9)]


async def attempt(program: LuaProcedure, remembering: Remembering, number: int, steps: int) -> str:
    host = Host(remembering, None, lease_ms=86_400_000, heard_at=time.monotonic())  # type: ignore[arg-type]
    leased = {
        "run_id": "bench",
        "attempt": number,
        "lease": "bench",
        "salt": "00" * 32,
        "draw_salt": "00" * 32,
        "sequence_number": remembering.sequence_number,
        "first_seq": 0,
        "input": {"tier": "inline", "value": {"steps": steps}},
        "started_at": "2026-01-01T00:00:00.000Z",
    }
    return await Attempt(host, leased, program).run()


async def measure_long(pool: Pool, steps: int) -> tuple[Marks, Marks]:
    """One long run, live and replayed by the next attempt."""
    program, remembering = await program_of(pool, "steps", STEPS), Remembering()
    found: list[Marks] = []
    reply = Execution._reply

    async def noting(self: Execution, thread: int, request: Any) -> Any:
        if thread == 0:
            found[-1].note()
        return await reply(self, thread, request)

    setattr(Execution, "_reply", noting)  # noqa: B010
    try:
        for number in (1, 2):
            found.append(Marks(pool, steps // PARTS))
            gc.collect()
            how = await attempt(program, remembering, number, steps)
            if how != "SUSPENDED" or remembering.sequence_number != steps:
                raise RuntimeError(f"expected {steps} checkpoints, then a wait; found {how}")
    finally:
        setattr(Execution, "_reply", reply)  # noqa: B010
    return found[0], found[1]


def told_of(name: str, steps: int, marks: Marks) -> str:
    """The first part is left out: in it the processes warm up. Medians, because others use the machine."""
    parts = marks.parts_us
    first, last = statistics.median(parts[1:4]), statistics.median(parts[-3:])
    change = last / first - 1 if first else 0.0
    verdict = "flat" if change <= FLAT_WITHIN else f"NOT flat within {FLAT_WITHIN:.0%}"
    return (
        f"{name}: a checkpoint takes {statistics.median(parts):,.0f} us of CPU; of {steps:,} the second to fourth "
        f"tenth take {first:,.0f} each, the last three {last:,.0f} ({change:+.0%}: {verdict})"
    )


async def bench(server: Server, machine: str, console: Console, *, is_quick: bool) -> None:
    starts, long, runs, hosted = (10, 100, 32, 50) if is_quick else (200, 20_000, 960, 2_000)
    console.print(machine, markup=False)
    async with Pool(LIMITS, children=1) as pool:
        median, worst = await measure_start(pool, starts)
        console.print(f"A fresh Lua state: {median:.2f} ms, the worst of ten {worst:.2f} ms.")
        live, replayed = await measure_long(pool, long)
        for name, found in (("live", live), ("replayed", replayed)):
            console.print(told_of(name, long, found))
    async for line in measure_hosted(server, runs=runs, checkpoints=hosted):
        console.print(line, markup=False)


def main() -> None:
    given = arguments_of("lua", __doc__).parse_args()
    run_bench(lambda server, machine, console: bench(server, machine, console, is_quick=given.quick))


if __name__ == "__main__":
    main()
