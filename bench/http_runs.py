"""Runs of one step over the gateway's HTTP API, with a plain worker: for bench.comparison.

Each of so many loops has two connections, as caller and worker have: the worker waits for a run, the caller starts one,
the worker gets it, puts one step and its end. A run counts from the worker's request to the answer that it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from typing import Any, Final, Self

from app.postgres.api_keys import PostgresAccess
from app.postgres.sessions import Sessions
from bench.measure import WARMUP_STEPS

PROGRAM: Final = "b" * 64
OFFERED: Final = {"name": "bench", "version": "1", "program_digest": PROGRAM}
ANSWER: Final = {"ticket_id": "T-1"}
ROLES: Final = ("agent", "worker")
_runs: Final = itertools.count(1)


async def make_keys(url: str) -> dict[str, str]:
    """An API key for the caller, and one for the worker."""
    async with await Sessions.open(url, sessions_max=1) as sessions:
        access = PostgresAccess(sessions, url)
        keys = {}
        for role in ROLES:
            name = f"bench-{role}"
            made = await access.create_key(name=name, principal_id=name, roles=[role], created_by="bench")
            keys[role] = made.text
        return keys


class PlainClient:
    """One connection that is kept, one request at a time."""

    def __init__(self, key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._head = f"Host: gateway\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, key: str) -> Self:
        return cls(key, *await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, path: str, said: dict[str, Any]) -> Any:
        body = json.dumps(said).encode()
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        status, _, lines = (await self._reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
        place = lines.lower().index(b"content-length:") + 15
        answer = await self._reader.readexactly(int(lines[place:].partition(b"\r")[0]))
        if b" 200 " not in status:
            raise RuntimeError(f"{path} was answered {status.decode()}: {answer.decode()[:300]}")
        return json.loads(answer)

    def close(self) -> None:
        self._writer.close()


async def measure_runs(port: int, keys: dict[str, str], arguments: Any, at_once: int, seconds: float) -> dict[str, Any]:
    """A closed loop, like `measure_http`."""
    opened = [[await PlainClient.open(port, keys[role]) for role in ROLES] for _ in range(at_once)]
    latencies: list[float] = []
    number = next(_runs)

    async def work(place: int, count: float, until: float, kept: list[float]) -> None:
        caller, worker = opened[place]
        while count > 0 and (began := time.perf_counter()) < until:
            count -= 1
            await _whole(caller, worker, f"bench-worker-{number}-{place}", arguments)
            kept.append(time.perf_counter() - began)

    try:
        await opened[0][1].ask("/v1/procedures", OFFERED)
        await asyncio.gather(*(work(place, WARMUP_STEPS, float("inf"), []) for place in range(at_once)))
        began = time.perf_counter()
        await asyncio.gather(*(work(place, float("inf"), began + seconds, latencies) for place in range(at_once)))
        return {"steps": len(latencies), "seconds": time.perf_counter() - began, "latencies_s": latencies}
    finally:
        for client in itertools.chain(*opened):
            with contextlib.suppress(OSError):
                client.close()


async def _whole(caller: PlainClient, worker: PlainClient, name: str, arguments: Any) -> None:
    lease = {"worker": name, "name": name, "procedures": [OFFERED], "slots": 1, "wait_ms": 30_000}
    waiting = asyncio.create_task(worker.ask("/v1/worker/lease", lease))
    await asyncio.sleep(0)  # it is sent first
    await caller.ask("/v1/runs", {"procedure": "bench", "input": arguments})
    (run,) = (await waiting)["runs"]
    put = {
        "lease": run["lease"],
        "attempt": run["attempt"],
        "after_seq": run["sequence_number"],
        "puts": [
            {
                "type": "checkpoint",
                "path": "1",
                "kind": "step",
                "name": "effect",
                "input_digest": PROGRAM,
                "outcome": "OK",
                "value": {"tier": "inline", "value": ANSWER},
                "started_at": run["started_at"],
                "duration_ms": 0,
            }
        ],
        "then": {"type": "complete", "output": {"tier": "inline", "value": ANSWER}, "positions": 1},
    }
    answer = await worker.ask(f"/v1/runs/{run['run_id']}/checkpoints", put)
    if answer["directive"] != "DONE":
        raise RuntimeError(f"the run has not ended: {answer}")
