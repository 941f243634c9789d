"""Calls over MCP that came without a key, on PostgreSQL, until their answer has arrived."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.core.limits import MCP_REISSUE_WINDOW_MS
from app.postgres.sessions import Sessions

Verdict = Literal["fresh", "again", "busy"]


@dataclass(frozen=True, slots=True)
class Begun:
    """`busy`: an equal call's client still waits for its answer, which goes by this key."""

    verdict: Verdict
    key: str
    holder: str


class PostgresIntents:
    """Any gateway on the database answers alike. Whether a holder lives is asked of its executor's lock."""

    def __init__(
        self, sessions: Sessions, executor_id: Callable[[], str], *, window_ms: int = MCP_REISSUE_WINDOW_MS
    ) -> None:
        self._sessions = sessions
        self._executor_id = executor_id
        self._window_ms = window_ms
        self._held: dict[bytes, Counter[str]] = {}  # keys whose clients wait here, by fingerprint
        self._beginning: dict[bytes, asyncio.Lock] = {}
        self._waiting: dict[bytes, asyncio.Event] = {}

    async def begin(self, fingerprint: bytes, *, server_id: str, tool_name: str, proposed_key: str) -> Begun:
        """Unless it is `busy`, `leave` or `settle` must follow."""
        lock = self._beginning.setdefault(fingerprint, asyncio.Lock())
        try:
            # One at a time: what is held here must be known to the next request.
            async with lock:
                holder = self._executor_id()
                (row,) = await self._sessions.commit(
                    "SELECT * FROM tga.mcp_begin($1, $2, $3, $4, $5::uuid, $6, $7)",
                    fingerprint,
                    server_id,
                    tool_name,
                    proposed_key,
                    holder,
                    list(self._held.get(fingerprint, ())),
                    self._window_ms,
                )
                begun = Begun(row["verdict"], row["used_key"], holder)
                if begun.verdict != "busy":
                    self._held.setdefault(fingerprint, Counter())[begun.key] += 1
                return begun
        finally:
            if not lock.locked() and self._beginning.get(fingerprint) is lock:
                del self._beginning[fingerprint]

    async def wait(self, fingerprint: bytes, wait_ms: int) -> None:
        """Until an equal call that is held here is settled or left; of other gateways nothing is heard, so not for
        longer than that."""
        event = self._waiting.setdefault(fingerprint, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1000):
                await event.wait()

    async def leave(self, fingerprint: bytes, begun: Begun) -> None:
        """The answer is still owed; the client that comes back gets it."""
        try:
            await self._sessions.commit("SELECT tga.mcp_leave($1, $2, $3::uuid)", fingerprint, begun.key, begun.holder)
        finally:
            self._let_go(fingerprint, begun.key)

    async def settle(self, fingerprint: bytes, begun: Begun) -> None:
        """The answer arrived: the next equal call is another one."""
        try:
            await self._sessions.commit("SELECT tga.mcp_settle($1, $2)", fingerprint, begun.key)
        finally:
            # Not before: until the row is gone, an equal call would be taken for this one.
            self._let_go(fingerprint, begun.key)

    def _let_go(self, fingerprint: bytes, key: str) -> None:
        held = self._held.get(fingerprint, Counter())
        held[key] -= 1
        if held[key] <= 0:
            del held[key]
        if not held:
            self._held.pop(fingerprint, None)
        if (event := self._waiting.pop(fingerprint, None)) is not None:
            event.set()
