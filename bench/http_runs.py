"""Runs of one step over the gateway's HTTP API, with plain workers: for bench.comparison and bench.shares.

In two shapes. `run`: so many loops, each of them a caller and a worker of one slot, with a connection each; the worker
waits for a run, the caller starts one, the worker gets it, puts one step and its end. A run counts from the worker's
request to the answer that it is done. `run by slots`: as many callers, and one worker with twice as many slots, as the
SDK's worker works: it has one question for runs open at a time, for as many as it has slots free, and puts what it has
done over connections of its own. A run counts from the caller's request to the answer that it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self

from app.postgres.api_keys import PostgresAccess
from app.postgres.sessions import Sessions
from bench.measure import WARMUP_STEPS

RUN, RUN_BY_SLOTS = "run", "run by slots"
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


class Loops:
    """A worker of one slot for every run that is under way."""

    def __init__(self, opened: list[list[PlainClient]], arguments: Any) -> None:
        self._opened = opened
        self._arguments = arguments
        self._number = next(_runs)

    async def do(self, place: int) -> None:
        caller, worker = self._opened[place]
        waiting = asyncio.create_task(
            worker.ask("/v1/worker/lease", _lease(f"bench-worker-{self._number}-{place}", slots=1))
        )
        await asyncio.sleep(0)  # it is sent first
        await caller.ask("/v1/runs", {"procedure": "bench", "input": self._arguments})
        (run,) = (await waiting)["runs"]
        await _put(worker, run)

    async def close(self) -> None:
        """Nothing is open between runs."""


class Slots:
    """One worker for all of them, which asks for as many runs as it has slots free, with one question at a time."""

    def __init__(self, opened: list[list[PlainClient]], asking: PlainClient, arguments: Any) -> None:
        self._opened = opened
        self._asking = asking
        self._arguments = arguments
        self._name = f"bench-worker-{next(_runs)}"
        self._free = deque(worker for _, worker in opened)  # each in turn: idle connections are closed
        self._done: dict[str, asyncio.Future[None]] = {}
        self._puts: set[asyncio.Task[None]] = set()
        self._leasing = asyncio.create_task(self._lease_for_ever())

    async def do(self, place: int) -> None:
        caller, _ = self._opened[place]
        run_id = f"{self._name}-{next(_runs)}"
        done = self._done[run_id] = asyncio.get_running_loop().create_future()
        await caller.ask("/v1/runs", {"procedure": "bench", "input": self._arguments, "run_id": run_id})
        await asyncio.wait({done, self._leasing}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            self._leasing.result()  # raises what ended it
        await done
        del self._done[run_id]

    async def _lease_for_ever(self) -> None:
        while True:
            # Of callers there are fewer than slots: some are always free.
            slots = len(self._opened) + len(self._free)
            for run in (await self._asking.ask("/v1/worker/lease", _lease(self._name, slots=slots)))["runs"]:
                task = asyncio.create_task(self._put(self._free.popleft(), run))
                self._puts.add(task)
                task.add_done_callback(self._puts.discard)

    async def _put(self, worker: PlainClient, run: dict[str, Any]) -> None:
        done = self._done[run["run_id"]]
        try:
            await _put(worker, run)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        self._free.append(worker)

    async def close(self) -> None:
        self._leasing.cancel()
        await asyncio.gather(self._leasing, return_exceptions=True)


async def measure_runs(
    port: int,
    keys: dict[str, str],
    arguments: Any,
    at_once: int,
    seconds: float,
    *,
    shape: str = RUN,
    on_border: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, Any]:
    """A closed loop, like `measure_http`. `on_border` is told when what counts begins, and when it is over."""
    opened = [[await PlainClient.open(port, keys[role]) for role in ROLES] for _ in range(at_once)]
    asking = await PlainClient.open(port, keys["worker"])
    await asking.ask("/v1/procedures", OFFERED)
    load = Slots(opened, asking, arguments) if shape == RUN_BY_SLOTS else Loops(opened, arguments)
    latencies: list[float] = []

    async def work(place: int, count: float, until: float, kept: list[float]) -> None:
        while count > 0 and (began := time.perf_counter()) < until:
            count -= 1
            await load.do(place)
            kept.append(time.perf_counter() - began)

    try:
        await asyncio.gather(*(work(place, WARMUP_STEPS, float("inf"), []) for place in range(at_once)))
        if on_border is not None:
            await on_border()
        began = time.perf_counter()
        await asyncio.gather(*(work(place, float("inf"), began + seconds, latencies) for place in range(at_once)))
        took = time.perf_counter() - began
        if on_border is not None:
            await on_border()
        return {"steps": len(latencies), "seconds": took, "latencies_s": latencies}
    finally:
        await load.close()
        for client in (asking, *itertools.chain(*opened)):
            with contextlib.suppress(OSError):
                client.close()


def _lease(worker: str, *, slots: int) -> dict[str, Any]:
    return {"worker": worker, "name": worker, "procedures": [OFFERED], "slots": slots, "wait_ms": 30_000}


async def _put(worker: PlainClient, run: dict[str, Any]) -> None:
    """The one step of this run, and its end."""
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
