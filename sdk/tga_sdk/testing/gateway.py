"""An in-memory gateway for tests of procedures: the SDK's own Worker, Client and AsyncClient run against it unchanged.

It keeps no ledger and admits every key; its policy is what the test says of each tool. All else that a program or a
caller can see is as the real gateway answers it, and transcripts hold it to that. What it does not have: receipts,
proofs, roles, `L` and `#` in cron expressions.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

import httpx2

from tga_sdk.testing import messages as m
from tga_sdk.testing.clock import Clock
from tga_sdk.testing.engine import Engine
from tga_sdk.testing.run import Record
from tga_sdk.testing.store import Seen, due_of
from tga_sdk.testing.tools import Call, Effect, Tool, ToolFunction, Tools

T = TypeVar("T")
URL: Final = "http://memory"
KEY: Final = "test"


class _Waiter:
    """A request that waits for a change."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: no task waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._event.wait()


class MemoryGateway:
    """A gateway in this process.

        gateway = MemoryGateway(tools={"bank.charge": charge})
        worker = Worker(gateway.url, gateway.key, [order], transport=gateway.transport)

    `tools`: functions by `server.tool`, called with the arguments as keywords; sync or async. What they return is JSON.
    They raise `ToolFailed` to fail for certain. `needs_approval(function)` has a person decide on each call,
    `denied("why")` has the policy refuse each one.
    `skip_waiting`: when nothing can happen before the next moment that something is due, time moves there by itself;
    schedules are kept then, and start nothing, because time would never stop.
    `seed`: a run with the same id draws the same random numbers on every gateway with this seed.
    """

    def __init__(
        self,
        tools: Mapping[str, ToolFunction | Tool] | None = None,
        *,
        clock: Clock | None = None,
        lease_ms: int = 30_000,
        skip_waiting: bool = False,
        seed: int | None = None,
    ) -> None:
        # Set here for good.
        self.url = URL
        self.key = KEY
        self.clock = clock or Clock()
        self.tools = Tools(tools or {})
        self.engine = Engine(self.clock, self.tools, lease_ms=lease_ms)
        self.engine.fires_schedules = not skip_waiting
        self.engine.seed = None if seed is None else str(seed).encode()
        self.engine.on_change.append(lambda run, record: self.notify())
        self.clock.on_move(self.notify)
        self.skip_waiting = skip_waiting
        self.lock = threading.RLock()
        # Of the moment.
        self._waiters: set[_Waiter] = set()
        self._holding = 0  # puts that wait in a suspension
        self.calls: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._background: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def transport(self) -> httpx2.AsyncBaseTransport:
        """For Worker and AsyncClient."""
        from tga_sdk.testing.transport import AsyncMemoryTransport

        return AsyncMemoryTransport(self)

    @property
    def sync_transport(self) -> httpx2.BaseTransport:
        """For Client."""
        from tga_sdk.testing.transport import MemoryTransport

        return MemoryTransport(self)

    @property
    def effects(self) -> list[Effect]:
        """The book of what tools did, in its order: one for each key."""
        return list(self.tools.book)

    def journal(self, run_id: str) -> list[dict[str, Any]]:
        """A run's records, as workers read them."""
        with self.lock:
            run = self.engine.load(run_id)
            return [self.engine.shown(record, number) for number, record in self.engine.journal_of(run)]

    def state(self, run_id: str) -> dict[str, Any]:
        """The state that a run's program keeps."""
        with self.lock:
            return dict(self.engine.load(run_id).document)

    def waits_for(self, run_id: str) -> list[str]:
        """What has begun in a run and others are to end: tool, ask, sleep, signal, child; in the order of beginning."""
        with self.lock:
            return [intent.said["kind"] for intent in self.engine.load(run_id).begun.values()]

    def lose_workers(self) -> None:
        """Time passes until every worker that does not ask for runs at this moment has lost those that it had."""
        with self.lock:
            self.clock.move_ms(self.engine.lease_ms + 1)
            self.engine.advance()

    def close(self) -> None:
        """Answer what waits, and end what was started for synchronous clients."""
        self._is_closed = True
        self.notify()
        if self._background is not None:
            self._background.call_soon_threadsafe(self._background.stop)
            if self._thread is not None:
                self._thread.join()
            self._background.close()
            self._background = None

    def __enter__(self) -> MemoryGateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def notify(self) -> None:
        """Something has changed: all who wait look again."""
        for waiter in list(self._waiters):
            waiter.wake()

    # Requests that wait. All others are answered in routes.py.

    async def lease(self, body: m.LeaseRequest, principal: str) -> list[dict[str, Any]]:
        """The route that workers ask for runs: waits until there is one, or `wait_ms` is over."""
        ends_s = time.monotonic() + body.wait_ms / 1000
        while True:
            with self.lock:
                self.engine.advance()
                leased = self.engine.lease(body, principal)
                if leased or time.monotonic() >= ends_s or self._is_closed:
                    return [self.engine.told(run) for run in leased]
                seen = self.engine.workers[body.worker]
                if self._skipped():
                    continue
                waiter = self._waiter()
            await self._wait(waiter, ends_s, seen)

    async def put(self, run_id: str, body: m.PutRequest, principal: str) -> dict[str, Any]:
        """The route by which workers record: all of the puts, or none."""
        then = body.then
        if isinstance(then, m.ThenTool):
            return await self._put_tool(run_id, body, then, principal)
        with self.lock:
            self.engine.advance()
            if isinstance(then, m.ThenChild):
                return self.engine.start_child(run_id, body, then, principal)
        wait_ms = then.wait_ms if isinstance(then, m.ThenSuspend) else 0
        ends_s = time.monotonic() + wait_ms / 1000
        while True:
            with self.lock:
                self.engine.advance()
                holds = time.monotonic() < ends_s and not self._is_closed
                stored = self.engine.put(run_id, body, holds=holds)
                if stored.directive != "HOLD":
                    return self.engine.answered(run_id, body, stored, principal=principal)
                self._holding += 1
                try:
                    if self._skipped():
                        continue
                finally:
                    self._holding -= 1
                waiter = self._waiter()
                seen = self.engine.workers.get(self.engine.load(run_id).worker or "", Seen(0))
            self._holding += 1
            try:
                await self._wait(waiter, ends_s, seen)
            finally:
                self._holding -= 1

    async def _put_tool(self, run_id: str, body: m.PutRequest, then: m.ThenTool, principal: str) -> dict[str, Any]:
        with self.lock:
            self.engine.advance()
            begun = self.engine.begin_tool(run_id, body, then, principal)
            if isinstance(begun, dict):
                return begun
            run = self.engine.load(run_id)
            seen = self.engine.workers.get(run.worker or "", Seen(0))
            intent = run.begun.get(then.path)
            due_at = None if intent is None else due_of(intent)
        await self.made(begun, wait_ms=then.wait_ms, seen=seen, due_at=due_at)
        with self.lock:
            self.engine.advance()
            if not begun.is_final and then.path in self.engine.load(run_id).begun:
                return self.engine.pending(run_id, body, begun)
            self.engine.tool_ended(begun)
            return self.engine.from_the_journal(run_id, body, then, principal)

    async def made(
        self,
        call: Call,
        *,
        wait_ms: int,
        waits_for_people: bool = False,
        seen: Seen | None = None,
        due_at: str | None = None,
    ) -> None:
        """Make the call, if it may be made; return when it is over, waits for a person, or takes too long; at `due_at`
        its run does not wait any more."""
        self.begin(call)
        ends_s = time.monotonic() + wait_ms / 1000
        while not call.is_final and not self._is_closed:
            with self.lock:
                if call.waiting is not None and not waits_for_people:
                    return
                if time.monotonic() >= ends_s or (due_at is not None and due_at <= self.engine.now()):
                    return
                waiter = self._waiter()
            await self._wait(waiter, ends_s, seen or Seen(0))

    def begin(self, call: Call) -> None:
        """Have the function called, unless it is being called already."""
        with self.lock:
            if call.state == "AUTHORIZED":
                call.state = "EXECUTING"
                self.tools.executing += 1
                task = asyncio.get_running_loop().create_task(self._execute(call))
                self.calls.add(task)
                task.add_done_callback(self.calls.discard)

    async def _execute(self, call: Call) -> None:
        result, error = await self.tools.execute(call)
        with self.lock:
            self.tools.end(call, result, error)
            if call.run_id is not None:
                self.engine.tool_ended(call)
            self.notify()

    def _waiter(self) -> _Waiter:
        """Registered before the lock is left: no change is missed."""
        waiter = _Waiter()
        self._waiters.add(waiter)
        return waiter

    async def _wait(self, waiter: _Waiter, ends_s: float, seen: Seen) -> None:
        """Until something changes, something is due, or it is over; a worker that waits here lives."""
        with self.lock:
            dues = [one for one in (self.engine.next_due_ms(), self.engine.next_schedule_ms()) if one is not None]
            left_s = ends_s - time.monotonic()
            for due_ms in dues:
                left_s = min(left_s, (due_ms - self.clock.now_ms()) / 1000 + 0.001)
            seen.held += 1
        try:
            await waiter.wait(left_s)
        finally:
            with self.lock:
                seen.held -= 1
                seen.at_ms = self.clock.now_ms()
                self._waiters.discard(waiter)

    def _skipped(self) -> bool:
        """Whether time has moved to the next moment at which something is due: nothing can happen before."""
        if not self.skip_waiting or self.tools.executing:
            return False
        running = sum(run.state == "RUNNING" for run in self.engine.runs.values())
        offered = {program for seen in self.engine.workers.values() for program in seen.programs}
        if running > self._holding or self.engine.ready(offered):
            return False
        due_ms = self.engine.next_due_ms()
        if due_ms is None:
            return False
        self.clock.move_ms(due_ms - self.clock.now_ms() + 1)
        return True

    def stuck_on(self) -> str | None:
        """What runs wait for, if nothing will ever end that by itself; None while something may happen."""
        with self.lock:
            runs = [run for run in self.engine.runs.values() if run.state in ("SCHEDULED", "RUNNING", "WAITING")]
            running = sum(run.state == "RUNNING" for run in runs)
            if self.tools.executing or running > self._holding or any(run.state == "SCHEDULED" for run in runs):
                return None
            if not runs or self.engine.next_due_ms() is not None:
                return None
            waits = [f"{one.said['kind']} {one.said['name']!r}" for run in runs for one in run.begun.values()]
            return ", ".join(waits)

    async def until(self, is_over: Callable[[], bool]) -> None:
        """Return when it is so; time and requests go on meanwhile."""
        while True:
            with self.lock:
                self.engine.advance()
                if is_over():
                    return
                waiter = self._waiter()
            await self._wait(waiter, time.monotonic() + 0.05, Seen(0))

    async def changes(self, run_id: str, after: int) -> AsyncIterator[Record | None]:
        """A run's records after this one as they come, and None when it has ended."""
        while True:
            with self.lock:
                self.engine.advance()
                run = self.engine.load(run_id)
                found = run.records[after:]
                is_over = run.state in ("COMPLETED", "CANCELLED")
                waiter = None if found or is_over or self._is_closed else self._waiter()
            for record in found:
                after = record.sequence_number
                yield record
            if waiter is None and not found:
                yield None
                return
            if waiter is not None:
                await self._wait(waiter, time.monotonic() + 15.0, Seen(0))

    # For synchronous clients: one loop, in a thread of its own.

    def in_background(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the gateway's own thread and wait: for `Client`, which has no event loop."""
        with self.lock:
            if self._background is None:
                self._background = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._background.run_forever, daemon=True, name="memory-gateway")
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._background).result()
