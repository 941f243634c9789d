"""Requests to a gateway, repeated until there is an answer.

Every route of the gateway is harmless to repeat with the same body, on the same gateway or on another one of the same
database. So a request whose answer did not come is sent again, to the next address, after a moment that doubles.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx2

from tga_sdk.errors import AnswerInvalid, GatewayError, GatewayUnreachable

REPEATED: Final = frozenset({429, 500, 502, 503, 504})  # the same request may be answered later
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 5.0
PARSED_MAX: Final = 1_024


class Wire:
    """A connection to one gateway, or to several of one database.

    `give_up_after`: seconds without any answer after which GatewayUnreachable is raised; None: never.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        key: str | None,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        give_up_after: float | None = None,
        connections: int = 100,
    ) -> None:
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        self.give_up_after = give_up_after
        self._at = 0
        self._parsed: dict[str, httpx2.URL] = {}  # addresses that were asked lately: a run puts to the same one
        self._headers = {"Accept": "application/json", "User-Agent": "tga-sdk"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        # The transport alone: cookies, redirects and hooks of a client cost a third of a request, and are not wanted.
        self._transport = transport or httpx2.AsyncHTTPTransport(
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections), trust_env=False
        )

    async def close(self) -> None:
        await self._transport.aclose()

    async def once(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> httpx2.Response:
        """One request to the gateway that is asked at the moment. `wait`: for how long it may hold the answer."""
        request = httpx2.Request(
            method,
            self._url(path),
            headers=self._headers if headers is None else {**self._headers, **headers},
            content=content,
            extensions={"timeout": {"connect": 10.0, "read": 30.0 + wait, "write": 30.0, "pool": 30.0}},
        )
        answer = await self._transport.handle_async_request(request)
        try:
            await answer.aread()
        except BaseException:
            await answer.aclose()
            raise
        return answer

    def _url(self, path: str) -> httpx2.URL:
        text = self.urls[self._at % len(self.urls)].rstrip("/") + path
        found = self._parsed.get(text)
        if found is None:
            if len(self._parsed) >= PARSED_MAX:
                self._parsed.clear()
            found = self._parsed[text] = httpx2.URL(text)
        return found

    async def ask(self, method: str, path: str, body: Any = None, *, wait: float = 0.0) -> Any:
        """The JSON that the gateway answers; GatewayError when it refuses."""
        content = None if body is None else json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        headers = None if body is None else {"Content-Type": "application/json"}
        return json_of(await self.send(method, path, content=content, headers=headers, wait=wait))

    async def send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> httpx2.Response:
        """The answer, however often it takes; GatewayError when the gateway refuses for good."""
        loop = asyncio.get_running_loop()
        silent_since = loop.time()
        pause = FIRST_PAUSE
        while True:
            found: httpx2.Response | None = None
            try:
                found = await self.once(method, path, content=content, headers=headers, wait=wait)
            except httpx2.HTTPError as error:
                said = f"{type(error).__name__}: {error}"
            else:
                if found.status_code < 300:
                    return found
                if found.status_code not in REPEATED:
                    raise refusal_of(found)
                said = f"the gateway answered {found.status_code}"
            if self.give_up_after is not None and loop.time() - silent_since > self.give_up_after:
                raise GatewayUnreachable(
                    f"no answer from {' or '.join(self.urls)} for {self.give_up_after:g} s ({said}); "
                    "is the gateway running? The same request may be sent again"
                )
            self._at += 1
            await asyncio.sleep(max(retry_after(found), pause * random.uniform(0.5, 1.0)))  # noqa: S311
            pause = min(pause * 2, LONGEST_PAUSE)


def json_of(answer: httpx2.Response) -> Any:
    """The JSON of an answer; AnswerInvalid when it is none: then something else than a gateway has answered."""
    if not answer.content:
        return None
    return parsed(answer.status_code, answer.content)


def parsed(status: int, content: bytes) -> Any:
    """The JSON in these bytes; AnswerInvalid when there is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise AnswerInvalid.found(status, f"the answer is no JSON: {content[:80]!r}") from None


def refusal_of(answer: httpx2.Response) -> GatewayError:
    """Why the gateway refused."""
    return refusal(answer.status_code, answer.content)


def refusal(status: int, content: bytes) -> GatewayError:
    """As `refusal_of`, of a status and bytes."""
    try:
        problem = json.loads(content)
    except (ValueError, RecursionError):
        problem = {}
    return GatewayError.of(status, problem if isinstance(problem, dict) else {})


def retry_after(answer: httpx2.Response | None) -> float:
    """For how many seconds the gateway asks to be left alone; at most a minute."""
    return seconds_of("" if answer is None else answer.headers.get("Retry-After", ""))


def seconds_of(said: str) -> float:
    """The seconds in a Retry-After header, at most a minute; 0 when it says none (a date among them)."""
    return min(float(said), 60.0) if said.isascii() and said.isdigit() else 0.0
