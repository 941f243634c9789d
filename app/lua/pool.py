"""Children that hold Lua states: started, spoken to, watched, killed.

A child answers frames in the order in which they came, so the oldest unanswered one is what it works on now. When a
child ends, the state of that frame is the guilty one; every other state in it is innocent and may be tried again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from app.lua import frames
from app.lua.answers import (
    AnswerRefused,
    read_answer,
)
from app.lua.answers import Failed as Failed
from app.lua.answers import LuaFailure as LuaFailure
from app.lua.answers import LuaWarning as LuaWarning
from app.lua.answers import Returned as Returned
from app.lua.answers import Yielded as Yielded
from app.lua.frames import Frame
from app.lua.limits import CHUNK_BYTES_MAX, PARTS_BYTES_MAX, Limits
from app.lua.parts import language_text
from app.lua.processes import ChildLost as ChildLost
from app.lua.processes import ChildProcess

HERE: Final = Path(__file__).resolve().parent
_OPENINGS_MAX: Final = 3  # how often a state is opened anew when its child ends for another's fault


class Chunk(NamedTuple):
    """A source in Lua; the name is what messages and lines show."""

    name: str
    source: str


def child_command() -> tuple[str, ...]:
    """How a child is started: isolated from the environment and from the user's site; it loads `app` from here."""
    home = str(HERE.parent.parent)
    program = f"import sys; sys.path.insert(0, {home!r}); from app.lua.child import main; main()"
    return (sys.executable, "-I", "-c", program)


class Pool:
    """A few children, many states. An async context manager; leaving it ends every child."""

    def __init__(
        self,
        limits: Limits | None = None,
        children: int = 2,
        *,
        language: str | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._language = language
        self._command = tuple(command or child_command())
        self._children: list[ChildProcess | None] = [None] * children
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
        for at, lock in enumerate(self._locks):
            async with lock:
                child = self._children[at]
                if child is not None:
                    await child.stop()

    async def report(self) -> dict[str, Any]:
        """What `doctor` says: how many children, and the confinement that is in force in them."""
        child = await self._child(0)
        return {"children": len(self._children), "confinement": list(child.confinement)}

    async def state(self, chunks: Sequence[Chunk], *, seed: bytes, is_strict: bool, epoch_ms: int = 0) -> LuaState:
        """A fresh state with the program's chunks compiled, in the child that holds the least.

        `seed` feeds what the program draws outside checkpoints; `epoch_ms` is what os.time says there.
        """
        state, _ = await self._open(_opening(chunks, seed=seed, is_strict=is_strict, epoch_ms=epoch_ms), None)
        return state

    async def begin(
        self, chunks: Sequence[Chunk], value: Any, *, seed: bytes, is_strict: bool, epoch_ms: int = 0
    ) -> tuple[LuaState, Yielded | Returned | Failed]:
        """As `state`, with its thread 0 resumed with this value: both are one exchange with the child."""
        opening = _opening(chunks, seed=seed, is_strict=is_strict, epoch_ms=epoch_ms)
        state, first = await self._open(opening, _written(value))
        if first is None:
            raise TypeError("expected the answer to the first slice, found none")
        return state, first

    async def _open(self, opening: bytes, value: bytes | None) -> tuple[LuaState, Yielded | Returned | Failed | None]:
        openings = 0
        while True:
            openings += 1
            child = await self._child(min(range(len(self._children)), key=self._load))
            state = LuaState(child, child.take_number())
            try:
                opened = child.send(Frame(frames.OPEN, state.number, payload=opening))
                first = None if value is None else state.send(0, value)
                await opened  # first: if its own opening has ended the child, it is guilty, and not another's victim
                return state, None if first is None else await state.read(first)
            except ChildLost as lost:
                if lost.is_guilty or openings == _OPENINGS_MAX or self._is_closed:
                    raise
            except BaseException:
                state.close()
                raise

    def _load(self, at: int) -> tuple[int, int]:
        child = self._children[at]
        return child.load() if child is not None and child.is_usable else (0, 0)

    async def _child(self, at: int) -> ChildProcess:
        async with self._locks[at]:
            if self._is_closed:
                raise ChildLost("DIED", is_guilty=False, detail="the pool is closed")
            child = self._children[at]
            if child is not None and not child.is_usable:
                await child.wait_gone()
            if child is None or child.is_gone:
                language = self._language
                if language is None:
                    language = language_text()
                child = await ChildProcess.start(self._command, self.limits, language)
                self._children[at] = child
            return child


class LuaState:
    """One attempt's Lua state. Several threads of it may be resumed at once; the child runs one after the other."""

    def __init__(self, child: ChildProcess, number: int) -> None:
        self._child = child
        self.number = number
        self._output_bytes = 0

    @property
    def limits(self) -> Limits:
        return self._child.limits

    async def resume(self, thread: int, value: Any) -> Yielded | Returned | Failed:
        """Run this thread up to its next operation, its end or its failure; ChildLost if the child ends meanwhile."""
        return await self.read(self.send(thread, _written(value)))

    def send(self, thread: int, payload: bytes) -> asyncio.Future[Frame]:
        return self._child.send(Frame(frames.RESUME, self.number, thread, payload=payload))

    async def read(self, answer: asyncio.Future[Frame]) -> Yielded | Returned | Failed:
        """What the child says; ChildLost also where it is no answer."""
        frame = await answer
        self._output_bytes += len(frame.payload)
        limits = self._child.limits
        try:
            if self._output_bytes > 2 * limits.output_bytes:  # an honest child stops the program at the limit
                raise AnswerRefused(f"expected at most {limits.output_bytes} bytes from one attempt")
            return read_answer(frame, bytes_max=2 * limits.frame_bytes)
        except AnswerRefused as refused:
            await self._child.end("OUTPUT", str(refused))
            raise ChildLost("OUTPUT", is_guilty=True, detail=str(refused)) from None

    def close(self) -> None:
        """Free the state, soon. Closing twice, or after its child is gone, does nothing."""
        self._child.close_state(self.number)


def _written(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _opening(chunks: Sequence[Chunk], *, seed: bytes, is_strict: bool, epoch_ms: int) -> bytes:
    for chunk in chunks:
        if len(chunk.source.encode(errors="surrogatepass")) > CHUNK_BYTES_MAX:
            raise ValueError(f"expected chunks of at most {CHUNK_BYTES_MAX} bytes, found a larger one: {chunk.name}")
    padded = seed + bytes(12)
    settings = {
        "chunks": [(_plain_name(chunk.name), chunk.source) for chunk in chunks],
        "seed": [int.from_bytes(padded[:6], "big"), int.from_bytes(padded[6:12], "big")],
        "strict": is_strict,
        "epoch_s": epoch_ms // 1000,
    }
    payload = json.dumps(settings).encode()
    if len(payload) > PARTS_BYTES_MAX:
        raise ValueError(f"expected sources of at most {PARTS_BYTES_MAX} bytes together, found {len(payload)}")
    return payload


def _plain_name(name: str) -> str:
    """A chunk's name as Lua may show it: never one of the trusted parts, which begin with a bracket."""
    plain = "".join(letter if letter.isprintable() else " " for letter in name)[:200]
    return plain if plain and not plain.startswith("[") else f"chunk {plain}"
