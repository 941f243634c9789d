"""Several processes on one port: the supervisor owns the listening sockets and the embedded database, accepts
connections, and hands each to the process that has the fewest.

Each process is a gateway like any other on the same database; nothing is shared between them but that. So what is true
of several gateways is true of them: any takes any call, one sequences, and what one leaves another goes on with.

SIGHUP starts them anew, one by one: the new one first, and the old one gives its connections back between two requests
before it ends. A process that ends by itself is replaced. SIGTERM and SIGINT end all of them within the limits that a
single gateway has. The supervisor's death, however it comes, ends them too: their channels to it end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from rich.console import Console

from app.config import load_config
from app.core.limits import (
    PROCESS_BEAT_MS,
    PROCESS_PAUSE_FIRST_MS,
    PROCESS_PAUSE_MAX_MS,
    PROCESS_STEADY_MS,
)
from app.gateway.channel import close_files
from app.gateway.logs import log_to_stderr
from app.gateway.serving_process import Share
from app.gateway.sockets import bind
from app.gateway.store import open_store, pool_sessions
from app.gateway.supervised_process import StartFailed, SupervisedProcess
from app.postgres.database import Database
from app.settings import Settings

output = Console(highlight=False, soft_wrap=True)
logger = logging.getLogger("tga")

_BACKLOG: Final = 2048
_ACCEPTED_AT_ONCE: Final = 64
_FULL_PAUSE_S: Final = 0.05  # when no process takes a connection, or no descriptor is left for one


async def supervise(settings: Settings) -> int:
    """Run `settings.processes` of them until a signal: 0, or the exit code of a process that cannot even be started."""
    config = load_config(settings.config_file)
    pool_sessions(config, settings.processes)  # each process looks for itself, too; here it is said once
    log_to_stderr(config.telemetry.log_format)
    restart = asyncio.Event()
    if not _has_terminal() and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        # From the first moment on: who asks for a restart while this starts must not end it.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, restart.set)
    sockets = bind(settings.host, settings.port)
    try:
        async with open_store(settings) as database:
            return await Supervisor(settings, sockets, database, restart).run()
    finally:
        for one in sockets:
            one.close()


class Doorway:
    """Accepts connections while there is a process to give them to; meanwhile others wait in the kernel's queue."""

    def __init__(self, sockets: list[socket.socket], processes: Callable[[], list[SupervisedProcess]]) -> None:
        # Set here for good.
        self._sockets = sockets
        self._processes = processes
        self._loop = asyncio.get_running_loop()
        # Connections so far; and whether they are being accepted now.
        self._count = 0
        self._is_open = False
        # What a process gave back when there was none to go on with it; `look` hands it on.
        self._held: deque[tuple[int, bool]] = deque()
        for one in sockets:
            one.setblocking(False)
            one.listen(_BACKLOG)

    def look(self) -> None:
        """Accept from now on if there is a process that takes connections, else not."""
        wanted = any(process.is_open for process in self._processes())
        while wanted and self._held:
            self.give(*self._held.popleft())
        if wanted == self._is_open:
            return
        self._is_open = wanted
        for one in self._sockets:
            if wanted:
                self._loop.add_reader(one.fileno(), self._accept, one)
            else:
                self._loop.remove_reader(one.fileno())

    def close(self) -> None:
        """Accept nothing more. Who connects from here on is refused."""
        if self._is_open:
            for one in self._sockets:
                self._loop.remove_reader(one.fileno())
        self._is_open = False
        for one in self._sockets:
            one.close()
        close_files(connection for connection, _ in self._held)

    def give(self, connection: int, had_requests: bool) -> None:
        """To the process with the fewest; of several, to the one whose turn is longest ago."""
        taking = [process for process in self._processes() if process.is_open]
        taking = taking or [process for process in self._processes() if process.is_taking]
        taking = [process for process in taking if not process.is_silent] or taking
        if not taking:
            self._held.append((connection, had_requests))
            return
        self._count += 1
        min(taking, key=lambda one: (one.load, one.given_at)).give(connection, had_requests, self._count)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if not any(process.is_open for process in self._processes()):
                self._pause()
                return
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                logger.warning("a connection cannot be accepted: %s", error)
                self._pause()
                return
            self.give(connection.detach(), False)

    def _pause(self) -> None:
        if self._is_open:
            self._is_open = False
            for one in self._sockets:
                self._loop.remove_reader(one.fileno())
        self._loop.call_later(_FULL_PAUSE_S, self._look_again)

    def _look_again(self) -> None:
        if all(one.fileno() >= 0 for one in self._sockets):
            self.look()


class Slot:
    """The place of one process. `lock`: held by the task that starts the next process in it."""

    def __init__(self, number: int, current: SupervisedProcess) -> None:
        self.number = number
        self.current = current
        self.lock = asyncio.Lock()


class Supervisor:
    """`run` does everything; signals set `_stop` and `_restart`, and it waits for them."""

    def __init__(
        self, settings: Settings, sockets: list[socket.socket], database: Database, restart: asyncio.Event
    ) -> None:
        # Set here for good.
        self._settings = settings
        self._database = database
        self._port = sockets[0].getsockname()[1]
        self._alive: list[SupervisedProcess] = []  # all that run, those that start or leave among them
        self._doorway = Doorway(sockets, lambda: self._alive)
        self._stop = asyncio.Event()
        self._restart = restart
        self._has_terminal = _has_terminal()
        self._tasks: set[asyncio.Task[None]] = set()
        # Filled by `run`.
        self._slots: list[Slot] = []

    async def run(self) -> int:
        with self._signals():
            try:
                return await self._until_stopped(self._serve())
            except StartFailed as failed:
                logger.error("%s. What it said is above", failed)
                return failed.code if 0 < failed.code < 128 else 1
            finally:
                await self._end_all()

    async def _serve(self) -> None:
        """Until it is cancelled; StartFailed if one of them cannot be started in the first place."""
        # The first one alone: it makes keys and pins tools, and if it cannot start the others need not try.
        self._slots.append(Slot(1, await self._start(1)))
        self._greet()
        numbers = range(2, self._settings.processes + 1)
        try:
            async with asyncio.TaskGroup() as starting:
                started = [starting.create_task(self._start(number)) for number in numbers]
        except BaseExceptionGroup as failed:
            raise next(_within(failed)) from None
        self._slots += [Slot(number, task.result()) for number, task in zip(numbers, started, strict=True)]
        output.print(f"{self._settings.processes} processes take requests.")
        async with asyncio.TaskGroup() as keeping:
            for slot in self._slots:
                keeping.create_task(self._keep(slot))
            keeping.create_task(self._restart_when_told())
            keeping.create_task(self._watch())

    async def _start(self, number: int) -> SupervisedProcess:
        """One that takes requests; StartFailed otherwise."""
        share = Share(number, self._settings.processes)
        process = await SupervisedProcess.start(share, self)
        self._alive.append(process)
        try:
            await process.until_ready()
        except StartFailed as failed:
            raise StartFailed(f"{process} could not be started: {failed}", failed.code) from None
        return process

    # What processes tell.

    def give(self, connection: int, had_requests: bool) -> None:
        self._doorway.give(connection, had_requests)

    def on_change(self) -> None:
        self._alive[:] = [process for process in self._alive if not process.ended.is_set()]
        self._doorway.look()
        self._tell_standing()

    def _tell_standing(self) -> None:
        ready = sum(process.is_taking and not process.is_silent for process in self._alive)
        for process in self._alive:
            process.tell_standing(ready)

    def on_question(self, process: SupervisedProcess, name: str, question: int) -> None:
        self._tasks.add(task := asyncio.create_task(self._answer(process, name, question)))
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asking: SupervisedProcess, name: str, question: int) -> None:
        """All others that serve show what they have. While a process is being replaced, only the one that stays."""
        others = {one.share.number: one for one in self._alive if one.is_ready and one is not asking}
        others.pop(asking.share.number, None)
        shown = await asyncio.gather(*(one.shown(name) for one in others.values()))
        asking.answer(question, {number: file for number, file in zip(others, shown, strict=True) if file is not None})

    async def _keep(self, slot: Slot) -> None:
        """When the process ends without being told to, start another: at once, or after a pause if it ends again and
        again. It is never given up: the others serve meanwhile."""
        failures = 0
        while True:
            process, began = slot.current, time.monotonic()
            await process.ended.wait()
            async with slot.lock:
                if slot.current is not process:  # it was replaced
                    continue
                is_steady = (time.monotonic() - began) * 1000 >= PROCESS_STEADY_MS
                failures = 0 if is_steady else failures + 1
                what = f"{process} ended: {process.how_it_ended}"
                while slot.current is process:
                    pause_ms = _pause_ms(failures)
                    when = f"in {pause_ms / 1000:g} s" if pause_ms else "now"
                    logger.error("%s; it is started again %s", what, when)
                    await asyncio.sleep(pause_ms / 1000)
                    try:
                        slot.current = await self._start(slot.number)
                    except StartFailed as failed:
                        what = str(failed)
                        failures += 1
                logger.warning("%s takes requests", slot.current)

    async def _watch(self) -> None:
        """Ask all of them for a sign of life, again and again, and say which gives none. It is not killed: what it
        has may be of use to somebody, and a machine that was suspended has frozen them all."""
        silent: set[int] = set()
        while True:
            await asyncio.sleep(PROCESS_BEAT_MS / 1000)
            for process in self._alive:
                process.beat()
                if process.is_silent != (process.pid in silent):
                    silent ^= {process.pid}
                    heard = "gives no sign of life, and gets no new connections" if process.is_silent else "is back"
                    logger.warning("%s %s", process, heard)
                    self._tell_standing()

    async def _restart_when_told(self) -> None:
        while True:
            await self._restart.wait()
            self._restart.clear()  # who asks again while this goes on is served by one more round
            output.print("Starting every process anew, one by one.")
            if await self._restart_all():
                output.print("Every process was started anew.")

    async def _restart_all(self) -> bool:
        for slot in self._slots:
            async with slot.lock:
                old = slot.current
                try:
                    slot.current = await self._start(slot.number)
                except StartFailed as failed:
                    logger.error("%s; %s stays, and no other is started anew. Mend it, then SIGHUP again", failed, old)
                    return False
            old.retire()
            self._doorway.look()
            if not await old.until_ended():
                logger.error("%s did not end in time, and was killed", old)
        return True

    def _greet(self) -> None:
        host = self._settings.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._port}"
        output.print(f"Listening on [bold]{url}[/]  (console: {url}/console, API: {url}/docs)")
        output.print(f"The database is {self._database.where}", markup=False)
        where = self._settings.admin_key_file
        output.print(f"The administrator's key is in {where}: Authorization: Bearer <key>", markup=False)

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> int:
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return 0
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _end_all(self) -> None:
        """As long as one of them finishes its work, clients that connect are told that the gateway is stopping."""
        self._stop.set()
        leaving = list(self._alive)
        for process in leaving:
            process.stop()
        for process, in_time in zip(
            leaving, await asyncio.gather(*(process.until_ended() for process in leaving)), strict=True
        ):
            if not in_time:
                logger.error("%s did not end in time, and was killed", process)
        self._doorway.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if not self._stop.is_set():
                output.print("\nStopping; once more to stop at once.")
                self._stop.set()
                return
            for process in self._alive:
                process.kill_now()

        def hang_up() -> None:
            if self._has_terminal and not _has_terminal():
                stop()  # it was closed
            else:
                self._restart.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` has it
            loop.add_signal_handler(signal.SIGHUP, hang_up)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            # SIGHUP is still caught: it ends nothing that is ending anyway.


def _within(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _within(one)
        else:
            yield one


def _pause_ms(failures: int) -> int:
    if failures <= 1:
        return 0
    return int(min(PROCESS_PAUSE_FIRST_MS * 2 ** min(failures - 2, 16), PROCESS_PAUSE_MAX_MS))


def _has_terminal() -> bool:
    """Whether this session has a terminal. It has none any more when that was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
