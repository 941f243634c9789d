"""A workflow of one step on DBOS, in a closed loop: for bench.runs, in an environment that has DBOS, and not us.
Prints a line for each number at once: the number, workflows a second."""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import sys
import time

from dbos import DBOS


@DBOS.step()
async def plan(_: int) -> dict[str, str]:
    return {"text": "x" * 188}


@DBOS.workflow()
async def whole(given: int) -> dict[str, str]:
    return await plan(given)


async def run_for(seconds: float, at_once: int) -> int:
    done = 0
    until = time.perf_counter() + seconds

    async def work() -> None:
        nonlocal done
        while time.perf_counter() < until:
            await whole(1)
            done += 1

    await asyncio.gather(*(work() for _ in range(at_once)))
    return done


async def main(url: str, seconds: float, at_once: list[int]) -> None:
    DBOS(config={"name": "bench", "system_database_url": url, "run_admin_server": False, "log_level": "ERROR"})
    DBOS.launch()
    for number in at_once:
        await run_for(0.5, number)
        started = time.perf_counter()
        done = await run_for(seconds, number)
        print(number, done / (time.perf_counter() - started), flush=True)
    DBOS.destroy()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), [int(part) for part in sys.argv[3].split(",")]))
