"""Calls as workflows of one activity on Temporal's dev server; a repeat asks the finished workflow for its result. The
worker is in this process. In an environment that has temporalio."""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

with workflow.unsafe.imports_passed_through():
    from loop import ANSWER, ARGUMENTS, serve


@activity.defn
async def effect(arguments: dict) -> dict:
    return ANSWER


@workflow.defn
class Call:
    @workflow.run
    async def run(self, arguments: dict) -> dict:
        return await workflow.execute_activity(effect, arguments, start_to_close_timeout=timedelta(minutes=1))


async def main(address: str) -> None:
    client = await Client.connect(address)
    done = set()

    async def call(worker: int, name: str) -> None:
        await client.execute_workflow(Call.run, ARGUMENTS, id=name, task_queue="bench")

    async def repeat(worker: int, name: str) -> None:
        same = f"repeated-{worker}"
        if same not in done:
            done.add(same)
            await call(worker, same)
        await client.get_workflow_handle(same).result()

    settings = {"task_queue": "bench", "workflows": [Call], "activities": [effect]}
    async with Worker(client, workflow_runner=UnsandboxedWorkflowRunner(), **settings):
        await serve({"call": call, "repeat": repeat})


asyncio.run(main(sys.argv[1]))
