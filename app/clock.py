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
        return self._at(time.time_ns())

    def after(self, milliseconds: int) -> str:
        at_ns = time.time_ns() + milliseconds * 1_000_000
        written = datetime.fromtimestamp(at_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{written}.{at_ns // 1_000_000 % 1000:03}Z"

    def _at(self, time_ns: int) -> str:
        second, rest_ns = divmod(time_ns, 1_000_000_000)
        if second != self._second:  # written once a second; a call asks a dozen times
            self._second, self._written = second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._written}.{rest_ns // 1_000_000:03}Z"

    def new_id(self) -> str:
        return str(uuid_utils.uuid7())

    def jitter(self) -> float:
        return random.random()  # noqa: S311 - spreads retries; nothing depends on it being unguessable

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
