"""Programs whose bodies take as long as a test wants: until the file `go` is in FLOW_NOTES."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tga_sdk import Context, SyncContext, procedure, task

FOLDER = Path(os.environ.get("FLOW_NOTES", "."))


def wait_for_it(name: str) -> str:
    with (FOLDER / name).open("a") as notes:
        notes.write("begun\n")
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    return name


@procedure(name="slow")
async def slow(ctx: Context[None], input: str) -> list[str]:
    first = await ctx.step("first", wait_for_it, input)
    return [first, await ctx.step("second", str.upper, input)]


@procedure(name="reads-a-clock")
def reads_a_clock(ctx: SyncContext[Any], input: None) -> float:
    return time.time()


@task
def add(a: int, b: int) -> int:
    return a + b
