"""CPU of a call by phase: who is at work is noted at the borders between the gateway's parts.

For one call at a time: then whatever the thread does between two borders belongs to that call, also what tasks of the
loop do for it while it waits. Noting takes about a microsecond a border, which the phases carry.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from app.api import tool_calls
from app.connectors import server_slots
from app.connectors.registry import Registry
from app.core import canonical, digest
from app.domain.tga.runtime import TgaRuntime
from app.edge.protocol import BoundedProtocol
from app.edge.services import Admitted
from app.gateway.policy_file import PolicyFile
from app.postgres.traces import PostgresTraces
from app.postgres.writer import Writer

PHASES: Final = (
    "parse",
    "arguments",
    "admission",
    "policy",
    "canonical",
    "database",
    "dispatch",
    "runtime",
    "edge",
    "response",
)
_in_call: contextvars.ContextVar[bool] = contextvars.ContextVar("in_call", default=False)


class Phases:
    """Seconds of CPU by phase, without what phases inside it took, and how many calls there were."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.calls = 0
        self._stack: list[str] = []
        self._last_s = 0.0

    @contextmanager
    def at_work(self, phase: str) -> Iterator[None]:
        self._turn()
        self._stack.append(phase)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def _turn(self) -> None:
        now = time.thread_time()
        if self._stack:
            self.cpu_s[self._stack[-1]] += now - self._last_s
        self._last_s = now

    def reset(self) -> None:
        self.cpu_s.clear()
        self.calls = 0

    def watch(self) -> None:
        """Put borders around the parts of this process."""
        self._around(TgaRuntime, "call", "runtime")
        self._around(Admitted, "__aenter__", "admission")
        self._around(PolicyFile, "judge", "policy")
        self._around(Writer, "commit", "database")
        self._around(PostgresTraces, "find_call", "database")
        self._around(PostgresTraces, "load_trace", "database")
        self._around(Registry, "verify_arguments", "arguments")
        self._around(tool_calls, "read_body", "parse")
        self._around(tool_calls, "send_effect", "response")
        self._around(server_slots.ServerSlots, "place", "dispatch")
        self._around(server_slots._Watched, "dispatch", "dispatch")
        self._around(BoundedProtocol, "data_received", "parse", is_outside=True)
        self._around(tool_calls.ToolCalls, "__call__", "edge", is_call=True)
        for original in (canonical.canonical_bytes, digest.digest_of, digest.digest_of_bytes):
            self._everywhere(original)

    def _everywhere(self, original: Callable[..., Any]) -> None:
        """Whatever module of ours has taken the function by its name."""
        watched = self._watched(original, "canonical")
        for name, module in list(sys.modules.items()):
            if name.startswith("app.") and getattr(module, original.__name__, None) is original:
                setattr(module, original.__name__, watched)

    def _around(self, owner: Any, name: str, phase: str, *, is_call: bool = False, is_outside: bool = False) -> None:
        setattr(owner, name, self._watched(getattr(owner, name), phase, is_call=is_call, is_outside=is_outside))

    def _watched(
        self, original: Callable[..., Any], phase: str, *, is_call: bool = False, is_outside: bool = False
    ) -> Callable[..., Any]:
        if original.__name__ == "place":
            return self._watched_place(original, phase)

        @functools.wraps(original)
        def watched(*args: Any, **named: Any) -> Any:
            if not (is_outside or _in_call.get()):
                return original(*args, **named)
            with self.at_work(phase):
                return original(*args, **named)

        @functools.wraps(original)
        async def watched_wait(*args: Any, **named: Any) -> Any:
            if is_call:
                _in_call.set(True)
                self.calls += 1
            elif not _in_call.get():
                return await original(*args, **named)
            with self.at_work(phase):
                return await original(*args, **named)

        return watched_wait if original.__code__.co_flags & 0x80 else watched

    def _watched_place(self, original: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """A place in a line: taking it, sending, and giving it back."""

        @functools.wraps(original)
        def watched(*args: Any, **named: Any) -> Any:
            return _Place(self, original(*args, **named), phase)

        return watched


class _Place:
    def __init__(self, phases: Phases, place: Any, phase: str) -> None:
        self._phases, self._place, self._phase = phases, place, phase

    async def __aenter__(self) -> Any:
        with self._phases.at_work(self._phase):
            return await self._place.__aenter__()

    async def __aexit__(self, *raised: Any) -> Any:
        with self._phases.at_work(self._phase):
            return await self._place.__aexit__(*raised)
