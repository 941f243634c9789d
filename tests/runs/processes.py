"""Gateways and workers as processes of their own, forked from one that has imported everything: they start in a moment,
and can be killed and stopped hundreds of times in a test.

A gateway is the one that `tga serve` runs, on a database that is there; nothing in `app` knows of the faults. They are
put around its ports before it is opened. A fault has a place, a mode, and how many of that place are passed before:

    commit:WHAT        WHAT is what the commit records of a run (`run_start`, `run_attempt.LEASED`, ...),
                       and `trace` when a tool call's own stream is in it
      kill_before      killed, nothing was sent to PostgreSQL            and_not_persisted
      kill_after       killed, persisted and not acknowledged            but_persisted
      db_rolled_back   its backend is ended inside the transaction       and_not_persisted, and the gateway lives
      db_unknown       persisted, and the connection broke               but_persisted, and the gateway lives
    hold_ready, hold_due, load_records, announce, dispatch, store_blob
      kill_before, kill_after
    answer:METHOD ROUTE
      kill_before      all is done; the caller does not know it
      lost             the same, but the gateway lives: the connection breaks
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import asyncpg

from app.clock import SystemClock
from app.connectors.http import HttpConnector
from app.core.errors import OutcomeUnknown, TgaError
from app.domain.ledger.plans import Plan
from app.domain.runs.blobs import Blobs
from app.domain.runs.engine import leasing
from app.gateway import wiring
from app.gateway.http_server import Router
from app.gateway.serving import serve
from app.postgres import runs as postgres_runs
from app.postgres.runs import PostgresRuns
from app.postgres.writer import Writer
from app.settings import Settings
from tests.runs import worker


@dataclass(frozen=True)
class Fault:
    place: str
    mode: str
    after: int = 0


@dataclass(frozen=True)
class GatewayOptions:
    """`notes`: a file in which it says where it listens, which places it passes, and that its fault has come."""

    environment: dict[str, str]
    notes: str
    admin_url: str
    fault: dict[str, Any] | None = None
    stop_at: str | None = None  # a place before which it stops itself, once
    is_patient: bool = False  # what it does not do because of an event it does after an hour
    model_at: str | None = None  # a server that answers as the model `scripted-in-lua` of Lua programs
    clock_ahead_ms: int = 0  # of everybody else's


@dataclass(frozen=True)
class WorkerOptions:
    urls: list[str]
    key: str
    worker_id: str
    notes: str
    die_at: tuple[str, int] | None = None
    stop_at: tuple[str, int] | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SdkWorkerOptions:
    """A worker of the SDK, with the procedures of tests.sdk.programs. `die_at`, `stop_at`: as for WorkerOptions."""

    urls: list[str]
    key: str
    notes: str
    die_at: tuple[str, int] | None = None
    stop_at: tuple[str, int] | None = None
    more: dict[str, Any] = field(default_factory=dict)


class Mine:
    """Counts the places that a gateway passes, and does what its fault says at one of them."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._fault = None if options.fault is None else Fault(**options.fault)
        self._stop_at = options.stop_at
        self._passed: Counter[str] = Counter()
        self._notes = os.open(options.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, **said: Any) -> None:
        os.write(self._notes, json.dumps(said).encode() + b"\n")

    def mode_at(self, place: str) -> str | None:
        """What is to happen at this place, this time."""
        number = self._passed[place]
        self._passed[place] += 1
        self.note(place=place)
        if place == self._stop_at:
            self._stop_at = None
            self.note(stopped=place)
            os.kill(os.getpid(), signal.SIGSTOP)
        fault = self._fault
        if fault is not None and (fault.place, fault.after) == (place, number):
            self.note(fired=asdict(fault))
            return fault.mode
        return None

    def die_if(self, condition: bool) -> None:
        if condition:
            os.kill(os.getpid(), signal.SIGKILL)

    async def around(self, place: str, work: Callable[[], Awaitable[Any]]) -> Any:
        mode = self.mode_at(place)
        self.die_if(mode == "kill_before")
        result = await work()
        self.die_if(mode == "kill_after")
        return result

    async def commit(self, plans: Sequence[Plan], work: Callable[[], Awaitable[Any]]) -> Any:
        what = what_is_recorded(plans)
        if what is None:
            return await work()
        mode = self.mode_at(f"commit:{what}")
        self.die_if(mode == "kill_before")
        if mode == "db_rolled_back":
            return await self._roll_back(plans[0], work)
        result = await work()
        self.die_if(mode == "kill_after")
        if mode == "db_unknown":
            lost = OutcomeUnknown("the connection broke while it committed")
            if result is None:
                raise lost
            return [lost] * len(plans)
        return result

    async def _roll_back(self, plan: Plan, work: Callable[[], Awaitable[Any]]) -> Any:
        """Let the commit wait for a lock inside its transaction, and end its backend there."""
        admin = await asyncpg.connect(self._options.admin_url)
        try:
            await admin.execute("SELECT pg_advisory_lock(tga.stream_lock_key($1::text))", plan.stream)
            task = asyncio.ensure_future(work())
            waiting = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while (pid := await admin.fetchval(waiting)) is None:
                if task.done():
                    return task.result()
                await asyncio.sleep(0.002)
            await admin.execute("SELECT pg_terminate_backend($1)", pid)
        finally:
            await admin.close()
        return await task


def what_is_recorded(plans: Sequence[Plan]) -> str | None:
    """What a commit records of runs; None when it concerns none."""
    runs = [plan for plan in plans if plan.stream.startswith("run:")]
    if not runs:
        is_of_run = any(b'"idempotency_key":"run:' in entry.artifact for plan in plans for entry in plan.entries)
        return "trace" if is_of_run else None
    names = []
    for entry in (entry for plan in runs for entry in plan.entries):
        said, artifact = json.loads(entry.entry), json.loads(entry.artifact)
        more = artifact.get("change") or artifact.get("kind") or ""
        if said["artifact_type"] == "run_answer":
            more = artifact["answered_by"]["type"]
        elif said["artifact_type"] == "run_end":
            more = artifact["outcome"]
        names.append(said["artifact_type"] + (f".{more}" if more else ""))
    if len(runs) < len(plans):
        names.append("trace")
    return "+".join(names) or "fence"


def lay_mines(mine: Mine) -> None:
    """Put the faults around the ports of a gateway that this process opens next."""

    def around(owner: Any, name: str, place: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        async def mined(self: Any, *arguments: Any, **named: Any) -> Any:
            return await mine.around(place, lambda: original(self, *arguments, **named))

        setattr(owner, name, mined)

    commit, commit_all = Writer.commit, Writer.commit_all

    async def mined_commit(self: Writer, plan: Plan) -> None:
        await mine.commit([plan], lambda: commit(self, plan))

    async def mined_commit_all(
        self: Writer, plans: Sequence[Plan], needs: Sequence[int | None] = ()
    ) -> list[TgaError | None]:
        return await mine.commit(plans, lambda: commit_all(self, plans, needs))  # type: ignore[no-any-return]

    setattr(Writer, "commit", mined_commit)  # noqa: B010
    setattr(Writer, "commit_all", mined_commit_all)  # noqa: B010
    for name in ("hold_ready", "hold_due", "load_records", "announce"):
        around(PostgresRuns, name, name)
    around(HttpConnector, "dispatch", "dispatch")
    around(Blobs, "put", "store_blob")
    answering = Router.__call__

    async def mined_call(self: Router, scope: Any, receive: Any, send: Any) -> None:
        route = re.sub(r"/v1/runs/[^/]+", "/v1/runs/{run_id}", scope["path"])

        async def mined_send(message: Any) -> None:
            if message["type"] == "http.response.start" and route.startswith(("/v1/runs", "/v1/worker")):
                mode = mine.mode_at(f"answer:{scope['method']} {route}")
                mine.die_if(mode == "kill_before")
                if mode == "lost":
                    raise ConnectionResetError("the answer is lost")
            await send(message)

        await answering(self, scope, receive, mined_send)

    setattr(Router, "__call__", mined_call)  # noqa: B010


class ClockAhead(SystemClock):
    """A clock that is set wrong. What it says of how much time has passed is right."""

    def __init__(self, ahead_ms: int) -> None:
        super().__init__()
        self._ahead_ms = ahead_ms

    def now(self) -> str:
        return self.after(0)

    def after(self, milliseconds: int) -> str:
        return super().after(milliseconds + self._ahead_ms)


async def run_gateway(options: GatewayOptions) -> None:
    mine = Mine(options)
    lay_mines(mine)
    if options.is_patient:
        setattr(leasing, "RUN_READY_POLL_MS", 3_600_000)  # noqa: B010
        setattr(postgres_runs, "RUN_HOLD_MS", 3_600_000)  # noqa: B010
    if options.model_at is not None:
        from tests.lua.models import offer_model

        offer_model(options.model_at)
    setattr(wiring, "SystemClock", functools.partial(ClockAhead, options.clock_ahead_ms))  # noqa: B010
    settings = Settings.from_environment(options.environment)

    async def on_listening(url: str) -> None:
        mine.note(url=url)

    async with wiring.open_gateway(settings) as gateway:
        await serve(gateway, settings, on_listening=on_listening)


async def run_worker(options: WorkerOptions) -> None:
    boundaries = worker.Boundaries(options.die_at, options.stop_at)
    notes = os.open(options.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(said: dict[str, Any]) -> None:
        os.write(notes, json.dumps(said).encode() + b"\n")

    tell({"ready": True})
    await worker.serve(options.urls, options.key, options.worker_id, boundaries, tell=tell, **options.more)


async def run_sdk_worker(options: SdkWorkerOptions) -> None:
    from tests.sdk import workers

    await workers.serve(options)


RUN: dict[str, tuple[Callable[..., Any], Callable[[Any], Coroutine[Any, Any, None]]]] = {
    "GatewayOptions": (GatewayOptions, run_gateway),
    "WorkerOptions": (WorkerOptions, run_worker),
    "SdkWorkerOptions": (SdkWorkerOptions, run_sdk_worker),
}


def command_line() -> list[str]:
    return [sys.executable, "-m", "tests.runs.processes"]


def fork(zygote: socket.socket, options: GatewayOptions | WorkerOptions | SdkWorkerOptions) -> int:
    """Ask for a process; its id."""
    zygote.send(json.dumps([type(options).__name__, asdict(options)]).encode())
    return int(zygote.recv(64))


def _serve_forks(control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while raw := control.recv(1 << 20):
        pid = os.fork()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            kind, fields = json.loads(raw)
            log = os.open(fields["notes"] + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            with contextlib.suppress(KeyboardInterrupt):
                if kind != "GatewayOptions":
                    for name in ("die_at", "stop_at"):
                        fields[name] = fields[name] and tuple(fields[name])
                make, run = RUN[kind]
                asyncio.run(run(make(**fields)))
            os._exit(0)
        control.send(str(pid).encode())


if __name__ == "__main__":
    _serve_forks(socket.socket(fileno=os.dup(0)))
