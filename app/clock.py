"""Time and chance of the real world: the runtime's Clock."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime

import uuid_utils


class SystemClock:
    def now(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def new_id(self) -> str:
        return str(uuid_utils.uuid7())

    def jitter(self) -> float:
        return random.random()  # noqa: S311 - spreads retries; nothing depends on it being unguessable

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
