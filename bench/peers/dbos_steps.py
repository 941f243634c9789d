"""One workflow of many steps on DBOS: for bench.sdk, in an environment that has DBOS, and not us.
Prints microseconds of this process's CPU for a step, and the steps a second."""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import sys
import time

from dbos import DBOS


@DBOS.step()
async def add(number: int) -> dict[str, object]:
    return {"number": number, "text": "x" * 180}


@DBOS.workflow()
async def steps(count: int) -> int:
    total = 0
    for number in range(count):
        total += (await add(number))["number"]
    return total


async def main(url: str, count: int) -> None:
    DBOS(config={"name": "bench", "system_database_url": url, "run_admin_server": False, "log_level": "ERROR"})
    DBOS.launch()
    await steps(50)
    cpu, wall = time.process_time(), time.perf_counter()
    await steps(count)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(cpu / count * 1e6, count / wall, flush=True)
    DBOS.destroy()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
