"""Children that hold Lua states: started, spoken to, watched, killed.

A child answers frames in the order in which they came, so the oldest unanswered one is what it works on now. When a
child ends, the state of that frame is the guilty one; every other state in it is innocent and may be tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from app.core.canonical import parse_json
from app.core.errors import TgaError
from app.lua import frames
from app.lua.frames import Frame, FrameReader, FrameRefused, write_frame
from app.lua.limits import CHUNK_BYTES_MAX, PARTS_BYTES_MAX, Limits
from app.lua.parts import language_text

HERE: Final = Path(__file__).resolve().parent
_EXIT_MEMORY: Final = 70
_START_TIMEOUT_S: Final = 120.0
_WATCH_S: Final = 0.5


class Chunk(NamedTuple):
    """A source in Lua; the name is what messages and lines show."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class LuaWarning:
    """What the program did that differs between attempts, told once a line."""

    chunk: str | None
    line: int | None
    what: str


@dataclass(frozen=True, slots=True)
class LuaFailure:
    """Why a thread of a program ended: an error that it raised, or (with `limit`) a bound that it met."""

    message: str
    chunk: str | None = None
    line: int | None = None
    traceback: str = ""
    value: Any = None  # the table that was thrown, where it was one
    limit: str | None = None  # CPU, MEMORY, OUTPUT, OPERATIONS, THREADS

    @property
    def code(self) -> str | None:
        return None if self.limit is None else f"LUA_LIMIT_{self.limit}"


@dataclass(frozen=True, slots=True)
class Yielded:
    """The program waits for an operation."""

    request: Any
    warnings: tuple[LuaWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any
    warnings: tuple[LuaWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    error: LuaFailure
    warnings: tuple[LuaWarning, ...] = ()


class ChildLost(Exception):
    """The child that held this state is gone. `is_guilty`: this state's slice ended it; do not try it again."""

    def __init__(self, reason: str, *, is_guilty: bool, detail: str = "") -> None:
        self.reason = reason  # CPU, MEMORY, TIME, OUTPUT, DIED
        self.is_guilty = is_guilty
        whose = "this program's slice ended it" if is_guilty else "another program's slice, or the machine, ended it"
        super().__init__(f"the process that ran the Lua program is gone ({reason}{detail and f': {detail}'}): {whose}")


class Pool:
    """A few children, many states. An async context manager; leaving it ends every child."""

    def __init__(self, limits: Limits | None = None, children: int = 2, *, language: str | None = None) -> None:
        self.limits = limits or Limits()
        self._count = children
        self._language = language
        self._children: list[_Child | None] = [None] * children
        self._locks = [asyncio.Lock() for _ in range(children)]
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every child. States that are still open meet ChildLost, innocent."""
        self._is_closed = True
        for child in self._children:
            if child is not None:
                await child.stop()

    async def report(self) -> dict[str, Any]:
        """What `doctor` says: how many children, and the confinement that is in force in them."""
        child = await self._child(0)
        return {"children": self._count, "confinement": list(child.confinement)}

    async def state(self, chunks: Sequence[Chunk], *, seed: bytes, is_strict: bool, epoch_ms: int = 0) -> LuaState:
        """A fresh state with the program's chunks compiled, in the child that holds the fewest.

        `seed` feeds what the program draws outside checkpoints; `epoch_ms` is what os.time says there.
        """
        for chunk in chunks:
            if len(chunk.source.encode(errors="replace")) > CHUNK_BYTES_MAX:
                raise ValueError(
                    f"expected chunks of at most {CHUNK_BYTES_MAX} bytes, found a larger one: {chunk.name}"
                )
        least = min(range(self._count), key=lambda at: child.load if (child := self._children[at]) else 0)
        child = await self._child(least)
        words = [int.from_bytes((seed + bytes(14))[at : at + 7], "big") for at in (0, 7)]
        settings = {
            "chunks": [(_plain_name(chunk.name), chunk.source) for chunk in chunks],
            "seed": [word >> 3 for word in words],
            "strict": is_strict,
            "epoch_s": epoch_ms // 1000,
        }
        payload = json.dumps(settings).encode()
        if len(payload) > PARTS_BYTES_MAX:
            raise ValueError(f"expected sources of at most {PARTS_BYTES_MAX} bytes together, found {len(payload)}")
        state = LuaState(child, child.take_number())
        await child.ask(Frame(frames.OPEN, state.number, payload=payload))
        return state

    async def _child(self, at: int) -> _Child:
        async with self._locks[at]:
            child = self._children[at]
            if self._is_closed:
                raise ChildLost("DIED", is_guilty=False, detail="the pool is closed")
            if child is None or child.is_gone:
                language = self._language
                if language is None:
                    language = language_text()
                child = self._children[at] = await _Child.start(self.limits, language)
            return child


class LuaState:
    """One attempt's Lua state. Several threads of it may be resumed at once; the child runs one after the other."""

    def __init__(self, child: _Child, number: int) -> None:
        self._child = child
        self.number = number
        self._is_closed = False

    async def resume(self, thread: int, value: Any) -> Yielded | Returned | Failed:
        """Run this thread up to its next operation, its end or its failure; ChildLost if the child ends meanwhile."""
        payload = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        frame = await self._child.ask(Frame(frames.RESUME, self.number, thread, payload=payload))
        return self._child.understood(frame)

    async def close(self) -> None:
        if self._is_closed or self._child.is_gone:
            return
        self._is_closed = True
        self._child.load -= 1
        with contextlib.suppress(ChildLost):
            await self._child.ask(Frame(frames.CLOSE, self.number))


class _Asked(NamedTuple):
    frame: Frame
    answer: asyncio.Future[Frame]


class _Child(asyncio.SubprocessProtocol):
    """One child process and what it has been asked."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(frame_bytes_max=2 * limits.frame_bytes)
        self._asked: deque[_Asked] = deque()
        self._head_since = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._numbers = 0
        self._verdict: tuple[str, str] | None = None  # why this side killed it
        self._transport: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._gone = asyncio.Event()
        self.is_gone = False
        self.load = 0
        self.confinement: tuple[str, ...] = ()

    @classmethod
    async def start(cls, limits: Limits, language: str) -> _Child:
        home = str(HERE.parent.parent)
        program = f"import sys; sys.path.insert(0, {home!r}); from app.lua.child import main; main()"
        child = cls(limits)
        transport, _ = await child._loop.subprocess_exec(
            lambda: child,
            *(sys.executable, "-I", "-c", program),
            env={"TZ": "UTC", "LC_ALL": "C"},
            cwd="/",
            stderr=None,
            start_new_session=True,
        )
        child._transport = transport
        stdin = transport.get_pipe_transport(0)
        if not isinstance(stdin, asyncio.WriteTransport):
            raise TypeError("the child has no standard input")
        child._stdin = stdin
        settings = {"limits": {**asdict(limits), "kill_cpu_s": limits.kill_cpu_s}, "language": language}
        ready = await child.ask(Frame(frames.INIT, payload=json.dumps(settings).encode()))
        child.confinement = tuple(json.loads(ready.payload)["confinement"])
        return child

    def take_number(self) -> int:
        self._numbers += 1
        self.load += 1
        return self._numbers

    async def ask(self, frame: Frame) -> Frame:
        if self.is_gone or self._stdin is None:
            raise ChildLost("DIED", is_guilty=False)
        answer: asyncio.Future[Frame] = self._loop.create_future()
        if not self._asked:
            self._head_since = self._loop.time()
        self._asked.append(_Asked(frame, answer))
        if self._watch is None:
            self._watch = self._loop.call_later(_WATCH_S, self._look)
        self._stdin.write(write_frame(frame))
        return await asyncio.shield(answer)

    def understood(self, frame: Frame) -> Yielded | Returned | Failed:
        """The answer as values. What is no JSON, or not of the agreed shape, ends the child: its Lua is broken into."""
        try:
            notes: Any = parse_json(frame.notes, bytes_max=self._limits.frame_bytes) if frame.notes else ()
            warnings = tuple(
                LuaWarning(_text(each.get("chunk")), _number(each.get("line")), _text(each.get("what")) or "")
                for each in notes
            )
            value: Any = parse_json(frame.payload, bytes_max=2 * self._limits.frame_bytes)
            if frame.kind == frames.YIELDED:
                return Yielded(value, warnings)
            if frame.kind == frames.RETURNED:
                return Returned(value, warnings)
            failure = LuaFailure(
                message=_text(value["message"]) or "",
                chunk=_text(value.get("chunk")),
                line=_number(value.get("line")),
                traceback=_text(value.get("traceback")) or "",
                value=value.get("value"),
                limit=_text(value.get("limit")),
            )
        except (TgaError, AttributeError, KeyError, TypeError) as error:
            self._kill("DIED", f"it answered what is not agreed: {error}")
            raise ChildLost("DIED", is_guilty=True, detail=f"it answered what is not agreed: {error}") from None
        return Failed(failure, warnings)

    async def stop(self) -> None:
        if not self.is_gone and self._stdin is not None:
            self._kill("DIED", "the pool was closed")
            await self._gone.wait()

    # What the event loop calls.

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except FrameRefused as error:
            self._kill("OUTPUT", str(error))

    def process_exited(self) -> None:
        self.is_gone = True
        if self._watch is not None:
            self._watch.cancel()
        status = self._transport.get_returncode() if self._transport else None
        reason, detail, is_anyones = self._cause(status)
        while self._asked:
            asked = self._asked.popleft()
            if not asked.answer.done():
                asked.answer.set_exception(ChildLost(reason, is_guilty=is_anyones, detail=detail))
                asked.answer.exception()  # a caller that was cancelled does not ask for it
            is_anyones = False
        self._gone.set()
        if self._transport is not None:
            self._transport.close()

    def _cause(self, status: int | None) -> tuple[str, str, bool]:
        """Why it ended, and whether the frame that it worked on is to blame."""
        if self._verdict is not None:
            reason, detail = self._verdict
            return reason, detail, detail != "the pool was closed"
        if status == -signal.SIGPROF or status == -signal.SIGXCPU:
            return "CPU", f"more than {self._limits.kill_cpu_s:g} s in one slice", True
        if status == _EXIT_MEMORY:
            return "MEMORY", "the process met its bound", True
        return "DIED", f"status {status}", status != -signal.SIGKILL

    def _take(self, frame: Frame) -> None:
        if not self._asked:
            raise FrameRefused("expected silence, found an answer that nothing asked for")
        asked = self._asked.popleft()
        self._head_since = self._loop.time()
        if (frame.state, frame.thread) != (asked.frame.state, asked.frame.thread):
            self._asked.appendleft(asked)
            raise FrameRefused("expected the answer of the oldest request, found another's")
        if not asked.answer.done():
            asked.answer.set_result(frame)

    def _look(self) -> None:
        self._watch = None
        if self.is_gone or not self._asked:
            return
        waited = self._loop.time() - self._head_since
        if waited > self._limits.slice_wall_s and self._asked[0].frame.kind != frames.INIT:
            self._kill("TIME", f"no answer for {waited:.0f} s")
            return
        self._watch = self._loop.call_later(_WATCH_S, self._look)

    def _kill(self, reason: str, detail: str) -> None:
        if self._verdict is None:
            self._verdict = (reason, detail)
        if self._transport is not None and not self.is_gone:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()


def _plain_name(name: str) -> str:
    """A chunk's name as Lua may show it: never one of the trusted parts, which begin with a bracket."""
    plain = "".join(letter if letter.isprintable() else " " for letter in name)[:200]
    return plain if plain and not plain.startswith("[") else f"chunk {plain}"


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"expected a string, found {type(value).__name__}")
    return value


def _number(value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise TypeError(f"expected an integer, found {type(value).__name__}")
    return value
