"""One process of several that serve one port, as it sees itself: its end of the channel to the supervisor.

The supervisor hands it connections. It leaves when the supervisor says so or is gone, and when it gets a signal of its
own. Told to `stop`, or left alone, it ends as a single gateway does; told to `retire`, or by a signal, it first gives
its connections back, one by one between two requests, and another process goes on with them.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self

from app.core.limits import PROCESS_ANSWER_MS
from app.edge.processes import Processes
from app.gateway.channel import Channel, Message, close_files, file_with, read_file

Take = Callable[[int, bool], None]  # a connection, and whether there was a request on it before


@dataclass(frozen=True, slots=True)
class Share:
    """Which process of how many."""

    number: int
    processes: int


class ServingProcess:
    """`leaving` is set when it is to leave; `is_told_to_stop` then says whether no other process takes its
    connections."""

    def __init__(self, end: socket.socket, share: Share) -> None:
        # Set here for good.
        self.share = share
        self.leaving = asyncio.Event()
        self._stopping = asyncio.Event()
        self._channel = Channel(end, self._on_message)
        self._watching = asyncio.create_task(self._watch())
        self._serves = False
        # Connections that came before there was anybody to serve them; `take_connections` ends that.
        self._waiting: deque[tuple[int, bool]] = deque()
        self._take: Take = lambda connection, had_requests: self._waiting.append((connection, had_requests))
        # Set by `give_back_connections`.
        self._gives_back = False
        # Set by `join`, and what the supervisor said last.
        self._processes: Processes | None = None
        self._ready = 1
        # Questions for what others show, by their numbers.
        self._questions = 0
        self._asked: dict[int, asyncio.Future[dict[int, bytes]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # How many connections have ended since that was told last.
        self._lost = 0

    @classmethod
    def of_descriptor(cls, descriptor: int, share: Share) -> Self:
        end = socket.socket(fileno=descriptor)
        end.set_inheritable(False)
        return cls(end, share)

    @property
    def is_told_to_stop(self) -> bool:
        return self._stopping.is_set()

    async def unless_stopped_early(self, work: Coroutine[Any, Any, bool]) -> bool:
        """Do the work. If the process is told to stop before it serves, the work is cancelled: there is nothing yet
        that could be lost."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self._serves:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return True
            return await task
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def take_connections(self, take: Take) -> None:
        """From now on connections are served; those that are waiting are the first."""
        self._take, self._serves = take, True
        while self._waiting:
            take(*self._waiting.popleft())

    def tell_ready(self) -> None:
        self._channel.send({"ready": True})

    def join(self, processes: Processes) -> None:
        """Keep `processes` up to date, and let it reach the others."""
        processes.number, processes.of, processes.ready = self.share.number, self.share.processes, self._ready
        processes.ask_others = self._ask_others
        self._processes = processes

    def retire(self) -> None:
        """Leave, and let others go on with the connections."""
        self.leaving.set()

    def give_back_connections(self) -> None:
        """Say that no more are wanted. What still comes goes back as it came."""
        self._gives_back = True
        self._channel.send({"retiring": True})

    def give_back(self, connection: int, had_requests: bool) -> None:
        self._channel.send({"returned": had_requests}, [connection])

    def connection_lost(self) -> None:
        """Of one that this process served: it is told to the supervisor, which counts them."""
        if not self._lost:
            asyncio.get_running_loop().call_soon(self._tell_lost)
        self._lost += 1

    async def close(self) -> None:
        for task in (self._watching, *self._tasks):
            task.cancel()
        await asyncio.gather(self._watching, *self._tasks, return_exceptions=True)
        self._channel.close()

    def _tell_lost(self) -> None:
        lost, self._lost = self._lost, 0
        self._channel.send({"closed": lost})

    def _on_message(self, message: Message, files: list[int]) -> None:
        match message:
            case {"connection": bool(had_requests)}:
                for connection in files:
                    if self._gives_back:
                        self._lost += 1
                        self.give_back(connection, had_requests)
                        self._tell_lost()
                    else:
                        self._take(connection, had_requests)
            case {"standing": int(ready)}:
                self._ready = ready
                if self._processes is not None:
                    self._processes.ready = ready
            case {"show": str(name), "question": int(question)}:
                self._begin(self._show(name, question))
            case {"shown": int(question), "numbers": list(numbers)}:
                if (asked := self._asked.pop(question, None)) is not None and not asked.done():
                    asked.set_result(dict(zip(numbers, map(read_file, files), strict=True)))
                close_files(files)
            case {"beat": _}:
                self._channel.send({"alive": True})
            case {"retire": _}:
                self.retire()
            case {"stop": _}:
                self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        self.leaving.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    async def _show(self, name: str, question: int) -> None:
        show = None if self._processes is None else self._processes.shows.get(name)
        shown = b"" if show is None else await show()
        self._channel.send({"shown": question}, [file_with(shown)])

    async def _ask_others(self, name: str) -> dict[int, bytes]:
        self._questions = question = self._questions + 1
        asked: asyncio.Future[dict[int, bytes]] = asyncio.get_running_loop().create_future()
        self._asked[question] = asked
        self._channel.send({"ask": name, "question": question})
        try:
            async with asyncio.timeout(2 * PROCESS_ANSWER_MS / 1000):
                return await asked
        except TimeoutError:  # the supervisor is frozen, or gone
            return {}
        finally:
            self._asked.pop(question, None)

    async def _watch(self) -> None:
        """The supervisor's end is ours, however it ended."""
        await self._channel.ended.wait()
        self._stop()
