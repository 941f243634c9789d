"""Sessions of the console that were ended, and sign-ins that were used, on PostgreSQL: every gateway knows of them."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime

from app.core.limits import ACCESS_CACHE_AGE_MS, CONSOLE_SESSIONS_KNOWN_MAX
from app.postgres.sessions import Sessions

PREFIX = "session:"  # before what the channel of keys says of them


class PostgresSpentSessions:
    """What is spent stays so, whichever gateway was told, also after a restart.

    That a session is not spent is remembered only while the channel is heard, for at most ACCESS_CACHE_AGE_MS: as with
    keys, a sign-out counts everywhere a moment after its commit.
    """

    def __init__(self, sessions: Sessions, hears: Callable[[], bool]) -> None:
        self._sessions = sessions
        self._hears = hears
        self._unspent: OrderedDict[bytes, float] = OrderedDict()  # until when, by this process's monotonic clock
        self._changes = 0

    async def spend(self, value: str, *, until: str) -> bool:
        """Whether it was not spent before; durable when this returns."""
        digest = _digest(value)
        (row,) = await self._sessions.commit(
            "SELECT tga.spend_session($1, $2) AS is_first", digest, datetime.fromisoformat(until)
        )
        self.heard(digest.hex())
        return bool(row["is_first"])

    async def is_spent(self, value: str) -> bool:
        digest, now_s = _digest(value), time.monotonic()
        if self._unspent.get(digest, 0.0) > now_s and self._hears():
            self._unspent.move_to_end(digest)
            return False
        changes, heard_before = self._changes, self._hears()
        if await self._sessions.fetch("SELECT FROM tga.spent_sessions WHERE digest = $1", digest):
            return True
        # A change that was heard since we asked may be one that this answer does not know of.
        if heard_before and self._hears() and changes == self._changes:
            self._unspent[digest] = now_s + ACCESS_CACHE_AGE_MS / 1000
            if len(self._unspent) > CONSOLE_SESSIONS_KNOWN_MAX:
                self._unspent.popitem(last=False)
        return False

    def heard(self, digest_hex: str) -> None:
        self._changes += 1
        self._unspent.pop(bytes.fromhex(digest_hex), None)

    def forget_all(self) -> None:
        self._changes += 1
        self._unspent.clear()


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8")).digest()
