"""A worker may hold several questions for runs open: together they never ask for more runs than it has slots, and what
any of them is answered with is begun."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2

from tests.runs.world import until
from tga_sdk import Worker, procedure

SLOTS = 5


@procedure(version="1")
async def waits(ctx: Any, given: Any) -> None:
    return None


class Asked(httpx2.AsyncBaseTransport):
    """Questions for runs stay open until the test answers them."""

    def __init__(self) -> None:
        self.open: list[tuple[int, asyncio.Future[list[dict[str, Any]]]]] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        said = json.loads(await request.aread() or b"{}")
        runs: list[dict[str, Any]] = []
        if request.url.path == "/v1/worker/lease":
            question = (said["slots"], asyncio.get_running_loop().create_future())
            self.open.append(question)
            try:
                runs = await question[1]
            finally:
                self.open.remove(question)
        return httpx2.Response(200, json={"runs": runs})

    @property
    def slots(self) -> list[int]:
        return [slots for slots, _ in self.open]


class Asking(Worker):
    """Its runs take as long as the test lets them."""

    questions = 2

    def __init__(self, transport: Asked) -> None:
        super().__init__("http://gateway", None, [waits], slots=SLOTS, transport=transport)
        self.begun: list[str] = []
        self.over = asyncio.Event()

    def _begin(self, host: Any, leased: dict[str, Any]) -> None:
        self.begun.append(leased["run_id"])

        async def executed() -> str:
            await self.over.wait()
            return "COMPLETED"

        task = asyncio.create_task(executed())
        self._running[task] = None  # type: ignore[assignment]
        task.add_done_callback(self._ended)


def run(run_id: str) -> dict[str, Any]:
    return {"run_id": run_id, "lease_ms": 30_000}


async def test_questions_together_ask_for_no_more_runs_than_there_are_slots() -> None:
    asked = Asked()
    worker = Asking(asked)
    working = asyncio.create_task(worker.run(signals=False))
    await until(lambda: asked.slots == [3, 2])
    asked.open[0][1].set_result([run("1"), run("2")])
    await until(lambda: asked.slots == [2, 1])  # one is asked anew while the other one waits on
    assert worker.begun == ["1", "2"]
    for _, answer in list(asked.open):
        answer.set_result([run(f"{len(worker.begun)}-{number}") for number in range(1)])
    await until(lambda: len(worker.begun) == 4)
    await until(lambda: sum(asked.slots) == 1)
    asked.open[0][1].set_result([run("last")])
    await until(lambda: len(worker.begun) == SLOTS and not asked.open)
    worker.over.set()
    await until(lambda: asked.slots == [3, 2])
    worker.stop()
    await working
    assert asked.open == []  # a question that nobody waits for would be given a run
