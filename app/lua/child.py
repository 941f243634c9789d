"""The process that holds Lua states: one slice at a time, frames in on descriptor 0, frames out on descriptor 1.

Standard library and lupa only. It holds no secret, no file, no socket; `confine` takes the means to get one before the
first submitted program arrives. Only bytes cross into a Lua state and out of it: no Python object is visible there.
"""

from __future__ import annotations

import json
import locale
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

import lupa.lua54 as lupa

from app.lua import frames
from app.lua.confine import confine
from app.lua.frames import Frame, FrameReader, write_frame

PARTS: Final = ("boot", "codec", "patterns", "determinism", "tables", "libraries", "sandbox")
EXIT_MEMORY: Final = 70  # the process as a whole met its bound
SPARE_STATES: Final = 4
_PUSH_SLACK_BYTES: Final = 65_536  # what pushing arguments needs beside them: there an allocation may not fail


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = EXIT_MEMORY
    try:
        Child().serve()
        status = 0
    except MemoryError:
        pass
    except BaseException as error:
        status = 71
        os.write(2, f"{type(error).__name__}: {error}\n".encode()[:500])
    os._exit(status)


class Child:
    def __init__(self) -> None:
        self._reader = FrameReader(frame_bytes_max=1 << 26)
        self._pending: list[Frame] = []
        self._states: dict[int, _State] = {}
        self._spares: list[_State] = []
        self._limits: dict[str, Any] = {}
        self._parts: list[bytes] = []
        self._language = b""

    def serve(self) -> None:
        while (frame := self._receive()) is not None:
            answer = self._answer(frame)
            data = memoryview(write_frame(answer))
            while data:
                data = data[os.write(1, data) :]

    def _receive(self) -> Frame | None:
        while not self._pending:
            if self._parts and len(self._spares) < SPARE_STATES and not select.select([0], [], [], 0)[0]:
                self._spares.append(self._fresh())
                continue
            data = os.read(0, 65_536)
            if not data:
                return None
            self._pending.extend(self._reader.feed(data))
        return self._pending.pop(0)

    def _answer(self, frame: Frame) -> Frame:
        if frame.kind == frames.INIT:
            return self._begin(json.loads(frame.payload))
        # The kernel ends the process when one frame has used this much CPU: SIGPROF has its default action.
        signal.setitimer(signal.ITIMER_PROF, self._limits["kill_cpu_s"])
        if frame.kind == frames.RESUME:
            return self._resume(frame)
        if frame.kind == frames.OPEN:
            return self._open(frame)
        self._states.pop(frame.state, None)
        return Frame(frames.CLOSED, frame.state)

    def _begin(self, settings: dict[str, Any]) -> Frame:
        self._limits = settings["limits"]
        here = Path(__file__).parent
        compiler = lupa.LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        # Without lines and names a part loads in half the time; the libraries keep theirs, which messages of C show.
        dump = compiler.eval(
            b"function(text, name, is_stripped) return string.dump(assert(load(text, name, 't')), is_stripped) end"
        )
        sources = [(name, (here / f"{name}.lua").read_bytes()) for name in PARTS]
        sources.append(("language", settings["language"].encode()))
        compiled = [dump(text, f"=[{name}]".encode(), name not in ("libraries", "tables")) for name, text in sources]
        self._parts, self._language = compiled[:-1], compiled[-1]
        self._fresh()  # a mistake in a trusted part shows now, while it can be told
        time.tzset()
        locale.setlocale(locale.LC_ALL, "C")
        os.environ.clear()
        in_force = confine(child_bytes=self._limits["child_bytes"])
        return Frame(frames.READY, payload=json.dumps({"confinement": in_force}).encode())

    def _fresh(self) -> _State:
        return _State(self._parts, self._language, self._limits)

    def _open(self, frame: Frame) -> Frame:
        settings = json.loads(frame.payload)
        state = self._spares.pop() if self._spares else self._fresh()
        self._states[frame.state] = state
        state.open(settings)
        return Frame(frames.OPENED, frame.state, memory=state.memory())

    def _resume(self, frame: Frame) -> Frame:
        state = self._states[frame.state]
        kind, payload, notes = state.resume(frame.thread, frame.payload)
        state.output_bytes += len(payload) + len(notes)
        if len(payload) + len(notes) > self._limits["frame_bytes"]:
            found = f"{len(payload)} bytes at once, found more than {self._limits['frame_bytes']}"
            kind, payload, notes = frames.FAILED, _limit_met("OUTPUT", f"expected to send less than {found}"), b""
        elif state.output_bytes > self._limits["output_bytes"]:
            text = f"expected at most {self._limits['output_bytes']} bytes from one attempt, found more"
            kind, payload, notes = frames.FAILED, _limit_met("OUTPUT", text), b""
        return Frame(kind, frame.state, frame.thread, state.memory(), notes, payload)


class _State:
    """One Lua state. Made ahead of its use: nothing in it depends on the program until `open`."""

    def __init__(self, parts: list[bytes], language: bytes, limits: dict[str, Any]) -> None:
        self._bytes_max: int = limits["state_bytes"]
        self.output_bytes = 0
        self._is_full = False  # the program's sources alone need more memory than it may have
        self._lua = lupa.LuaRuntime(
            encoding=None,
            register_eval=False,
            register_builtins=False,
            attribute_handlers=(_refuse_attribute, _refuse_attribute),
            max_memory=self._bytes_max,
        )
        numbers = ",".join(f"{name}={value!r}" for name, value in limits.items())
        loaded = self._lua.eval(
            b"function(boot, codec, patterns, determinism, tables, libraries, sandbox, limits)"
            b" local load, assert = load, assert"
            b" local function part(text) return assert(load(text, '=', 'b')) end"
            b" local control = part(boot)(part(codec), part(patterns), part(determinism), part(tables),"
            b" part(libraries), part(sandbox), load('return {' .. limits .. '}')())"
            b" return control.language, control.resume, control.chunk, control.configure end"
        )
        begin, self._resume, self._chunk, self._configure = loaded(*parts, numbers.encode())
        begin(language)

    def memory(self) -> int:
        return int(self._lua.get_memory_used())

    def open(self, settings: dict[str, Any]) -> None:
        wanted = {"strict": settings["strict"], "epoch_s": settings["epoch_s"], "seed": settings["seed"]}
        live_seed = int.from_bytes(os.urandom(7), "big")
        self._configure(json.dumps(wanted).encode(), live_seed)
        for name, source in settings["chunks"]:
            text = source.encode(errors="replace")
            try:
                self._is_full = self._is_full or not self._has_room(len(text))
                if not self._is_full:
                    self._chunk(name.encode(errors="replace"), text)
            except (lupa.LuaMemoryError, MemoryError):
                self._is_full = True

    def resume(self, thread: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
        if self._is_full or not self._has_room(len(payload)):
            return frames.FAILED, _memory_met(self._bytes_max), b""
        try:
            kind, text, notes = self._resume(thread, payload)
        except (lupa.LuaMemoryError, MemoryError):
            return frames.FAILED, _memory_met(self._bytes_max), b""
        except lupa.LuaError as error:
            return frames.FAILED, _failure(f"the sandbox failed: {error}"[:1000], None), b""
        return {b"Y": frames.YIELDED, b"R": frames.RETURNED}.get(kind, frames.FAILED), text, notes

    def _has_room(self, size: int) -> bool:
        return self.memory() + size + _PUSH_SLACK_BYTES < self._bytes_max


def _refuse_attribute(*_: object) -> NoReturn:
    raise AttributeError("no Python object has attributes here")


def _failure(message: str, limit: str | None) -> bytes:
    return json.dumps({"message": message, "traceback": "", "limit": limit}).encode()


def _limit_met(limit: str, message: str) -> bytes:
    return _failure(message, limit)


def _memory_met(bytes_max: int) -> bytes:
    return _failure(
        f"expected the program to need at most {bytes_max} bytes of memory, found that it needs more", "MEMORY"
    )


if __name__ == "__main__":
    sys.exit("started by the gateway alone: see app/lua/pool.py")
