"""Live pages: an event whenever something that the visitor may see has changed. It says what, never how: the page asks
for itself again, so nothing can be missed, and filters apply to what arrives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from app.console.sessions import SCHEME
from app.core.limits import CONSOLE_BEAT_MS, LIST_ITEMS_MAX
from app.domain.identity import Principal
from app.domain.ledger.queries import FeedPosition
from app.edge.cursors import feed_cursor, feed_position
from app.edge.permissions import require, scope_of
from app.edge.services import Services, header_of
from app.edge.streaming import Events, EventStream, event, mark
from app.edge.watching import FeedWatch

_STREAMS_NAMED_MAX: Final = 50


class _LiveEvents(EventStream):
    """A beat that scripts see: comments are kept from them."""

    beat_bytes = event("beat", {})


class Watch:
    """One look at the store for all live pages together."""

    def __init__(self, services: Services) -> None:
        self._services = services.for_reading()
        self._feed = FeedWatch(self._services.feed)

    def stream(self, request: Request, cookie: str) -> Response:
        """`changed` with the names of streams; `here` when it begins, and `beat` every other second."""
        headers = [pair for pair in request.scope["headers"] if pair[0] not in (b"authorization", b"cookie")]
        headers.append((b"authorization", f"{SCHEME} {cookie}".encode("ascii")))
        asked = Request({**request.scope, "headers": headers}, request.receive)

        async def opens(principal: Principal) -> Events:
            require(principal, "read")
            last = header_of(request.scope, b"last-event-id")
            after = FeedPosition(await self._services.feed.latest(), 0) if last is None else feed_position(last)
            return self._changes(principal, after)

        return _LiveEvents(self._services, asked, opens, heartbeat_ms=CONSOLE_BEAT_MS)

    async def _changes(self, principal: Principal, after: FeedPosition) -> AsyncGenerator[bytes, None]:
        scope, feed = scope_of(principal), self._services.feed
        yield event("here", {}, identity=feed_cursor(after))
        while True:
            page = await feed.page(scope, after=after, limit=LIST_ITEMS_MAX)
            if page.next == after and not page.items:
                await self._feed.beyond(after.xid)
                continue
            after = page.next
            names = list(dict.fromkeys(item.stored.stream for item in page.items))
            if names:
                yield event("changed", {"streams": names[:_STREAMS_NAMED_MAX]}, identity=feed_cursor(after))
            else:
                yield mark(feed_cursor(after))
