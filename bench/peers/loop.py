"""A closed loop for the programs beside it. Stands alone: it runs in the environments of others, and without us.

Reads a line for each measurement (`call 8 3.0` or `repeat 8 3.0`), answers with a line of JSON. A call is one durable
effect, done by a function in the same process; a repeat asks again for one that is done.
"""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time

ARGUMENTS = {"title": "ticket", "priority": 2, "text": "It does not work. " * 24}  # about 500 bytes
ANSWER = {"ticket_id": "T-1"}
WARMUP_STEPS = 8


async def measure(do, at_once: int, seconds: float) -> dict:
    """`do(worker, name)` makes one step, under a name that no step had before."""
    latencies = []
    numbers = itertools.count()

    async def work(worker: int, until: float, kept: list, steps: int) -> None:
        for _ in range(steps):
            began = time.perf_counter()
            if began >= until:
                return
            await do(worker, f"{began}-{next(numbers)}")
            kept.append(time.perf_counter() - began)

    await asyncio.gather(*(work(n, float("inf"), [], WARMUP_STEPS) for n in range(at_once)))
    began = time.perf_counter()
    await asyncio.gather(*(work(n, began + seconds, latencies, 2**62) for n in range(at_once)))
    return {"steps": len(latencies), "seconds": time.perf_counter() - began, "latencies_s": latencies}


async def serve(steps: dict) -> None:
    """Until the input ends. `steps`: by `call` and `repeat`, what makes one; None where there is no such thing."""
    print("ready", flush=True)
    reader = asyncio.get_running_loop()
    while line := await reader.run_in_executor(None, sys.stdin.readline):
        what, at_once, seconds = line.split()
        do = steps[what]
        print(json.dumps(None if do is None else await measure(do, int(at_once), float(seconds))), flush=True)
