"""Runs over HTTP, for tests: an edge on a real socket, an engine on real PostgreSQL, and short ways to both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import LimitsConfig
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import Front, World
from tests.runs.engines import PROGRAM, Engine, open_engine

OFFER = {"name": "onboard", "version": "1", "program_digest": PROGRAM}
QUESTION = {"form": "approve", "message": "Pay?", "answer_schema": {"type": "boolean"}}


@dataclass
class Runs:
    """`front` is the way in; `engine` stands behind it."""

    front: Front
    engine: Engine

    async def start(self, run_id: str, given: Any = None, who: str = "agent", **more: Any) -> Any:
        body = {"procedure": "onboard", "input": given, "run_id": run_id, **more}
        return await self.ok(await self.front.post("/v1/runs", body, who))

    async def lease(self, slots: int = 1, who: str = "worker", wait_ms: int = 5_000) -> list[Any]:
        ask = {"worker": f"{who}-one", "name": who, "procedures": [OFFER], "slots": slots, "wait_ms": wait_ms}
        found: list[Any] = (await self.ok(await self.front.post("/v1/worker/lease", ask, who)))["runs"]
        return found

    async def put(self, run: Any, *puts: Any, after: int = 2, then: Any = None, who: str = "worker") -> Any:
        body = {"lease": run["lease"], "attempt": run["attempt"], "after_seq": after, "puts": puts, "then": then}
        return await self.ok(await self.front.post(f"/v1/runs/{run['run_id']}/checkpoints", body, who))

    async def asking(self, run_id: str, **question: Any) -> Any:
        """A run that waits for an answer to its first operation; the lease under which it asked."""
        await self.start(run_id)
        (run,) = await self.lease()
        await self.put(run, ask("1", **question), then={"type": "suspend", "awaits": ["1"]})
        return run

    async def complete(self, run_id: str) -> None:
        await self.start(run_id)
        (run,) = await self.lease()
        await self.put(run, then={"type": "complete", "output": {"tier": "inline", "value": 1}, "positions": 0})

    async def fail(self, run_id: str) -> None:
        await self.start(run_id)
        (run,) = await self.lease()
        error = {"type": "Broken", "message": "broken", "retryable": False}
        await self.put(run, then={"type": "fail", "error": error})

    @staticmethod
    async def ok(answer: tuple[int, Any]) -> Any:
        status, document = answer
        assert status == 200, document
        return document


def ask(path: str, name: str = "pay?", **question: Any) -> dict[str, Any]:
    request = {**QUESTION, **question}
    return {"type": "ask", "path": path, "name": name, "input_digest": PROGRAM, "request": request}


@asynccontextmanager
async def open_runs(
    database: Database,
    sessions: Sessions,
    ledger: PostgresLedger,
    folder: Path,
    *,
    limits: LimitsConfig | None = None,
    **options: Any,
) -> AsyncIterator[Runs]:
    async with open_engine(database.gateway_url, folder=folder / "blobs", **options) as engine:
        world = World(database, sessions, ledger, folder, runs=engine.engine)
        async with world.open(limits) as front:
            yield Runs(front, engine)
