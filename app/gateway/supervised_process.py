"""One process of several that serve one port, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Mapping
from typing import Protocol, Self

from app.core.limits import PROCESS_ANSWER_MS, PROCESS_SILENT_MS, PROCESS_START_MS, PROCESS_STOP_MS
from app.gateway.channel import Channel, Message, close_files, open_pair
from app.gateway.serving_process import Share


class StartFailed(Exception):
    """The process ended, or was ended, before it took requests. `code` is its exit code."""

    def __init__(self, how: str, code: int) -> None:
        super().__init__(how)
        self.code = code


class Supervises(Protocol):
    """What a process tells its supervisor."""

    def give(self, connection: int, had_requests: bool) -> None:
        """A connection that it gives back, for another process; and whether there was a request on it."""

    def on_change(self) -> None:
        """It takes requests now, or does no longer."""

    def on_question(self, process: SupervisedProcess, name: str, question: int) -> None:
        """It wants to know what the others show under this name; see `answer`."""


class SupervisedProcess:
    """`load`: connections that it was given and that have not ended. `is_taking`: it may be given more, and has not
    been told to leave; `is_open`: what it is given now reaches it at once."""

    def __init__(self, share: Share, supervisor: Supervises) -> None:
        # Set here for good, or by `start`.
        self.share = share
        self._supervisor = supervisor
        self._process: asyncio.subprocess.Process
        self._channel: Channel
        self._waiting: asyncio.Task[None]
        self._ready = asyncio.Event()
        self.ended = asyncio.Event()
        # Questions for what it shows, by their numbers.
        self._questions = 0
        self._shown: dict[int, asyncio.Future[int]] = {}
        # Changed by what the process says.
        self.load = 0
        self.given_at = 0  # when it was given its last connection, as a number of connections
        self._is_retiring = False
        self._asked_at: float | None = None  # for a sign of life that it has not given yet

    @classmethod
    async def start(cls, share: Share, supervisor: Supervises) -> Self:
        """Start it; it takes no requests yet."""
        made = cls(share, supervisor)
        ours, theirs = open_pair()
        try:
            made._process = await asyncio.create_subprocess_exec(
                # -P: whatever lies in the present folder is not this program.
                *(sys.executable, "-P", "-m", "tga_gateway", "serve", "--processes", str(share.processes)),
                *("--process", str(share.number), "--channel", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # what a terminal signals is for the supervisor
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        made._channel = Channel(ours, made._on_message)
        made._waiting = asyncio.create_task(made._wait())
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and not self.ended.is_set()

    @property
    def is_taking(self) -> bool:
        return self.is_ready and not self._is_retiring

    @property
    def is_open(self) -> bool:
        return self.is_taking and self._channel.has_room

    @property
    def how_it_ended(self) -> str:
        code = self._process.returncode
        if code is None:
            return "still runs"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    @property
    def is_silent(self) -> bool:
        """Whether it was asked for a sign of life long ago and has given none: it is frozen, or hangs."""
        return self._asked_at is not None and (time.monotonic() - self._asked_at) * 1000 >= PROCESS_SILENT_MS

    def beat(self) -> None:
        """Ask it for a sign of life, unless it has not yet answered the last time."""
        if self._asked_at is None and self.is_ready:
            self._asked_at = time.monotonic()
            self._channel.send({"beat": True})

    def __str__(self) -> str:
        return f"process {self.share.number} ({self.pid})"

    async def until_ready(self) -> None:
        """Until it takes requests; StartFailed if that does not come to be, and then it is gone."""
        ready, ended = asyncio.create_task(self._ready.wait()), asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait({ready, ended}, timeout=PROCESS_START_MS / 1000, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
        if self.is_ready:
            return
        late = "" if self.ended.is_set() else f"it did not take requests within {PROCESS_START_MS // 1000} s, and was "
        await self.kill()
        raise StartFailed(late + self.how_it_ended, self._process.returncode or 0)

    def give(self, connection: int, had_requests: bool, number: int) -> None:
        """The connection is the process's from here on."""
        self.load += 1
        self.given_at = number
        self._channel.send({"connection": had_requests}, [connection])

    def tell_standing(self, ready: int) -> None:
        """How many processes take requests."""
        self._channel.send({"standing": ready})

    async def shown(self, name: str) -> int | None:
        """What it shows under this name, as an open file; None if it does not answer in time."""
        self._questions = question = self._questions + 1
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._shown[question] = waiting
        self._channel.send({"show": name, "question": question})
        try:
            async with asyncio.timeout(PROCESS_ANSWER_MS / 1000):
                return await waiting
        except TimeoutError:
            return None
        finally:
            self._shown.pop(question, None)

    def answer(self, question: int, shown: Mapping[int, int]) -> None:
        """What it asked for: files, by the numbers of their processes."""
        self._channel.send({"shown": question, "numbers": list(shown)}, list(shown.values()))

    def retire(self) -> None:
        """Ask it to give its connections back, finish what it has begun, and end."""
        self._is_retiring = True
        self._channel.send({"retire": True})

    def stop(self) -> None:
        """Ask it to end as a single gateway does."""
        self._channel.send({"stop": True})

    async def until_ended(self) -> bool:
        """Until it has ended; it is killed if that takes too long, and False says so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROCESS_STOP_MS / 1000):
                await self.ended.wait()
            return True
        await self.kill()
        return False

    async def kill(self) -> None:
        self.kill_now()
        await self.ended.wait()

    def kill_now(self) -> None:
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _on_message(self, message: Message, files: list[int]) -> None:
        match message:
            case {"ready": _}:
                self._ready.set()
                self._supervisor.on_change()
            case {"alive": _}:
                self._asked_at = None
            case {"closed": int(count)}:
                self.load -= count
            case {"returned": bool(had_requests)}:
                for connection in files:
                    self._supervisor.give(connection, had_requests)
            case {"ask": str(name), "question": int(question)}:
                self._supervisor.on_question(self, name, question)
            case {"shown": int(question)}:
                waiting = self._shown.pop(question, None)
                if waiting is not None and not waiting.done() and files:
                    waiting.set_result(files.pop())
                close_files(files)
            case {"retiring": _}:
                self._is_retiring = True
                self._supervisor.on_change()
            case _:
                close_files(files)

    async def _wait(self) -> None:
        await self._process.wait()
        self._channel.close()
        self.ended.set()
        self._supervisor.on_change()
