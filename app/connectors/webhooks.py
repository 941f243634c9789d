"""Tells webhooks which requests wait for a supervisor, and what runs ask: from the outbox, signed, at least once.
docs/webhooks.md is for those who receive it.

Each row of the outbox is one POST of JSON, repeated until it is answered with 2xx or nothing waits any longer. The
headers follow Standard Webhooks: `webhook-id` (the same for every repeat, so that receivers can tell repeats),
`webhook-timestamp` (seconds, of this attempt) and `webhook-signature`: `v1a,` and the gateway's Ed25519 signature, in
base64, over `{id}.{timestamp}.{body}`. `tga-key-id` names the key.

A repeat comes after a failure, and after a lease ran out: that of a deliverer which died, or was cut off, between the
POST and noting it. Order is not promised.

Rows of a webhook that is no longer configured stay, and are delivered when it is configured again; they go, like all
others, when their trace waits no longer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeAlias

from yarl import URL

from app.config.telling import WebhookFormat
from app.connectors.callbacks import Callbacks
from app.connectors.http_client import HttpPool, Origin
from app.connectors.http_connection import HttpFailure
from app.connectors.webhook_formats import shaped
from app.core.canonical import canonical_bytes
from app.core.errors import SettingInvalid, TgaError
from app.core.instruments import Instruments
from app.core.limits import (
    OUTBOX_CLEAN_EVERY_MS,
    OUTBOX_CLEAN_ROWS_MAX,
    WEBHOOK_BACKOFF_FIRST_MS,
    WEBHOOK_BACKOFF_MAX_MS,
    WEBHOOK_LEASE_MS,
    WEBHOOK_POLL_MS,
    WEBHOOK_POSTS_AT_ONCE_MAX,
    WEBHOOK_TIMEOUT_MS,
    WEBHOOKS_MAX,
)
from app.domain.clock import Clock
from app.domain.ledger.documents import Signature
from app.domain.runs.engine.announcing import RunAnnouncement
from app.domain.runs.requests import CALLBACK
from app.domain.tga.announcements import Announcement, Outbox, OutboxRow
from app.domain.tga.documents import TraceId
from app.domain.tga.transitions import TRACE

Load: TypeAlias = Callable[[TraceId], Awaitable[Announcement | None]]
LoadRun: TypeAlias = Callable[[str, str], Awaitable[RunAnnouncement | None]]
Sign: TypeAlias = Callable[[bytes], Signature]

APPROVAL_REQUESTED: Final = "approval_requested"
_UNPRINTABLE = re.compile(r"[^ -~]")
_ERROR_CHARS_MAX = 256
_log = logging.getLogger(__name__)


class Webhooks:
    """Delivers what is due. Any number of them, in any number of processes, may share an outbox."""

    def __init__(
        self,
        urls: Mapping[str, str],
        outbox: Outbox,
        *,
        load: Load,
        load_run: LoadRun | None = None,
        sign: Sign,
        clock: Clock,
        timeout_ms: int = WEBHOOK_TIMEOUT_MS,
        lease_ms: int = WEBHOOK_LEASE_MS,
        instruments: Instruments | None = None,
        formats: Mapping[str, WebhookFormat] | None = None,
        public_url: str | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        """`load` gives what a trace that still waits announces, and None when it waits no longer; `load_run` likewise
        what a run asks, for one webhook. `formats`: of webhooks that are not told in our own; `public_url`: under
        which people reach the console. `callbacks`: URLs that questions name themselves."""
        if timeout_ms >= lease_ms:
            raise SettingInvalid(
                "a lease must outlast a delivery, or every slow one is made twice",
                expected=f"more than {timeout_ms} ms",
                found=f"{lease_ms} ms",
            )
        self._urls = {name: _verified_url(name, url) for name, url in urls.items()}
        self._outbox = outbox
        self._load = load
        self._load_run = load_run
        self._sign = sign
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._lease_ms = lease_ms
        self._instruments = instruments or Instruments()
        self._formats = dict(formats or {})
        self._public_url = public_url
        self._callbacks = callbacks
        self._names = [*self._urls, *([CALLBACK] if callbacks is not None else [])]
        # A connection for each POST: on a kept one, a stray answer would pass for this one's.
        self._pool = HttpPool(keeps_alive=False, connections_per_server=WEBHOOKS_MAX * WEBHOOK_POSTS_AT_ONCE_MAX)

    async def run(self) -> None:
        """Deliver until cancelled. No webhook waits for another, and no failure ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in self._names:
                    tasks.create_task(self._repeat(partial(self._deliver_due, name), WEBHOOK_POLL_MS))
                tasks.create_task(self._repeat(self.drop_decided, OUTBOX_CLEAN_EVERY_MS))
        finally:
            await self.close()

    async def deliver_due(self) -> int:
        """One pass: everything that is due, once. Returns how many rows were delivered or had become needless."""
        return await _all(self._deliver_due(name) for name in self._names)

    async def drop_decided(self) -> int:
        """Remove the rows of traces that wait no longer, also those of webhooks that are not configured."""
        return await self._outbox.drop_decided(at_most=OUTBOX_CLEAN_ROWS_MAX)

    async def close(self) -> None:
        await self._pool.close()
        if self._callbacks is not None:
            await self._callbacks.close()

    async def _repeat(self, work: Callable[[], Awaitable[int]], every_ms: int) -> None:
        while True:
            try:
                await work()
            except TgaError as error:  # the store is away; the rows are still there when it comes back
                _log.warning("webhooks wait for the store: %s", error.code)
            except Exception:
                _log.exception("a defect in the delivery of webhooks; it goes on")
            await self._clock.sleep(every_ms / 1000)

    async def _deliver_due(self, name: str) -> int:
        settled = 0
        # Only as many are taken as are sent at once: a row that waits its turn here would wait away its lease.
        while rows := await self._outbox.take([name], lease_ms=self._lease_ms, at_most=WEBHOOK_POSTS_AT_ONCE_MAX):
            settled += await _all(self._deliver(row) for row in rows)
        return settled

    async def _deliver(self, row: OutboxRow) -> bool:
        """Whether the row is settled. However the delivery fails, the others are not touched."""
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                failure = await self._tell(row)
        except TimeoutError:
            failure = f"no answer within {self._timeout_ms} ms"
        except TgaError as error:
            failure = f"the request could not be read: {error.code}"
        except Exception as error:  # the others are not touched
            failure = _reason(error)
        if failure is None:
            # A crash before this line has the receiver told again: at least once.
            await self._outbox.done([row])
            return True
        retry_ms = backoff_ms(row.attempts, self._clock.jitter())
        _log.warning(
            "webhook %s: attempt %d for %s: %s; again in %d ms",
            row.webhook,
            row.attempts,
            row.stream,
            failure,
            retry_ms,
        )
        await self._outbox.failed(row, failure, retry_ms=retry_ms)
        return False

    async def _tell(self, row: OutboxRow) -> str | None:
        """None when there is nothing more to tell; else why a receiver did not take it."""
        if row.webhook == CALLBACK and self._callbacks is not None:
            return await self._callbacks.tell(row.identity, self._call_back)
        announcement = await self._announcement(row)
        if announcement is None:
            return None
        return await self.post(row.webhook, delivery_id_of(row), APPROVAL_REQUESTED, asdict(announcement))

    async def _call_back(self, url: URL, pool: HttpPool, delivery_id: str, told: Mapping[str, Any]) -> str | None:
        body = canonical_bytes({"event": APPROVAL_REQUESTED, "delivery_id": delivery_id, **told})
        failure = await self._send(pool, url, delivery_id, body)
        self._instruments.deliveries.add((CALLBACK, "taken" if failure is None else "failed"))
        return failure

    async def _announcement(self, row: OutboxRow) -> Announcement | RunAnnouncement | None:
        if TRACE.has(row.stream):
            return await self._load(TraceId(row.identity))
        return None if self._load_run is None else await self._load_run(row.identity, row.webhook)

    async def post(self, webhook: str, delivery_id: str, event: str, told: Mapping[str, Any]) -> str | None:
        """As `_post`, counted."""
        failure = await self._post(webhook, delivery_id, event, told)
        self._instruments.deliveries.add((webhook, "taken" if failure is None else "failed"))
        return failure

    async def _post(self, webhook: str, delivery_id: str, event: str, told: Mapping[str, Any]) -> str | None:
        form = self._formats.get(webhook, "json")
        if form == "json":
            body = canonical_bytes({"event": event, "delivery_id": delivery_id, **told})
        else:
            body = canonical_bytes(shaped(form, event, told, self._public_url))
        return await self._send(self._pool, self._urls[webhook], delivery_id, body)

    async def _send(self, pool: HttpPool, url: URL, delivery_id: str, body: bytes) -> str | None:
        """None when the receiver took it; else why it did not. The status decides, and no more is read of the answer:
        nothing in it matters, and no receiver can hold the gateway with it."""
        headers = self._headers(delivery_id, body)
        try:
            async with (
                asyncio.timeout(self._timeout_ms / 1000),
                pool.request("POST", Origin.of(url), url.raw_path_qs, headers=headers, body=body) as answer,
            ):
                return None if 200 <= answer.status < 300 else f"the receiver answered {answer.status}"
        except TimeoutError:
            return f"no answer within {self._timeout_ms} ms"
        except Exception as error:  # whatever the receiver made of it, the others are not touched
            return _reason(error)

    def _headers(self, delivery_id: str, body: bytes) -> dict[str, str]:
        timestamp = str(int(datetime.fromisoformat(self._clock.now()).timestamp()))
        signature = self._sign(f"{delivery_id}.{timestamp}.".encode("ascii") + body)
        return {
            "webhook-id": delivery_id,
            "webhook-timestamp": timestamp,
            "webhook-signature": f"v1a,{signature.value}",
            "tga-key-id": signature.key_id,
            "Content-Type": "application/json",
        }


def delivery_id_of(row: OutboxRow) -> str:
    """The same for every attempt; the id of the trace or run keeps the rows of different databases apart."""
    return f"{row.identity}-{row.id}"


def backoff_ms(attempts: int, jitter: float) -> int:
    """How long after the n-th attempt to wait: doubling up to ten minutes, with jitter over half of it."""
    whole = min(WEBHOOK_BACKOFF_FIRST_MS << min(attempts - 1, 20), WEBHOOK_BACKOFF_MAX_MS)
    return int(whole * (0.5 + jitter / 2))


async def _all(deliveries: Iterable[Awaitable[int]]) -> int:
    """The sum when all have ended; then the first error, if there was one. None is left running unseen."""
    results = await asyncio.gather(*deliveries, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return sum(result for result in results if not isinstance(result, BaseException))


def _verified_url(name: str, written: str) -> URL:
    # The address is not shown: receivers put tokens into paths and queries.
    try:
        url = URL(written)
        is_usable = url.scheme in ("http", "https") and bool(url.host)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise SettingInvalid(
            f"the url of webhook {name} cannot be used", expected="http://host/... or https://host/..."
        )
    return url


def _reason(error: Exception) -> str:
    # Of other errors only the kind: their words may quote the address, and with it a token.
    detail = f": {error}" if isinstance(error, HttpFailure) else ""
    return _UNPRINTABLE.sub("?", f"{type(error).__name__}{detail}")[:_ERROR_CHARS_MAX]
