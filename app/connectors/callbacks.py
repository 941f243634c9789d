"""Tells the URL that a question names itself of it: `Human.approve{callback = ...}`, `ctx.approve(callback=...)`.

As webhooks are told (signed, from the outbox, repeated until a 2xx or until the question is closed), one POST for each
question, with a `webhook-id` that is the question's own. The URL is the program's, which the operator need not trust:
it leads nowhere but to the hosts that the operator allows (`[callbacks]`, none by default), which is looked at when the
run asks and again here; no redirect is followed, and nothing of the answer but its status is read or told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from yarl import URL

from app.config.tables import CallbacksConfig
from app.connectors.allowed_hosts import AllowedHosts
from app.connectors.http_client import HttpPool
from app.core.errors import RunCallbackRefused
from app.core.limits import CALLBACKS_KNOWN_MAX, WEBHOOK_POSTS_AT_ONCE_MAX
from app.domain.runs.engine.announcing import CalledBack

LoadCallbacks: TypeAlias = Callable[[str], Awaitable[list[CalledBack]]]
Post: TypeAlias = Callable[[URL, HttpPool, str, Mapping[str, Any]], Awaitable[str | None]]
TABLE: Final = "[callbacks]"


class Callbacks:
    """What questions name as callbacks, and the way there."""

    def __init__(self, config: CallbacksConfig, load: LoadCallbacks, *, public_url: str | None = None) -> None:
        self._hosts = AllowedHosts(config.allowed_hosts, config.private_hosts, table=TABLE)
        self._load = load
        self._public_url = public_url
        self._pool = HttpPool(
            keeps_alive=False,
            connections_per_server=WEBHOOK_POSTS_AT_ONCE_MAX,
            verify_address=self._hosts.verify_address,
        )
        # Which questions were taken by their receivers, the oldest first: a run that asks twice has two rows in the
        # outbox, and each of them would tell both. What is forgotten here is told again, under the same id.
        self._taken: dict[str, None] = {}
        self._under_way: dict[str, asyncio.Task[str | None]] = {}  # by delivery: two rows of a run share it

    def verify(self, url: str) -> None:
        """RunCallbackRefused unless a question may name it."""
        try:
            self._hosts.verified(url)
        except ValueError as error:
            expected, _, found = str(error).removeprefix("expected ").partition(", found ")
            raise RunCallbackRefused(
                "a question names a callback that this gateway does not call", expected=expected, found=found or None
            ) from None

    async def tell(self, run_id: str, post: Post) -> str | None:
        """Tell all that the run asks and that names a URL; None when all were taken, or why some were not. They are
        told beside each other: a receiver that does not answer keeps nobody else from being told."""
        told = await asyncio.gather(*(self._tell(run_id, asked, post) for asked in await self._load(run_id)))
        return "; ".join(failure for failure in told if failure is not None) or None

    async def _tell(self, run_id: str, asked: CalledBack, post: Post) -> str | None:
        delivery_id = f"{run_id}-{asked.intent_digest[:32]}"
        if delivery_id in self._taken:
            return None
        try:
            url = self._hosts.verified(asked.url)
        except ValueError as error:  # another gateway allowed it, or the operator has changed their mind
            return str(error)
        under_way = self._under_way.get(delivery_id)
        if under_way is None:
            under_way = self._under_way[delivery_id] = asyncio.create_task(self._told(url, delivery_id, asked, post))
            under_way.add_done_callback(lambda _: self._under_way.pop(delivery_id, None))
        return await asyncio.shield(under_way)

    async def _told(self, url: URL, delivery_id: str, asked: CalledBack, post: Post) -> str | None:
        told = asdict(asked.announcement)
        told["answer_url"] = None if self._public_url is None else f"{self._public_url}{told['callback']}"
        failure = await post(url, self._pool, delivery_id, told)
        if failure is None:
            self._taken[delivery_id] = None
            while len(self._taken) > CALLBACKS_KNOWN_MAX:
                del self._taken[next(iter(self._taken))]
        return failure

    async def close(self) -> None:
        await self._pool.close()
