"""Calls as tasks of one step on Absurd: spawned, then claimed and performed by the same client. A repeat is spawned
with the same idempotency key, and its result fetched. In an environment that has absurd-sdk; its schema is there."""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import sys

from absurd_sdk import AsyncAbsurd
from loop import ANSWER, ARGUMENTS, serve

CLIENTS_MAX = 64  # connections; more are slower


async def main(url: str) -> None:
    clients: dict[int, tuple[AsyncAbsurd, asyncio.Lock]] = {}

    async def client(worker: int) -> tuple[AsyncAbsurd, asyncio.Lock]:
        place = worker % CLIENTS_MAX
        if place not in clients:
            made = clients[place] = AsyncAbsurd(url, queue_name="bench"), asyncio.Lock()

            @made[0].register_task("call")
            async def perform(params, context):
                async def effect():
                    return ANSWER

                return await context.step("effect", effect)

        return clients[place]

    async def call(worker: int, name: str) -> None:
        absurd, lock = await client(worker)
        async with lock:
            await absurd.spawn("call", ARGUMENTS, idempotency_key=name)
            await absurd.work_batch(f"worker-{worker}")

    async def repeat(worker: int, name: str) -> None:
        absurd, lock = await client(worker)
        async with lock:
            spawned = await absurd.spawn("call", ARGUMENTS, idempotency_key=f"repeated-{worker}")
            result = await absurd.fetch_task_result(spawned["task_id"])
            if result is None or result.state != "completed":
                await absurd.work_batch(f"worker-{worker}")

    await (await client(0))[0].create_queue("bench")
    await serve({"call": call, "repeat": repeat})


asyncio.run(main(sys.argv[1]))
