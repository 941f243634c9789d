"""Times as the gateway writes them."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def time_text(seconds: float) -> str:
    """A time as the gateway writes it: UTC with milliseconds."""
    whole, rest = divmod(round(seconds * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{rest:03d}Z"


def time_of(said: str) -> datetime:
    """The time that the gateway has written so."""
    return datetime.fromisoformat(said.replace("Z", "+00:00")).astimezone(UTC)
