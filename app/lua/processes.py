"""One child process as the gateway holds it: what it was asked, what it answered, and when to end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final, NamedTuple, cast

from app.lua import frames
from app.lua.frames import Frame, FrameReader, FrameRefused, write_frame
from app.lua.limits import Limits

_EXIT_MEMORY: Final = 70
_WATCH_S: Final = 0.5
_CPU_GRACE_S: Final = 1.0  # the kernel's own timer comes first; this is for a child that has disarmed it
_PIPE_GRACE_S: Final = 2.0
_MEMORY_STEP_BYTES: Final = 8_388_608


class ChildLost(Exception):
    """The child that held this state is gone. `is_guilty`: this state's slice ended it; do not try it again."""

    def __init__(self, reason: str, *, is_guilty: bool, detail: str = "") -> None:
        self.reason = reason  # CPU, MEMORY, TIME, OUTPUT, DIED
        self.is_guilty = is_guilty
        whose = "this program's slice ended it" if is_guilty else "another program's slice, or the machine, ended it"
        super().__init__(f"the process that ran the Lua program is gone ({reason}{detail and f': {detail}'}): {whose}")


class ChildNotStarted(Exception):
    """No Lua program can run: the process that would run them ended before it was ready."""


class _Asked(NamedTuple):
    frame: Frame
    answer: asyncio.Future[Frame]


class _Verdict(NamedTuple):
    reason: str
    detail: str
    is_heads: bool  # whether the frame that it worked on is to blame


class ChildProcess(asyncio.SubprocessProtocol):
    """Frames in order, one answer each. The head of `_asked` is what the child works on."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.confinement: tuple[str, ...] = ()
        self.is_gone = False
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(frame_bytes_max=2 * limits.frame_bytes)
        self._asked: deque[_Asked] = deque()
        self._numbers = 0
        self._memory: dict[int, int] = {}  # bytes of every open state, as last told
        self._verdict: _Verdict | None = None  # why this side ended it; set before the kill
        self._gone = asyncio.Event()
        self._transport: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._pidfd: int | None = None
        # The watchdog: since when the head is the head, and the child's CPU when it first saw it there.
        self._watch: asyncio.TimerHandle | None = None
        self._head_since = 0.0
        self._seen: tuple[_Asked, float | None] | None = None

    @classmethod
    async def start(cls, command: Sequence[str], limits: Limits, language: str) -> ChildProcess:
        """A child that is confined and ready. It inherits no environment and no descriptor but its three."""
        child = cls(limits)
        await child._loop.subprocess_exec(
            lambda: child,
            *command,
            env={"TZ": "UTC", "LC_ALL": "C"},
            cwd="/",
            stderr=None,
            start_new_session=True,
        )
        settings = {"limits": {**asdict(limits), "kill_cpu_s": limits.kill_cpu_s}, "language": language}
        try:
            ready = await child.ask(Frame(frames.INIT, payload=json.dumps(settings).encode()))
        except ChildLost as lost:
            raise ChildNotStarted(f"the process for Lua programs did not start; its error is above. {lost}") from None
        except BaseException:
            await child.stop()
            raise
        child.confinement = tuple(str(each) for each in json.loads(ready.payload)["confinement"])
        return child

    @property
    def is_usable(self) -> bool:
        return not self.is_gone and self._verdict is None

    @property
    def pid(self) -> int | None:
        return self._transport.get_pid() if self._transport is not None else None

    def load(self) -> tuple[int, int]:
        """Memory in coarse steps, then states: by which a child is chosen."""
        return sum(self._memory.values()) // _MEMORY_STEP_BYTES, len(self._memory)

    def take_number(self) -> int:
        self._numbers += 1
        self._memory[self._numbers] = 0
        return self._numbers

    async def ask(self, frame: Frame) -> Frame:
        """The answer to this frame; ChildLost if the child ends first. A caller that is cancelled leaves it unread."""
        return await self.send(frame)

    def send(self, frame: Frame) -> asyncio.Future[Frame]:
        """As `ask`, for who has more to send before it waits for the answer, or does not wait for it at all."""
        if not self.is_usable or self._stdin is None:
            raise ChildLost("DIED", is_guilty=False)
        answer: asyncio.Future[Frame] = self._loop.create_future()
        if not self._asked:
            self._head_since = self._loop.time()
        self._asked.append(_Asked(frame, answer))
        if self._watch is None:
            self._watch = self._loop.call_later(_WATCH_S, self._look)
        self._stdin.write(write_frame(frame))
        return answer

    def close_state(self, number: int) -> None:
        """Not waited for: what is asked of the child next comes after it."""
        if self._memory.pop(number, None) is not None:
            with contextlib.suppress(ChildLost):
                self.send(Frame(frames.CLOSE, number))

    async def end(self, reason: str, detail: str) -> None:
        """Kill it because of what it answered, and wait until it is gone. What it works on now is innocent."""
        self._kill(_Verdict(reason, detail, is_heads=False))
        await self._gone.wait()

    async def wait_gone(self) -> None:
        await self._gone.wait()

    async def stop(self) -> None:
        if not self.is_gone and self._transport is not None:
            await self.end("DIED", "the pool was closed")

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of uvloop, in which the gateway runs, have these methods and other classes.
        made = self._transport = cast("asyncio.SubprocessTransport", transport)
        # Not the transport's own kill: it would reap a child that has just ended, and lose its status.
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(made.get_pid())
        self._stdin = cast("asyncio.WriteTransport | None", made.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if self._verdict is not None:
            return
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except FrameRefused as refused:
            self._kill(_Verdict("OUTPUT", str(refused), is_heads=True))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        # It ends, and its status will say why. One that only closed its pipe would work on, unheard by the host.
        self._loop.call_later(_PIPE_GRACE_S, self._kill, _Verdict("DIED", "it closed its pipe", is_heads=True))

    def process_exited(self) -> None:
        self.is_gone = True
        if self._watch is not None:
            self._watch.cancel()
        verdict = self._verdict or self._judge(self._transport.get_returncode() if self._transport else None)
        is_head = True
        while self._asked:
            answer = self._asked.popleft().answer
            if not answer.done():
                is_guilty = is_head and verdict.is_heads
                answer.set_exception(ChildLost(verdict.reason, is_guilty=is_guilty, detail=verdict.detail))
                answer.exception()  # retrieved, so that asyncio does not log it where the caller went away
            is_head = False
        self._memory.clear()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._gone.set()
        if self._transport is not None:
            self._transport.close()

    def _judge(self, status: int | None) -> _Verdict:
        """Why it ended by itself. A kill from outside, and memory that all states filled, are no single program's
        fault."""
        if status in (-signal.SIGPROF, -signal.SIGXCPU):
            return _Verdict("CPU", f"more than {self.limits.kill_cpu_s:g} s of CPU in one slice", is_heads=True)
        if status == _EXIT_MEMORY:
            return _Verdict("MEMORY", "its states needed more together than the process may have", is_heads=False)
        return _Verdict("DIED", f"status {status}", is_heads=status != -signal.SIGKILL)

    def _take(self, frame: Frame) -> None:
        if not self._asked:
            raise FrameRefused("expected silence, found an answer that nothing asked for")
        asked = self._asked[0]
        if (frame.state, frame.thread) != (asked.frame.state, asked.frame.thread):
            raise FrameRefused("expected the answer to the oldest request, found another's")
        self._asked.popleft()
        self._head_since = self._loop.time()
        if frame.state in self._memory:
            self._memory[frame.state] = frame.memory
        if not asked.answer.done():
            asked.answer.set_result(frame)

    def _look(self) -> None:
        """The watchdog: ends a child whose head takes too long, by the clock or by its CPU."""
        self._watch = None
        if self.is_gone or not self._asked:
            self._seen = None
            return
        head = self._asked[0]
        waited = self._loop.time() - self._head_since
        cpu = _cpu_s(self.pid)
        if self._seen is None or self._seen[0] is not head:
            self._seen = (head, cpu)
        since = self._seen[1]
        used = cpu - since if cpu is not None and since is not None else 0.0
        if head.frame.kind != frames.INIT and waited > self.limits.slice_wall_s:
            self._kill(_Verdict("TIME", f"no answer for {waited:.0f} s", is_heads=True))
        elif head.frame.kind != frames.INIT and used > self.limits.kill_cpu_s + _CPU_GRACE_S:
            self._kill(_Verdict("CPU", f"{used:.0f} s of CPU in one slice", is_heads=True))
        else:
            self._watch = self._loop.call_later(_WATCH_S, self._look)

    def _kill(self, verdict: _Verdict) -> None:
        self._verdict = self._verdict or verdict
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        elif self._transport is not None and not self.is_gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._transport.get_pid(), signal.SIGKILL)


def _cpu_s(pid: int | None) -> float | None:
    """CPU that a process has used so far, where /proc tells."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
