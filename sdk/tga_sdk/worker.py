"""A worker: leases runs, executes their programs, many at once, and says that it lives.

1. It registers its procedures, then asks for runs for as long as it has slots free; the gateway holds the question
   until there are some.
2. Every run is one `Attempt`, a task of its own. One heartbeat tells the gateway of all of them.
3. Asked to stop (SIGTERM, SIGINT, `stop()`), it takes no more runs. Bodies that are under way end and are recorded,
   then their runs are given back. After `drain_seconds`, or when asked again, it leaves them as they are: they are
   leased anew when the lease is over.

A gateway that does not answer is asked again; so a worker outlives restarts of the gateway. While it cannot be sure
that its runs are its own, it starts no body.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import httpx2

from tga_sdk import guard
from tga_sdk.attempt import Attempt, Host
from tga_sdk.errors import GatewayError, ProcedureInvalid
from tga_sdk.procedures import Procedure, procedure_of
from tga_sdk.telemetry import enable_by_environment
from tga_sdk.wire import Wire

LEASE_WAIT_MS: Final = 20_000
THREADS_MAX: Final = 1_000
BEATS_A_LEASE: Final = 3
RUNS_A_BEAT: Final = 1_000
SLOTS_MAX: Final = 256
logger = logging.getLogger("tga_sdk.worker")


class Worker:
    """Executes runs of these procedures.

    `url`: of one gateway, or of several of the same database. `key`: an API key with the role worker. `slots`: how many
    runs at once. `strict_determinism`: a program that does outside of an operation what a replay would do differently
    fails at that line; otherwise it is warned about. `drain_seconds`: how long bodies may take to end when the worker
    is asked to stop.

    Guaranteed: no run is executed by two workers with effect; of one that lost its lease nothing is recorded and no
    tool call leaves. Several workers, also of several versions, may run side by side.
    """

    questions = 1  # for runs that are held open at once, while there are slots free
    watches_programs = True  # whether this process is watched for what a replay would do differently

    def __init__(
        self,
        url: str | Sequence[str],
        key: str | None,
        procedures: Sequence[Any],
        *,
        slots: int = 32,
        strict_determinism: bool = False,
        transport: httpx2.AsyncBaseTransport | None = None,
        name: str | None = None,
        drain_seconds: float = 30.0,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        if not 1 <= slots <= SLOTS_MAX:
            raise ProcedureInvalid(f"slots: expected 1 to {SLOTS_MAX}, found {slots}")
        enable_by_environment()
        self.given = list(procedures)
        self.procedures = self._served()
        self.slots = slots
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.worker_id = f"{secrets.token_hex(12)}-{os.getpid()}"
        self.drain_seconds = drain_seconds
        self._url = url
        self._key = key
        self._transport = transport
        self._is_strict = strict_determinism
        self._on_ready = on_ready
        self._stopping = asyncio.Event()
        self._host: Host | None = None
        self._running: dict[asyncio.Task[str], Attempt] = {}

    async def run(self, *, signals: bool = True) -> None:
        """Work until `stop()` is called or, with `signals`, SIGTERM or SIGINT comes."""
        if self.watches_programs:
            guard.install()
        wire = Wire(self._url, self._key, transport=self._transport, connections=self.slots + 8)
        threads = concurrent.futures.ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="tga-body")
        host = self._host = Host(wire, threads, self._is_strict)
        # A gateway in memory has a time of its own, which tests move: then it is the worker's, too.
        host.now = getattr(self._transport, "now", host.now)
        host.pause = getattr(self._transport, "pause", host.pause)
        loop = asyncio.get_running_loop()
        caught = (signal.SIGTERM, signal.SIGINT) if signals else ()
        for number in caught:
            loop.add_signal_handler(number, self.stop)
        try:
            await self._register(wire)
            logger.info(
                "worker %s serves %s", self.name, ", ".join(f"{p.name} {p.version}" for p in self.procedures.values())
            )
            if self._on_ready is not None:
                self._on_ready()
            beating = asyncio.create_task(self._beat_for_ever(host))
            try:
                await self._lease_for_ever(host)
                await self._drain(host)
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
        finally:
            for number in caught:
                loop.remove_signal_handler(number)
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            threads.shutdown(wait=False, cancel_futures=True)
            await wire.close()

    def stop(self) -> None:
        """Take no more runs, end what is under way, and return from `run`. A second call does not wait for bodies."""
        if self._stopping.is_set():
            self.drain_seconds = 0.0
            for task in self._running:
                task.cancel()
        self._stopping.set()
        if self._host is not None:
            self._host.is_draining = True

    # What is served. A worker whose programs come and go while it works replaces these four.

    def _served(self) -> dict[str, Procedure[Any, Any]]:
        return _by_name(self.given)

    def _offers(self) -> list[dict[str, Any]]:
        return [procedure.offer() for procedure in self.procedures.values()]

    def _procedure_of(self, leased: dict[str, Any]) -> Procedure[Any, Any]:
        return self.procedures[leased["procedure"]]

    async def _register(self, wire: Wire) -> None:
        for procedure in self.procedures.values():
            await wire.ask("POST", "/v1/procedures", procedure.registration())
        for one in self.given:
            register = getattr(one, "register", None)
            if register is not None:
                await register(wire)

    # ---------------------------------------------------------------------------------------------------------- leases

    async def _lease_for_ever(self, host: Host) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        asking: dict[asyncio.Task[list[dict[str, Any]]], int] = {}  # questions for runs, and for how many each asks
        try:
            while not self._stopping.is_set():
                free = self.slots - len(self._running) - sum(asking.values())
                while free > 0 and len(asking) < self.questions:
                    asked = -(-free // (self.questions - len(asking)))
                    asking[asyncio.create_task(self._lease(host, asked))] = asked
                    free -= asked
                waiting: set[asyncio.Task[Any]] = {*asking, stopping}
                if len(asking) < self.questions:
                    waiting |= self._running.keys()
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for answered in [task for task in asking if task.done()]:
                    del asking[answered]
                    for leased in answered.result():
                        self._begin(host, leased)
        finally:  # also when this worker is cancelled: a run that it leased then would have no worker
            stopping.cancel()
            for task in asking:
                task.cancel()
        for task in asking:
            with contextlib.suppress(asyncio.CancelledError):
                for leased in await task:
                    self._begin(host, leased)

    async def _lease(self, host: Host, slots: int) -> list[dict[str, Any]]:
        asked = {
            "worker": self.worker_id,
            "name": self.name,
            "procedures": self._offers(),
            "slots": slots,
            "wait_ms": LEASE_WAIT_MS,
        }
        sent = time.monotonic()
        leased: list[dict[str, Any]] = (
            await host.wire.ask("POST", "/v1/worker/lease", asked, wait=LEASE_WAIT_MS / 1000)
        )["runs"]
        if leased:
            host.lease_ms = leased[0]["lease_ms"]
            if not self._running:
                host.heard_at = max(host.heard_at, sent)
            # A question that was held for long says nothing of now: the run would be left before its first body.
            if (time.monotonic() - host.heard_at) * 1000 > host.lease_ms / BEATS_A_LEASE:
                await self._beat(host)
        return leased

    def _begin(self, host: Host, leased: dict[str, Any]) -> None:
        attempt = Attempt(host, leased, self._procedure_of(leased))
        task = asyncio.create_task(self._execute(attempt))
        self._running[task] = attempt
        task.add_done_callback(self._ended)

    async def _execute(self, attempt: Attempt) -> str:
        logger.debug("run %s: attempt %d begins", attempt.run_id, attempt.number)
        how = await attempt.run()
        logger.info("run %s: attempt %d ended: %s", attempt.run_id, attempt.number, how)
        return how

    def _ended(self, task: asyncio.Task[str]) -> None:
        attempt = self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and attempt is not None:
            logger.error("run %s: attempt %d was left: %s", attempt.run_id, attempt.number, error, exc_info=error)

    async def _drain(self, host: Host) -> None:
        host.is_draining = True
        if self._running:
            logger.info("worker %s ends: %d runs are under way", self.name, len(self._running))
            await asyncio.wait(set(self._running), timeout=self.drain_seconds)

    # ------------------------------------------------------------------------------------------------------ heartbeats

    async def _beat_for_ever(self, host: Host) -> None:
        while True:
            before = time.monotonic()
            try:
                await self._beat(host)
            except GatewayError as error:
                logger.error("the gateway refused a heartbeat: %s", error)
            due = before + host.lease_ms / 1000 / BEATS_A_LEASE
            while (left := due - time.monotonic()) > 0:
                await asyncio.sleep(min(left, 0.5))
                due = min(due, before + host.lease_ms / 1000 / BEATS_A_LEASE)  # the first lease says how long that is

    async def _beat(self, host: Host) -> None:
        attempts = {attempt.run_id: attempt for attempt in self._running.values() if attempt.over is None}
        sent = time.monotonic()
        runs = [{"run_id": attempt.run_id, "lease": attempt.lease} for attempt in attempts.values()]
        told = await host.wire.ask(
            "POST", "/v1/worker/heartbeat", {"worker": self.worker_id, "name": self.name, "runs": runs[:RUNS_A_BEAT]}
        )
        host.heard_at = max(host.heard_at, sent)
        for one in told["runs"]:
            if one["directive"] == "STOP" and one["run_id"] in attempts:
                attempts[one["run_id"]].stop(f"STOP {one['reason']}")


def _by_name(given: Sequence[Any]) -> dict[str, Procedure[Any, Any]]:
    procedures: dict[str, Procedure[Any, Any]] = {}
    for one in given:
        procedure = procedure_of(one)
        if procedure.name in procedures:
            raise ProcedureInvalid(
                f"two procedures have the name {procedure.name}: {procedures[procedure.name].source} and "
                f"{procedure.source}; "
                "a worker serves one version of each (start a second worker for another)"
            )
        procedures[procedure.name] = procedure
    if not procedures:
        raise ProcedureInvalid("a worker needs at least one procedure, task or flow")
    return procedures
