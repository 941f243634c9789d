"""Calls over MCP that came without a key, on PostgreSQL, until their answer has arrived."""

from __future__ import annotations

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
        self._held: set[bytes] = set()

    async def begin(self, fingerprint: bytes, *, server_id: str, tool_name: str, proposed_key: str) -> Begun:
        """Unless it is `busy`, `leave` or `settle` must follow."""
        holder = self._executor_id()
        is_held_here = fingerprint in self._held
        self._held.add(fingerprint)
        try:
            (row,) = await self._sessions.commit(
                "SELECT * FROM tga.mcp_begin($1, $2, $3, $4, $5::uuid, $6, $7)",
                fingerprint,
                server_id,
                tool_name,
                proposed_key,
                holder,
                is_held_here,
                self._window_ms,
            )
        except BaseException:
            if not is_held_here:
                self._held.discard(fingerprint)
            raise
        if row["verdict"] == "busy" and not is_held_here:
            self._held.discard(fingerprint)
        return Begun(row["verdict"], row["used_key"], holder)

    async def leave(self, fingerprint: bytes, begun: Begun) -> None:
        """The answer is still owed; whoever comes back gets it."""
        self._held.discard(fingerprint)
        await self._sessions.commit("SELECT tga.mcp_leave($1, $2, $3::uuid)", fingerprint, begun.key, begun.holder)

    async def settle(self, fingerprint: bytes, begun: Begun) -> None:
        """The answer arrived: the next equal call is another one."""
        self._held.discard(fingerprint)
        await self._sessions.commit("SELECT tga.mcp_settle($1, $2)", fingerprint, begun.key)
