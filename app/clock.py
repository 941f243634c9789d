"""Time and chance of the real world: the runtime's Clock."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime

import uuid_utils


class SystemClock:
    def __init__(self) -> None:
        self._second = -1
        self._written = ""

    def now(self) -> str:
        second, rest_ns = divmod(time.time_ns(), 1_000_000_000)
        if second != self._second:  # written once a second; a call asks a dozen times
            self._second, self._written = second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._written}.{rest_ns // 1_000_000:03}Z"

    def new_id(self) -> str:
        return str(uuid_utils.uuid7())

    def jitter(self) -> float:
        return random.random()  # noqa: S311 - spreads retries; nothing depends on it being unguessable

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
