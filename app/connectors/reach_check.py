"""Whether a tool server can be reached, looked at without a call: a dead one is known before it is needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from app.connectors.server_slots import Health
from app.connectors.server_status import Failure, ServerStatus, StatusWatch
from app.core.limits import REACH_CHECK_EVERY_MS, REACH_CHECK_MS


class Reachable(Protocol):
    async def why_unreachable(self) -> str | None: ...


class ReachCheck:
    """Asks a connector that keeps no session of its own whether it could send now (over HTTP: connects, and closes
    again); nothing is sent. Says nothing of what the server would answer. An operator corrects `address_field`."""

    def __init__(self, server_id: str, connector: Reachable, now: Callable[[], str], *, address_field: str) -> None:
        self._connector = connector
        self._watch = StatusWatch(server_id, now)
        self._looked_at_s: float | None = None
        self._seen = Health()
        self._remedy = f"Start it, or correct servers.{server_id.rpartition('/')[2]}.{address_field} in tga.toml."

    @property
    def status(self) -> ServerStatus:
        return self._watch.status

    def is_due(self, health: Health) -> bool:
        """Every so often, and at once after a call that failed. A server that answered since needs no look."""
        seen, self._seen = self._seen, health
        if health.answered > seen.answered and health.failed == seen.failed:
            self._looked_at_s = time.monotonic()
            self._watch.note_up()
            return False
        if self._looked_at_s is None or health.failed > seen.failed:
            return True
        return (time.monotonic() - self._looked_at_s) * 1000 >= REACH_CHECK_EVERY_MS

    async def look(self) -> None:
        self._looked_at_s = time.monotonic()
        try:
            async with asyncio.timeout(REACH_CHECK_MS / 1000):
                reason = await self._connector.why_unreachable()
        except TimeoutError:
            reason = f"no connection within {REACH_CHECK_MS} ms"
        if reason is None:
            self._watch.note_up()
        else:
            self._watch.note_down(Failure(reason, self._remedy, reason))
