"""Calls as workflows of one step on DBOS; a repeat is the same workflow id again. In an environment that has DBOS."""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import sys

from dbos import DBOS, SetWorkflowID
from loop import ANSWER, ARGUMENTS, serve


@DBOS.step()
async def effect(arguments: dict) -> dict:
    return ANSWER


@DBOS.workflow()
async def whole(arguments: dict) -> dict:
    return await effect(arguments)


async def call(worker: int, name: str) -> None:
    with SetWorkflowID(name):
        await whole(ARGUMENTS)


async def repeat(worker: int, name: str) -> None:
    with SetWorkflowID(f"repeated-{worker}"):
        await whole(ARGUMENTS)


async def main(url: str) -> None:
    DBOS(config={"name": "bench", "system_database_url": url, "run_admin_server": False, "log_level": "ERROR"})
    DBOS.launch()
    await serve({"call": call, "repeat": repeat})
    DBOS.destroy()


asyncio.run(main(sys.argv[1]))
