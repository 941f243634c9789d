"""Tools that are not what was pinned, told of in the log: at the start, and when a server changes them later."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from app.core.limits import PINS_PER_SERVER_MAX
from app.domain.system.pins import Pins
from app.domain.tools import Tool

logger = logging.getLogger("tga")


class QuarantineLog:
    """Pins tools as they are seen, and says once of each definition that is quarantined that it is."""

    def __init__(self, pins: Pins) -> None:
        self._pins: Final = pins
        self._told: set[tuple[str, str, str]] = set()

    async def see(self, tools: Iterable[Tool]) -> list[str]:
        """Which of the tools cannot be pinned, and why."""
        seen = list(tools)
        unpinned = await self._pins.see(seen)
        for tool in seen:
            state = self._pins.state_of(tool)
            key = (tool.server_id, tool.tool_name, tool.definition_digest)
            # A server that changes all the time fills neither the log nor the memory.
            is_told = key in self._told or len(self._told) >= PINS_PER_SERVER_MAX
            if state.status != "pinned" and state.pinned_digest is not None and not is_told:
                self._told.add(key)
                logger.warning(
                    "quarantined: %s %s is not what was pinned at %s. It is neither listed to models nor called. "
                    "Look at the change: tga servers accept %s %s",
                    tool.server_id,
                    tool.tool_name,
                    state.since,
                    tool.server_id.rpartition("/")[2],
                    tool.tool_name,
                )
        return unpinned
