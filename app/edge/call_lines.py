"""A line for each call, on stderr: as text, or as JSON. Neither arguments nor outputs nor keys are in it.

Lines are put by and written by a thread, many at once: a call does not wait for a terminal or a pipe. If that does not
keep up, lines are dropped and counted; the record has every call in any case. What a caller or a server has named is
written so that it stays on its line.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, Literal

import orjson

from app.core.errors import TgaError
from app.core.instruments import Instruments
from app.core.limits import LOG_LINES_EVERY_MS, LOG_LINES_QUEUED_MAX
from app.domain.clock import Clock
from app.domain.tga.execution import Answer, TraceExecution
from app.domain.tga.runtime import CheckedCall

_PLAIN: Final = re.compile(r"[A-Za-z0-9._:/@+-]+")
_CHARS_MAX: Final = 256
_LINE_ENDS: Final = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_CLOSE_WAIT_S: Final = 2.0
LogFormat = Literal["text", "json"]


@lru_cache(maxsize=4096)
def word(value: str) -> str:
    """As it is if it is plain; else quoted and escaped, in ASCII, so that it can neither end its line nor pass for
    another field."""
    if _PLAIN.fullmatch(value):
        return value
    quoted = orjson.dumps(value[:_CHARS_MAX].encode("utf-8", "replace").decode("utf-8")).decode()
    return quoted.encode("ascii", "backslashreplace").decode().replace("\x7f", "\\x7f")


@lru_cache(maxsize=1024)
def _named(server: str, tool: str, state: str, decision: str, principal: str) -> str:
    """What the lines of one caller's calls of one tool have in common."""
    return f" server={word(server)} tool={word(tool)} state={state} decision={decision} principal={word(principal)}"


class LineWriter:
    """Writes lines in a thread of its own. `put` is called by one thread, and takes no lock."""

    def __init__(self, instruments: Instruments, write: Callable[[bytes], object] | None = None) -> None:
        self._instruments = instruments
        self._write = write or _to_stderr
        self._lines: deque[str] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Write it soon; without its newline."""
        if len(self._lines) >= LOG_LINES_QUEUED_MAX:
            self._instruments.lines_dropped.add()
            return
        self._lines.append(line)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log lines", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what is left, if that does not take long: a reader of stderr that does not read must not hold the
        gateway."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_WAIT_S)

    def _run(self) -> None:
        while not self._closing.wait(LOG_LINES_EVERY_MS / 1000):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        lines: list[str] = []
        while self._lines:
            lines.append(self._lines.popleft())
        if lines:
            lines.append("")
            try:
                self._write("\n".join(lines).encode("utf-8", "replace"))
            except OSError:  # the reader is gone
                self._instruments.lines_dropped.add(amount=len(lines) - 1)


def _to_stderr(raw: bytes) -> None:
    left = memoryview(raw)
    while left:
        left = left[os.write(2, left) :]


class Lines:
    """CallLines, into a LineWriter."""

    def __init__(self, writer: LineWriter, clock: Clock, log_format: LogFormat) -> None:
        self._put = writer.put
        self._clock = clock
        self._is_json = log_format == "json"

    def executed(self, execution: TraceExecution, answer: Answer, decision: str, took_ms: float) -> None:
        request, effect = execution.request, answer.effect
        error = "" if effect is None or effect.error is None else effect.error.code
        waiting = answer.waiting or ""
        if self._is_json:
            self._put_json(
                request.trace_id,
                request.traceparent,
                {
                    "event": "call",
                    "server": request.server_id,
                    "tool": request.tool_name,
                    "state": answer.state,
                    "decision": decision,
                    "waiting": waiting or None,
                    "principal": request.principal.principal_id,
                    "tenant": request.principal.tenant,
                    "run": None if request.run is None else request.run.run_id,
                    "attempts": execution.attempts.count,
                    "error": error or None,
                    "duration_ms": round(took_ms, 3),
                },
            )
            return
        more = f" waiting={waiting}" if waiting else ""
        if error:
            more += f" error={word(error)}"  # a tool server may have chosen it
        if execution.attempts.count > 1:
            more += f" attempts={execution.attempts.count}"
        if request.run is not None:
            more += f" run={word(request.run.run_id)}"
        principal = request.principal.principal_id
        named = _named(request.server_id, request.tool_name, answer.state, decision, principal)
        self._put(
            f"{self._clock.now()} INFO tga.calls: call trace_id={request.trace_id}"
            f"{_otel(request.traceparent)}{named} duration_ms={took_ms:.1f}{more}"
        )

    def repeated(self, call: CheckedCall, answer: Answer) -> None:
        self._say("repeat", call, answer.trace_id, {"state": answer.state})

    def refused(self, call: CheckedCall, error: TgaError) -> None:
        self._say("refused", call, call.trace_id, {"error": error.code})

    def _say(self, event: str, call: CheckedCall, trace_id: str | None, more: dict[str, str]) -> None:
        named = {"server": call.server_id, "tool": call.tool_name, **more, "principal": call.principal.principal_id}
        if self._is_json:
            tenant = {"tenant": call.principal.tenant}
            self._put_json(trace_id or "", call.traceparent, {"event": event, **named, **tenant})
            return
        told = " ".join(f"{name}={word(value)}" for name, value in named.items())
        self._put(
            f"{self._clock.now()} INFO tga.calls: {event} trace_id={trace_id or '-'}{_otel(call.traceparent)} {told}"
        )

    def _put_json(self, trace_id: str, traceparent: str | None, told: dict[str, Any]) -> None:
        line = {
            "time": self._clock.now(),
            "level": "INFO",
            "logger": "tga.calls",
            **told,
            "trace_id": trace_id,
            "otel_trace_id": trace_id.replace("-", "") if traceparent is None else traceparent[3:35],
        }
        try:
            self._put(on_one_line(orjson.dumps(line).decode()))
        except TypeError:  # a lone surrogate
            plain = {name: _storable(value) for name, value in line.items()}
            self._put(on_one_line(orjson.dumps(plain).decode()))


def on_one_line(written: str) -> str:
    """JSON for readers that split lines as Unicode does: what ends one there is escaped."""
    return written if written.isascii() else written.translate(_LINE_ENDS)


def _otel(traceparent: str | None) -> str:
    """The caller's trace, where it named one; else it is the trace's own id."""
    return "" if traceparent is None else f" otel_trace_id={traceparent[3:35]}"


def _storable(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value
