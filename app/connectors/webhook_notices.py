"""Tells webhooks of what stands and wants a person: calls that are held, tools in quarantine, a forked log.

Approvals have rows in an outbox; these have not. Each gateway looks every few seconds at what stands, and tells each
webhook what it has not told it yet. What still stands after a restart, or is seen by two gateways, is told again, under
the same `webhook-id`: at least once, as with approvals. What no longer stands is forgotten, told or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from app.connectors.webhooks import Webhooks, backoff_ms
from app.core.limits import WEBHOOK_NOTICES_MAX, WEBHOOK_POSTS_AT_ONCE_MAX
from app.domain.clock import Clock

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Notice:
    """`notice_id` is the same for as long as it is the same thing that stands."""

    event: str
    notice_id: str
    told: Mapping[str, Any]


Look: TypeAlias = Callable[[], Awaitable[Iterable[Notice]]]


@dataclass(slots=True)
class _Delivery:
    """Of one notice to one webhook, by this gateway."""

    attempts: int = 0
    is_done: bool = False
    due_ms: float = 0.0


class WebhookNotices:
    def __init__(self, webhooks: Webhooks, events: Mapping[str, Iterable[str]], look: Look, clock: Clock) -> None:
        """`events`: what each webhook wants to be told of."""
        self._webhooks = webhooks
        self._events = {name: frozenset(wanted) for name, wanted in events.items()}
        self._look = look
        self._clock = clock
        self._known: dict[tuple[str, str], _Delivery] = {}

    async def tell(self) -> int:
        """One pass: whatever stands and is due, once. Returns how many deliveries were taken by their receivers."""
        if not self._events:
            return 0
        standing = list(await self._look())[:WEBHOOK_NOTICES_MAX]
        wanted = {
            (name, notice.notice_id): notice
            for notice in standing
            for name, events in self._events.items()
            if notice.event in events
        }
        self._known = {key: self._known.get(key, _Delivery()) for key in wanted}
        now = self._clock.monotonic_ms()
        at_once = asyncio.Semaphore(WEBHOOK_POSTS_AT_ONCE_MAX)

        async def deliver(name: str, notice: Notice, delivery: _Delivery) -> bool:
            async with at_once:
                return await self._deliver(name, notice, delivery)

        due = [key for key, known in self._known.items() if not known.is_done and known.due_ms <= now]
        told = await asyncio.gather(*(deliver(key[0], wanted[key], self._known[key]) for key in due))
        return sum(told)

    async def _deliver(self, name: str, notice: Notice, delivery: _Delivery) -> bool:
        delivery.attempts += 1
        failure = await self._webhooks.post(name, notice.notice_id, notice.event, notice.told)
        if failure is None:
            delivery.is_done = True
            return True
        retry_ms = backoff_ms(delivery.attempts, self._clock.jitter())
        delivery.due_ms = self._clock.monotonic_ms() + retry_ms
        _log.warning("webhook %s: %s %s: %s; again in %d ms", name, notice.event, notice.notice_id, failure, retry_ms)
        return False
