"""Noticing that something new stands in the store: for all followers together, not for each.

Everything is level-triggered: a look compares what is stored with what was known, so nothing that happens between two
looks is missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Final

from app.core.errors import TgaError
from app.core.limits import EVENTS_PAGE_BYTES_MAX, FEED_POLL_MS, FOLLOW_POLL_MAX_MS, FOLLOW_POLL_MS, LIST_ITEMS_MAX
from app.domain.ledger.queries import EntryPage, Feed, StreamQueries

_LOOKED_AT_TOGETHER_MAX: Final = 1_000


class Signal:
    """A number that only rises, and those who wait for it to pass theirs."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._risen = asyncio.Event()

    def rise(self, value: int) -> None:
        self.value = value
        risen, self._risen = self._risen, asyncio.Event()
        risen.set()

    async def beyond(self, value: int) -> None:
        while self.value <= value:
            await self._risen.wait()


class WatchedStream:
    """A stream that someone follows. `page` holds what came last, so that its followers need not each read it."""

    def __init__(self, known: int, due: float) -> None:
        # Set by the poller, when it has seen the stream move.
        self.head = Signal(known)
        self.page: EntryPage | None = None
        self.page_after = known  # the entry that `page` follows
        # The poller's plan: when it looks next, and the pause after that.
        self.due = due
        self.delay_ms = FOLLOW_POLL_MS
        self.followers = 0  # counted by `watching`; at zero the stream is watched no more

    async def beyond(self, sequence_number: int) -> EntryPage | None:
        """Wait for an entry after this one; what follows it, if that is at hand."""
        await self.head.beyond(sequence_number)
        return self.page if self.page_after == sequence_number else None


class StreamWatch:
    """Looks at the heads of all followed streams with one query a time, each as often as its own pace says: often
    after it has moved, once a second when it rests. Without followers it does nothing."""

    def __init__(self, queries: StreamQueries) -> None:
        self._queries = queries
        self._watched: dict[str, WatchedStream] = {}  # changed by followers, as they come and go
        self._changed = asyncio.Event()  # set by followers: the poller's plan is another
        self._poller: asyncio.Task[None] | None = None  # started by the first follower, ends after the last

    @contextmanager
    def watching(self, stream: str, known: int) -> Iterator[WatchedStream]:
        """`known` is the newest entry that the follower has read."""
        now = asyncio.get_running_loop().time()
        watched = self._watched.setdefault(stream, WatchedStream(known, now))
        watched.followers += 1
        watched.due, watched.delay_ms = min(watched.due, now + FOLLOW_POLL_MS / 1000), FOLLOW_POLL_MS
        self._changed.set()
        if self._poller is None:
            self._poller = asyncio.create_task(
                self._poll(), context=Context()
            )  # reads for all followers, as no principal
        try:
            yield watched
        finally:
            watched.followers -= 1
            if watched.followers == 0:
                del self._watched[stream]
                self._changed.set()

    async def _poll(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while self._watched:
                self._changed.clear()
                due = [stream for stream, watched in self._watched.items() if watched.due <= clock()]
                if due:
                    await self._look(due[:_LOOKED_AT_TOGETHER_MAX])
                pause_s = min((watched.due for watched in self._watched.values()), default=0.0) - clock()
                if pause_s > 0:
                    try:
                        async with asyncio.timeout(pause_s):
                            await self._changed.wait()
                    except TimeoutError:
                        continue
        finally:
            # Cleared in the step that found no follower: the next follower starts another poller.
            self._poller = None

    async def _look(self, due: list[str]) -> None:
        try:
            heads = await self._queries.sequence_numbers(due)
        except TgaError:  # the store will be back, or its readers will learn otherwise
            heads = {}
        now = asyncio.get_running_loop().time()
        for stream in due:
            watched = self._watched.get(stream)
            if watched is None:
                continue
            if heads.get(stream, 0) > watched.head.value:
                await self._bring(stream, watched)
                watched.delay_ms = FOLLOW_POLL_MS
            else:
                watched.delay_ms = min(2 * watched.delay_ms, FOLLOW_POLL_MAX_MS)
            watched.due = now + watched.delay_ms / 1000

    async def _bring(self, stream: str, watched: WatchedStream) -> None:
        known = watched.head.value
        try:
            page = await self._queries.entries(
                stream, after_seq=known, limit=LIST_ITEMS_MAX, bytes_max=EVENTS_PAGE_BYTES_MAX
            )
        except TgaError:
            return  # seen again at the next look
        if page is not None and page.head > known:
            watched.page, watched.page_after = page, known
            watched.head.rise(page.head)


class FeedWatch:
    """The newest final transaction, looked at for all who follow the feed, and only while someone waits."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._latest = Signal()  # raised by the poller
        self._waiting = 0  # followers that wait: counted by `beyond`
        self._poller: asyncio.Task[None] | None = None  # started by the first of them, ends after the last

    async def beyond(self, xid: int) -> None:
        """Wait until there is something final after this transaction."""
        self._waiting += 1
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), context=Context())
        try:
            await self._latest.beyond(xid)
        finally:
            self._waiting -= 1

    async def _poll(self) -> None:
        delay_ms = FEED_POLL_MS
        try:
            while self._waiting:
                try:
                    latest = await self._feed.latest()
                except TgaError:
                    latest = self._latest.value
                if latest > self._latest.value:
                    self._latest.rise(latest)
                    delay_ms = FEED_POLL_MS
                else:
                    delay_ms = min(2 * delay_ms, FOLLOW_POLL_MAX_MS)
                await asyncio.sleep(delay_ms / 1000)
        finally:
            self._poller = None
