"""Whether a tool server can be called, since when, why not, and what to do: what operators are shown of it.

| state       | of an MCP server                                    | of an HTTP server                          |
|-------------|-----------------------------------------------------|--------------------------------------------|
| `unchecked` | not started yet                                     | no connection to it was tried yet          |
| `starting`  | started, not ready, and still within its start time | never                                      |
| `up`        | connected, its tools are known                      | takes connections                          |
| `down`      | cannot be used now; it is tried again               | takes no connections; it is tried again    |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

logger = logging.getLogger("tga")

_FAILURES_TOLD_MAX: Final = 8

State = Literal["unchecked", "starting", "up", "down"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a server cannot be used. `reason` is in the gateway's own words, for everybody; `error` may hold the
    server's words too, for operators. `remedy` is what to do."""

    reason: str
    remedy: str
    error: str


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """`since`: when the state came to be. `failure` is the last one; it stays known while the server is up again."""

    state: State
    since: str
    failure: Failure | None = None

    @property
    def is_callable(self) -> bool:
        return self.state in ("up", "unchecked")


class StatusWatch:
    """Keeps the status of one server, and writes every change of it to the log."""

    def __init__(self, server_id: str, now: Callable[[], str]) -> None:
        self._server_id: Final = server_id
        self._now = now
        self.status = ServerStatus("unchecked", now())
        self._told: set[Failure] = set()  # while it is down

    def note_starting(self) -> None:
        """A server that was down stays down while it is tried again: that is what callers meet."""
        if self.status.state == "unchecked":
            self.status = ServerStatus("starting", self._now())

    def note_up(self) -> None:
        known = self.status
        if known.state == "up":
            return
        self.status = ServerStatus("up", self._now(), known.failure)
        self._told.clear()
        if known.state == "down":
            logger.warning("server %s is up again", self._server_id)

    def note_down(self, failure: Failure) -> None:
        known = self.status
        since = known.since if known.state == "down" else self._now()
        self.status = ServerStatus("down", since, failure)
        # It is tried again and again: each way to fail is told once, and of a server that invents new ones only some.
        if failure not in self._told and len(self._told) < _FAILURES_TOLD_MAX:
            self._told.add(failure)
            logger.warning("server %s is down: %s. %s", self._server_id, failure.error, failure.remedy)
