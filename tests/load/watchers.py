"""People and programs beside the agents: supervisors who decide, and auditors who follow the ledger."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.load.agents import APPROVE, DENY, RACE
from tests.load.asking import Client


class Supervisor:
    """Decides on what waits, as its intent says; several of them come to the same request now and then."""

    def __init__(self, client: Client, stop: asyncio.Event) -> None:
        self._client = client
        self._stop = stop

    async def run(self) -> None:
        while not self._stop.is_set():
            page = await self._client.ask("approvals", "GET", "/v1/approvals?limit=100", expect=[200])
            if page is not None and page.status == 200:
                items = [item for item in page.document["items"] if item["intent"] in (APPROVE, DENY, RACE)]
                self._client.rng.shuffle(items)
                for item in items[:5]:
                    await self._decide(item)
            await asyncio.sleep(self._client.rng.uniform(0.1, 0.4))

    async def _decide(self, item: dict[str, Any]) -> None:
        rng, digest = self._client.rng, item["action_request_digest"]
        expect: list[int | str] = [200, 202, "ALREADY_DECIDED"]
        if rng.random() < 0.1:
            digest, expect = "0" * 64, ["REQUEST_MISMATCH", "ALREADY_DECIDED"]
        body = {"decision": "DENY" if item["intent"] == DENY else "APPROVE", "action_request_digest": digest}
        if rng.random() < 0.3:
            body |= {"wait_ms": 0}
        path = f"/v1/traces/{item['trace_id']}/decision"
        await self._client.ask("decide", "POST", path, body, expect=expect, trace_id=item["trace_id"])


class Auditor:
    """Follows the feed page by page, through every death of the gateway, and looks at each entry once."""

    def __init__(self, client: Client, stop: asyncio.Event) -> None:
        self._client = client
        self._stop = stop
        self._cursor: str | None = None
        self.last_of: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            is_last = self._stop.is_set()  # before the page: nothing is appended after that
            is_more = await self._read_page()
            if is_last and not is_more:
                return
            if not is_more:
                await asyncio.sleep(self._client.rng.uniform(0.1, 0.3))

    async def _read_page(self) -> bool:
        after = "" if self._cursor is None else f"&after={self._cursor}"
        page = await self._client.ask("feed", "GET", f"/v1/events?limit=200{after}", expect=[200])
        if page is None or page.status != 200:
            await asyncio.sleep(0.1)
            return True  # to be asked again
        for item in page.document["items"]:
            stream, number = item["stream"], item["sequence_number"]
            if number != self.last_of.get(stream, 0) + 1 or item["problem"] is not None:
                self._client.complain("feed", f"after {self.last_of.get(stream, 0)} of {stream} came {number}")
            self.last_of[stream] = number
        before, self._cursor = self._cursor, str(page.document["next"])
        return before != self._cursor
